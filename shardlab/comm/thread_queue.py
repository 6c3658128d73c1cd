"""Collectives beside the compute, by a thread: it takes job after job, first in, first out.

Transports are written as plain blocking code. The thread sleeps in gloo, not in Python, so backward goes on; when a job
began and ended is known exactly, and a sleep in a job (an emulated link) burns no CPU. Where nothing is under way and
the transport can, the caller begins the collective itself: on busy cores it costs more to wake a thread.
"""

import contextlib
import threading
import weakref
from queue import SimpleQueue
from time import perf_counter_ns

import torch

from shardlab.comm.events import CollectiveEvent, DeviceEvent, Observers
from shardlab.comm.failures import Failures
from shardlab.comm.streams import CUDA
from shardlab.comm.transports.base import Arrival, Job, Message, Start


class _Entry:
    """One job in a ``ThreadQueue``."""

    def __init__(
        self, job: Job, event: CollectiveEvent, observers: Observers, ready: DeviceEvent | None, failures: Failures
    ) -> None:
        self.job, self.event, self.observers = job, event, observers
        self.ready, self._failures = ready, failures
        self.begun = False  # in the caller's thread
        self.under_way = threading.Lock()  # held until its end; an Event takes six calls where a lock takes none
        self.under_way.acquire()
        self.error: BaseException | None = None

    def begin(self, start: Start) -> None:
        """Begin now, in the caller's thread; the queue's thread then only waits for the end."""
        self.event.start_ns = perf_counter_ns()
        try:
            with torch.inference_mode():
                job = start()
        except Exception as error:  # as in run()
            self.error, job = error, _nothing
        self.begun = True
        self._tell_started()
        if job is None:
            self.end()
        else:
            self.job = job

    def run(self) -> None:
        """Do what is left of the job, in the queue's thread."""
        try:
            if self.ready is not None:
                self.ready.synchronize()  # a staged transport reads the tensor from the host
            if not self.begun:
                self.event.start_ns = perf_counter_ns()  # only now: until then the device computed what is sent
                self._tell_started()
            self.job()
            if self.ready is not None:
                CUDA.current_stream().synchronize()  # the job may have copied; the caller reads on another stream
        except BaseException as error:  # a thread must not lose it: wait() raises it in the caller
            self.error = error
        self.end()

    def end(self, ended_ns: float | None = None) -> None:
        """Tell that it has ended; ``ended_ns``: when, if not now."""
        if self.error is not None:  # it may also have come from begin()
            self._failures.note(self.event, self.error)
        # Observers first: whoever has waited finds the collective's end in the records.
        self.event.end_ns = perf_counter_ns() if ended_ns is None else max(ended_ns, self.event.start_ns)
        for observer in self.observers:
            observer.completed(self.event)
        self.under_way.release()

    def wait(self) -> None:
        """Return at its end; raise its error."""
        with self.under_way:
            pass
        if self.error is not None:
            self._failures.tell(self.event)
            raise self.error

    def _tell_started(self) -> None:
        for observer in self.observers:
            observer.started(self.event)


class _Awaited(_Entry):
    """A receive that ends in the caller's thread: to wake one that then wakes the caller takes twice as long."""

    def __init__(self, event: CollectiveEvent, observers: Observers, failures: Failures) -> None:
        super().__init__(_nothing, event, observers, None, failures)
        self._takes = threading.Lock()

    def post(self, arrival: Arrival, after: Job | None) -> None:
        """It may come from now on; ``after`` is done once it has."""
        self._arrival, self._after, self.event.look = arrival, after or _nothing, self._look
        self.event.start_ns = perf_counter_ns()
        self._tell_started()

    def take(self) -> None:
        """Wait until it has come, unless somebody else has."""
        with self._takes:
            self._take()

    def wait(self) -> None:
        self.take()
        super().wait()

    def _look(self) -> None:
        if self._takes.acquire(blocking=False):
            try:
                if self.under_way.locked() and self._arrival.has_come():
                    self._take()
            finally:
                self._takes.release()

    def _take(self) -> None:
        if not self.under_way.locked():
            return
        came_ns = None
        try:
            came_ns = self._arrival.wait()
            self._after()
        except Exception as error:  # an interrupt leaves it under way: somebody may wait again
            self.error = error
        self.event.look = None
        del self._arrival, self._after  # the memory: whoever records holds the event, and the queue this
        self.end(came_ns)


