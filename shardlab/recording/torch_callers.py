"""How events name what torch itself sends: for which part of torch and what for, along which axis, by which backend."""

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.callers import callers
from shardlab.recording.script_tensors import ScriptTensors
from shardlab.vocabulary import Collective, MeshAxis

_TORCH, _SHARDLAB = str(torch.__path__[0]), str(Path(__file__).parent.parent)
# Frames of torch between C++ and a dispatch mode that traces memory.
_DISPATCHER = ("/_ops.py", "/_dynamo/eval_frame.py", "/_compile.py")
_NAMED_MESH = "mesh_"  # begins the description of a group that a DeviceMesh has made for one of its named dimensions
_PIPELINE = "pipeline"
POINT_TO_POINT = (Collective.SEND, Collective.RECV)
_WORDS = {
    MeshAxis.DATA: ("data", "dp", "ddp", "batch"),
    MeshAxis.SHARD: ("shard", "fsdp", "dp_shard"),
    MeshAxis.REPLICA: ("replica", "replicate", "ddp_replicate", "dp_replicate"),
    MeshAxis.TENSOR: ("tensor", "tp", "mp", "model"),
    _PIPELINE: ("pp", "pipe", "stage"),
}
_AXIS_OF = {word: axis for axis, words in _WORDS.items() for word in words}


class Caller(NamedTuple):
    """Which part of torch sent a collective.

    Attributes:
        name: 'ddp', 'ddp_buckets' (where DDP rebuilds its buckets), 'fsdp', 'zero', 'dtensor', 'pipeline', 'autograd'
            (C++ in a backward: DDP, or a part of DTensor), or '' for the script itself.
        waits_in_cpp: it waits where Python cannot see it.
    """

    name: str
    waits_in_cpp: bool = False


SCRIPT, AUTOGRAD = Caller(""), Caller("autograd", waits_in_cpp=True)
_DDP, _DDP_BUCKETS = Caller("ddp", waits_in_cpp=True), Caller("ddp_buckets", waits_in_cpp=True)
_REBUILDS = "_pre_forward"  # private: the method of DDP in which C++ sends the order of the new buckets
_CALLERS = {
    "/distributed/fsdp/": Caller("fsdp"), "/distributed/optim/zero_redundancy_optimizer.py": Caller("zero"),
    "/distributed/tensor/": Caller("dtensor"), "/distributed/pipelining/": Caller("pipeline"),
    "/nn/parallel/distributed.py": _DDP, "/distributed/algorithms/ddp_comm_hooks/": _DDP,
}  # fmt: skip


def caller_of(frame: FrameType | None) -> Caller:
    """The part of torch that a call comes from.

    Args:
        frame: that of the call, None for one from C++ in a thread of autograd; the frames of torch above it are looked
            at.
    """
    is_first = True
    for above in callers(frame):
        part = _part_of(above.f_code.co_filename)
        if part is _DDP and is_first and above.f_code.co_name == _REBUILDS:
            return _DDP_BUCKETS
        if isinstance(part, Caller) and (is_first or part is not AUTOGRAD):
            return part
        is_first = is_first and part is _Frame.BETWEEN
    return SCRIPT


class _Frame(Enum):
    BETWEEN = 0  # C++ and the part of torch that sends
    OF_TORCH = 1


@cache
def _part_of(path: str) -> Caller | _Frame:
    """What a frame of a file says: who sends, or that a frame further up will say it."""
    if path.startswith(_SHARDLAB):
        return _Frame.BETWEEN
    if not path.startswith(_TORCH):
        return SCRIPT
    place = path.removeprefix(_TORCH)
    if place == "/autograd/graph.py":
        return AUTOGRAD
    found = [caller for part, caller in _CALLERS.items() if place.startswith(part)]
    return found[0] if found else _Frame.BETWEEN if place in _DISPATCHER else _Frame.OF_TORCH


