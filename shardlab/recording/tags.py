"""What a recorded collective is for, as far as the part of torch that sends it tells."""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from shardlab.comm.torch_names import Caller
from shardlab.recording.loop import Loop
from shardlab.recording.script_tensors import ScriptTensors
from shardlab.vocabulary import Collective

BUCKET = "gradients of bucket"
USED = "map of used parameters"  # DDP's, with find_unused_parameters
WORDS = {
    ("ddp", Collective.ALL_REDUCE): BUCKET,
    ("ddp", Collective.BROADCAST): "parameters or buffers",
    ("ddp_buckets", Collective.BROADCAST): "order of the new buckets",
    ("ddp", Collective.ALL_GATHER): "shapes of parameters",
    ("fsdp", Collective.ALL_GATHER): "parameters of unit",
    ("fsdp", Collective.REDUCE_SCATTER): "gradients of unit",
    ("fsdp", Collective.ALL_REDUCE): "gradients over replicas",
    ("zero", Collective.BROADCAST): "parameters",
}
PARTS = {
    "ddp": "DDP", "fsdp": "FSDP", "zero": "ZeroRedundancyOptimizer", "dtensor": "DTensor", "autograd": "DTensor",
    "pipeline": "the pipeline",
}  # fmt: skip


class Tags:
    """What a collective is for, as far as its caller tells, with its number in the step."""

    def __init__(self, loop: Loop, tensors: ScriptTensors) -> None:
        self._loop, self._tensors = loop, tensors
        self._counts: Counter[str] = Counter()
        self._step = loop.step

    def __call__(self, op: Collective, caller: Caller, tensors: Sequence[Tensor]) -> str:
        """For example 'gradients of bucket 0'."""
        if self._loop.step != self._step:
            self._step = self._loop.step
            self._counts.clear()
            # Of the step before: DDP may have freed them since, and other storages may have their identities.
            self._tensors.buckets.clear()
        name = "ddp" if caller.name == "autograd" and self._tensors.has_ddp else caller.name
        words = WORDS.get((name, op)) or f"{op} of {PARTS.get(name, 'the script')}"
        if words == BUCKET and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            words = USED
        number, self._counts[words] = self._counts[words], self._counts[words] + 1
        return f"{words} {number}"
