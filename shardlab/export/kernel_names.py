"""Which kernels communicate, by their names: a table of libraries, and words that look like one that is not in it.

A name is that of the function, without template arguments and parameters. Several libraries have kernels of their own
that stay on one device, such as DeepEP's layout of tokens: these are beside the library's name. A kernel that no row
knows counts as compute. Where it looks like communication all the same, ``looks_like`` says so, and nobody can know.
"""

import re
from typing import NamedTuple


class Library(NamedTuple):
    """A library that communicates.

    Attributes:
        source: where its kernels are named.
        names: a part of the names of those that communicate.
        stays: a part of the names of those that do not, though they have a part of ``names``.
    """

    source: str
    names: str
    stays: str = r"(?!)"


LIBRARIES = (
    Library("NCCL, src/device and src/device/symmetric; RCCL; MSCCL and MSCCL++", "nccl|rccl|msccl"),
    Library("HCCL, in traces of torch_npu: hcom_allReduce__...; oneCCL, src/sycl_kernels", "hccl|hcom_|oneccl"),
    # MSCCL++, FlashInfer, TensorRT-LLM, QuickReduce, AITER, Triton kernels by hand. What inductor has fused
    # (triton_...) is named after its neighbours, and computes.
    Library("any kernel named after a collective", "all_?reduce|reduce_?scatter|all_?gather|all_?to_?all", "^triton_"),
    Library("torch, csrc/distributed/c10d/symm_mem",
            r"symmetric_memory|multimem_|barrier_kernel$|(put|wait)_signal_kernel"),
    Library("DeepEP, csrc/kernels, whatever the namespace around it",
            r"deep_ep::|\bep::|::(inter|intra)node(_ll)?::", "layout|epilogue"),
    Library("DeepEP, branch hybrid-ep, csrc/hybrid_ep", "hybrid_ep", "permut|scan|preprocess"),
    Library("NVSHMEM, rocSHMEM and Intel SHMEM, device and stream APIs", "nvshmem|roc_?shmem|ishmem"),
    Library("MORI, src/ops/dispatch_combine", r"mori::|\bEp(Dispatch|Combine)"),
    Library("pplx-kernels, csrc/all_to_all; TensorRT-LLM, moeAlltoAllKernels", r"\b_?a2a_|moea2a|mnnvl"),
    Library("Transformer Engine, comm_gemm_overlap/userbuffers", "userbuffers"),
    Library("vLLM and SGLang, csrc/custom_all_reduce.cuh; QuickReduce",
            "cross_?device_?(reduce|store|load)|quick_?reduce"),
    Library("FlashInfer and TensorRT-LLM, one-shot with Lamport flags", "lamport", "initiali[sz]e"),
    Library("copies between two devices, as CUPTI and rocprofiler name them", "^memcpy ptop|^copypeertopeer"),
)  # fmt: skip
_KNOWN = [(re.compile(one.names, re.IGNORECASE), re.compile(one.stays, re.IGNORECASE)) for one in LIBRARIES]
# Libraries of one device: ATen, whose index_put and dispatch move nothing between ranks, and others.
_COMPUTES = re.compile(
    r"^(at|at_cuda_detail|cub|thrust|cutlass|cute|cudnn|flash|rocprim|ck|ck_tile|xformers)::"
    r"|^(triton_|flash_|fmha_|ampere_|sm\d+_|nvjet|cijk_|volta_|turing_|hopper_)"
    r"|gemm|gemv|elementwise|softmax|layer_?norm|rms_?norm|attention|attn|mla_|split_?k",
    re.IGNORECASE,
)
_WORDS = re.compile(
    r"(?<![a-z])(dispatch|combine|put|putmem|getmem|send|recv|p2p|peer|broadcast|exchange|rdma|internode|intranode|"
    r"notify)(?![a-z])"
)


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
    return not is_known_to_compute(function) and _WORDS.search(words) is not None
