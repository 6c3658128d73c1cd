"""Runs the learner's function on real ranks, case by case, and says what differs first.

The function runs in ranks only, never in the caller's process: it may raise, hang or end its process. What it sends is
counted by an observer of the communicator, not by asking it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import zip_longest
from math import inf, isnan
from pathlib import Path

from shardlab.comm import CollectiveEvent, Observer
from shardlab.comm.mesh import Mesh
from shardlab.course.exercises.exercise import Attempt, Case, Done, Exercise, Function, Measured, Message
from shardlab.course.exercises.mistakes import COSTS, NUMBERS, facts_of, mistake_in
from shardlab.course.exercises.traffic import wrong_traffic
from shardlab.course.exercises.values import differences, numbers_in, plain, told_apart
from shardlab.launch import RankDied, RankError, RankHang, RankPool, current
from shardlab.trace.observed import wire_bytes
from shardlab.vocabulary import class_of

TIMEOUT_S = 5.0  # in one collective
LIMIT_S = 20.0  # of one case
WEIGHED = "whole."  # exercises whose last case weighs a step
OWN_FOLDER = str(Path(__file__).parent)


class Verdict(StrEnum):
    """How a check ended; blocked: nothing is said of the solution.

    This machine lacks something or is too busy, or every wanted result is 0, as of a training that does not train.
    """

    PASSED = "passed"
    FAILED = "failed"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class Score:
    """What was counted, on the rank with the most; lower is better, and the same on every machine.

    Attributes:
        messages: sent, added up over the cases in which messages count; ``num_bytes`` likewise.
        peak_bytes: held at once, in the case with most.
        time_us: on the virtual clock, added up over the cases.
    """

    messages: int = 0
    num_bytes: int = 0
    peak_bytes: int = 0
    time_us: int = 0

    def plus(self, done: Sequence[Done], *, counts: bool = True) -> "Score":
        """With another case; ``counts``: its messages too."""
        sent = [[message for message in of_rank.messages if message.is_sent and counts] for of_rank in done]
        num_bytes = max(sum(message.sent_bytes for message in messages) for messages in sent)
        peak_bytes = max(self.peak_bytes, *(round(of_rank.peak_bytes) for of_rank in done))
        time_us = self.time_us + round(max(of_rank.time_us for of_rank in done))
        return Score(self.messages + max(map(len, sent)), self.num_bytes + round(num_bytes), peak_bytes, time_us)

    def __str__(self) -> str:
        """A sentence for each thing that was counted; empty if nothing was."""
        sentences = {
            f"The busiest rank sent {self.messages} messages, {self.num_bytes} B, over all cases.": self.messages,
            f"At most {self.peak_bytes} B were held at once.": self.peak_bytes,
            f"All cases together took {self.time_us} us on the virtual clock.": self.time_us,
        }
        return " ".join(sentence for sentence, number in sentences.items() if number)


@dataclass(frozen=True)
class Report:
    """The verdict on one function.

    Attributes:
        exercise: its name.
        verdict: passed, failed or blocked.
        reason: what differs, in one sentence; empty if it passed.
        detail: the rank's traceback, or the table of a hang, where there is one.
        case: the case that failed, or the last one.
        done: what each rank came to in it; empty where the ranks did not come to an end.
        score: of all cases that passed and in which messages count.
        mistake: what was thought, where a failure is known (``mistakes.py``).
    """

    exercise: str
    verdict: Verdict
    reason: str = ""
    detail: str = ""
    case: Case | None = None
    done: tuple[Done, ...] = ()
    score: Score = Score()
    mistake: str = ""

    def __repr__(self) -> str:
        """One line, for the end of a cell."""
        return f"{self.exercise}: {self.verdict}"


class MessageLog(Observer):
    """An observer that keeps what a rank sends and receives, and over which axis, if there are several.

    Attributes:
        phase: of the step, in which the next message is sent; whoever weighs a step sets it.
    """

    def __init__(self, *, with_axis: bool = False) -> None:
        self._events: list[tuple[CollectiveEvent, str]] = []
        self._with_axis = with_axis
        self.phase = ""

    @property
    def messages(self) -> list[Message]:
        """In the order of the calls, and whether each has been waited for by now."""
        return [self._message(*each) for each in self._events]

    def _message(self, event: CollectiveEvent, phase: str) -> Message:
        # A message that the exercise sends for the learner has no line of the learner's.
        line = "" if event.source_line.startswith(OWN_FOLDER) else event.source_line
        axis = event.axis if self._with_axis else ""
        waited = not isnan(event.wait_end_ns)
        return Message(str(event.op), event.num_bytes, wire_bytes(event), line, axis, waited, phase)

    def issued(self, event: CollectiveEvent) -> None:
        """Keep it."""
        self._events.append((event, self.phase))


def on_rank(
    rank: int, attempt: Attempt, function: Function, inputs: Sequence[tuple[object, ...]], axes: Mapping[str, int]
) -> Done | None:
    """One rank of a case; ranks that the case does not need return None."""
    num_ranks, log = len(inputs), MessageLog(with_axis=bool(axes))
    with Mesh(axes or {"data": num_ranks}, ranks=range(num_ranks), device="cpu") as mesh:
        if not mesh.is_member:
            return None
        current().emit("begun")
        with mesh.observed_by(log):
            result = attempt(function, mesh if axes else mesh.data, *inputs[rank])
        found = result if isinstance(result, Measured) else Measured(result)
        messages = tuple(log.messages) if found.counted is None else found.counted
        return Done(**vars(found) | {"result": plain(found.result), "counted": None, "messages": messages})


def pool_for(cases: Sequence[Case], timeout_s: float = TIMEOUT_S, limit_s: float = LIMIT_S) -> RankPool:
    """Ranks for all of the cases, on the CPU, so that the verdict is the same on every machine."""
    num_ranks = max(len(case.inputs) for case in cases)
    preload = (__name__,)  # imported once, and not by every rank while another one already waits for it
    return RankPool(num_ranks, device="cpu", timeout_s=timeout_s, limit_s=limit_s, notice_s=None, preload=preload)


def why_not_ready(pool: RankPool) -> str:
    """Why ranks do not start here; empty once they are up and have imported what they need to run a function.

    The time in which a rank imports must not count as another one's time in a collective.
    """
    try:
        pool.start()
        pool.run(_imported)
    except (OSError, RuntimeError, ValueError) as error:
        return f"ranks do not start here: {str(error).partition(chr(10))[0]}"
    return ""


def _imported(rank: int) -> None:
    """Do nothing: to be called it had to be imported."""


def examine(
    exercise: Exercise, function: Function, pool: RankPool, on_case: Callable[[str], None] = lambda _: None
) -> Report:
    """Run all cases, and call ``on_case`` after each; the first that fails decides."""
    if why := why_not_ready(pool):
        return Report(exercise.name, Verdict.BLOCKED, why)
    given: object = function
    if not callable(given):
        what = f"it is {class_of(given)}, and nothing that can be called"
        return Report(exercise.name, Verdict.FAILED, f"{what}; give the function, or the class, by its name alone")
    score, cases = Score(), exercise.cases()
    for case in cases:
        done, reason, verdict = run_case(exercise, function, case, pool)
        if reason := reason or _wrong(case, done, exercise.result_words):
            first, _, rest = f"{case.words}: {reason}".partition("\n")
            report = Report(exercise.name, verdict, first, rest.strip(), case, done, score)
            return replace(report, mistake=_mistake(exercise, function, report, pool))
        score = score.plus(done, counts=case.traffic is not None)
        on_case(case.words)
    if not any(map(_shows_something, cases)):
        return Report(exercise.name, Verdict.BLOCKED, "every wanted result is 0, as of a function that does nothing")
    return Report(exercise.name, Verdict.PASSED, case=case, done=done, score=score)


def _mistake(exercise: Exercise, function: Function, report: Report, pool: RankPool) -> str:
    """What was thought; of a whole strategy whose numbers are wrong, a step is weighed all the same."""
    if report.verdict is not Verdict.FAILED or report.case is None:
        return ""
    case, done, facts = report.case, report.done, COSTS
    if exercise.name.startswith(WEIGHED) and done and case.traffic is None:
        case, facts = exercise.cases()[-1], NUMBERS
        done = run_case(exercise, function, case, pool)[0]
    found = facts_of(done, case, facts) if exercise.name.startswith(WEIGHED) else ()
    return mistake_in(exercise.name, report.reason, report.case, report.done, found)


def _shows_something(case: Case) -> bool:
    """Whether a function that does nothing would fail: not one whose results are to be 0, however they come about."""
    is_limited = case.traffic is not None or min(case.most_peak_bytes, case.most_time_us) < inf
    numbers = numbers_in(plain(case.wanted))
    return is_limited or not numbers or any(numbers)


def run_case(
    exercise: Exercise, function: Function, case: Case, pool: RankPool
) -> tuple[tuple[Done, ...], str, Verdict]:
    """What each rank came to; or why they did not come to an end, and whether that is the function's doing."""
    begun = set[int]()
    try:
        done = pool.run(
            on_rank, exercise.attempt, function, case.inputs, case.axes, on_message=lambda rank, _: begun.add(rank)
        )
    except (RankError, RankHang, TypeError) as error:
        late = sorted(set(range(len(case.inputs))) - begun)
        if isinstance(error, RankDied):
            reason = f"the process of rank {error.rank} ended"
            if error.rank in late:
                return (), f"{reason} before it called your function", Verdict.BLOCKED
            return (), reason, Verdict.FAILED
        if isinstance(error, RankHang) and late:
            named = ", ".join(map(str, late))
            return (), f"rank {named} had no time to call your function; run it again", Verdict.BLOCKED
        # A TypeError is of the function itself: it holds what cannot be sent to a rank.
        first, _, rest = str(error).strip().partition("\n")
        is_ours = isinstance(error, RankError) and __file__ in rest  # none of the function's lines led there
        return (), first if is_ours else f"{first}\n{rest}", Verdict.FAILED
    return tuple(of_rank for of_rank in done if of_rank is not None), "", Verdict.FAILED


