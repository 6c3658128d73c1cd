"""Gradients that backwards have brought: until an optimizer steps them, somebody clears them, or both."""

from collections.abc import Collection, Iterable

from shardlab.same.notes import Cleared, Part


class Held:
    """What is known of them by name, also from one step to the next."""

    def __init__(self) -> None:
        # Norm, backward (-1 when it has been stepped), whether another optimizer has stepped since.
        self._known: dict[str, tuple[float, int, bool]] = {}

    def kept(self) -> dict[str, float]:
        """Norms of those that were stepped, and that nobody has cleared: the next backward adds to them."""
        return {name: norm for name, (norm, backward, _) in self._known.items() if backward < 0 < norm}

    def brought(self, parts: Iterable[Part], backward: int) -> None:
        """Gradients as a backward leaves them; it has brought nothing of one that it leaves as it was."""
        for part in parts:
            # What the loss of another optimizer brought before stays that.
            before, _, is_of_another = self._known.get(part.name, (0.0, 0, False))
            if (norm := float(part.value.norm())) != before:
                self._known[part.name] = norm, backward, is_of_another

    def stepped(self, names: Collection[str]) -> None:
        """An optimizer has stepped these."""
        for name, (norm, backward, _) in self._known.items():
            if name in names or backward >= 0:
                self._known[name] = (norm, -1, False) if name in names else (norm, backward, True)

    def cleared(self, parts: Iterable[Part], line: str) -> list[Cleared]:
        """Those that are gone, though nobody has stepped them; ``parts`` are all that are there."""
        held = {name: known for name, known in self._known.items() if known[0] > 0}
        if not held:
            return []
        now = {part.name: float(part.value.norm()) for part in parts}
        gone = {name: known for name, known in held.items() if not now.get(name, 0.0) > 0}
        for name in gone:
            del self._known[name]
        return [
            Cleared(name, norm, number, line, another) for name, (norm, number, another) in gone.items() if number >= 0
        ]
