"""How long a step of a transformer takes on GPUs that are not here, how much memory it needs, and what was left out.

Time is that of ``step_model``, with factors that ``calibration`` takes from measured steps; bytes are of ``peak``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from shardlab.forecast.calibration import checked, fitted
from shardlab.forecast.job import Job
from shardlab.forecast.peak import norm_copies_bytes, peak_bytes, room_bytes
from shardlab.forecast.step_model import HOST_BOUND, Factors, Step, step_parts

# Reserved over allocated bytes, least and most: OpenTau PR #273 (batch 40); Megatron-LM issue #150 (fsdp2 on 16 GPUs).
# In between lie 1.26 to 1.36 (llama-cookbook PR #41, torchtitan PR #135 and #165).
RESERVED = (1.01, 1.62)
USABLE = 0.9  # of a card's memory: what libraries, their messages and the allocator take at least is in no tensor
FAR = 0.05  # a calibration pair that is missed by more is named
# Units that are gathered and freed leave gaps that no unit fits; where less memory is free beside the peak than so many
# bytes and gathered layers, the allocator may empty its cache and ask again (pytorch issue 65078; arXiv 2304.11277,
# section 3.4). The line is drawn on ten published steps with less, of which all were slower than their forecast; of 189
# with more none was by 15 %. Others with less were not slowed, nor were three of the ten jobs themselves with torch 2:
# 13B on 8 A100 40GB made 17 % more tokens a second (1948 to 1668, 2019 to 1727, 2074 to 1763), on 16, with room, 2 %
# (2031 to 1993; llm-foundry, scripts/train/benchmarking: torch2.md, README.md). So it is a warning, and no seconds.
ROOM_BYTES, ROOM_LAYERS = 4.8e9, 9.1
LONG_HOPS = 1e-3  # seconds of a ring's hops, those of 214 ranks
WAITS = 0.05  # of a step, for its host: from here on the host sets the pace
MOST_SENT = 0.6  # of a layer's compute, its messages: of published steps that are sharded by unit 0.57 at most
# What is in no seconds, since no term for it holds on a machine that it was not chosen on: how many times as long a
# step may take at most. That of the allocator is rounded up from 1.05 to 1.35 on those ten steps (1.41 without a
# measured one of the machine); of messages from 1.19 and 1.53, 13B with 512 and 128 tokens on 8 A100 40GB (torch2.md,
# again); of a host that nobody measured, which may be as much faster, from 45 us a kernel (``LAUNCH_SECONDS``).
RETRIES, MESSAGES, HOST = 1.5, 1.6, 1.5


@dataclass(frozen=True)
class Forecast:
    """What is foretold of a step.

    Attributes:
        seconds: of a step.
        parts: what they are spent on, in seconds; they add up to ``seconds``.
        peak_bytes: of a rank, in tensors.
        not_modelled: sentences on what was left out or assumed.
        least_seconds: on a faster host, where one that nobody measured sets the pace; else ``seconds``. By how
            much a forecast may miss is in neither: ``region.range_of`` adds what ``region.expected_miss`` says.
        most_seconds: of a step over the slowest links between hosts that are usual, where no network says them, and
            ``seconds`` is over the fastest, on a slower host, where nobody measured it, and with what else is warned
            of; elsewhere the same as ``seconds``.
        warnings: sentences on what makes this very step one outside of what is known, and is not in its seconds.
    """

    seconds: float
    parts: Mapping[str, float]
    peak_bytes: float
    not_modelled: tuple[str, ...]
    least_seconds: float
    most_seconds: float
    warnings: tuple[str, ...]


def predict_step(
    *, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq_len: int, micro_batch: int, data:
    int, accumulation: int = 1, tensor: int = 1, strategy: str = "fsdp", precision: str = "bf16", recompute: int | str =
    0, hardware: str = "a100-80gb", network: str | None = None, calibration: Sequence[tuple[Mapping[str, Any], float]] =
    (), gated: bool | None = None, compiled: bool = False, cuda_graph: bool = False, attention: str | None = None,
    head_dim: int | None = None, window: int | None = None, windowed_layers: int = 0, layer_numel: int | None = None,
    root_numel: int | None = None, no_sync: bool = False, sequence_parallel: bool = True, async_tensor: bool
    = False, states: str = "mixed",
) -> Forecast:  # fmt: skip
    """Seconds of a training step of a causal transformer, their parts, and bytes at the peak of a rank.

    A step is ``accumulation`` forwards and backwards of ``micro_batch`` sequences of ``seq_len`` tokens on each of
    ``data`` ranks (a rank is ``tensor`` GPUs), and a step of Adam. Matrix products of a layer: (tokens, hidden) by
    (hidden, hidden + 2 hidden kv_heads / heads), (hidden, hidden), and those of the MLP; of the head (hidden, vocab).

    Args:
        hidden: width of the residual; without ``head_dim`` ``heads`` divide it.
        layers: transformer layers.
        heads: of attention; ``tensor`` divides them.
        kv_heads: heads of keys and values; they divide ``heads``.
        ffn: inner width of the MLP; ``tensor`` divides it.
        vocab: logits of a token.
        seq_len: tokens of a sequence.
        micro_batch: sequences of a forward on one data rank.
        data: ranks of the data axis.
        accumulation: micro-batches of a step.
        tensor: GPUs that share a layer; neighbours on a host.
        strategy: single, ddp, bucketed, zero1, zero2, zero3, fsdp, shard_grad_op or hybrid_shard (sharded in a host).
        precision: of products and messages: bf16, fp16 or tf32; fp8 for products of layers in 8 bits, all else in 16.
            What the optimizer steps is in ``states``.
        recompute: layers whose forward runs again in backward up to its last product, or 'full' for all; 'selective'
            for memory-bound work and every second product, or, where scores are stored, for these alone.
        hardware: name of a preset, see ``gpu.cards``.
        network: such as '8 per host, 600GB/s, 200Gb/s per GPU', see ``network.network_of``; None where not known:
            then ``most_seconds`` is over the slowest link between hosts that is usual.
        calibration: up to three pairs of arguments like these and measured seconds, of the same cluster.
        gated: whether layers are written as in Llama (three matrices in the MLP, rotation, head and embedding apart) or
            as in GPT (two, together); None: as in Llama unless ``ffn`` is four times ``hidden``.
        compiled: whether memory-bound work is fused by a compiler.
        cuda_graph: whether a step is launched as a CUDA graph, so that the host launches no kernel on its own.
        attention: 'flash-1' (as fast as Triton's of 2023), 'flash-2', 'unfused' (products, one kernel in between) or
            'op-by-op' (scaled, masked and normalised by an operation each), all causal; the scores of the last two are
            computed whole, and stored. None: 'flash-2' for layers as in Llama, 'flash-1' for those as in GPT.
        head_dim: elements of a head; None for ``hidden / heads``.
        window: tokens that a token attends to at most in ``windowed_layers`` of the layers; in the others to all.
        windowed_layers: see ``window``.
        layer_numel: parameters of a layer; None for those of its matrix products and two norms.
        root_numel: parameters of all but the layers; None for embedding and head, see ``gated``.
        no_sync: whether only the last micro-batch reduces gradients, which until then add up whole on every rank;
            False: each reduces them, and where gradients are sharded none are whole between two micro-batches.
        sequence_parallel: with ``tensor``: whether tensor ranks share norms and residuals by tokens, as in Megatron-LM,
            where the inputs of products are gathered again in backward.
        async_tensor: with ``tensor``: whether its messages go in parts, beside the products that need or make them.
        states: bytes of what training keeps for a parameter: a name of ``formulas.PRECISIONS``, or those of parameter,
            gradient, master weight, momentum and variance, such as '2+4+4+4+4'. Gradients travel in as many bytes.

    Raises:
        ValueError: an argument is not allowed; the message names the field and what is.

    Sources: arXiv 1910.02054 (sections 5, 7), 2304.11277 (3), 2205.05198 (5), 2104.04473 (3), 2507.03114 (contention).
    """
    arguments = {name: value for name, value in locals().items() if name != "calibration"}  # all are of a job
    return forecast_of(Job(**arguments), calibration)


def forecast_of(job: Job, calibration: Sequence[tuple[Mapping[str, Any], float]] = ()) -> Forecast:
    """As ``predict_step``, of arguments that are checked."""
    pairs = checked(calibration, job)
    factors = fitted(pairs)
    parts = step_parts(job, factors)
    seconds, sentences = parts.total(), tuple(_sentences(job, pairs, factors))
    # A slower host is replayed, whether this one sets the pace or not: so over faster links no step takes longer.
    at_worst = fitted(checked(calibration, job.slowest)) if pairs else Factors(host=1 / HOST)
    slow = max(seconds, step_parts(job.slowest, at_worst).total())
    warned = [*doubts_of(job, parts, is_measured=bool(pairs))]
    least, most = seconds / prod(one.faster for one in warned), slow * prod(one.slower for one in warned)
    spent = {part: max(0.0, of) for part, of in parts.items()}  # differences of times, such as -1e-13
    return Forecast(seconds, spent, peak_bytes(job), sentences, least, most, tuple(one.said for one in warned))


def may_retry(job: Job) -> bool:
    """Whether a step that fits has so little room that the allocator may ask again."""
    gathered = job.held_layer_params / job.tensor * job.itemsize
    return job.row.by_unit and job.shards > 1 and 0 <= room_bytes(job) < ROOM_BYTES + ROOM_LAYERS * gathered


def sent_share(job: Job) -> float:
    """A layer's messages, over the slowest links, against its compute, in seconds; 0 unless units are gathered."""
    return Step(job.slowest, Factors()).sent_share if job.row.by_unit and job.shards > 1 else 0.0


class Doubt(NamedTuple):
    """How many times as slow a step may be as its parts say, how many times as fast, and why."""

    slower: float
    faster: float
    said: str


def doubts_of(job: Job, parts: Mapping[str, float], *, is_measured: bool) -> Iterator[Doubt]:
    """What makes a step with these parts one that is not known, where one of its cluster was measured or none was."""
    if may_retry(job):
        yield Doubt(RETRIES, 1.0,
            f"Beside the peak {room_bytes(job) / 1e9:.3g} GB are free; with so little, for layers of this size, "
            "torch's allocator may empty its cache and ask again. Published steps took 5 to 35 % longer there than is "
            "forecast, and three of them as long as forecast with torch 2.",
        )  # fmt: skip
    if (share := sent_share(job)) > MOST_SENT:
        yield Doubt(MESSAGES, 1.0,
            f"A layer's messages take {share:.0%} of the time of its compute; of no published step more than 57 %. Two "
            "with 512 and 128 tokens a micro-batch took 19 and 53 % longer than is forecast. More tokens a micro-batch "
            "would help.",
        )  # fmt: skip
    if waits_for_host(parts):
        yield Doubt(1.0, 1.0 if is_measured else HOST,  # a slower one is replayed
            f"Host-bound: {parts[HOST_BOUND] / sum(parts.values()):.0%} of a step the GPU waits for the next kernel to "
            "be launched. More tokens a micro-batch, a compiler or a CUDA graph would help; more tensor parallelism "
            "would not.",
        )  # fmt: skip


def waits_for_host(parts: Mapping[str, float]) -> bool:
    """Whether the device waits for the host in more than a small part of a step."""
    return parts[HOST_BOUND] > WAITS * sum(parts.values())


def _sentences(job: Job, pairs: Sequence[tuple[Job, float]], factors: Factors) -> list[str]:
    found = [
        "Loading data, checkpoints, evaluation, stragglers, congestion by others, and what the host does "
        "besides launching kernels are not in the seconds; the allocator's reserve and the libraries' own memory are "
        "not in the bytes.",
        f"Layers are taken to be written as in {'Llama' if job.is_gated else 'GPT'}"
        f"{', compiled' if job.compiled else ''}, with attention {job.kernel}. All parameters are trained, and there "
        "are no stages: LoRA and pipelines are not forecast.",
    ]
    if job.written == "llama" and (norms := norm_copies_bytes(job)):
        found.append(
            "Norms keep what fused ones keep; written operation by operation in 32 bits, as in transformers, they keep "
            f"{norms / 1e9:.3g} GB more at the peak."
        )
    found += _on_network(job)
    if job.accumulation > 1 and not job.row.alone:
        found.append(
            "Only the last micro-batch reduces gradients, which until then are whole on every rank: the others run in "
            "no_sync()." if job.no_sync else
            "Each micro-batch reduces its gradients; no_sync() would save that, and keep whole gradients."
        )  # fmt: skip
    if job.row.parameters and not job.row.by_unit:
        found.append("Nothing overlaps and all is gathered at once, as in this package; others gather layer by layer.")
    if job.tensor > 1:
        sums = "; without sequence parallelism"
        if job.sequence_parallel:
            without = peak_bytes(replace(job, sequence_parallel=False)) / 1e9
            sums = f". Sequence parallelism divides norms and residuals; without it the peak is {without:.3g} GB"
        beside = "go in parts, beside products" if job.async_tensor else "are not split or overlapped"
        found.append(f"Tensor-parallel messages {beside}, and gather an input once for all products of it{sums}.")
    return [*found, *_on_pairs(job, pairs, factors)]


def _on_network(job: Job) -> Iterator[str]:
    """What is taken for the links, where nobody has said it."""
    if job.assumed_gigabits:
        least, most = job.assumed_gigabits
        yield (
            f"The network between hosts is not known: {least:g} to {most:g}Gb/s per GPU, what is usual for the card, "
            f"are assumed, with {job.links.per_host} GPUs a host and {job.card.inside} inside; say it with network= or "
            f"--network. What a step is spent on is over {most:g}."
        )
    elif job.network is None and job.data * job.tensor > 1:
        yield f"The network is not known: GPUs of one host, {job.card.inside} between them, are assumed."
    step = Step(job, Factors())
    layer = step.units[0][0]
    for op, axis, part in job.row.reduced(job.sizes):
        num_bytes = layer.reduced_bytes * part / (1 if job.row.by_unit else layer.num_messages)
        hops = step.message_seconds(op, axis, 1.0)
        if hops > max(LONG_HOPS, (others := step.message_seconds(op, axis, num_bytes) - hops)):
            yield (
                f"A message over {job.sizes[axis]:,} ranks takes {1e3 * hops:.2g} ms for its hops and "
                f"{1e3 * others:.2g} ms for its {num_bytes / 1e6:.0f} MB: larger ones would wait less, and so would "
                "hybrid_shard, whose rings are short."
            )
    if not job.links.is_switched:
        yield (
            "Hosts of four GPUs are taken to have no switch, so that two GPUs have a third of their links for each "
            "other; where there is one, give both directions in numbers, such as 900GB/s, for the link's name."
        )


def _on_pairs(job: Job, pairs: Sequence[tuple[Job, float]], factors: Factors) -> list[str]:
    """What measured steps are of, and which are still missed."""
    if not pairs:
        seconds, slow = (step_parts(job, one).total() for one in (factors, Factors(host=1 / HOST)))
        on_slow = f" Its range counts a host that takes {HOST:g} times as long a kernel." * (slow > 1.005 * seconds)
        said = "Nothing was measured on this cluster; give up to three steps of it: calibration= or --measured."
        return [said + on_slow]
    found = [
        f"Calibration pair {number} is of {of.card.name}, the forecast of {job.card.name}."
        for number, (of, _) in enumerate(pairs)
        if of.card != job.card
    ]
    for number, (of, seconds) in enumerate(pairs):
        error = step_parts(of, factors).total() / seconds - 1
        if abs(error) > FAR:
            found.append(f"Calibration pair {number} is still missed by {error:+.0%}: something is not modelled here.")
    return found