def _wrong(case: Case, done: Sequence[Done], result_words: str) -> str:
    """What is wrong; the result is checked first, because the cost of a wrong result does not matter."""
    faults = [f"rank {rank}: {of_rank.fault}" for rank, of_rank in enumerate(done) if of_rank.fault]
    in_traffic = wrong_traffic(case.traffic, done) if case.traffic is not None else ""
    return next(iter(faults), "") or _wrong_result(case, done, result_words) or _too_high(case, done) or in_traffic


def _too_high(case: Case, done: Sequence[Done]) -> str:
    for rank, of_rank in enumerate(done):
        if of_rank.peak_bytes > case.most_peak_bytes:
            held, allowed = told_apart(of_rank.peak_bytes, case.most_peak_bytes)
            return f"rank {rank} held {held} B at once, and {allowed} B are allowed"
        if of_rank.time_us > case.most_time_us:
            took, enough = told_apart(of_rank.time_us, case.most_time_us)
            return f"rank {rank} took {took} us on the virtual clock, and {enough} are enough"
    return ""


def _wrong_result(case: Case, done: Sequence[Done], result_words: str) -> str:
    """The first part of the result that is wrong on any rank: what they do together, one rank spoils for all."""
    pairs = [(plain(wanted), of_rank.result) for wanted, of_rank in zip(case.wanted, done, strict=True)]
    parts = [differences(wanted, found, result_words) for wanted, found in pairs]
    for of_part in zip_longest(*parts, fillvalue=""):
        for rank, words in enumerate(of_part):
            if words:
                return f"rank {rank}, {words}"
    return ""
