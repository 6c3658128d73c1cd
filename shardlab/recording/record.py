"""``record``: opens a directory, listens while the block runs, and closes the record, also after an error.

``recorded_script`` is a file that is run inside ``record`` as ``python SCRIPT ARGS`` would run it.
What a rank must know for that it knows without asking the others: its number, the directory, the origin of time.
"""

import builtins
import contextlib
import os
import platform
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from importlib.machinery import SourceFileLoader
from math import isnan, nan, prod
from pathlib import Path
from time import perf_counter_ns
from types import ModuleType
from typing import NamedTuple, Self

import psutil
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode  # no public way to see whether one is active

from shardlab.comm import CollectiveEvent, Observer
from shardlab.experiment.directory import OF_A_RANK, OF_FIRST, another, made
from shardlab.installed import __version__
from shardlab.launch.cell_bar import cell_bar
from shardlab.launch.placement import torchrun_env
from shardlab.recording.global_hooks import Hooks
from shardlab.recording.inferred_loop import Loop
from shardlab.recording.script_collectives import TorchCalls
from shardlab.recording.script_tensors import ScriptTensors
from shardlab.recording.torch_callers import Tags
from shardlab.records.store import RunWriter, write_manifest
from shardlab.trace.clock import Clock, clock_for
from shardlab.trace.recorder import ALWAYS_AT_REST, Recorder, compiles

TRACED_STEP = 2  # not the first steps, in which optimizer state is still being allocated
RARELY_FROM = 64
ALWAYS_WATCHED = 16
WATCH_EVERY = 16
_MANIFEST, _PART = "manifest.json", "manifest.json.part"


class Place(NamedTuple):
    """A process among those that are recorded."""

    rank: int
    num_ranks: int

    @classmethod
    def here(cls) -> "Place":
        """As torch's default group says if there is one, else as torchrun says, else alone."""
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        env = torchrun_env()
        return cls(0, 1) if env is None else cls(env.rank, env.world_size)


@contextlib.contextmanager
def record(
    directory: Path | str, *, trace_memory: int | None = TRACED_STEP, watch_every: int = WATCH_EVERY, overwrite: bool =
    False,
) -> Iterator[Path]:  # fmt: skip
    """Inside, what this rank trains with plain torch is recorded, on every rank into the same directory.

    It communicates nothing and changes no number. Every step has its loss, learning rate and time. Collectives, units
    and waits are recorded in watched steps: the first 16, and then one in ``watch_every``. There a unit costs about
    0.1 ms and a collective 0.3 to 0.5 ms, on a CPU whose caches the compute has emptied; in other steps no hook stands
    on a unit and none in torch's dispatcher. Measured in turns with the same steps unrecorded, in CPU time (two DDP
    ranks, 15 units, steps of 15 ms, from step 17 on, watched ones included): 0.5 ms a step, and 4.6 ms if all are
    watched.

    Between two steps all memory is read (steps 0, 1, 64, 256 and so on), in tens of milliseconds; on a GPU the device
    is also waited for once a step, at the beginning of the next forward. The traced step takes several times as long
    and is left out of timings. At the end all hooks are gone; the records are there up to the last finished step, also
    after an error or a kill. Steps, losses and norms: see ``recording.inferred_loop``. Unknown, and missing in
    the tables: gradient norms where nothing is clipped, numbers of tokens, who holds which shard.

    A module that torch.compile compiles is one unit. Until its root is known (in the first two steps) torch warns that
    there are global hooks on modules, and afterwards it may compile once more.

    Processes that the script starts itself are not recorded. If it does, begin to record in each of them, after
    ``init_process_group`` (or under torchrun), which says which rank this is.

    Args:
        directory: new or empty; of several hosts each sees its own or all see one.
        overwrite: remove the record that is in ``directory``, finished or not.
        trace_memory: the step of which every allocation is traced, for its peak by role; None for none. A step is not
            traced while another dispatch mode of torch is active, or once torch.compile was asked for anything.
        watch_every: after the first 16 steps, collectives and units are recorded in one step in so many; 1 for all.

    Yields:
        The directory, absolute.

    Raises:
        ValueError: ``directory`` is not empty, this process records already, or (from the forward) a module belongs to
            one of shardlab's engines.
    """
    directory = Path(directory).absolute()  # the script may change its own
    place = Place.here()
    if _Process.directory is not None:
        raise ValueError(f"record: this process records into {_Process.directory} already; leave that block first")
    check_steps(trace_memory, watch_every)
    claim(directory, place, overwrite=overwrite)
    recording = Recording(directory, place, trace_memory, watch_every)
    _Process.directory = directory
    try:
        with recording:
            yield directory
    finally:
        _Process.directory = None


