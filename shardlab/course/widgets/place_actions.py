"""A schedule placed by hand, action by action: each move begins as early as it can, or is refused with the reason."""

from collections.abc import Callable
from html import escape
from typing import Any

from ipywidgets import HTML, Button, HBox, Layout, VBox

from shardlab.schedules import Action, Kind, Schedule

SLOTS = {Kind.FORWARD: 1, Kind.BACKWARD: 2}


class Board:
    """Forwards and backwards of a pipeline with one stage a rank, placed in an order in which they can be done.

    Args:
        num_ranks: of the pipeline.
        num_micro_batches: of a step.

    Attributes:
        lists: what each rank does so far.

    Raises:
        ValueError: a number is none from 1.
    """

    def __init__(self, num_ranks: int, num_micro_batches: int) -> None:
        for name, number in (("num_ranks", num_ranks), ("num_micro_batches", num_micro_batches)):
            if type(number) is not int or number < 1:
                raise ValueError(f"{name}: {number!r} is given; allowed values are integers from 1")
        self.lists: list[list[Action]] = [[] for _ in range(num_ranks)]
        self._number, self._ends = num_micro_batches, dict[Action, int]()  # in the order in which they were placed

    def why_not(self, action: Action) -> str:
        """Why it cannot be the next of its rank; empty where it can."""
        kind, stage, number = action
        if action in self._ends:
            return f"{action} stands already"
        if not (0 <= stage < len(self.lists) and 0 <= number < self._number and kind in SLOTS):
            return f"{action} is no action of this step"
        for needed, why in self._needs(action):
            if needed not in self._ends:
                return f"{action} needs {why} of {needed}, which nobody has done yet"
        return ""

    def _needs(self, action: Action) -> list[tuple[Action, str]]:
        kind, stage, number = action
        forward, last = Kind.FORWARD, len(self.lists) - 1
        if kind is forward:
            return [(Action(forward, stage - 1, number), "the output")] if stage else []
        behind = [(Action(kind, stage + 1, number), "the gradient")] if stage < last else []
        return [(Action(forward, stage, number), "the activations"), *behind]

    def place(self, text: str) -> str:
        """Put an action, such as '2F0', behind those of its rank; the reason where it cannot be, else empty."""
        action = Action.parse(text)
        if not (refusal := self.why_not(action)):
            own = self.lists[action.stage]
            before = [*own[-1:], *(needed for needed, _ in self._needs(action))]
            self._ends[action] = max((self._ends[one] for one in before), default=0) + SLOTS[action.kind]
            own.append(action)
        return refusal

    def undo(self) -> None:
        """Take the last one back."""
        if self._ends:
            action, _ = self._ends.popitem()
            self.lists[action.stage].pop()

    @property
    def is_complete(self) -> bool:
        """Whether every micro-batch has been forward and backward through all stages."""
        return len(self._ends) == 2 * self._number * len(self.lists)

    @property
    def idle(self) -> list[int]:
        """Slots of each rank, until the last one ends, in which it does nothing."""
        last = max(self._ends.values(), default=0)
        return [last - sum(SLOTS[action.kind] for action in actions) for actions in self.lists]

    def schedule(self) -> Schedule:
        """What has been placed.

        Raises:
            ValueError: something is missing.
        """
        return Schedule(tuple(map(tuple, self.lists)))

    def __str__(self) -> str:
        """A row for each rank, columns of equal width for the slots; then the bubble."""
        last = max(self._ends.values(), default=0)
        width, rank_width, rows = 1 + len(str(self._number - 1)), len(str(len(self.lists) - 1)), []
        for rank, actions in enumerate(self.lists):
            cells = [f"{'.':>{width}} "] * last
            for action in actions:
                end, text = self._ends[action], f"{action.kind}{action.micro_batch}"
                for slot in range(end - SLOTS[action.kind], end):
                    cells[slot] = f"{text:>{width}} "
            rows.append(f"rank {rank:<{rank_width}}  {''.join(cells)}".rstrip())
        share = sum(self.idle) / (last * len(self.lists)) if last else 0.0
        done = "complete" if self.is_complete else f"{len(self._ends)} of {2 * self._number * len(self.lists)} placed"
        return "\n".join([*rows, f"{last} slots, {share:.0%} of the ranks' time idle so far; {done}"])


def place_actions(num_ranks: int = 3, num_micro_batches: int = 4) -> VBox:
    """Two buttons for each rank, its next forward and its next backward; below, what has been placed.

    Args:
        num_ranks: see ``Board``, which does the same in a script; it is the widget's ``board``.
        num_micro_batches: likewise.
    """
    board, picture, said = Board(num_ranks, num_micro_batches), HTML(), HTML()

    def show(refusal: str = "") -> None:
        said.value, picture.value = escape(refusal), f"<pre>{escape(str(board))}</pre>"

    def press(rank: int, kind: Kind) -> None:
        number = sum(action.kind is kind for action in board.lists[rank])
        show(board.place(f"{rank}{kind}{number}") if number < num_micro_batches else f"rank {rank} has done all {kind}")

    def back() -> None:
        board.undo()
        show()

    def button(words: str, act: Callable[..., None], *args: Any) -> Button:
        made = Button(description=words, layout=Layout(width="90px"))
        made.on_click(lambda _: act(*args))
        return made

    rows = [HBox([button(f"rank {rank}: {kind}", press, rank, kind) for kind in SLOTS]) for rank in range(num_ranks)]
    show()
    box = VBox([*rows, button("undo", back), said, picture])
    box.board = board  # for cells after it
    return box
