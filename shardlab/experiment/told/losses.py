"""Are losses equal, and if not, why: in sentences."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite, prod
from typing import Any

import pandas as pd

from shardlab.experiment.run.rank_checks import DATA, GRADIENTS, IGNORED, LOSS
from shardlab.experiment.told import summary
from shardlab.experiment.told.saved_runs import Comparison
from shardlab.experiment.told.summary import JUDGED_STEPS, NORM_TOLERANCE, REFERENCE, why_dead
from shardlab.experiment.trained.batches import first_other
from shardlab.vocabulary import MeshAxis

SAME_SUM = 1e-4  # relative
APART = 0.1  # of what rounding may make of the single process's loss: more than it makes of a first step
AGREED = 1e-3  # of the distance to the single process
BAD_ROWS = "The rows themselves hold inf or NaN: look at the data."
SAME = 1e-6  # relative: what rounding makes of a loss
TOLD_APART = 10  # the plain mean is farther off by at least so many times
_ADVICE = "compare seeds Python's, NumPy's and torch's generators; seed any other, as in np.random.default_rng(0)"
_WHOLE = "; and a function data(rank, ranks, seed) must give all ranks together what it gives one, with ranks = 1"
Manifests = Mapping[str, Mapping[str, Any]]


def verdict(comparison: Comparison) -> str:
    """Sentences if losses are no numbers, or not equal: by how much, and why; else empty."""
    if wrong := summary.not_finite(comparison.records.steps):
        runs = ", ".join(f"that of {run} from step {step} on" for run, step in wrong.items())
        return f"Losses are NOT finite, so the run has failed: {runs}. {_began(comparison, wrong)}" + (
            BAD_ROWS if data_are_lost(comparison) else "Lower the learning rate, or clip the gradients."
        )
    if comparison.losses_equal:
        return ""
    is_single = (reference := summary.reference_of(comparison.records)) == REFERENCE
    sums = _looks_like_sums(comparison) if is_single else ""
    if sentence := trained_on_others(comparison.records.manifests) or sums:
        return sentence
    steps = min(JUDGED_STEPS, int(comparison.summary["steps"].max()))
    origin = "the single process" if is_single else f"{reference}, the first strategy on several ranks"
    largest = comparison.summary["judged_loss_difference"].max()
    said = f"Losses are NOT equal: in the first {steps} steps they differ by up to {largest:.1e} from {origin}."
    if means := _mean_of_means(comparison):
        return f"{said} {means}"
    apart = norms_apart(comparison.summary)
    why = f" {apart}" if apart else ""
    return said + why + _own_buffers(comparison) + (_divides_rows_badly(comparison) if is_single else "")


def norms_apart(table: pd.DataFrame) -> str:
    """A sentence if a strategy has gradients of another norm than the reference, which an optimizer may hide."""
    known = table.reindex(columns=["strategy", "norm_ratio", "losses_equal"])
    apart = known[(known["losses_equal"] == False) & ((known["norm_ratio"] - 1).abs() > NORM_TOLERANCE)]  # noqa: E712
    if apart.empty:
        return ""
    ratios = ", ".join(f"{row.strategy} {row.norm_ratio:.4g}" for row in apart.itertuples())
    return (
        f"The norm of the gradients is another than the reference's, by these factors: {ratios}. Of a constant factor "
        "Adam shows nothing in the losses."
    )


def dead_verdict(comparison: Comparison) -> str:
    """That equal losses show nothing, as of a loss that never moves; else empty."""
    dead = why_dead(comparison.records.steps)
    table = comparison.summary
    if not dead or len(table) == 1 or (table["losses_equal"] == False).any():  # noqa: E712
        return ""
    return f"nothing can be said of the losses: {dead}, right or wrong"


def alone_verdict(comparison: Comparison) -> str:
    """One sentence if losses were not compared with the single process, although there is one; else empty."""
    reasons = summary.differs_by_rank(comparison.records)
    if not reasons or REFERENCE not in set(comparison.summary["strategy"]):
        return ""
    return f"They were not compared with the single process, which rightly differs: {', and '.join(reasons)}."


def gradients_verdict(comparison: Comparison) -> str:
    """One sentence if a gradient was inf or NaN so late that no loss has shown it; else empty."""
    shown = summary.not_finite(comparison.records.steps)
    found = []
    for run, manifest in comparison.records.manifests.items():
        step, what, ranks = _first_lost(manifest.get("not_finite", {}))
        if what == GRADIENTS and run not in shown:
            found.append(f"in {run} on rank {', '.join(ranks)}, in step {step}")
    return f"Gradients are NOT finite: {'; '.join(found)}." if found else ""


def data_are_lost(comparison: Comparison) -> bool:
    """Whether a loss was inf or NaN where its rows were."""
    return any(known.get("not_finite", {}).get(DATA) for known in comparison.records.manifests.values())


def _began(comparison: Comparison, runs: Iterable[str]) -> str:
    """A sentence for each run in which it began on some ranks only: then it is their rows, or their hardware."""
    said = ""
    for run in runs:
        manifest = comparison.records.manifests[run]
        step, what, ranks = _first_lost(manifest.get("not_finite", {}))
        if 0 < len(ranks) < manifest["ranks"]:
            where = ", ".join(ranks)
            said += f"In {run} it began on rank {where}, with the {what} of its own rows in step {step}. "
    return said


def _first_lost(known: Mapping[str, Mapping[str, int]]) -> tuple[int, str, list[str]]:
    """The first step with an inf or NaN on some rank's own rows, whether in loss or gradients, and on which ranks."""
    found = [(step, what, rank) for what in (DATA, LOSS, GRADIENTS) for rank, step in known.get(what, {}).items()]
    if not found:
        return 0, "", []
    # Of one step the loss, which stands first: a NaN in it is in the gradients too.
    step, what, _ = min(found, key=lambda lost: lost[0])
    return step, what, [rank for other, kind, rank in found if (other, kind) == (step, what)]


