"""Which steps are unlike all whose memory was traced: their peak may be another.

On a CPU a peak is known of traced steps alone, and tracing makes a step three times slower. What a step needs follows
from what it calls, one call after another, and from the shapes that each call is given. So a call is covered if a
traced step made it after the same calls, with no dim smaller. At the first call that is not, tracing may begin. Of
batches of random length that is so in about log(steps) steps; where each is longer than the last, tracing would take
all the time, so not every one of them is traced. Nor is one that is smaller, but for the first: it shows that steps
differ.

That a step is of another kind may be known only in the middle of it, as that of a GAN whose second half begins as the
first does. If its kind comes a second time, the step is traced in which it should come again.
"""

from collections.abc import Hashable, Iterable

from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]
MOST_AT_ONCE, EVERY = 3, 8  # steps that are traced for being unlike others: so many, and one more in so many steps


class UnlikeSteps:
    """The calls of traced steps, and of those that were unlike all of them and were not traced."""

    def __init__(self) -> None:
        self._traced: dict[Hashable, list[Shapes]] = {}  # by a call and all before it
        self._missed: list[tuple[Hashable, Shapes, int]] = []
        self._came: dict[Hashable, int] = {}  # the step in which a kind that was never traced has come last
        self._due = -1
        self._num_steps = self._num_traced = 0
        self._has_smaller = True  # none is looked for before the optimizer's state is there
        self._calls: list[tuple[Hashable, Shapes]] = []

    def forget_traced(self) -> None:
        """What was traced so far covers nothing more: optimizer state was missing."""
        self._traced.clear()
        self._has_smaller = False

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step, self._calls = step, []
        self._num_steps += 1

    def add(self, what: Hashable, given: Iterable[Tensor]) -> bool:
        """Note a call; return whether the step ought to be traced from here on.

        Args:
            what: is called.
            given: its tensors.
        """
        before = self._calls[-1][0] if self._calls else None
        self._calls.append((hash((before, what)), shapes_of(given)))
        call, shapes = self._calls[-1]
        if self._num_traced >= MOST_AT_ONCE + self._num_steps // EVERY:
            return False
        known = self._traced.get(call, [])
        if not self._has_smaller and known and all(shapes != other and within(shapes, other) for other in known):
            self._has_smaller = True
            return True
        return self._step == self._due or not self._covers(call, shapes)

    def trace(self) -> None:
        """The step is traced for what ``add`` has returned."""
        self._num_traced += 1

    def end(self, *, traced: bool) -> int | None:
        """The step ends.

        Returns:
            The last step until now that is unlike all traced ones; None if there is none.
        """
        if traced:
            for call, shapes in self._calls:
                self._traced.setdefault(call, []).append(shapes)
            self._missed = [missed for missed in self._missed if not self._covers(*missed[:2])]
        elif new := [call for call in self._calls if not self._covers(*call)]:
            self._missed = [missed for missed in self._missed if missed[:2] not in new]
            self._missed += [(*call, self._step) for call in new]
            self._expect(new[0][0])
        return max((step for _, _, step in self._missed), default=None)

    def _covers(self, call: Hashable, shapes: Shapes) -> bool:
        return any(within(shapes, traced) for traced in self._traced.get(call, []))

    def _expect(self, call: Hashable) -> None:
        """Foretell when a kind of step comes again, from the two times it came last."""
        if call not in self._traced:
            if call in self._came:
                self._due = 2 * self._step - self._came[call]
            self._came[call] = self._step


def shapes_of(tensors: Iterable[Tensor]) -> Shapes:
    """Their shapes; of a nested tensor, which has none of numbers alone, how many elements it has."""
    return tuple((tensor.numel(),) if tensor.is_nested else tuple(tensor.shape) for tensor in tensors)


def within(shapes: Shapes, others: Shapes) -> bool:
    """Whether there are as many, of as many dims, and none of them larger."""
    return [*map(len, shapes)] == [*map(len, others)] and all(
        size <= other for shape, larger in zip(shapes, others, strict=True)
        for size, other in zip(shape, larger, strict=True)
    )  # fmt: skip
