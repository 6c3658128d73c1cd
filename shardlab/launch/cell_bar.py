"""A bar below the cell that runs, while ranks work: what was done last, how much of all, and the seconds that are left.

The command line has bars of its own, of ``rich``.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from time import monotonic

TICK_S = 0.5
_shown: list["_Bar"] = []  # one at most


@contextmanager
def cell_bar(title: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show a bar; yields a function that says what was done, which is one more of ``total``.

    Nothing is shown outside of a cell, under pytest (which compares what cells show), where cells are saved with
    pictures, and of what takes less than half a second. A bar inside another is not shown: what it is about stands in
    the outer one. When all is done one line stays.
    """
    for outer in _shown:
        outer.said = title
    is_in_cell = sys.modules.get("IPython") is not None and threading.current_thread() is threading.main_thread()
    if _shown or not is_in_cell or {"PYTEST_VERSION", "SHARDLAB_PNG"} & os.environ.keys():
        yield lambda _: None
        return
    bar = _Bar(title, total)
    ticking = threading.Thread(target=bar.tick, daemon=True)
    _shown.append(bar)
    ticking.start()
    try:
        yield bar.advance
    finally:
        _shown.remove(bar)
        bar.has_ended.set()
        ticking.join()


class _Bar:
    def __init__(self, title: str, total: int | None) -> None:
        self.title, self.total, self.said, self.done = title, total, "", 0
        self.began, self.has_ended = monotonic(), threading.Event()
        self.first = self.began  # when the first was done: ranks have started then

    def advance(self, said: str) -> None:
        self.said, self.done = said, self.done + 1
        self.first = monotonic() if self.done == 1 else self.first

    def tick(self) -> None:
        """Draw it twice a second; in a thread of its own, since the cell's waits for ranks."""
        from IPython.core.getipython import get_ipython
        from IPython.display import DisplayHandle

        if not hasattr(get_ipython(), "kernel"):
            return  # a terminal would print each drawing
        handle = None
        while not self.has_ended.wait(TICK_S):
            if handle is None:
                handle = DisplayHandle()  # type: ignore[no-untyped-call]  # IPython leaves it untyped
                handle.display(self._drawn(), raw=True)  # type: ignore[no-untyped-call]
            else:
                handle.update(self._drawn(), raw=True)  # type: ignore[no-untyped-call]
        if handle is not None:
            words = f"{self.title}: {monotonic() - self.began:.0f} s"
            handle.update({"text/plain": words, "text/html": f"<small>{escape(words)}</small>"}, raw=True)  # type: ignore[no-untyped-call]

    def _drawn(self) -> dict[str, str]:
        now, of_all, left = monotonic(), f", {self.done} of {self.total}" if self.total else "", ""
        if self.total and self.done > 1:
            each = (now - self.first) / (self.done - 1)
            left = f", about {each * (self.total - self.done):.0f} s left"
        words = f"{self.title}{self.said and f': {self.said}'}{of_all}, {now - self.began:.0f} s{left}"
        where = f' max="{self.total}" value="{self.done}"' if self.done else ""  # without, it moves by itself
        return {"text/plain": words, "text/html": f"<progress{where}></progress> {escape(words)}"}
