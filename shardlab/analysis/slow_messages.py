"""Causes of a long step in its messages: too many, too large, too late, or too uneven."""

from collections.abc import Iterator

import numpy as np

from shardlab.analysis.changed_messages import Latency, ahead, in_parts, merged
from shardlab.analysis.judged_steps import Found, Recorded
from shardlab.analysis.recorded_step import Message, RecordedStep
from shardlab.vocabulary import FLAG, Collective, Phase

LATENCY, LATE_GATHER = "latency of many small messages", "late gather (prefetch too short)"
MIB = 1024**2
UNEVEN = 3.0  # times the usual size


def found(record: Recorded) -> Iterator[Found]:
    """Those of the messages."""
    if not record.messages:
        return
    latency, count = record.latency_us, len(record.messages)
    size = sum(one.num_bytes for one in record.messages)
    exposed = record.us - float(np.median([step.with_transfers(lambda *_: 0.0).us for step in record.steps]))
    said = f"{exposed / 1e3:.3g} ms of a step wait for {count} messages of {size / count / 1e3:.3g} kB"
    if latency is None:
        half = [step.with_transfers(lambda _, us: us / 2) for step in record.steps]
        yield Found("bandwidth", half, f"{said}; latency is not told apart: all are of one size", "a faster link")
    else:
        yield _latency(record, latency, said)
        rest = [step.with_transfers(lambda one, us: min(us, latency(one))) for step in record.steps]
        half = [
            step.with_transfers(lambda one, us: us - max(0.0, us - latency(one)) / 2) for step in record.steps
        ]  # fmt: skip
        yield Found(
            "bandwidth", half, f"{said}, little of it latency", "half the bytes (--precision bf16) or twice the "
            "bandwidth", rest, {"bandwidth": 2},
        )  # fmt: skip
    yield Found(
        LATE_GATHER, [ahead(step) for step in record.steps], f"{said}, gathers that could travel earlier",
        "--prefetch one higher", settings={"prefetch": "+1"},
    )  # fmt: skip
    yield from _uneven(record, latency or _none)
    yield from _last_bucket(record, latency or _none)


def _none(_: Message) -> float:
    return 0.0


def _latency(record: Recorded, latency: Latency, said: str) -> Found:
    """Fewer messages where that gains more than half of the latency, else half of the latency."""
    each = float(np.median([latency(one) for one in record.messages]))
    evidence = f"{said}, each with {each / 1e3:.3g} ms of latency"
    free = [step.with_transfers(lambda one, us: us - min(us, latency(one))) for step in record.steps]
    half = [step.with_transfers(lambda one, us: us - min(us, latency(one)) / 2) for step in record.steps]
    best = Found(LATENCY, half, evidence, "a link of half the latency", free, {"latency": 0.5})
    least = float(np.median(record.gains(half)))
    buckets = is_bucketed(record)
    largest = max(one.num_bytes for one in record.messages)
    total = sum(one.num_bytes for one in record.messages if one.op != Collective.ALL_GATHER)
    limits = [largest * 2**power for power in range(1, 12)] if buckets else []
    for limit in [*(one for one in limits if one < total), float("inf")]:
        changed = [merged(step, limit, latency) for step in record.steps]
        gain = float(np.median(record.gains(changed)))
        if gain > least + 0.02 * record.us:
            least, mib = gain, -(-min(limit, total) // MIB)
            how = (f"larger buckets (--bucket-mib {mib:g})", {"bucket_mib": mib})
            unit = ("one unit (--wrap root), which holds all parameters at once", {"wrap": "root"})
            change, settings = how if buckets else unit
            best = Found(LATENCY, changed, evidence, change, free, settings)
    return best


def _uneven(record: Recorded, latency: Latency) -> Iterator[Found]:
    """A unit whose gather is much larger than the others', in parts as large as those."""
    sizes = {one.tag: one.num_bytes for one in record.messages if _is_gather(one)}
    if is_bucketed(record) or len(sizes) < 3:
        return
    usual, (tag, size) = float(np.median(list(sizes.values()))), max(sizes.items(), key=lambda pair: pair[1])
    if size < UNEVEN * usual:
        return
    num_parts = round(size / usual)
    changed = []
    for step in record.steps:
        for one in [one for one in step.messages if one.num_bytes == size]:
            step = in_parts(step, one, num_parts, latency)
        changed.append(step)
    unit = tag.split(" of ")[-1]
    said = f"unit {unit} has {size / 1e6:.3g} MB, and the usual one {usual / 1e6:.3g} MB"
    yield Found(
        "uneven units",
        changed,
        said,
        f"units of like size: cut {unit} into {num_parts} (--wrap)",
        settings={"wrap": unit},
    )


def _last_bucket(record: Recorded, latency: Latency) -> Iterator[Found]:
    """Smaller buckets, which leave less for when backward has ended."""
    sent = [one for one in record.messages if one.op != Collective.ALL_GATHER and one.phase == Phase.BACKWARD]
    if not sent or not is_bucketed(record) or any(map(_is_gather, record.messages)):  # zero3 sends when all is computed
        return
    last = sent[-1].tag
    without = [step.with_transfers(lambda one, us: 0.0 if one.tag == last else us) for step in record.steps]
    tries = {num_parts: [_smaller(step, num_parts, latency) for step in record.steps] for num_parts in (2, 4, 8)}
    best = max(tries, key=lambda num_parts: float(np.median(record.gains(tries[num_parts]))))
    mib = max(one.num_bytes for one in sent) / best / MIB
    said = f"the last of {len(sent)} reductions has {sent[-1].num_bytes / 1e6:.3g} MB, and no compute beside it"
    yield Found(
        "exposed last bucket",
        tries[best],
        said,
        f"smaller buckets (--bucket-mib {mib:.2g})",
        without,
        {"bucket_mib": float(f"{mib:.2g}")},
    )


def _smaller(step: RecordedStep, num_parts: int, latency: Latency) -> RecordedStep:
    """With all reductions in parts; the parts of gathers behind the step have their latency each."""
    more = num_parts - 1
    step = step.with_transfers(lambda one, us: us + more * latency(one) if one.op == Collective.ALL_GATHER else us)
    for one in [one for one in step.messages if one.phase == Phase.BACKWARD and one.tag != FLAG]:
        step = in_parts(step, one, num_parts, latency)
    return step


def is_bucketed(record: Recorded) -> bool:
    """Whether buckets are sent, and not units."""
    return any("bucket" in one.tag for one in record.messages)


def _is_gather(one: Message) -> bool:
    return one.op == Collective.ALL_GATHER and one.phase == Phase.FORWARD
