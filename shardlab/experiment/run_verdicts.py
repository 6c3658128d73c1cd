"""What a comparison shows, in sentences: are losses, plan and transports equal?"""

from collections.abc import Iterable, Mapping
from math import prod

import pandas as pd

from shardlab.analysis.timed import in_timed_steps, timed_steps
from shardlab.engines import STRATEGIES
from shardlab.experiment import rank_checks, summary
from shardlab.experiment.comparison import Comparison
from shardlab.experiment.rank_checks import DATA, GRADIENTS, LOSS
from shardlab.experiment.summary import JUDGED_STEPS, LOOK_FOR, NORM_TOLERANCE, REFERENCE, why_dead
from shardlab.experiment.watched_loss import mean_of_means
from shardlab.plots.text import format_percent
from shardlab.records.store import Records
from shardlab.vocabulary import HostTransport, MeshAxis, Phase, SpanKind

SAME_SUM = 1e-4  # relative
APART = 1e-3  # of the single process's loss: more than rounding
AGREED = 1e-3  # of the distance to the single process
QUIET = 0.2  # of a step, off the CPU
BAD_ROWS = "The rows themselves hold inf or NaN: look at the data."
SAME_PEAK = 0.01  # of a peak: what is less does not change how it reads


def verdicts(comparison: Comparison) -> list[str]:
    """What the lines of the answer leave out, in sentences: what is wrong, in detail, and what else to know."""
    # The worst first: where strategies are missing, what follows says little.
    said = (
        failed_verdict(comparison), resumed_verdict(comparison), verdict(comparison), gradients_verdict(comparison),
        alone_verdict(comparison), plan_verdict(comparison), traffic_verdict(comparison), transport_verdict(comparison),
        buckets_verdict(comparison), unseen_verdict(comparison),
    )  # fmt: skip
    return [sentence for sentence in said if sentence]


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
    sentence = rank_checks.trained_on_others(comparison.records.manifests, REFERENCE)
    if not sentence and is_single:
        sentence = _looks_like_sums(comparison)
    if sentence:
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
    """One sentence if equal losses show nothing, as of a loss that never moves; else empty."""
    dead = why_dead(comparison.records.steps)
    table = comparison.summary
    if not dead or len(table) == 1 or (table["losses_equal"] == False).any():  # noqa: E712
        return ""
    return f"Nothing can be said of the losses: {dead}, right or wrong. Look for {LOOK_FOR}."


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
    said = rank_checks.own_buffers_said(comparison.records.manifests.values())
    others = " torch_ddp goes on from those of rank 0, as ours do with broadcast_buffers."
    others = others if "torch_ddp" in comparison.records.manifests else ""
    return f" What differs first: {said}.{others}" if said else ""


def resumed_verdict(comparison: Comparison) -> str:
    """One sentence if a run went on from a checkpoint that was trained on other rows; else empty."""
    return rank_checks.resumed_on_others(comparison.records.manifests)


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


def gradients_verdict(comparison: Comparison) -> str:
    """One sentence if a gradient was inf or NaN so late that no loss has shown it; else empty."""
    shown = summary.not_finite(comparison.records.steps)
    found = []
    for run, manifest in comparison.records.manifests.items():
        step, what, ranks = _first_lost(manifest.get("not_finite", {}))
        if what == GRADIENTS and run not in shown:
            found.append(f"in {run} on rank {', '.join(ranks)}, in step {step}")
    return f"Gradients are NOT finite: {'; '.join(found)}." if found else ""


def _first_lost(known: Mapping[str, Mapping[str, int]]) -> tuple[int, str, list[str]]:
    """The first step with an inf or NaN on some rank's own rows, whether in loss or gradients, and on which ranks."""
    found = [(step, what, rank) for what in (DATA, LOSS, GRADIENTS) for rank, step in known.get(what, {}).items()]
    if not found:
        return 0, "", []
    # Of one step the loss, which stands first: a NaN in it is in the gradients too.
    step, what, _ = min(found, key=lambda lost: lost[0])
    return step, what, [rank for other, kind, rank in found if (other, kind) == (step, what)]


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
    if len(shared) < 2 or distance < APART * abs(first[REFERENCE]) or shared.max() - shared.min() > AGREED * distance:
        return ""
    return (
        f" From the first step on {', '.join(shared.index)} agree with each other: each rank's loss is of its own "
        "rows. So the loss of a batch is not the mean of the losses of its parts, as where rows are compared with one "
        "another (a contrastive loss) or weighed by their number; then the single process rightly differs."
    )