class _Process:
    """A process records into one directory at a time."""

    directory: Path | None = None


def check_steps(trace_memory: int | None, watch_every: int) -> None:
    """Raise ValueError unless the first is the number of a step, the second a distance between two."""
    if trace_memory is not None and (type(trace_memory) is not int or trace_memory < 0):
        raise ValueError(f"trace_memory: {trace_memory!r} is given; it must be the number of a step, from 0, or None")
    if isinstance(watch_every, bool) or not isinstance(watch_every, int) or watch_every < 1:
        raise ValueError(f"watch_every: {watch_every!r} is given; it must be a whole number of steps, 1 or more")


class Recording(Observer):
    """One rank's record, open while it is entered.

    Args:
        directory: claimed.
        place: this rank among all.
        trace_memory: see ``record``.
        watch_every: likewise.
    """

    def __init__(self, directory: Path, place: Place, trace_memory: int | None, watch_every: int) -> None:
        self._directory, self._place = directory, place
        self._trace_memory, self._watch_every = trace_memory, watch_every
        self._tensors = ScriptTensors()
        self._loop = Loop(self)
        self._hooks = Hooks(self._loop, self._tensors, self._loop)
        self._tags = Tags(lambda: self._loop.moment, self._tensors)
        self._calls: TorchCalls | None = None  # while collectives are watched
        self._axes: dict[str, int] = {}  # ranks along each; of groups of several sizes the largest
        self._backends: set[str] = set()
        self._recorder: Recorder | None = None
        self._device = torch.device("cpu")
        self._origin_ns = origin_ns(place.num_ranks)
        self._listening = self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Begin to listen."""
        # Undone in reverse: listening ends, the last step and the manifest are written, the writer makes its files.
        with contextlib.ExitStack() as stack:
            self._writer = stack.enter_context(
                contextlib.closing(RunWriter(self._directory, self._place.rank, self._directory.name, "measured"))
            )
            self._write_manifest()
            stack.callback(self._write_manifest)
            stack.callback(self._loop.finish)
            self._advance = stack.enter_context(cell_bar("recording"))
            self._listening = stack.enter_context(contextlib.ExitStack())
            self._listening.enter_context(self._hooks)
            self._listening.callback(self.watch, on=False)
            self.watch(on=True)
            # Forked children (workers of a DataLoader) share the journal's memory, and must not write into it.
            os.register_at_fork(after_in_child=partial(_forget, weakref.ref(self)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Listen no more, and write what is left."""
        self._stack.close()
        if self._loop.num_steps == 0 and error[0] is None and self._place.rank == 0:
            warnings.warn(
                "record: no optimizer has taken a step in this process, so there is nothing to report. A step ends "
                "with the step() of a torch.optim.Optimizer; a loop that steps by hand needs one. Processes that a "
                "script starts itself (mp.spawn) are not seen: start it with torchrun, or call shardlab.record in them",
                stacklevel=2,
            )

    def issued(self, event: CollectiveEvent) -> None:
        """Record a collective."""
        began_ns = perf_counter_ns()
        known = self._axes.get(event.axis, 0)
        self._axes[event.axis] = max(known, event.group_size)
        self._backends.add(event.transport)
        if self._axes[event.axis] > known:  # at once, for a run that is killed
            self._write_manifest()
        self._loop.issued(event)
        self._loop.spent(began_ns)

    def started(self, event: CollectiveEvent) -> None:
        """It has begun."""
        if self._recorder is not None:
            self._recorder.started(event)

    def completed(self, event: CollectiveEvent) -> None:
        """It has ended."""
        if self._recorder is not None:
            self._recorder.completed(event)

    def open(self) -> tuple[Recorder, Clock]:
        """Called at the first step, when it is known on which device the script computes."""
        self._device = self._tensors.device
        clock = clock_for(self._device)
        self._recorder = Recorder(self._writer, clock, self._origin_ns, device=self._device, samples=samples_at_rest)
        self._recorder.live_tensors = self._tensors.live_tensors
        return self._recorder, clock

    def traces(self, step: int) -> bool:
        """Whether the memory of a step is traced."""
        return step == self._trace_memory and not compiles() and _get_current_dispatch_mode() is None

    def may_trace(self) -> bool:
        """Whether the memory of a step may be traced that is unlike all that were."""
        return self._trace_memory is not None and _get_current_dispatch_mode() is None

    def reads(self, step: int) -> bool:
        """Whether what is held after a step is read, which takes so long that the next step begins anew."""
        return samples_at_rest(step) or step == self._trace_memory

    def watches(self, step: int) -> bool:
        """Whether a step's collectives and units are recorded; of every rank the same."""
        # Where memory is read, the collectives say which storages are buckets.
        return step < ALWAYS_WATCHED or step % self._watch_every == 0 or self.reads(step)

    def watch(self, *, on: bool) -> None:
        """Listen to collectives and units from now on, or no longer."""
        if on == (self._calls is not None):
            return
        began_ns = perf_counter_ns()
        self._hooks.watch_units(on=on)
        if self._calls is None:
            self._calls = TorchCalls(self, self._tags).__enter__()
        else:
            self._calls.__exit__()
            self._calls = None
        self._loop.spent(began_ns)

    def end_waits(self) -> None:
        """C++ code of torch has waited for collectives."""
        if self._calls is not None:
            self._calls.end_waits()

    def forget_ended(self) -> None:
        """A step has been written: collectives that have ended and that nobody has waited for are let go."""
        self._advance(f"step {self._loop.step}")
        if self._calls is not None:
            self._calls.forget_ended()

    def _write_manifest(self) -> None:
        if self._place.rank != 0:
            return
        axes, recorder = self._axes, self._recorder
        shares = (nan, nan) if recorder is None else (recorder.cost_share, recorder.unwatched_cost_share)
        share, unwatched = (None if isnan(share) else share for share in shares)
        manifest = {
            "run": self._directory.name, "recorded": sys.argv, "ranks": self._place.num_ranks,
            "mesh": axes if prod(axes.values()) == self._place.num_ranks else None,
            "versions": {"shardlab": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "devices": [str(self._device)] * self._place.num_ranks, "backend": ",".join(sorted(self._backends)),
            "config": {}, "always_watched": ALWAYS_WATCHED, "watch_every": self._watch_every, "padding_bytes": 0,
            "recorder_share": share, "unwatched_recorder_share": unwatched,
        }  # fmt: skip
        write_manifest(self._directory, manifest)


def samples_at_rest(step: int) -> bool:
    """Whether what is held after a step is read, which looks at every object of Python: tens of milliseconds."""
    is_power_of_four = step.bit_count() == 1 and step.bit_length() % 2 == 1
    return step < ALWAYS_AT_REST or (step >= RARELY_FROM and is_power_of_four)


def _forget(recording: "weakref.ref[Recording]") -> None:
    """In a forked child: listen no more."""
    if (known := recording()) is not None:
        known._listening.close()


def claim(directory: Path, place: Place, *, overwrite: bool = False) -> None:
    """Make the directory of a record. The other ranks of this record may have begun to write: that is allowed.

    Args:
        directory: of the record.
        place: this rank; to overwrite, each rank removes its own files, and rank 0 also those of no current rank.
        overwrite: remove the record that is in it.

    Raises:
        ValueError: it holds anything else, is a file, or cannot be made. Then nothing was removed.
    """
    names = made(directory)
    owners = {name: int(found[1]) for name in names if (found := OF_A_RANK.fullmatch(name))}
    others = {name for name, rank in owners.items() if rank != place.rank}
    if overwrite and (foreign := sorted(names - owners.keys() - OF_FIRST)):
        raise ValueError(
            f"overwrite: {directory} also holds {', '.join(foreign[:3])}, which no record has; name another directory"
        )
    begun = {name for name in others if name.endswith(".journal")} | {_PART} | ({_MANIFEST} if place.rank else set())
    if not overwrite and names - begun:
        raise ValueError(f"out: {directory} holds {another(directory)}")
    if overwrite:
        of_none = {name for name, rank in owners.items() if rank >= place.num_ranks}
        for name in (owners.keys() - others) | (of_none | (OF_FIRST & names) if place.rank == 0 else set()):
            (directory / name).unlink(missing_ok=True)


def origin_ns(num_ranks: int) -> int:
    """Where times count from, in ``time.perf_counter_ns``: of several ranks on a host the start of their parent."""
    now_ns = time.perf_counter_ns()
    if num_ranks == 1:
        return now_ns
    stat = Path(f"/proc/{os.getppid()}/stat")
    if not stat.is_file():  # no Linux: here ranks may differ by the microseconds between two readings of a clock
        return now_ns - time.time_ns() + int(psutil.Process(os.getppid()).create_time() * 1e9)
    # The name, in brackets, may have spaces. Field 22 counts ticks of CLOCK_BOOTTIME, so for all ranks the same.
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def directory_by_date() -> Path:
    """``runs/DATE``; under torchrun the date is that of its start, so that the ranks of a host have the same."""
    began = time.time() if torchrun_env() is None else psutil.Process(os.getppid()).create_time()
    return Path("runs") / datetime.fromtimestamp(int(began)).strftime("%Y%m%d-%H%M%S")


def recorded_script(
    path: Path, arguments: Sequence[str], directory: Path, *, overwrite: bool, watch_every: int
) -> Callable[[], None]:
    """Check before anything runs; the call runs the script as ``__main__``, and records it.

    What it raises, also ``SystemExit``, leaves as it is.

    Args:
        path: of the script.
        arguments: its own.
        directory: new or empty.
        overwrite: see ``record``.
        watch_every: likewise.

    Raises:
        ValueError: there is no such script, the directory is not empty, or ``watch_every`` is no number of steps.
    """
    if not path.is_file():
        raise ValueError(f"script: {path} is not a file; name a Python script, then its arguments")
    check_steps(TRACED_STEP, watch_every)
    claim(directory, Place.here(), overwrite=overwrite)

    def run() -> None:
        main = as_main(path, arguments)
        with record(directory, watch_every=watch_every, overwrite=overwrite):
            main()

    return run


def as_main(path: Path, arguments: Sequence[str]) -> Callable[[], None]:
    """Prepare this process for a script, as ``python PATH ARGUMENTS`` would; the call runs it as ``__main__``."""
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(path.resolve().parent)  # where ``python SCRIPT`` finds the script's own modules
    # Not by runpy, which makes ``sys.argv[0]`` what ``__file__`` is; Python makes only the latter absolute.
    main, file = ModuleType("__main__"), str(path.absolute())
    loader = SourceFileLoader("__main__", file)
    vars(main).update(__file__=file, __loader__=loader, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main  # for good: at exit too, scripts pickle what is theirs

    def run() -> None:
        exec(loader.source_to_code(loader.get_data(file), file), vars(main))

    return run
