"""Did a run train at all? Of one whose loss never moves every strategy says the same, right or wrong."""

import pandas as pd

ALIKE = 1e-6  # relative: what rounding makes of numbers that are the same
LOOK_FOR = "a constant or detached loss, outputs times 0, or a learning rate of 0"


def why_dead(steps: pd.DataFrame) -> str:
    """Why the losses of these steps say nothing of a strategy, in words; empty where they do.

    Args:
        steps: table ``steps`` of one run or several; NaN norms are not known.
    """
    losses = steps.groupby(["run", "step"])["loss"].first()
    norms = steps.reindex(columns=["run", "step", "grad_norm"]).dropna().groupby(["run", "step"])["grad_norm"].max()
    if len(norms) and not norms.to_numpy().any():
        return "the norm of the gradients is 0"
    if _all_alike(losses):
        return f"the loss is {losses.iloc[0]:.6g} in every step"
    if _all_alike(norms):
        return f"the norm of the gradients is {norms.iloc[0]:.6g} in every step"
    return ""


def _all_alike(known: "pd.Series[float]") -> bool:
    """Whether in every run, of two steps or more, a number is the same in all."""
    by_run = known.groupby("run")
    spread = by_run.max() - by_run.min()
    return bool(len(known) and (by_run.size() > 1).all() and (spread <= ALIKE * by_run.max().abs()).all())
