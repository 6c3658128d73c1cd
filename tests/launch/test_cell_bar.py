"""The bar below a cell: shown in a kernel while something takes long, and nowhere else."""

import time
from types import SimpleNamespace

import pytest

from shardlab.launch import cell_bar as module


@pytest.fixture
def drawn(monkeypatch):
    """What a kernel was given to show, one text after the other."""
    texts = []
    handle = SimpleNamespace(display=lambda data, raw: texts.append(data["text/plain"]))
    handle.update = handle.display
    monkeypatch.delenv("PYTEST_VERSION")
    monkeypatch.setattr(module, "TICK_S", 0.02)
    monkeypatch.setattr("IPython.display.DisplayHandle", lambda: handle)
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: SimpleNamespace(kernel=None))
    return texts


def until(drawn, words):
    end = time.monotonic() + 10
    while not (drawn and words in drawn[-1]):
        assert time.monotonic() < end, drawn
        time.sleep(0.01)


def test_it_says_what_was_done_and_what_is_left_and_ends_as_one_line(drawn):
    with module.cell_bar("compare", 3) as advance:
        until(drawn, "compare, 0 of 3, 0 s")
        with module.cell_bar("starting 2 ranks"):
            until(drawn, "compare: starting 2 ranks, 0 of 3")
        advance("zero1, step 0")
        until(drawn, "compare: zero1, step 0, 1 of 3, 0 s")
        advance("zero1, step 1")
        until(drawn, "2 of 3, 0 s, about 0 s left")
    assert drawn[-1] == "compare: 0 s"


def test_what_is_quick_and_what_pytest_compares_shows_nothing(drawn, monkeypatch):
    monkeypatch.setattr(module, "TICK_S", 5)
    with module.cell_bar("quick"):
        pass
    monkeypatch.setenv("PYTEST_VERSION", "8")
    with module.cell_bar("compared", 2) as advance:
        advance("one")
    assert drawn == []
