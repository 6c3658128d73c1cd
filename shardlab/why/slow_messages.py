"""Causes of a long step in its messages: too many, too large, too late, too uneven, or sent again and again."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from math import inf

import numpy as np
import pandas as pd

from shardlab.analysis.rows import KEYS, begins_of_backward, numbers, positions
from shardlab.partition.step_program import Issue, Message, Work
from shardlab.vocabulary import FLAG, Collective, MeshAxis, Phase
from shardlab.why.changed_messages import Latency, ahead, in_parts, merged
from shardlab.why.judged_steps import Found, Recorded, Steps, link_of
from shardlab.why.recorded_step import RecordedStep

REPEATED = "every micro-batch communicates"
CHANGE = "no_sync() around all micro-batches but the last (FSDP2: set_requires_gradient_sync(False))"
REDUCTIONS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
SAME = [*KEYS, "axis", "op", "tag"]
LATENCY, LATE_GATHER = "latency of many small messages", "late gather (prefetch too short)"
MIB = 1024**2
UNEVEN, FEWEST_UNITS = 3.0, 3  # times the usual size, of how many
ALIKE_SIZES = 8.0  # times the smallest of its class
OF_SCRIPT = " of the script "  # in the tag of what a recorded script sends by itself
EARLY = 0.02  # of a step's work: a strategy that sends only after backward does less between its reductions
SEEN = 0.02  # of a step: what gains less is worth no larger bucket


def found(record: Recorded) -> Iterator[Found]:
    """Those of the messages."""
    if not record.messages:
        return
    latency = record.latency_us
    exposed = float(np.median(record.gains(record.with_transfers(lambda *_: 0.0)))) / 1e3
    said = f"{exposed:.3g} ms of a step wait for {_by_size([one.num_bytes for one in record.messages])}"
    known, apart = latency or (lambda _: 0.0), "latency not told apart: all of one size"
    link = link_of(record.collectives)

    def of_bytes(one: Message, us: float) -> float:
        """What is left of a transfer; of an emulated link no more than its bytes take, since the rest is the host's."""
        most = us if link is None else link.ring_time_us(one.op, one.num_bytes, one.group_size)
        return max(0.0, min(us, most) - known(one))

    if latency is not None:
        free = record.with_transfers(lambda one, us: us - min(us, latency(one)))
        yield _latency(record, latency, free, said)
        apart = f"{np.median(record.gains(free)) / 1e3:.3g} ms of it latency"
    half = record.with_transfers(lambda one, us: us - of_bytes(one, us) / 2)
    rest = record.with_transfers(lambda one, us: us - of_bytes(one, us))
    yield Found("bandwidth", half, f"{said}, {apart}", "a link of twice the bandwidth", rest, {"bandwidth": 2})
    earlier, evidence = [ahead(step) for step in record.steps], f"{said}, and gathers could travel earlier"
    yield Found(
        LATE_GATHER, earlier, evidence, "gathers one unit earlier (--prefetch one higher)", settings={"prefetch": 1}
    )
    gathers_buckets = _is_bucketed(record) and any(map(_is_first_gather, record.messages))
    yield from _first_gather(record, known) if gathers_buckets else _last_bucket(record, known)
    yield from _uneven(record, known)


def _by_size(sizes: list[int]) -> str:
    """How many messages there are of each size, alike ones together: '40 messages of 4 B and 2 of 10.5 MB'."""
    classes: list[list[int]] = []
    for size in sorted(sizes):
        if classes and size <= ALIKE_SIZES * classes[-1][0]:
            classes[-1].append(size)
        else:
            classes.append([size])
    usual = [(len(alike), _bytes(float(np.median(alike)))) for alike in classes]
    (count, size_of_first), *others = usual
    parts = [f"{count} message{'s' * (count > 1)} of {size_of_first}", *(f"{more} of {size}" for more, size in others)]
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _bytes(size: float) -> str:
    power = next(power for power in (0, 1, 2, 3) if size < 1000 ** (power + 1) or power == 3)
    return f"{size / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def every_micro_batch(record: Recorded) -> Iterator[Found]:
    """Reductions that each micro-batch sends, and those of the last one alone."""
    rows = repeated(record.collectives, record.spans)
    own = rows[rows["rank"] == rows["rank"].min()]
    tags = {step: set(of_step["tag"]) for step, of_step in own.groupby("step")}
    numbers = record.timed["step"].unique()
    if len(tags) < len(numbers):  # in some steps there is nothing of it
        return
    changed = [
        step.without_messages(_all_but_the_last(step, tags[number]))
        for number, step in zip(numbers, record.steps, strict=True)
    ]
    yield Found(REPEATED, changed, repeated_in_words(own, len(numbers)), CHANGE)


