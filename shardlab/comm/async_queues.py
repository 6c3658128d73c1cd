"""Where collectives run beside the compute: one queue per communicator, first in, first out.

Transports are written as plain blocking code. A queue makes them asynchronous:

* ``ThreadQueue``: one thread takes job after job. The thread sleeps in gloo, not in Python, so backward goes on; when a
  job began and ended is known exactly, and a sleep in a job (an emulated link) burns no CPU. Where nothing is under
  way and the transport can, the caller begins the collective itself: on busy cores it costs more to wake a thread.
  A letter (``transports.letters``) goes past the thread altogether.
* ``StreamQueue``: NCCL's calls only enqueue work, so the queue is a CUDA stream, and two CUDA events are its clock.
  Whether a collective has ended its end event is asked, and never waited for.
"""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter_ns

import torch

from shardlab.comm.events import CollectiveEvent, DeviceEvent, Observers
from shardlab.comm.failures import Failures
from shardlab.comm.streams import CUDA, Streams, mark
from shardlab.comm.transports.base import Job, Message, Start
from shardlab.comm.transports.letters import awaited


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
                self.job = start()
        except Exception as error:  # as in run()
            self.error, self.job = error, _nothing
        self.begun = True
        self._tell_started()

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
        if self.error is not None:  # it may also have come from begin()
            self._failures.note(self.event, self.error)
        # Observers first: whoever has waited finds the collective's end in the records.
        self.event.end_ns = perf_counter_ns()
        for observer in self.observers:
            observer.completed(self.event)
        self.under_way.release()

    def wait(self) -> None:
        with self.under_way:
            pass
        if self.error is not None:
            self._failures.tell(self.event)
            raise self.error

    def _tell_started(self) -> None:
        for observer in self.observers:
            observer.started(self.event)


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
        if (post := message.transport.letter_of(message)) is not None:
            return awaited(post(), message, event, observers)
        queue = self
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
        for queue in (*self._sends.values(), self):
            # The marker goes behind all entries; after the join no job can touch a group that is about to be destroyed.
            queue._abandon()
            queue._thread.join()
        if (error := self._failures.take_untold()) is not None:
            raise error


class Running:
    """Collectives that a stream has been given, in the order of issue, until their end has been told."""

    def __init__(self) -> None:
        self._entries: deque[tuple[CollectiveEvent, Observers]] = deque()

    def add(self, event: CollectiveEvent, observers: Observers) -> None:
        """One more; first those that have ended meanwhile are told."""
        self.tell_ended()
        self._entries.append((event, observers))
        for observer in observers:
            observer.started(event)

    def tell_ended(self) -> None:
        """Tell the observers what has ended; waits for nothing."""
        while self._entries and self._entries[0][0].has_ended_on_stream:
            event, observers = self._entries.popleft()
            for observer in observers:
                observer.completed(event)


@dataclass(frozen=True, eq=False)
class _Held:
    """A message that has been issued and has not left."""

    message: Message
    event: CollectiveEvent
    observers: Observers


class StreamQueue:
    """A CUDA stream beside the compute stream, for transports whose calls only enqueue (NCCL).

    Args:
        device: of the streams.
        streams: CUDA's.
    """

    def __init__(self, device: torch.device, streams: Streams = CUDA) -> None:
        self._streams = streams
        self._stream = streams.Stream(device)
        self._running = Running()
        self._held: list[_Held] = []

    def submit(self, job: Job, event: CollectiveEvent, observers: Observers, start: Start | None = None) -> Job:
        """Enqueue ``job`` behind everything that the current stream has been given so far; ``start`` is not needed."""
        # Before the collective: a rank may need a held message before it comes to the collective itself.
        self._let_travel(self._held)
        # The buffers are still being computed on the current stream.
        self._stream.wait_stream(self._streams.current_stream())
        end = self._enqueue(job, [(event, observers)])

        def wait() -> None:
            # The host goes on. The buffers may be freed: the current stream uses their memory again behind the event.
            self._streams.current_stream().wait_event(end)
            self._running.tell_ended()

        return wait

    def submit_message(self, message: Message, event: CollectiveEvent, observers: Observers) -> Job:
        """Hold a message until somebody waits for it or a collective is issued: what is held may travel together.

        A stream does one thing after another. Two ranks that both send first and then receive would each wait for the
        other's receive, which stands behind its send. What is ``in_order`` is not held.
        """
        if message.in_order:
            self._let_travel(self._held)  # as before a collective
        self._stream.wait_stream(self._streams.current_stream())  # now: what comes later does not change the buffer
        held = _Held(message, event, observers)
        self._held.append(held)
        if message.in_order:
            self._let_travel([held])

        def wait() -> None:
            if held in self._held:
                self._let_travel(_together(self._held, held))
            assert event.device_times is not None
            self._streams.current_stream().wait_event(event.device_times[1])
            self._running.tell_ended()

        return wait

    def close(self) -> None:
        """Wait for the stream."""
        self._let_travel(self._held)
        # The host waits: the group may be destroyed after this, and only now have all end events been passed.
        self._stream.synchronize()
        self._running.tell_ended()

    def _let_travel(self, leaving: Sequence[_Held]) -> None:
        if not leaving:
            return
        messages = [held.message for held in leaving]
        self._held = [held for held in self._held if held not in leaving]

        def job() -> None:
            messages[0].transport.exchange(messages)
            for message in messages:
                if message.after is not None:
                    message.after()

        self._enqueue(job, [(held.event, held.observers) for held in leaving])

    def _enqueue(self, job: Job, told: Sequence[tuple[CollectiveEvent, Observers]]) -> DeviceEvent:
        with self._streams.stream(self._stream):
            begin = mark(self._streams)
            job()
            end = mark(self._streams)
        for event, observers in told:
            event.device_times = (begin, end)
            self._running.add(event, observers)
        return end


def _together(held: Sequence[_Held], waited: _Held) -> list[_Held]:
    """What has to leave with the message that is waited for.

    Messages that are grouped end together. So a receive takes along all sends, which the other side may need first,
    and no receive behind it, for which the other side may need this one first. A send takes along all.
    """
    if waited.message.is_send:
        return list(held)
    place = held.index(waited)
    return [one for at, one in enumerate(held) if at <= place or one.message.is_send]


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
