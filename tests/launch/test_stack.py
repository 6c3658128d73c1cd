"""Whether a thread is inside a collective, and still inside the same one."""

import contextlib
import functools
import multiprocessing
import sys
import threading
from traceback import walk_stack

import pytest
from torch.distributed import distributed_c10d

from shardlab.comm.group import _line_of_caller
from shardlab.installed import PACKAGE
from shardlab.launch.stack import StackWatch, _call_of, failed_call

PROGRAM = f"{PACKAGE}/models/mlp.py"


class Steps:
    """A thread that calls a function of torch's collectives module (as far as a stack can tell) again and again."""

    def __init__(self):
        self.inside = threading.Semaphore(0)
        self.leave = threading.Semaphore(0)
        self.is_over = False
        scope = {}
        text = "def all_reduce(inside, leave):\n    inside.release()\n    leave.acquire()\n"
        exec(compile(text, distributed_c10d.__file__, "exec"), scope)
        self._collective = scope["all_reduce"]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        while not self.is_over:
            self._collective(self.inside, self.leave)

    def next_call(self):
        self.leave.release()
        self.inside.acquire()


@pytest.fixture
def steps():
    steps = Steps()
    steps.inside.acquire()
    yield steps
    steps.is_over = True
    steps.leave.release()
    steps.thread.join()


def test_same_call_is_the_same_and_the_next_is_another(steps):
    watch = StackWatch(steps.thread.ident)
    for _ in range(20):
        call = watch.look()
        assert call.op == "all_reduce"
        assert call.source_line.startswith(f"{__file__}:")
        assert watch.look() is call
        steps.next_call()
        assert watch.look() is not call


def test_thread_outside_any_collective():
    assert StackWatch(threading.main_thread().ident).look() is None
    assert StackWatch(0).look() is None


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ((multiprocessing.process.__file__,), ("", f"{distributed_c10d.__file__}:1")),
        ((multiprocessing.process.__file__, PROGRAM), (f"{PROGRAM}:1", f"{PROGRAM}:1")),
        (("/home/me/train.py", contextlib.__file__, PROGRAM), ("/home/me/train.py:1", f"{PROGRAM}:1")),
        (("/home/me/train.py", functools.__file__), ("/home/me/train.py:1", "/home/me/train.py:1")),
    ],
)
def test_a_line_of_the_standard_library_is_never_named(files, named):
    """``files``: of the frames that call the collective, outermost first."""
    lines, scope = [], {"frame": sys._getframe, "walk": walk_stack, "seen": _call_of, "of_event": _line_of_caller}
    text = "def call(): lines.append(seen(walk(frame())).source_line); lines.append(of_event())"
    for file in (*files, distributed_c10d.__file__)[::-1]:
        scope = {**scope, "lines": lines, "inner": scope.get("call")}
        exec(compile(text, file, "exec"), scope)
        text = "def call(): inner()"
    thread = threading.Thread(target=scope["call"])  # below which there is no line of this file
    thread.start()
    thread.join()
    assert tuple(lines) == named


def test_exception_in_a_collective_is_placed():
    with pytest.raises(ValueError, match="not been initialized") as caught:
        distributed_c10d.get_backend()
    call = failed_call(caught.tb)
    assert call.op == "get_backend"
    assert call.source_line.startswith(f"{__file__}:")


def test_exception_elsewhere_is_not():
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("x")
    assert failed_call(caught.tb) is None
    assert failed_call(None) is None