def _mean_of_means(comparison: Comparison) -> str:
    """A sentence if ranks' losses are means over different numbers of what they count; else empty."""
    manifests = comparison.records.manifests
    whole = manifests.get(REFERENCE, {}).get("first_losses") or {}
    for run, manifest in manifests.items():
        if whole and run != REFERENCE and (found := manifest.get("first_losses")) and len(found["losses"]) > 1:
            return mean_of_means(whole["losses"][0], found["losses"], found["weights"], found["counts"])
    return ""


def _own_buffers(comparison: Comparison) -> str:
    """A sentence if ranks have buffers of their own, of which torch's DDP keeps only rank 0's."""
    said = summary.own_buffers_said(comparison.records.manifests.values())
    others = " torch_ddp goes on from those of rank 0, as ours do with broadcast_buffers."
    others = others if "torch_ddp" in comparison.records.manifests else ""
    return f" What differs first: {said}.{others}" if said else ""


def _looks_like_sums(comparison: Comparison) -> str:
    """One sentence if the losses of all ranks together are the single process's: then each is a sum, and no mean."""
    first = _first_losses(comparison)
    for run in first.index:
        ranks = _data_ranks(comparison, run)
        if ranks > 1 and first[REFERENCE] and abs(first[run] * ranks / first[REFERENCE] - 1) < SAME_SUM:
            return (
                f"Losses are NOT equal: with {ranks} data ranks that of {run} is 1/{ranks} of the single process's, so "
                "the loss is a sum over rows; return their mean."
            )
    return ""


def _divides_rows_badly(comparison: Comparison) -> str:
    """A sentence if the strategies that share a batch agree with each other and not with the single process."""
    first = _first_losses(comparison)
    shared = first[[_data_ranks(comparison, run) > 1 for run in first.index]]
    distance = (shared - first[REFERENCE]).abs().min()
    rounding = max((summary.tolerance_of_run(run, comparison.records, "float32") for run in shared.index), default=0.0)
    least = APART * rounding * abs(first[REFERENCE])
    if len(shared) < 2 or distance < least or shared.max() - shared.min() > AGREED * distance:
        return ""
    return (
        f" From the first step on {', '.join(shared.index)} agree with each other: each rank's loss is of its own "
        "rows. So the loss of a batch is not the mean of the losses of its parts, as where rows are compared with one "
        "another (a contrastive loss) or weighed by their number; then the single process rightly differs."
    )


