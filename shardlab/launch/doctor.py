"""Checks of this machine, for when ranks do not start: one row per check, with a verdict."""

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from shardlab.installed import num_cores

_GIB = 1 << 30
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # by which ranks know that they are on one host
# In nvidia-smi's table of GPUs by GPUs: NVLink with its number of links, or the way over PCIe.
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")
_CHROME_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Check(NamedTuple):
    """One row: what was checked, what was found, and ``ok`` or the consequence."""

    check: str
    value: str
    verdict: str


def doctor() -> list[Check]:
    """Check this machine and this process. Starts nothing and does not initialise CUDA."""
    return [*_software(), *_machine(), *_gpus(), *_network(), _chrome()]


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
    cores, memory = num_cores(), psutil.virtual_memory()
    text = f"{memory.available / _GIB:.1f} GiB free of {memory.total / _GIB:.1f} GiB"
    return [
        Check("cores", str(cores), "ok" if cores > 1 else "one core: ranks take turns, overlap cannot be seen"),
        Check("memory", text, "ok" if memory.available > _GIB else "under 1 GiB: ranks may be killed"),
    ]


def _gpus() -> list[Check]:
    num_gpus = torch.cuda.device_count()
    initialised = torch.cuda.is_initialized()
    holds = "this process holds GPU memory; ranks are not hurt by it, they never fork from here"
    return [
        Check("GPUs", str(num_gpus), "ok" if num_gpus else "ranks run on CPU"),
        *([_links(_topology())] if num_gpus > 1 else []),
        Check("CUDA initialised here", "yes" if initialised else "no", holds if initialised else "ok"),
    ]


def _topology() -> str:
    """What ``nvidia-smi topo -m`` prints; empty where it cannot."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _links(topology: str) -> Check:
    """How GPUs reach each other: between how many pairs of them there is which link."""
    rows = [line.split() for line in topology.splitlines() if re.match(r"GPU\d+\s", line)]
    pairs = Counter(
        row[column] for place, row in enumerate(rows) for column in range(place + 2, len(rows) + 1)
        if column < len(row) and _LINK.fullmatch(row[column])
    )  # fmt: skip
    value = ", ".join(f"{kind} between {count} pair{'s' * (count > 1)}" for kind, count in pairs.most_common())
    if not pairs:
        return Check("links between GPUs", "unknown", "nvidia-smi topo -m says nothing of them")
    over_pcie = any(not kind.startswith("NV") for kind in pairs)
    return Check("links between GPUs", value, "over PCIe: a fraction of NVLink's bandwidth" if over_pcie else "ok")


def _network() -> list[Check]:
    """How ranks on the CPU send to each other, here and between hosts."""
    shares = hasattr(os, "memfd_create") and _BOOT_ID.is_file()
    verdict = "ok" if shares else "no memfd_create or no boot id: gloo over loopback is slower"
    sends = Check("ranks of one host send through", "shared memory" if shares else "gloo", verdict)
    others = sorted(name for name, addresses in psutil.net_if_addrs().items() if _is_for_others(name, addresses))
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if chosen:
        unknown = [name for name in chosen.split(",") if name not in psutil.net_if_addrs()]
        verdict = f"this machine has no interface {', '.join(unknown)}" if unknown else "ok"
    elif others:
        verdict = f"for several hosts set GLOO_SOCKET_IFNAME={others[0]} on each, by its own name there"
    else:
        verdict = "no interface but loopback: one host only"
    value = f"GLOO_SOCKET_IFNAME={chosen}" if chosen else ", ".join(others) or "loopback"
    return [sends, Check("interfaces between hosts", value, verdict)]


def _is_for_others(name: str, addresses: list[Any]) -> bool:
    is_up = name in (stats := psutil.net_if_stats()) and stats[name].isup
    return is_up and any(one.family == socket.AF_INET and not one.address.startswith("127.") for one in addresses)


def _chrome() -> Check:
    found = next((path for name in _CHROME_NAMES if (path := shutil.which(name))), None)
    return Check("chrome", found or "none", "ok" if found else "figures get no PNG beside them")
