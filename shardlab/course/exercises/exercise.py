"""What an exercise is: cases with inputs and wanted results for each rank, and how much may be sent for them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import getdoc
from math import inf, prod
from pathlib import Path
from typing import Any

from shardlab.comm import BaseMesh, Communicator
from shardlab.course.exercises.values import numbers_in
from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.vocabulary import Collective, Role

Function = Callable[..., Any]
Attempt = Callable[..., object]


@dataclass(frozen=True)
class Message:
    """One call of a verb on one rank.

    Attributes:
        op: the verb.
        num_bytes: of its buffer.
        sent_bytes: that this rank sends for it.
        line: where the call stands.
        axis: of the mesh; empty where it has only one.
        is_waited_for: whether the rank has waited for its end.
        phase: of the step, where one is weighed: 'forward', 'backward', with all to the optimizer's step, or 'step'.
        computed_us: what the rank had computed on the virtual clock when it was sent, and when the rank waited for it.
    """

    op: str
    num_bytes: int
    sent_bytes: float
    line: str = ""
    axis: str = ""
    is_waited_for: bool = True
    phase: str = ""
    computed_us: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def around_a_ring(cls, op: Collective, num_bytes: int, num_ranks: int, axis: str = "") -> "Message":
        """With what the ring formulas of ``partition.ring_cost`` say that each rank sends."""
        return cls(str(op), num_bytes, ring_wire_bytes(op, num_bytes, num_ranks), axis=axis)

    @property
    def is_sent(self) -> bool:
        """Whether it counts: what one rank receives another one sends."""
        return self.op != Collective.RECV


@dataclass(frozen=True)
class Traffic:
    """What may be sent in a case.

    Attributes:
        wanted: the messages of a good solution, by rank: the wanted half of the picture.
        most_messages: messages that one rank may send.
        most_bytes: bytes that one rank may send, by the ring formulas of ``partition.ring_cost``.
        least_bytes: bytes that all ranks together must send; with fewer, something went another way.
    """

    wanted: tuple[tuple[Message, ...], ...]
    most_messages: int
    most_bytes: float
    least_bytes: float

    @classmethod
    def of(cls, wanted: Sequence[Sequence[Message]]) -> "Traffic":
        """No more than the busiest rank of ``wanted`` sends, and all together no less."""
        sent = [[message for message in messages if message.is_sent] for messages in wanted]
        by_rank = [sum(message.sent_bytes for message in messages) for messages in sent]
        return cls(tuple(map(tuple, wanted)), max(map(len, sent)), max(by_rank), sum(by_rank))

    @classmethod
    def alike(cls, op: Collective, sizes: Iterable[int], num_ranks: int) -> "Traffic":
        """Each rank sends messages of these bytes around a ring; nothing where it is alone."""
        messages = [Message.around_a_ring(op, size, num_ranks) for size in sizes]
        return cls.of([messages if num_ranks > 1 else []] * num_ranks)

    @property
    def ops(self) -> tuple[str, ...]:
        """The verbs that a good solution uses; no other may be used."""
        return tuple(dict.fromkeys(message.op for messages in self.wanted for message in messages))


@dataclass(frozen=True)
class Measured:
    """What an attempt of your own may return, where more than messages is scored.

    Attributes:
        result: what is compared.
        peak_bytes: most that this rank held at once.
        time_us: what the rank took on a virtual clock.
        counted: the messages that count, where not all do.
        fault: what the attempt itself has found wrong, in words; empty if nothing.
        held: bytes that this rank held, one after another: memory over time, for the picture.
        spans: what the rank and its link did on the virtual clock, likewise.
        at_rest: bytes by role that the rank held between steps.
        factor: by which its means are not those of one process; 0 if they are no multiple.
        keeps_own: whether they are a multiple of this rank's own gradients.
    """

    result: object
    peak_bytes: float = 0
    time_us: float = 0
    counted: tuple[Message, ...] | None = None
    fault: str = ""
    held: tuple[float, ...] = ()
    spans: tuple[tuple[str, float, float], ...] = ()
    at_rest: Mapping[Role, int] = field(default_factory=dict)
    factor: float = 0
    keeps_own: bool = False


class VirtualClock:
    """One rank that computes, and a link that carries one message at a time, in time that is the same on every machine.

    A message starts when it is sent and the one before it has ended; it takes latency_us + bytes / bytes_per_us.

    Args:
        latency_us: of each message, which is one hop.
        bytes_per_us: of the link; 125 is 1 Gbit/s.

    Attributes:
        now_us: where the rank has come to.
        exposed_us: how long it has waited for messages.
        spans: what took time so far: ('compute' or 'message', start, end).
    """

    def __init__(self, latency_us: float, bytes_per_us: float) -> None:
        self._latency_us, self._bytes_per_us = latency_us, bytes_per_us
        self.now_us = self.exposed_us = self._link_free_us = 0.0
        self.spans: list[tuple[str, float, float]] = []

    @property
    def computed_us(self) -> float:
        """How long the rank has computed."""
        return sum(end - start for what, start, end in self.spans if what == "compute")

    def compute(self, time_us: float) -> None:
        """The rank is busy for so long; messages that are under way go on."""
        self.spans.append(("compute", self.now_us, self.now_us + time_us))
        self.now_us += time_us

    def send(self, num_bytes: float) -> float:
        """Start a message; the time at which it ends."""
        start_us = max(self.now_us, self._link_free_us)
        self._link_free_us = start_us + self._latency_us + num_bytes / self._bytes_per_us
        self.spans.append(("message", start_us, self._link_free_us))
        return self._link_free_us

    def wait(self, end_us: float) -> None:
        """Go on at ``end_us``, or at once if that is over."""
        self.exposed_us += max(0.0, end_us - self.now_us)
        self.now_us = max(self.now_us, end_us)


@dataclass(frozen=True)
class Done(Measured):
    """What one rank came to."""

    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Case:
    """One run of the learner's function on as many ranks as there are inputs.

    Attributes:
        words: what is special about it, as '3 ranks, 7 elements'.
        inputs: for each rank the arguments after the communicator.
        wanted: for each rank the result.
        traffic: what may be sent; None where nobody counts.
        most_peak_bytes: what a rank may hold at once, where the attempt measures it.
        most_time_us: what a rank may take on the virtual clock, likewise.
        axes: size of each axis of the mesh; empty for one axis, ``data``. With several the attempt gets the mesh in the
            place of a communicator.
    """

    words: str
    inputs: tuple[tuple[object, ...], ...]
    wanted: tuple[object, ...]
    traffic: Traffic | None = None
    most_peak_bytes: float = inf
    most_time_us: float = inf
    axes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that every rank of the mesh has inputs and a wanted result."""
        num_ranks = prod(self.axes.values()) if self.axes else max(1, len(self.inputs))
        if not num_ranks == len(self.inputs) == len(self.wanted):
            raise ValueError(
                f"case {self.words!r}: {len(self.inputs)} inputs and {len(self.wanted)} wanted results for {num_ranks} "
                "ranks; give one of each for every rank"
            )