def _all_but_the_last(step: RecordedStep, tags: Collection[str]) -> set[Message]:
    """Of the reductions of each tag."""
    sent = [one for one in step.messages if one.tag in tags and one.op in REDUCTIONS and one.phase == Phase.BACKWARD]
    return set(sent) - set({(one.queue, one.op, one.tag): one for one in sent}.values())


def _latency(record: Recorded, latency: Latency, free: Steps, said: str) -> Found:
    """Fewer messages where that gains more than half of the latency, else half of it; ``free`` is without any."""
    each = float(np.median([latency(one) for one in record.messages])) / 1e3
    evidence = f"{said}, each with {each:.3g} ms of latency"
    half = record.with_transfers(lambda one, us: us - min(us, latency(one)) / 2)
    best = Found(LATENCY, half, evidence, "a link of half the latency", free, {"latency": 0.5})
    least = float(np.median(record.gains(half)))
    free_to_move = [one for one in record.messages if not one.is_inside]
    largest = max((one.num_bytes for one in free_to_move), default=0)
    total = sum(one.num_bytes for one in free_to_move if one.op != Collective.ALL_GATHER)
    tagged = "bucket" if _is_bucketed(record) else ""
    limits = [largest * 2**power for power in range(1, 12)] if tagged else []
    for limit in [*(one for one in limits if one < total), inf]:
        changed = [merged(step, limit, latency, tagged) for step in record.steps]
        gain = float(np.median(record.gains(changed)))
        if gain > least + SEEN * record.us:
            least, mib = gain, -(-min(limit, total) // MIB)
            best = replace(best, changed=changed, change=f"larger buckets (--bucket-mib {mib:g})",
                           settings={"bucket_mib": mib})  # fmt: skip
    script = [one for one in record.messages if OF_SCRIPT in one.tag]
    if len(script) > 1:
        changed = [_joined(step) for step in record.steps]
        if (gain := float(np.median(record.gains(changed)))) > least + SEEN * record.us:
            change = f"one message for the script's {len(script)}, if none is needed before the last,"
            return replace(best, changed=changed, change=change, settings={})
    if _is_bucketed(record) or best.changed is half:
        return best
    if not any(one.op == Collective.ALL_GATHER for one in free_to_move):
        return replace(best, change="buckets (--strategies bucketed)", settings={"strategies": ("bucketed",)})
    return replace(best, change="one unit (--wrap root), which holds all parameters at once", settings={"wrap": "root"})


def _joined(step: RecordedStep) -> RecordedStep:
    """With one message, the last, for all that the script itself sends of a kind; ranks still meet as often."""
    sent = [one for one in step.messages if OF_SCRIPT in one.tag]
    last = {(one.op, one.queue, one.phase, tuple(one.transfer_us)): one for one in sent}
    gone = set(sent) - set(last.values())
    return step.with_transfers(lambda one, us: 0.0 if one in gone else us)


def _uneven(record: Recorded, latency: Latency) -> Iterator[Found]:
    """A unit whose gather is much larger than the others', in parts as large as those."""
    sizes = {one.tag: one.num_bytes for one in record.messages if _is_first_gather(one)}
    if _is_bucketed(record) or len(sizes) < FEWEST_UNITS:
        return
    usual, (tag, size) = float(np.median(list(sizes.values()))), max(sizes.items(), key=lambda pair: pair[1])
    if size < UNEVEN * usual:
        return
    num_parts, unit = round(size / usual), _unit_of(tag)
    changed = [_in_parts(step, num_parts, latency, lambda one: _unit_of(one.tag) == unit) for step in record.steps]
    said = f"unit {unit} has {size / 1e6:.3g} MB, and the usual one {usual / 1e6:.3g} MB"
    change = f"units of like size: cut {unit} into {num_parts} (--wrap)"
    yield Found("uneven units", changed, said, change, settings={"wrap": unit})


def _unit_of(tag: str) -> str:
    return tag.split(" of ")[-1].removeprefix("unit ")


def _last_bucket(record: Recorded, latency: Latency) -> Iterator[Found]:
    """Smaller buckets, which leave less for when backward has ended."""
    sent = [one for one in record.messages if _is_reduction(one)]
    if not sent or not _is_bucketed(record) or not _is_early(record.steps[0]):
        return
    without = record.with_transfers(lambda one, us: 0.0 if one.tag == sent[-1].tag else us)
    tries = {parts: _smaller(record, parts, latency) for parts in (2, 4, 8)}
    best = max(tries, key=lambda parts: float(np.median(record.gains(tries[parts]))))
    mib = float(f"{max(one.num_bytes for one in sent) / best / MIB:.2g}")
    said = f"the last of {len(sent)} reductions has {sent[-1].num_bytes / 1e6:.3g} MB, and no compute beside it"
    change = f"smaller buckets (--bucket-mib {mib:g})"
    yield Found("exposed last bucket", tries[best], said, change, without, {"bucket_mib": mib})


def _is_early(step: RecordedStep) -> bool:
    """Whether ranks compute between their first reduction and their last; one alone may be early."""
    items = next(iter(step.programs.values()))
    places = [place for place, one in enumerate(items) if isinstance(one, Issue) and _is_reduction(one.message)]
    if len(places) < 2:
        return True
    worked, between = (
        sum(one.us for one in some if isinstance(one, Work)) for some in (items, items[places[0] : places[-1]])
    )
    return between > EARLY * worked


def _smaller(record: Recorded, parts: int, latency: Latency) -> Steps:
    """With all reductions in parts; behind the step each part of a gather has its latency."""
    steps = record.with_transfers(
        lambda one, us: us + (parts - 1) * latency(one) if one.op == Collective.ALL_GATHER else us
    )
    return [_in_parts(step, parts, latency, _is_reduction) for step in steps]


def _first_gather(record: Recorded, latency: Latency) -> Iterator[Found]:
    """Gathers unit by unit beside compute, where all of them are in front of it; reductions likewise."""
    gathers = list({one.tag: one for one in record.messages if _is_first_gather(one)}.values())
    if len(gathers) > 1:
        changed = [
            _in_parts(merged(step, inf, latency), len(gathers), latency, lambda one: one.tag != FLAG)
            for step in record.steps
        ]
        size = sum(one.num_bytes for one in gathers) / 1e6
        said = f"{size:.3g} MB are gathered before compute begins, and {size:.3g} MB reduced when it has ended"
        change = "gather unit by unit (--strategies fsdp)"
        # All messages change places, which is forecast less well than other changes.
        yield Found("exposed first gather", changed, said, change, settings={"strategies": ("fsdp",)}, least=0.25)


def _in_parts(step: RecordedStep, num_parts: int, latency: Latency, chosen: Callable[[Message], bool]) -> RecordedStep:
    """With the chosen messages in parts."""
    for one in [one for one in step.messages if chosen(one)]:
        step = in_parts(step, one, num_parts, latency)
    return step


def _is_bucketed(record: Recorded) -> bool:
    """Whether buckets are sent, and not units."""
    return any("bucket" in one.tag for one in record.messages)


def _is_first_gather(one: Message) -> bool:
    return one.op == Collective.ALL_GATHER and one.phase == Phase.FORWARD and not one.is_inside


def _is_reduction(one: Message) -> bool:
    return one.op != Collective.ALL_GATHER and one.phase == Phase.BACKWARD and one.tag != FLAG and not one.is_inside


def repeated(collectives: pd.DataFrame, spans: pd.DataFrame) -> pd.DataFrame:
    """The rows that a later reduction of the same gradients in their step makes superfluous.

    It is exact: a reduction is tagged with what it carries, and one with the same tag in a later backward of the step
    carries the same gradients again.
    """
    is_sent = (collectives["phase"] == str(Phase.BACKWARD)) & collectives["op"].isin(map(str, REDUCTIONS))
    rows = collectives[is_sent & (collectives["tag"] != FLAG) & (collectives["axis"] != str(MeshAxis.TENSOR))]
    backward, of_spans = np.zeros(len(rows), dtype=np.int64), positions(spans)
    for key, here in positions(rows).items():
        if key in of_spans:
            begins = begins_of_backward(spans.iloc[of_spans[key]])
            backward[here] = np.searchsorted(begins, numbers(rows, "issue_us")[here], side="right")
    same = rows.assign(backward=backward).groupby(SAME, sort=False)
    # Twice in one backward is another thing: a strategy that tags all of its messages alike.
    once_each = same["backward"].transform("size") == same["backward"].transform("nunique")
    return rows[once_each & (rows["seq"] != same["seq"].transform("max"))]


def repeated_in_words(rows: pd.DataFrame, num_steps: int) -> str:
    """What is sent again and again, in words.

    Args:
        rows: those of ``repeated``, of one rank.
        num_steps: how many steps they are of.
    """
    what = rows.groupby(["step", "axis", "op", "tag"])
    count, times = round(what.ngroups / num_steps), 1 + round(what.size().median())
    size = rows["wire_bytes"].sum() / num_steps / 1e6  # as SENT counts
    return f"each of {count} reductions of gradients is sent {times} times a step, {size:.3g} MB of it before the last"
