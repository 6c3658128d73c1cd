"""Checks of this machine, for when ranks do not start: one row per check, with a verdict."""

import importlib.metadata
import os
import platform
import shutil
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

_GIB = 1 << 30
_CHROME_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Check(NamedTuple):
    """One row: what was checked, what was found, and ``ok`` or the consequence."""

    check: str
    value: str
    verdict: str


def doctor() -> list[Check]:
    """Check this machine and this process. Starts nothing and does not initialise CUDA."""
    return [*_software(), *_machine(), *_gpus(), _chrome()]


def _software() -> list[Check]:
    version = importlib.metadata.version("torch")
    backends = [name for name, here in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if here]
    verdict = "ok" if "gloo" in backends else "no gloo: ranks on CPU and ranks that share a GPU cannot start"
    return [
        Check("python", platform.python_version(), "ok"),
        Check("torch", version, "ok" if dist.is_available() else "built without torch.distributed: no ranks"),
        Check("backends", ", ".join(backends) or "none", verdict),
    ]


def _machine() -> list[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    text = f"{memory.available / _GIB:.1f} GiB free of {memory.total / _GIB:.1f} GiB"
    return [
        Check("cores", str(cores), "ok" if cores > 1 else "one core: ranks take turns, overlap cannot be seen"),
        Check("memory", text, "ok" if memory.available > _GIB else "under 1 GiB: ranks may be killed"),
    ]


def _gpus() -> list[Check]:
    num_gpus = torch.cuda.device_count()
    initialised = torch.cuda.is_initialized()
    verdict = (
        "this process holds GPU memory; ranks are not hurt by it, they never fork from here" if initialised else "ok"
    )
    return [
        Check("GPUs", str(num_gpus), "ok" if num_gpus else "ranks run on CPU with gloo"),
        Check("CUDA initialised here", "yes" if initialised else "no", verdict),
    ]


def _chrome() -> Check:
    found = next((path for name in _CHROME_NAMES if (path := shutil.which(name))), None)
    return Check("chrome", found or "none", "ok" if found else "figures get no PNG beside them")