def call(function: Function, comm: Communicator | BaseMesh, *inputs: object) -> object:
    """The usual attempt: the function gets the communicator (or mesh) and the rank's inputs; its result counts."""
    return function(comm, *inputs)


def call_in_place(function: Function, comm: Communicator, *inputs: object) -> object:
    """The function changes its first input, which counts; what it returns does not."""
    function(comm, *inputs)
    return inputs[0]


def call_without_ranks(function: Function, _comm: Communicator, *inputs: object) -> object:
    """A function of its inputs alone, without a communicator."""
    return function(*inputs)


@dataclass(frozen=True)
class Exercise:
    """What is asked, and how an answer is judged.

    Attributes:
        name: ``topic.what``; the learner's function has the same name with an underscore, ``topic_what``.
        task: what the function gets and what it must do.
        starter: source to begin with; it must not pass.
        cases: makes the cases; called for each check, so that nothing is made on import.
        hints: from the first push to nearly the solution.
        notebook: where it belongs.
        attempt: what a rank does with the function: ``call``, ``call_in_place``, ``call_without_ranks`` or your own
            ``f(function, comm, *inputs)``, which returns what is compared, or that as ``Measured``.
        drawn: a rank's result as a row of numbers, for the picture.
        drawn_words: what stands in each column of it.
        result_words: what is compared, in the verdict.
        shown_inputs: a rank's inputs in words, where their values would not say what the learner's function gets.
        points: in a class, of an answer that passes.
    """

    name: str
    task: str
    starter: str
    cases: Callable[[], Sequence[Case]]
    hints: tuple[str, ...] = ()
    notebook: str = ""
    attempt: Attempt = call
    drawn: Callable[[Any], Sequence[float]] = field(default=numbers_in)
    drawn_words: str = "a number of the result"
    result_words: str = "result"
    shown_inputs: Callable[..., str] | None = None
    points: int = 1

    def __post_init__(self) -> None:
        """Check that the name is also that of a function."""
        if not self.function_name.isidentifier():
            raise ValueError(f"name: {self.name!r} was given; write words with dots between them, as 'zero1.owners'")

    @classmethod
    def of(
        cls, name: str, made: Callable[..., Any], notebook: str, table: Mapping[str, Iterable[Any]] | None = None,
        **more: Any,
    ) -> "Exercise":  # fmt: skip
        """One of ours: its task stands in the docstring of ``made``, before a list of hints.

        Args:
            name: see above, as ``notebook`` and the rest; the starter stands under it in ``starters.md``.
            made: makes a case of its words and of what the table has beside them; all cases without a table.
            notebook: where it belongs.
            table: what differs, by the words of each case.
            more: the other fields.
        """
        task, _, hints = (getdoc(made) or "").partition("\n\nHints:\n- ")
        lines = tuple(" ".join(hint.split("\n  ")) for hint in hints.split("\n- "))
        cases = made if table is None else lambda: [made(words, *row) for words, row in table.items()]
        return cls(name, task, code_in(said_under(name, "starters.md")), cases, lines, notebook, **more)

    @property
    def function_name(self) -> str:
        """What the learner's function is called in a file."""
        return self.name.replace(".", "_")


def said_under(name: str, file: str) -> str:
    """What ``starters.md`` or ``solutions.md`` has under an exercise's name, as Markdown; '' if it is none of ours."""
    text = (Path(__file__).parent / "ladder" / file).read_text()
    return text.partition(f"## {name}\n")[2].partition("\n## ")[0].strip()


def code_in(text: str) -> str:
    """The code of Markdown that has one block."""
    return text.partition("```python\n")[2].removesuffix("```")
