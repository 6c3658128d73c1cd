"""The words that all tables, figures and engines share.

Each is a ``StrEnum``, so members equal their text: ``Role.GRADIENT == "gradient"``.
"""

from enum import StrEnum
from functools import cache


class Collective(StrEnum):
    """A verb of the communicator, or (reduce, gather, scatter) one that only recorded scripts use.

    ``UNKNOWN`` moved data between ranks, but the imported trace does not say by which verb.
    """

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    RECV = "recv"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    BARRIER = "barrier"
    UNKNOWN = "unknown communication"


class Phase(StrEnum):
    """What a rank is doing in its training step."""

    SETUP = "setup"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    CLIP = "clip"
    STEP = "step"
    METRICS = "metrics"


class Role(StrEnum):
    """What a storage is used for. Each storage has exactly one role."""

    PARAMETER = "parameter"
    GATHERED_PARAMETER = "gathered_parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    MASTER_WEIGHT = "master_weight"
    COMMUNICATION_BUFFER = "communication_buffer"
    ACTIVATION = "activation"
    OFFLOADED = "offloaded"  # in host memory, not on the device
    OTHER = "other"
    UNATTRIBUTED = "unattributed"  # a live tensor in host memory that no engine, module or optimizer refers to
    WORKSPACE = "workspace"  # in the CUDA allocator but in no tensor: library workspaces, and rounding to blocks


class SpanKind(StrEnum):
    """What a span measures."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    OFF_CPU = "off_cpu"  # the rank neither computed nor waited: it slept, or other processes had its core


COMPUTE_KINDS = (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.RECOMPUTE, SpanKind.OPTIMIZER)
"""The spans in which a rank computes."""

FLAG = "whether a rank refuses"
"""What the message is for by which all ranks raise together, over each data axis; beside it who used what."""
TOLD = "raised, so all do"
"""In the error of a rank that has not raised by itself."""
WHOLE_MODEL = "model"
"""The unit of a span or a sample that belongs to the whole model and to no part of it."""


class MeshAxis(StrEnum):
    """An axis of the mesh of ranks."""

    DATA = "data"
    SHARD = "shard"
    REPLICA = "replica"
    CONTEXT = "context"
    TENSOR = "tensor"
    PIPE = "pipe"


class Partition(StrEnum):
    """How the elements of a bucket are divided over the ranks."""

    ELEMENTS = "elements"
    ROUND_ROBIN = "round_robin"
    CONTIGUOUS = "contiguous"
    BALANCED = "balanced"


class Sharding(StrEnum):
    """How FSDP uses the ranks: shard over all, gather once, replicate over all, or shard in groups."""

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"


class LayoutName(StrEnum):
    """Where FSDP cuts a unit: anywhere in a flat range, or between the rows of each parameter."""

    FLAT = "flat"
    DIM0 = "dim0"


class Offload(StrEnum):
    """What FSDP keeps in host memory between steps."""

    NONE = "none"
    PARAMETERS = "parameters"
    ALL = "all"


class HostTransport(StrEnum):
    """How tensors travel through host memory, the fastest first."""

    SHARED_MEMORY = "shared_memory"
    GLOO = "gloo"


@cache  # every collective asks
def dtype_name(dtype: object) -> str:
    """A ``torch.dtype`` as tables and files spell it, for example 'float32'."""
    return str(dtype).removeprefix("torch.")


def class_of(value: object) -> str:
    """The class of a value behind its article, for messages: 'an int', 'a Tensor', 'an MLP', 'a UserDict'."""
    name = type(value).__name__
    is_spelled = name[:2].isupper()  # letter by letter
    return f"{'an' if name[0] in ('AEFHILMNORSX' if is_spelled else 'AEIOaeio') else 'a'} {name}"
