"""Reading the files of torch.profiler (Kineto): what ran on which thread or stream of a rank, and its names.

A collective has one of four names: the operation that the caller issued (``c10d::allreduce_``), the task of gloo's
thread (``gloo:all_reduce``), the kernel (``ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)``), or the name in the
arguments of that kernel (``allreduce``). Whether a kernel communicates does not depend on that: what NCCL or another
library for communication runs does (``LIBRARIES``), and where no name tells the collective it is
``Collective.UNKNOWN``.

Several libraries have kernels of their own that stay on one device, such as DeepEP's layout of tokens: these are beside
the library's name. A kernel that no row knows counts as compute. Where it looks like communication all the same,
``looks_like`` says so, and nobody can know.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from shardlab.vocabulary import Collective

# AllReduce, ReduceScatter, ...
NCCL_NAMES = {op: op.title().replace("_", "") for op in Collective} | {Collective.UNKNOWN: "Generic"}
# Parts of names, without case and underscores; the first that a name has, long ones first: "allreduce" before "reduce".
# NCCL's kernel SendRecv is a send, if its arguments do not say which it was.
_WORDS = {"crossdevicereduce": Collective.ALL_REDUCE} | {  # of vLLM
    op.replace("_", ""): op for op in sorted(Collective, key=len, reverse=True) if op != Collective.UNKNOWN
}
_TYPES = {
    "float": ("float32", 4), "float32": ("float32", 4), "double": ("float64", 8), "float64": ("float64", 8),
    "half": ("float16", 2), "float16": ("float16", 2), "bfloat16": ("bfloat16", 2), "int": ("int32", 4),
    "int32": ("int32", 4), "longint": ("int64", 8), "long": ("int64", 8), "int64": ("int64", 8), "bool": ("bool", 1),
    "unsignedchar": ("uint8", 1), "byte": ("uint8", 1), "uint8": ("uint8", 1), "signedchar": ("int8", 1),
    "char": ("int8", 1), "int8": ("int8", 1),
}  # fmt: skip


# A part of the names of kernels that communicate; of those that do not, though they have it.
LIBRARIES = {
    "nccl|rccl|msccl": "",  # NCCL, src/device and src/device/symmetric; RCCL; MSCCL and MSCCL++
    "hccl|hcom_|oneccl": "",  # HCCL, in traces of torch_npu: hcom_allReduce__...; oneCCL, src/sycl_kernels
    # Any kernel named after a collective: MSCCL++, FlashInfer, TensorRT-LLM, QuickReduce, AITER, Triton kernels by
    # hand. What inductor has fused (triton_...) is named after its neighbours, and computes.
    "all_?reduce|reduce_?scatter|all_?gather|all_?to_?all": "^triton_",
    # torch, csrc/distributed/c10d/symm_mem
    r"symmetric_memory|multimem_|barrier_kernel$|(put|wait)_signal_kernel": "",
    # DeepEP, csrc/kernels, whatever the namespace around it
    r"deep_ep::|\bep::|::(inter|intra)node(_ll)?::": "layout|epilogue",
    "hybrid_ep": "permut|scan|preprocess",  # DeepEP, branch hybrid-ep, csrc/hybrid_ep
    "nvshmem|roc_?shmem|ishmem": "",  # NVSHMEM, rocSHMEM and Intel SHMEM, device and stream APIs
    r"mori::|\bEp(Dispatch|Combine)": "",  # MORI, src/ops/dispatch_combine
    r"\b_?a2a_|moea2a|mnnvl": "",  # pplx-kernels, csrc/all_to_all; TensorRT-LLM, moeAlltoAllKernels
    "userbuffers": "",  # Transformer Engine, comm_gemm_overlap/userbuffers
    # vLLM and SGLang, csrc/custom_all_reduce.cuh; QuickReduce
    "cross_?device_?(reduce|store|load)|quick_?reduce": "",
    "lamport": "initiali[sz]e",  # FlashInfer and TensorRT-LLM, one-shot with Lamport flags
    "^memcpy ptop|^copypeertopeer": "",  # copies between two devices, as CUPTI and rocprofiler name them
}
_KNOWN = [
    (re.compile(names, re.IGNORECASE), re.compile(stays or "(?!)", re.IGNORECASE)) for names, stays in LIBRARIES.items()
]
# Libraries of one device: ATen, whose index_put and dispatch move nothing between ranks, and others.
_COMPUTES = re.compile(
    r"^(at|at_cuda_detail|cub|thrust|cutlass|cute|cudnn|flash|rocprim|ck|ck_tile|xformers)::"
    r"|^(triton_|flash_|fmha_|ampere_|sm\d+_|nvjet|cijk_|volta_|turing_|hopper_)"
    r"|gemm|gemv|elementwise|softmax|layer_?norm|rms_?norm|attention|attn|mla_|split_?k",
    re.IGNORECASE,
)
_LOOKS = re.compile(
    r"(?<![a-z])(dispatch|combine|put|putmem|getmem|send|recv|p2p|peer|broadcast|exchange|rdma|internode|intranode|"
    r"notify)(?![a-z])"
)


@dataclass(frozen=True, slots=True)
class Slice:
    """An event with a duration. Times are microseconds on the clock of the host."""

    name: str
    category: str
    thread: tuple[str, str]
    start_us: float
    end_us: float
    args: Mapping[str, Any]


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank.

    Attributes:
        path: of the file.
        rank: from the file; 0 if it does not say.
        num_ranks: from the file; 1 if it does not say.
        group_sizes: sizes of all process groups in the file.
        slices: in order of start.
        communication_threads: threads of gloo, whose operations are not compute.
        names_device: whether the file describes a device, as it does wherever torch sees one.
    """

    path: Path
    rank: int
    num_ranks: int
    group_sizes: frozenset[int]
    slices: tuple[Slice, ...]
    communication_threads: frozenset[tuple[str, str]]
    names_device: bool

    def of(self, *categories: str) -> list[Slice]:
        """The slices of some categories."""
        return [one for one in self.slices if one.category in categories]


