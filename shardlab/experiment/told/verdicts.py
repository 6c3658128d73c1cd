"""What a comparison shows beside its losses, in sentences: are plan and transports equal, and do times count?"""

from collections.abc import Iterable

import pandas as pd

from shardlab.analysis.rows import in_timed_steps, timed_steps
from shardlab.engines import STRATEGIES
from shardlab.experiment.told.losses import SAME_SUM, alone_verdict, gradients_verdict, resumed_verdict, verdict
from shardlab.experiment.told.saved_runs import Comparison
from shardlab.plots.text import format_percent
from shardlab.records.store import Records
from shardlab.vocabulary import HostTransport, Phase, SpanKind

QUIET = 0.2  # of a step, off the CPU


def verdicts(comparison: Comparison) -> list[str]:
    """What the lines of the answer leave out, in sentences: what is wrong, in detail, and what else to know."""
    # The worst first: where strategies are missing, what follows says little.
    said = (
        failed_verdict(comparison), resumed_verdict(comparison), verdict(comparison), gradients_verdict(comparison),
        alone_verdict(comparison), plan_verdict(comparison), traffic_verdict(comparison), transport_verdict(comparison),
        unseen_verdict(comparison),
    )  # fmt: skip
    return [sentence for sentence in said if sentence]


def agreement_verdict(comparison: Comparison) -> str:
    """One sentence if ranks that train the same parameters have not done the same; else empty."""
    manifests = comparison.records.manifests
    found = [f"in {run} {words}" for run, known in manifests.items() if (words := known.get("disagreement"))]
    own = [run for run, known in manifests.items() if known.get("disagreement") and run not in STRATEGIES]
    meant = f"; where {', '.join(own)} means that, set ranks_differ = True in its class" if own else ""
    return f"Ranks DISAGREE, so the numbers are of no one run: {'; '.join(found)}{meant}" if found else ""


def failed_verdict(comparison: Comparison) -> str:
    """One sentence if strategies raised on a rank; else empty."""
    said = "; ".join(f"{strategy}: {why.rstrip('.')}" for strategy, why in comparison.failed.items())
    return f"NOT run to the end: {said}." if said else ""


def unfinished_verdict(comparison: Comparison) -> str:
    """One sentence if strategies, or steps of one, are missing because the comparison was cut off; else empty."""
    manifests, last = comparison.records.manifests, comparison.records.steps.groupby("run")["step"].max()
    asked = {run: int(known.get("config", {}).get("steps", 0)) for run, known in manifests.items()}
    cut = [f"{run} after {last[run] + 1} of {asked[run]} steps" for run in last.index if last[run] + 1 < asked[run]]
    if (comparison.directory / "records").is_dir():  # else one run of it was loaded
        wanted = [name for known in manifests.values() for name in known["config"]["strategies"]]
        ran = {*comparison.summary["strategy"], *comparison.failed}
        cut += [name for name in dict.fromkeys(wanted) if name not in ran]
    return f"NOT finished: {', '.join(cut)}; the comparison was cut off before." if cut else ""


def plan_verdict(comparison: Comparison) -> str:
    """One sentence if bytes and messages are not those of the plan, or there is none; else empty."""
    planned = comparison.summary.dropna(subset="as_planned")
    if planned.empty:
        said = comparison.summary.get("not_planned", pd.Series(dtype=object)).dropna()  # not in an older summary
        why = "" if said.empty else str(said.iloc[0])
        return f"There is no plan to compare bytes and messages with{why and f': {why}'}."
    wrong = planned.loc[~planned["as_planned"].astype(bool), "strategy"]
    return f"Bytes at rest or messages of {', '.join(wrong)} are NOT those of the plan." if len(wrong) else ""


def traffic_verdict(comparison: Comparison) -> str:
    """One sentence if a strategy's transport moves more than its algorithm needs; else empty."""
    sent = comparison.records.collectives
    sent = sent[(sent["phase"] != str(Phase.METRICS)) & (sent["step"] >= 0)]
    sums = sent.groupby("run", sort=False)[["moved_bytes", "wire_bytes"]].sum()
    factors = sums["moved_bytes"] / sums["wire_bytes"]
    more = [f"{run} moves {factor:.2f} times" for run, factor in factors.items() if factor > 1 + SAME_SUM]
    if not more:
        return ""
    return f"{', '.join(more)} what its algorithm needs: torch's gloo reduce-scatters by a whole all-reduce."


def transport_verdict(comparison: Comparison) -> str:
    """One sentence if torch's engines used another transport than ours, which affects times; else empty."""
    transports = transports_of(comparison)
    if set(transports) != set(HostTransport):
        return ""
    ours, theirs = (", ".join(transports[name]) for name in (HostTransport.SHARED_MEMORY, HostTransport.GLOO))
    return (
        f"Times compare more than engines: {ours} sent through shared memory, {theirs} over gloo; "
        "with transport=gloo all do."
    )


def unseen_verdict(comparison: Comparison) -> str:
    """One sentence if nobody saw a stream wait for what a strategy sent, so that times are not known; else empty."""
    summary = comparison.summary
    is_unseen = summary[["exposed_comm_ms", "overlap"]].isna().any(axis=1)
    unseen = summary[is_unseen & (summary["wire_bytes_per_step"] > 0)]["strategy"]
    if not len(unseen):
        return ""
    return (
        f"How much communication was exposed or hidden is not known for {', '.join(unseen)}: streams ran it, and the "
        "stream that computes was not seen to wait for it."
    )


def busy_verdict(records: Records, runs: Iterable[str] | None = None) -> str:
    """One sentence if ranks were not running for a good part of their steps, so that times say little; else empty.

    Args:
        records: of some runs.
        runs: those whose times are compared; None for all.
    """
    steps = records.steps if runs is None else records.steps[records.steps["run"].isin(list(runs))]
    _, worked = in_timed_steps(records.collectives, records.spans, steps)
    away = worked[worked["kind"] == str(SpanKind.OFF_CPU)]
    lost = (away["end_us"] - away["start_us"]).groupby(away["run"]).sum()
    shares = (lost / timed_steps(steps).groupby("run")["step_us"].sum()).dropna()
    if not len(shares) or shares.max() <= QUIET:
        return ""
    run, why = str(shares.idxmax()), "they slept, or other programs or ranks had the cores"
    queued = timed_steps(steps[steps["run"] == run]).get("queued_us", pd.Series(dtype="float64"))
    if queued.notna().any():
        why = "other programs or ranks had the cores" if 2 * queued.sum() >= lost.loc[run] else "they slept"
    share = format_percent(shares.max())
    return f"Times are UNCERTAIN: in {run} ranks were off the CPU for {share} of their steps: {why}."


def transports_of(comparison: Comparison) -> dict[str, list[str]]:
    """Each transport and the strategies that used it, without the reported loss, which is always sent by us."""
    sent = comparison.records.collectives.dropna(subset="transport")
    sent = sent[~sent["phase"].isin([Phase.SETUP, Phase.METRICS])]
    real = sent["transport"].str.replace(" as .*", "", regex=True)  # without the name of an emulated link
    return {str(name): list(runs.unique()) for name, runs in sent["run"].groupby(real)}