class ThreadQueue:
    """A daemon thread that runs blocking transports in issue order.

    Args:
        name: of the thread.
        device: of the tensors.
        failures: of the mesh.
    """

    def __init__(self, name: str, device: torch.device, failures: Failures) -> None:
        self._device, self._failures = device, failures
        self._sends: dict[int, ThreadQueue] = {}  # by the rank that receives
        self._awaited: list[_Awaited] = []
        # The thread gets the queue and not ``self``: it would otherwise keep this object, and so itself, alive. Nor any
        # error: that has the frames of whoever was told of it, and these have the mesh.
        self._queue: SimpleQueue[_Entry | None] = SimpleQueue()
        self._last_under_way = threading.Lock()
        self._thread = threading.Thread(target=_serve, args=(self._queue, device), name=name, daemon=True)
        self._thread.start()
        # A mesh that is dropped without close() must not leave its thread behind.
        self._abandon = weakref.finalize(self, self._queue.put, None)

    def submit(
        self, job: Job, event: CollectiveEvent, observers: Observers, start: Start | None = None, *,
        waits: bool = True,
    ) -> Job:  # fmt: skip
        """Queue ``job`` for the thread; ``start`` begins it here, if it ``waits`` only where all before are done."""
        # Recorded here, in the caller's thread: the queue's thread has another current stream.
        ready = _end_of_current_stream() if self._device.type == "cuda" else None
        entry = _Entry(job, event, observers, ready, self._failures)
        # (Work of a CUDA stream that the tensor still waits for may only be waited for by the thread.)
        if start is not None and ready is None and not (waits and self._last_under_way.locked()):
            entry.begin(start)
            if not entry.under_way.locked():
                return entry.wait
        # Even one that has begun goes through the queue: the end of each is told in the order of issue.
        self._last_under_way = entry.under_way
        self._queue.put(entry)
        return entry.wait

    def submit_message(self, message: Message, event: CollectiveEvent, observers: Observers) -> Job:
        """Queue a receive among the collectives, and a send in another thread, one for each rank that receives.

        Where they can, they begin here, whatever is under way: a thread would first have to get the interpreter from
        a caller who computes, while the other rank waits. They do so in the order of the calls, by which ranks pair
        them.
        """
        queue = self
        if (arrival := message.transport.arrival_of(message)) is not None:
            entry = _Awaited(event, observers, self._failures)
            entry.post(arrival, message.after)
            self._awaited = [one for one in (*self._awaited, entry) if one.under_way.locked()]
            return entry.wait
        if message.is_send:
            # In one thread each rank of a ring would send first, and no rank would ever come to receive. And a send
            # waits for its receiver, which may first need what another rank does with the next send.
            if message.peer not in self._sends:
                name = f"{self._thread.name}-sends-to-{message.peer}"
                self._sends[message.peer] = ThreadQueue(name, self._device, self._failures)
            queue = self._sends[message.peer]
        start = message.transport.start_of(message)
        return queue.submit(message.travel, event, observers, start, waits=False)

    def close(self) -> None:
        """End the threads after the jobs that are queued; raise the first error of the mesh that nobody was told of."""
        for entry in self._awaited:
            entry.take()
        for queue in (*self._sends.values(), self):
            # The marker goes behind all entries; after the join no job can touch a group that is about to be destroyed.
            queue._abandon()
            queue._thread.join()
        if (error := self._failures.take_untold()) is not None:
            raise error


def _end_of_current_stream() -> DeviceEvent:
    """An event after all work given to the current stream: a staged transport must not read a tensor before it."""
    event: DeviceEvent = CUDA.Event(blocking=True)  # whoever waits for it sleeps: several ranks share the cores
    event.record()
    return event


def _nothing() -> None:
    """What is left to do of a job that could not begin."""


def _serve(queue: "SimpleQueue[_Entry | None]", device: torch.device) -> None:
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread is on device 0, and would take memory there
            # And on the stream that computes: what a job copies would wait for all that computes meanwhile.
            stack.enter_context(CUDA.stream(CUDA.Stream(device)))
        # Grad mode is per thread: without this the sums of a composed reduce-scatter would be taped. Inference mode,
        # not just no_grad: a tensor that was made in a caller's inference mode may be written into nowhere else.
        stack.enter_context(torch.inference_mode())
        while (entry := queue.get()) is not None:
            entry.run()
            del entry  # or the last job's buffers would live until the next one