def axis_of(group: dist.ProcessGroup, caller: Caller, op: Collective) -> str:
    """The axis of a group: its dimension's name in a DeviceMesh, in our words where we have one.

    A group without a name over all ranks is the data axis, unless DTensor is the first to use it, which divides
    tensors, or two ranks send to each other first, as the stages of a pipeline do. Any other is named after its ranks.
    """
    word = group.group_desc
    if word.startswith(_NAMED_MESH) and not word.startswith("mesh_dim"):
        word = word.removeprefix(_NAMED_MESH)
        return _AXIS_OF.get(word, word)
    if group.size() == dist.get_world_size():
        if op in POINT_TO_POINT:
            return _PIPELINE
        return MeshAxis.TENSOR if caller.name == "dtensor" else MeshAxis.DATA
    return f"ranks {','.join(map(str, dist.get_process_group_ranks(group)))}"


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that sends tensors of a device's type, for example 'gloo'."""
    # Private: the public get_backend() names only one of a group with a backend for each type of device.
    return str(group._get_backend(device).name())


BUCKET = "gradients of bucket"
USED = "map of used parameters"  # DDP's, with find_unused_parameters
WORDS = {
    ("ddp", Collective.ALL_REDUCE): BUCKET, ("ddp", Collective.BROADCAST): "parameters or buffers",
    ("ddp_buckets", Collective.BROADCAST): "order of the new buckets",
    ("ddp", Collective.ALL_GATHER): "shapes of parameters", ("fsdp", Collective.ALL_GATHER): "parameters, gather",
    ("fsdp", Collective.REDUCE_SCATTER): "gradients, reduction",
    ("fsdp", Collective.ALL_REDUCE): "gradients over replicas", ("zero", Collective.BROADCAST): "parameters",
}  # fmt: skip
REDUCTIONS = (BUCKET, WORDS["fsdp", Collective.REDUCE_SCATTER], WORDS["fsdp", Collective.ALL_REDUCE])
PARTS = {
    "ddp": "DDP", "fsdp": "FSDP", "zero": "ZeroRedundancyOptimizer", "dtensor": "DTensor", "autograd": "DTensor",
    "pipeline": "the pipeline",
}  # fmt: skip


class Moment(NamedTuple):
    """Where the script is when it sends.

    Attributes:
        step: the one that runs.
        backward: how many have begun in it.
        models: the roots whose forward the running backward is of.
    """

    step: int
    backward: int
    models: frozenset[int]


class Tags:
    """What a collective is for, as far as its caller tells, with its number in the step.

    The n-th reduction of gradients in a backward is the n-th of each backward of the same models: in every micro-batch
    it has the same number.

    Args:
        now: returns where the script is.
        tensors: of the script.
    """

    def __init__(self, now: Callable[[], Moment], tensors: ScriptTensors) -> None:
        self._now, self._tensors = now, tensors
        self._counts: Counter[str] = Counter()  # of different things in the step
        self._places: Counter[str] = Counter()  # of reductions in the backward
        self._numbers: dict[tuple[object, ...], int] = {}
        self._moment = now()

    def __call__(self, op: Collective, caller: Caller, tensors: Sequence[Tensor]) -> str:
        """For example 'gradients of bucket 0'."""
        before, self._moment = self._moment, self._now()
        if self._moment.step != before.step:
            self._counts.clear()
            self._numbers.clear()
        if self._moment != before:
            self._places.clear()
        name = "ddp" if caller.name == "autograd" and self._tensors.has_ddp else caller.name
        words = WORDS.get((name, op)) or f"{op} of {PARTS.get(name, 'the script')}"
        if words == BUCKET and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            words = USED
        elif words == BUCKET:
            self._tensors.add_buckets(tensors)
        return f"{words} {self._number(words)}"

    def _number(self, words: str) -> int:
        number = self._counts[words]
        if words in REDUCTIONS:
            place = words, self._moment.models, self._places[words]
            number = self._numbers.setdefault(place, number)
            self._places[words] += 1
        self._counts[words] = max(self._counts[words], number + 1)
        return number