def _first_losses(comparison: Comparison) -> "pd.Series[float]":
    """The loss of the first step, by run; all ranks have the same."""
    steps = comparison.records.steps
    first: pd.Series[float] = steps[steps["step"] == steps["step"].min()].groupby("run", sort=False)["loss"].first()
    return first


def _data_ranks(comparison: Comparison, run: str) -> int:
    mesh = comparison.records.manifests[run]["mesh"]
    return prod(size for axis, size in mesh.items() if axis not in (MeshAxis.TENSOR, MeshAxis.PIPE))


def others_than(reference: str, manifests: Manifests) -> dict[str, int]:
    """The runs that trained on other rows than ``reference``, and from which step on."""
    known = {run: manifest.get("batches", []) for run, manifest in manifests.items()}
    found = {run: first_other(known[reference], batches) for run, batches in known.items()}
    return {run: _step(place, manifests[run]) for run, place in found.items() if place is not None}


def trained_on_others(manifests: Manifests) -> str:
    """One sentence if runs trained on other rows than the single process, or than the first without it; else empty."""
    first = REFERENCE if REFERENCE in manifests else next(iter(manifests))
    others = others_than(first, manifests)
    if not others:
        return ""
    return (
        f"The DATA differ, so losses are not compared: from step {min(others.values())} on {', '.join(others)} trained "
        f"on other rows than {first}; {_ADVICE}{_WHOLE}."
    )


def resumed_verdict(comparison: Comparison) -> str:
    """One sentence if runs went on from a checkpoint that was trained on other rows; else empty."""
    manifests = comparison.records.manifests
    known = {run: manifest.get("other_batch") for run, manifest in manifests.items()}
    others = {run: _step(place, manifests[run]) for run, place in known.items() if place is not None}
    if not others:
        return ""
    return (
        f"The DATA differ from those that were trained on before the checkpoint, from step {min(others.values())} on, "
        f"so {', '.join(others)} did not go on as one long run would; {_ADVICE}."
    )


def _step(batch: int, manifest: Mapping[str, Any]) -> int:
    return batch // int(manifest["config"].get("accumulation", 1))


def mean_of_means(
    whole: float, losses: Sequence[float], weights: Sequence[float], counts: Mapping[str, Sequence[float]]
) -> str:
    """One sentence if ranks' losses are means over different numbers of what they count; else empty.

    Args:
        whole: the single process's loss of the first micro-batch.
        losses: the ranks'.
        weights: of these in the mean over ranks.
        counts: by expression, what each rank counted.
    """
    if not all(map(isfinite, (whole, *losses))):
        return ""
    plain = abs(sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / len(losses) - whole)
    nearest, words = inf, ""
    # Of equal counts that of targets is named, which says what it means.
    for expression, numbers in sorted(counts.items(), key=lambda one: str(IGNORED) not in one[0]):
        total = sum(numbers)
        if len(set(numbers)) > 1 and min(numbers) >= 0 and total > 0:
            mean = sum(loss * number for loss, number in zip(losses, numbers, strict=True) if number) / total
            if (distance := abs(mean - whole)) < nearest:
                nearest, words = distance, expression
    rounding = SAME * max(abs(whole), 1.0)
    if not words or nearest > rounding or plain < TOLD_APART * max(nearest, rounding / TOLD_APART):
        return ""
    numbers = counts[words]
    return (
        f"It is a mean of means: ranks' batches have different numbers of counted entries, from {min(numbers):g} to "
        f"{max(numbers):g} in the first ({words}), by which one process weighs them and a mean over ranks does not. "
        f"With Workload(..., weight=lambda batch: {words}) all strategies train as one process does."
    )
