"""A recorded step with its messages sent otherwise: fewer of them, gathers earlier, or one in parts."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from shardlab.partition.step_program import Issue, Item, Message, Program, Wait, Work
from shardlab.vocabulary import FLAG, Collective, Phase
from shardlab.why.recorded_step import RecordedStep

Latency = Callable[[Message], float]


def merged(step: RecordedStep, limit_bytes: float, latency_us: Latency, tagged: str = "") -> RecordedStep:
    """With neighbouring messages of one kind sent as one, of up to ``limit_bytes``: those with ``tagged`` in their tag.

    What is gathered is there before the first of them; a reduction has to wait for the last one's gradients.
    """
    one_for: dict[Message, tuple[Message, Message, Message]] = {}  # the first, the last, the whole
    for group in _neighbours([one for one in step.messages if tagged in one.tag], limit_bytes):
        less = (len(group) - 1) * latency_us(group[0])
        times = {
            rank: max(sum(one.transfer_us[rank] for one in group) - less, max(one.transfer_us[rank] for one in group))
            for rank in group[0].transfer_us
        }
        whole = replace(group[0], num_bytes=sum(one.num_bytes for one in group), transfer_us=times)
        one_for |= dict.fromkeys(group, (group[0], group[-1], whole))

    def change(_: int, items: Program) -> Iterator[Item]:
        for item in items:
            if isinstance(item, Work):
                yield item
                continue
            first, last, whole = one_for.get(item.message, (item.message,) * 3)
            if item.message is (first if whole.op == Collective.ALL_GATHER else last):
                yield replace(item, message=whole)

    return step.each(change)


def _neighbours(messages: list[Message], limit_bytes: float) -> Iterator[list[Message]]:
    kinds: dict[object, list[Message]] = {}
    for one in messages:
        if one.tag == FLAG or one.is_inside:
            continue
        key = one.op, one.queue, one.phase, tuple(one.transfer_us)
        held = kinds.setdefault(key, [])
        again = one.tag in {other.tag for other in held}  # the next micro-batch has begun
        if held and (again or sum(other.num_bytes for other in held) + one.num_bytes > limit_bytes):
            yield held
            held = kinds[key] = []
        held.append(one)
    yield from (held for held in kinds.values() if held)


def ahead(step: RecordedStep) -> RecordedStep:
    """With each gather of a phase issued one gather earlier.

    One that is waited for at once moves to where the wait before it ended; one that follows a wait, behind an earlier
    wait. The first wait is before them all, so that what is gathered ahead does not delay the first gather. They start
    as late after that as others do that are issued beside compute, whose core the queue wants, too.
    """
    waited = _at_once(step)

    def delayed(one: Message) -> Message:
        return _beside_compute(step, one) if one in waited and one.op == Collective.ALL_GATHER else one

    late = step.with_messages(delayed)
    at_once = _at_once(late)

    def change(_: int, items: Program) -> Iterator[Item]:
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            items = tuple(item for part in _micro_batches(items, phase) for item in _ahead(part, phase, at_once))
        yield from items

    return late.each(change)


def _at_once(step: RecordedStep) -> set[Message]:
    """Messages whose wait follows their issue."""
    return {
        item.message
        for items in step.programs.values()
        for item, after in pairwise(item for item in items if not isinstance(item, Work))
        if isinstance(item, Issue) and isinstance(after, Wait) and after.message is item.message
    }


def _beside_compute(step: RecordedStep, message: Message) -> Message:
    """A message as late in starting as those that are not waited for at once."""
    at_once = _at_once(step)
    late_us = [max(one.dispatch_us.values()) for one in step.messages if one not in at_once]
    us = fmean(late_us) if late_us else 0.0
    return replace(message, dispatch_us={rank: max(own, us) for rank, own in message.dispatch_us.items()})


def _micro_batches(items: Program, phase: Phase) -> Iterator[Program]:
    """The items of a rank, cut where a gather comes again."""
    begin, tags = 0, set[str]()
    for place, item in enumerate(items):
        if isinstance(item, Issue) and _gathers(item, phase):
            if item.message.tag in tags:
                yield items[begin:place]
                begin, tags = place, set()
            tags.add(item.message.tag)
    yield items[begin:]


def _ahead(items: Program, phase: Phase, at_once: Collection[Message]) -> Iterator[Item]:
    """The items of a micro-batch; gathers by the number of waits that they are to follow."""
    num_waits, moved = 0, dict[int, list[Item]]()
    for item in items:
        if isinstance(item, Issue) and _gathers(item, phase) and num_waits:
            behind = num_waits if item.message in at_once else max(1, num_waits - 1)
            moved.setdefault(behind, []).append(item)
        num_waits += isinstance(item, Wait) and _gathers(item, phase)
    num_waits = 0
    for item in items:
        if not (isinstance(item, Issue) and _gathers(item, phase) and num_waits):
            yield item
        if isinstance(item, Wait) and _gathers(item, phase):
            num_waits += 1
            yield from moved.pop(num_waits, ())


def _gathers(item: Item, phase: Phase) -> bool:
    if isinstance(item, Work) or item.message.is_inside:
        return False
    return item.message.op == Collective.ALL_GATHER and item.message.phase == phase


def in_parts(step: RecordedStep, message: Message, num_parts: int, latency_us: Latency) -> RecordedStep:
    """With one message in equal parts, and the compute that it feeds, or that feeds it, in as many.

    A part of a gather is waited for before its part of the compute, while the next one travels. A part of a reduction
    is issued after its part of the compute, which begins behind the reduction before it, or when backward begins.
    """
    times = {
        rank: min(us, latency_us(message)) + max(0.0, us - latency_us(message)) / num_parts
        for rank, us in message.transfer_us.items()
    }
    size = message.num_bytes // num_parts
    gathers = message.op == Collective.ALL_GATHER
    like = [message, *[_beside_compute(step, message) if gathers else message] * (num_parts - 1)]
    parts = [replace(one, num_bytes=size, transfer_us=times) for one in like]

    def change(rank: int, items: Program) -> Iterator[Item]:
        if not gathers:
            for moment in step.backward_us.get(rank, ()):
                items = tuple(_cut_at(items, moment))
        places = [place for place, item in enumerate(items) if not isinstance(item, Work) and item.message is message]
        if gathers and len(places) == 2:
            stop = _end_of_compute(items, places[1])
            yield from (*items[: places[0]], Issue(parts[0]), *items[places[0] + 1 : places[1]])
            yield from _fed(items[places[1] + 1 : stop], parts, items[places[1]])
            yield from items[stop:]
        elif gathers or not places:  # nobody waits for it
            yield from items
        else:
            start = _begin_of_compute(items, places[0], step.backward_us.get(rank, ()))
            yield from (*items[:start], *_feeding(items[start : places[0]], parts))
            for item in items[places[0] + 1 :]:
                is_wait = isinstance(item, Wait) and item.message is message
                yield from [Wait(part, 0.0) for part in parts] if is_wait else [item]

    return step.each(change)


def _end_of_compute(items: Program, wait: int) -> int:
    """Before the next wait for a gather or the next reduction."""
    for place in range(wait + 1, len(items)):
        item = items[place]
        if isinstance(item, Work) or item.message.is_inside:
            continue
        if isinstance(item, Wait) == (item.message.op == Collective.ALL_GATHER):
            return place
    return len(items)


def _cut_at(items: Program, moment: float) -> Iterator[Item]:
    for item in items:
        if isinstance(item, Work) and item.start_us < moment < item.end_us:
            yield from item.cut((moment - item.start_us) / (item.end_us - item.start_us))
        else:
            yield item


def _begin_of_compute(items: Program, issue: int, backward_us: tuple[float, ...]) -> int:
    """Behind the reduction before it, or where its backward begins."""
    now = max((item.end_us for item in items[:issue] if isinstance(item, Work)), default=0.0)
    begin = max((moment for moment in backward_us if moment < now), default=0.0)
    for place in range(issue - 1, -1, -1):
        item = items[place]
        if isinstance(item, Work):
            if item.end_us <= begin:
                return place + 1
        elif isinstance(item, Issue) and item.message.op != Collective.ALL_GATHER and not item.message.is_inside:
            return place + 1
    return 0


def _cut(items: Program, num_parts: int) -> Iterator[Item | int]:
    """The items, and in between the numbers of the parts where their work has come so far."""
    whole = sum(item.us for item in items if isinstance(item, Work))
    done, part = 0.0, 1
    for item in items:
        while isinstance(item, Work) and part < num_parts and done + item.us >= (bound := whole * part / num_parts):
            first, item = item.cut((bound - done) / item.us if item.us else 0.0)
            yield first
            yield part
            done, part = bound, part + 1
        done += item.us if isinstance(item, Work) else 0.0
        yield item
    yield from range(part, num_parts)


def _fed(items: Program, parts: list[Message], wait: Item) -> Iterator[Item]:
    """Compute behind the gathers of its parts; what was gathered ahead comes behind the last of them."""
    later = [item for item in items if isinstance(item, Issue) and item.message.op == Collective.ALL_GATHER]
    yield replace(wait, message=parts[0])  # type: ignore[arg-type]
    yield Issue(parts[1])
    for item in _cut(tuple(item for item in items if item not in later), len(parts)):
        if isinstance(item, int):
            yield Wait(parts[item], 0.0)
            yield from [Issue(parts[item + 1])] if item + 1 < len(parts) else later
        else:
            yield item


def _feeding(items: Program, parts: list[Message]) -> Iterator[Item]:
    """Compute with a reduction of each part behind it."""
    for item in _cut(items, len(parts)):
        yield Issue(parts[item - 1]) if isinstance(item, int) else item
    yield Issue(parts[-1])
