"""Whether a thread is inside a collective, and still inside the same one."""

import threading

import pytest
from torch.distributed import distributed_c10d

from shardlab.launch.stack import StackWatch, failed_call


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
