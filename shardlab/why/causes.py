"""Why a step takes as long as it does: its causes, each with what changing one thing would gain, by replay.

A cause is a share of the step that one change takes away. The recorded steps are replayed with the change made
(``recorded_step``): each gain is the median over several steps, and counts where three steps in four gain at least a
tenth of their time (of an optimizer a fifth, of gathers in front a quarter), so that noise of single steps names
nothing; of messages at least the share that ranks are off the CPU. Causes are ranked by the time that would go if the
cause were absent. Those among the messages explain the same time, so of them the one whose change gains most is first;
a faster link only where no other order or size of messages gains three quarters of that.

========================================  ==========================================  ===============================
cause                                     seen in                                     the change that is replayed
========================================  ==========================================  ===============================
input wait                                spans of data                               none of them
host-bound                                time outside all spans and waits; calls     none of it
                                          of operations, at their least
recomputation                             spans of recomputation                      none of them
optimizer step                            spans of the optimizer                      none of them: an upper bound
off the CPU                               spans off the CPU, beside a straggler's     none of them
straggler                                 the last rank of each meeting               its work as long as the others'
contention                                spans of alike units, with and without      all as long as those without
                                          messages beside them
latency of many small messages            messages x latency                          fewer messages, or half of it
bandwidth                                 the rest of the transfers                   half of it
pipeline bubble                           waits for other stages, in the list         twice the micro-batches, or
                                          of actions                                  halves of backward
unbalanced stages                         work of ranks on their stages               as much on each rank
late gather (prefetch too short)          gathers waited for                          each issued one gather earlier
uneven units                              a unit's messages, against the median       its messages in parts
every micro-batch communicates            a tag again in the step's next backward     the last one's reductions
exposed last bucket, exposed first        the last reduction, the first gather        it travels in parts, beside
gather                                                                                the compute around it
========================================  ==========================================  ===============================

Latency is that of the emulated link, where the record names one; else of a line through the transfers by size, which
needs small messages beside large ones, such as the reported loss. Where no host is seen to wait (on a GPU streams do,
and traces of a profiler do not say it) nothing can be replayed: see ``step_shares``. Retries of the allocator are in no
table.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from shardlab.vocabulary import SpanKind
from shardlab.why import pipelined, slow_messages, slow_work, step_shares
from shardlab.why.judged_steps import BALANCED, UNKNOWN, Cause, Found, Recorded, watched
from shardlab.why.recorded_step import REPRODUCED, no_host_waits, of_run

SEEN = 0.01  # of a step: what gains less is not listed
FEWEST_STEPS = 3
FOR_MONEY = 0.75  # of its gain by which a faster link is ranked: what an option brings is had for nothing


def causes(
    collectives: pd.DataFrame, spans: pd.DataFrame, steps: pd.DataFrame, run: str | None = None,
    axes: Mapping[str, int] | None = None, besides: Collection[str] = (),
) -> list[Cause]:  # fmt: skip
    """The causes of a run's step time, the largest gain first: the first one is the primary cause.

    Args:
        collectives: table ``collectives``; the rows of all ranks.
        spans: table ``spans``.
        steps: table ``steps``.
        run: which run; None where the tables hold one.
        axes: sizes of the axes of the mesh, see ``with_group``.
        besides: names of causes that are known already, and left out.

    Returns:
        'balanced' comes first where no change gains a tenth of a step, and 'cannot be said' is alone.

    Raises:
        ValueError: columns or times are missing or impossible, or there is no such run.
    """
    collectives, spans, steps = of_run(collectives, spans, steps, run)
    if spans.empty:
        return [_unknown("table spans is missing: what ranks computed is not known")]
    if no_host_waits(collectives):
        return step_shares.found(collectives, spans, steps, axes)
    if "start_us" not in steps or steps["start_us"].isna().any():
        return [_unknown("when steps began is missing")]
    if watched(steps)["step"].nunique() < FEWEST_STEPS:
        needed = f"{FEWEST_STEPS} steps are needed beside the first and the traced one, and there"
        count = steps["step"].nunique()
        return [_unknown(f"{needed} {'is' if count == 1 else 'are'} {count} in all", "run more steps")]
    record = Recorded(collectives, spans, steps, axes)
    measured = record.timed.groupby("step")["step_us"].median().to_numpy(dtype=np.float64)
    off = float(np.median(np.abs(record.base / measured - 1)))
    if not off <= REPRODUCED:
        missing = f"a replay that reproduces the step is missing: it is {100 * off:.3g} % off"
        return [_unknown(missing, "run more steps")]
    return _ranked(record, besides)


def _unknown(missing: str, change: str = "record it on the CPU, with a few more steps") -> Cause:
    return Cause(UNKNOWN, 0.0, 0.0, missing, change, 0.0)


def _ranked(record: Recorded, besides: Collection[str]) -> list[Cause]:
    def weighed(found: Iterable[Found], least: float = 0.0) -> list[tuple[Cause, bool]]:
        wanted = [replace(one, least=max(one.least, least)) for one in found if one.name not in besides]
        return [_weighed(record, one) for one in wanted]

    work = weighed(slow_work.found(record)) + weighed(pipelined.found(record))
    # Where ranks are off the CPU a message waits for a rank without a core, too, and no other message would help.
    messages = weighed(slow_messages.found(record), record.away)
    messages += weighed(slow_messages.every_micro_batch(record))
    # Causes among the messages are views of the same time: of them the change that gains most comes first.
    most = max((cause.us for cause, counts in messages if counts), default=0.0)
    keys = [(cause.us, cause, counts) for cause, counts in work] + [(most, *one) for one in messages]
    keys.sort(
        key=lambda key: (-key[2], -key[0], -key[1].gain_us * (FOR_MONEY if "bandwidth" in key[1].settings else 1))
    )
    found = [cause for _, cause, counts in keys if counts]
    rest = [cause for _, cause, counts in keys if not counts and cause.gain_us > SEEN * record.us]
    rest.sort(key=lambda cause: -cause.gain_us)
    return [*(found or [_balanced(record, rest)]), *rest]


def _weighed(record: Recorded, one: Found) -> tuple[Cause, bool]:
    """The cause, and whether it counts."""
    gains = record.gains(one.changed, one.base)
    gain, low = float(np.median(gains)), float(np.quantile(gains / record.base, 0.25))
    us = gain if one.without is None else max(gain, float(np.median(record.gains(one.without, one.base))))
    return Cause(one.name, us, us / record.us, one.evidence, one.change, gain, one.settings), low >= one.least


def _balanced(record: Recorded, rest: list[Cause]) -> Cause:
    compute = record.us_of(record.of_kind(SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER, on_cpu=True))
    most = f"; the largest gain that a change would bring is about {rest[0].gain_us / 1e3:.2g} ms" if rest else ""
    evidence = f"ranks compute for {100 * compute / record.us:.0f} % of a step{most}"
    return Cause(BALANCED, compute, compute / record.us, evidence, "a faster device or fewer operations", 0.0)