def read_traces(path: Path | str) -> list[RankTrace]:
    """The traces of a file or of all ``*.json`` and ``*.json.gz`` in a directory, by rank.

    Raises:
        ValueError: there is none, one is not a trace of torch.profiler, or two belong to the same rank.
    """
    path = Path(path)
    files = sorted([*path.glob("*.json"), *path.glob("*.json.gz")]) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"trace: {path} has no *.json or *.json.gz")
    found: dict[int, RankTrace] = {}
    for trace in map(_read, files):
        if trace.rank in found:
            raise ValueError(f"trace: {found[trace.rank].path} and {trace.path} are both of rank {trace.rank}")
        found[trace.rank] = trace
    return [found[rank] for rank in sorted(found)]


def _read(path: Path) -> RankTrace:
    try:
        raw = path.read_bytes()
        content = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except OSError as error:
        raise ValueError(f"trace: {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, RecursionError, zlib.error) as error:
        raise ValueError(f"trace: {path} is damaged or not JSON ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise ValueError(f"trace: {path} is not a trace of torch.profiler: it has no list 'traceEvents'")
    with of_file(path):
        about, events = content.get("distributedInfo") or {}, content["traceEvents"]
        groups = [int(group["pg_size"]) for group in about.get("pg_config") or [] if "pg_size" in group]
        base_us = float(content.get("baseTimeNanoseconds", 0)) / 1e3
        named = (event for event in events if event.get("name") == "thread_name")
        gloo = frozenset(_thread(event) for event in named if "gloo" in str((event.get("args") or {}).get("name")))
        slices = tuple(sorted(_slices(events, base_us), key=lambda one: (one.start_us, -one.end_us)))
        rank, num_ranks = int(about.get("rank", 0)), int(about.get("world_size", 1))
        names_device = bool(content.get("deviceProperties")) or "nccl" in str(about.get("backend"))
        return RankTrace(path, rank, num_ranks, frozenset(groups), slices, gloo, names_device)


@contextmanager
def of_file(path: Path) -> Iterator[None]:
    """Inside, a value that torch.profiler does not write is a ValueError that names the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"trace: {path}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"trace: {path} is not as torch.profiler writes it: {error!r}") from error


def _slices(events: list[dict[str, Any]], base_us: float) -> Iterator[Slice]:
    for event in events:
        if event.get("ph") == "X" and event.get("cat") != "Trace":  # 'Trace' is a slice around the whole file
            start, duration = float(event["ts"]) + base_us, float(event["dur"])
            if not isfinite(start) or not 0 <= duration < float("inf"):
                raise ValueError(
                    f"{event.get('name')!r} begins at {start} us and lasts {duration} us; the clock ran backwards, "
                    "or the file is damaged"
                )
            category, args = str(event.get("cat", "")), event.get("args") or {}
            yield Slice(str(event.get("name", "")), category, _thread(event), start, start + duration, args)


def _thread(event: Mapping[str, Any]) -> tuple[str, str]:
    return str(event.get("pid")), str(event.get("tid"))


def collective_of(name: str) -> Collective | None:
    """The collective of an operation, gloo task, communicating kernel or its argument; None if the name has none."""
    plain = function_of(name).rsplit("::", 1)[-1].replace("_", "").lower()
    return next((op for word, op in _WORDS.items() if word in plain), None)


def function_of(kernel: str) -> str:
    """The name of a kernel without its return type, template arguments and parameters."""
    for of_no_name in ("void ", "(anonymous namespace)::", "<unnamed>::"):
        kernel = kernel.replace(of_no_name, "")
    return re.split(r"[<(]", kernel, maxsplit=1)[0].strip()


def communicates(kernel: Slice) -> bool:
    """Whether a kernel or a copy of the device moves data between ranks, by its name or its arguments."""
    return "Collective name" in kernel.args or is_known_to_communicate(function_of(kernel.name))


def dtype_of(name: str) -> tuple[str, int | None]:
    """Our name of an element type, and its bytes; an unknown type keeps its name and has None bytes."""
    plain = name.removeprefix("c10::").replace(" ", "").lower()
    return _TYPES.get(plain, (name, None))


def is_known_to_communicate(function: str) -> bool:
    """Whether the table has the function of a kernel."""
    return any(names.search(function) and not stays.search(function) for names, stays in _KNOWN)


def is_known_to_compute(function: str) -> bool:
    """Whether it is of a library of one device, or of the part of a communication library that stays on one."""
    of_library = any(names.search(function) and stays.search(function) for names, stays in _KNOWN)
    return of_library or _COMPUTES.search(function) is not None


def looks_like(function: str) -> bool:
    """Whether words in a name that nothing knows are those of communication."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", function).lower()
    return not is_known_to_compute(function) and _LOOKS.search(words) is not None