def _first_losses(comparison: Comparison) -> "pd.Series[float]":
    """The loss of the first step, by run."""
    steps = comparison.records.steps
    first: pd.DataFrame = steps[(steps["step"] == steps["step"].min()) & (steps["rank"] == 0)]
    losses: pd.Series[float] = first.set_index("run")["loss"]
    return losses


def _data_ranks(comparison: Comparison, run: str) -> int:
    mesh = comparison.records.manifests[run]["mesh"]
    return prod(size for axis, size in mesh.items() if axis != MeshAxis.TENSOR)


def alone_verdict(comparison: Comparison) -> str:
    """One sentence if losses were not compared with the single process, although there is one; else empty."""
    reasons = summary.differs_by_rank(comparison.records)
    if not reasons or REFERENCE not in set(comparison.summary["strategy"]):
        return ""
    return f"They were not compared with the single process, which rightly differs: {', and '.join(reasons)}."


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


def buckets_verdict(comparison: Comparison) -> str:
    """One sentence if strategies had buckets of different sizes, as one of your own may; else empty."""
    sizes: dict[int, list[str]] = {}
    for run, manifest in comparison.records.manifests.items():
        if (size := manifest.get("bucket_bytes")) is not None:  # not in an older record
            sizes.setdefault(int(size), []).append(run)
    if len(sizes) < 2:
        return ""
    said = "; ".join(f"{', '.join(runs)} {size / 2**20:.4g} MiB" for size, runs in sizes.items())
    return f"Buckets differ in size, and with them the number of messages and what overlaps: {said}."


def ranks_differ(records: Records) -> list[str]:
    """The runs whose ranks hold parameters of their own by design, as in local SGD."""
    return [run for run, manifest in records.manifests.items() if manifest.get("ranks_differ")]


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


def busy_verdict(comparison: Comparison, runs: Iterable[str] | None = None) -> str:
    """One sentence if ranks were not running for a good part of their steps, so that times say little; else empty.

    Args:
        comparison: of some runs.
        runs: those whose times are compared; None for all.
    """
    steps, spans = comparison.records.steps, comparison.records.spans
    steps = steps if runs is None else steps[steps["run"].isin(list(runs))]
    _, worked = in_timed_steps(comparison.records.collectives, spans, steps)
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


def peak_note(summary: pd.DataFrame) -> str:
    """What is known of ordinary peaks, where the traced step had other collectives in flight; else empty."""
    sizes = ["traced_in_flight_bytes", "in_flight_bytes", "peak_bytes"]
    known = summary.dropna(subset=sizes).set_index("strategy")[sizes].astype("float64") / 1e6
    differ = (known["traced_in_flight_bytes"] - known["in_flight_bytes"]).abs() > SAME_PEAK * known["peak_bytes"]
    parts = [
        f"{strategy} {traced:.2f} MB, ordinary steps {ordinary:.2f} MB (peak {peak:.2f} MB)"
        for strategy, (traced, ordinary, peak) in zip(known.index[differ], known[differ].to_numpy(), strict=True)
    ]
    if not parts:
        return ""
    return (
        "Peaks are those of a traced step, which computes more slowly: it had other collectives in flight than "
        f"ordinary steps, whose peak may differ by as much. In flight at most: {'; '.join(parts)}."
    )


def transports_of(comparison: Comparison) -> dict[str, list[str]]:
    """Each transport and the strategies that used it, without the reported loss, which is always sent by us."""
    sent = comparison.records.collectives.dropna(subset="transport")
    sent = sent[~sent["phase"].isin([Phase.SETUP, Phase.METRICS])]
    real = sent["transport"].str.replace(" as .*", "", regex=True)  # without the name of an emulated link
    return {str(name): list(runs.unique()) for name, runs in sent["run"].groupby(real)}
