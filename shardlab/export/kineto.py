"""What torch.profiler's traces call things: collectives, element types, wrappers round the real work.

A collective of a trace is written in one of four ways: as the operation the caller issued (``c10d::allreduce_``), as
what gloo's thread did (``gloo:all_reduce``), as NCCL's kernel (``ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)``), and
as the name in that kernel's arguments (``allreduce``).
"""

from shardlab.vocabulary import Collective

NCCL_NAMES = {
    Collective.ALL_REDUCE: "AllReduce",
    Collective.REDUCE_SCATTER: "ReduceScatter",
    Collective.ALL_GATHER: "AllGather",
    Collective.BROADCAST: "Broadcast",
    Collective.ALL_TO_ALL: "AllToAll",
    Collective.SEND: "Send",
    Collective.RECV: "Recv",
    Collective.BARRIER: "Barrier",
}

# Beginnings of a name without case, underscores and wrappers, the longer before what it begins with.
_BEGINNINGS = {
    "reducescatter": Collective.REDUCE_SCATTER,
    "allreduce": Collective.ALL_REDUCE,
    "allgather": Collective.ALL_GATHER,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "barrier": Collective.BARRIER,
    "send": Collective.SEND,  # NCCL's kernel SendRecv too, where its arguments do not say which it was
    "recv": Collective.RECV,
}
_TYPES = {
    "float": ("float32", 4), "float32": ("float32", 4), "double": ("float64", 8), "float64": ("float64", 8),
    "half": ("float16", 2), "float16": ("float16", 2), "bfloat16": ("bfloat16", 2), "int": ("int32", 4),
    "int32": ("int32", 4), "longint": ("int64", 8), "long": ("int64", 8), "int64": ("int64", 8), "bool": ("bool", 1),
    "unsignedchar": ("uint8", 1), "byte": ("uint8", 1), "uint8": ("uint8", 1), "signedchar": ("int8", 1),
    "char": ("int8", 1), "int8": ("int8", 1),
}  # fmt: skip


def collective_of(name: str) -> Collective | None:
    """The collective that an operation, a gloo task, an NCCL kernel or its argument is; None for any other name."""
    plain = name.rsplit("::", 1)[-1].removeprefix("gloo:").removeprefix("ncclDevKernel_").removeprefix("ncclKernel_")
    plain = plain.replace("_", "").lower()
    return next((op for begin, op in _BEGINNINGS.items() if plain.startswith(begin)), None)


def dtype_of(name: str) -> tuple[str, int | None]:
    """Our name of an element type, and its bytes; an unknown one keeps its name and has none."""
    plain = name.removeprefix("c10::").replace(" ", "").lower()
    return _TYPES.get(plain, (name, None))
