"""Which device and backend ranks get on machines with any number of GPUs."""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from shardlab.launch import place
from shardlab.launch.doctor import _links, doctor
from shardlab.launch.placement import agreed


@pytest.fixture
def machine(monkeypatch):
    def with_gpus(num_gpus, nccl=True):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)

    return with_gpus


def test_any_number_of_gpus(machine):
    for num_gpus, nccl, num_ranks, backend, devices, staged, banner in (
        (0, True, 3, "gloo", ("cpu",) * 3, False, None),
        (4, True, 2, "nccl", ("cuda:0", "cuda:1"), False, None),
        (2, True, 3, "gloo", ("cuda:0", "cuda:1", "cuda:0"), True, "3 ranks share 2 GPUs (NCCL refuses"),
        (2, False, 2, "gloo", ("cuda:0", "cuda:1"), True, "without NCCL"),
    ):
        machine(num_gpus, nccl)
        placement = place(num_ranks)
        assert (placement.backend, placement.devices, placement.staged) == (backend, devices, staged)
        assert placement.device_type == ("cuda" if num_gpus else "cpu")
        assert placement.banner is None if banner is None else banner in placement.banner
    assert place(2, "cpu").devices == ("cpu", "cpu")


def test_nccl_may_be_told_to_let_ranks_share(machine, monkeypatch):
    machine(2)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    placement = place(3)
    assert (placement.backend, placement.staged) == ("nccl", False)
    assert placement.banner.startswith("3 ranks share 2 GPUs and send by NCCL (NCCL_MULTI_RANK_GPU_ENABLE=1)")
    assert place(2).banner is None
    shared = in_every_rank(["GPU-a", "GPU-b", "GPU-a"], 1)
    assert (shared.backend, shared.staged, shared.banner) == ("nccl", False, placement.banner)
    machine(2, nccl=False)
    assert place(3).staged


def in_every_rank(gpus, num_visible, local_ranks=None):
    """The placement on which ranks agree that have these GPUs and see so many of them; threads with one store."""
    store, world_size = dist.HashStore(), len(gpus)

    def rank(number):
        local = number if local_ranks is None else local_ranks[number]
        seen = place(world_size)
        own = seen.devices[local % num_visible]
        devices = tuple(own if other == number else device for other, device in enumerate(seen.devices))
        return agreed(replace(seen, devices=devices), number, gpus[number], store)

    with ThreadPoolExecutor(world_size) as threads:
        found = list(threads.map(rank, range(world_size)))
    assert all(placement == found[0] for placement in found)
    return found[0]


def test_three_ranks_that_see_one_gpu_each_are_not_staged_if_it_is_another_one(machine):
    machine(1)
    assert place(3).staged  # all that a single process could say
    placement = in_every_rank(["GPU-a", "GPU-b", "GPU-c"], 1)
    assert (placement.backend, placement.staged, placement.banner) == ("nccl", False, None)
    assert placement.devices == ("cuda:0",) * 3
    shared = in_every_rank(["GPU-a", "GPU-b", "GPU-a"], 1)
    assert (shared.backend, shared.staged) == ("gloo", True)
    assert "3 ranks share 2 GPUs" in shared.banner
    machine(1, nccl=False)
    assert "without NCCL" in in_every_rank(["GPU-a", "GPU-b"], 1).banner


def test_four_ranks_on_two_hosts_of_two_gpus_without_a_local_world_size(machine):
    machine(2)
    placement = in_every_rank(["GPU-a", "GPU-b", "GPU-c", "GPU-d"], 2, local_ranks=(0, 1, 0, 1))
    assert (placement.backend, placement.staged) == ("nccl", False)
    assert placement.devices == ("cuda:0", "cuda:1", "cuda:0", "cuda:1")


def test_bad_input_names_the_field(machine):
    machine(0)
    with pytest.raises(ValueError, match=r"device: 'cuda' is given.*allowed values here are auto, cpu"):
        place(2, "cuda")
    with pytest.raises(ValueError, match=r"device: 'tpu'.*auto, cpu, cuda"):
        place(2, "tpu")
    for world_size in (0, -2, 1.5, True, "2"):
        with pytest.raises(ValueError, match="world_size"):
            place(world_size)


def test_no_cuda_context_comes_of_it():
    place(2)
    checks = {check.check: check for check in doctor()}
    assert checks["CUDA initialised here"].value == "no"
    assert checks["python"].verdict == "ok"
    assert all(check.value and check.verdict for check in checks.values())


def test_doctor_says_how_ranks_send_here_and_what_several_hosts_need(monkeypatch):
    def found():
        return {check.check: (check.value, check.verdict) for check in doctor()}

    assert found()["ranks of one host send through"] == ("shared memory", "ok")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert found()["interfaces between hosts"] == ("GLOO_SOCKET_IFNAME=lo", "ok")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such")
    assert found()["interfaces between hosts"][1] == "this machine has no interface no-such"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    address = SimpleNamespace(family=socket.AF_INET, address="10.0.0.7")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"ib0": [address]})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"ib0": SimpleNamespace(isup=True)})
    assert found()["interfaces between hosts"][1].startswith("for several hosts set GLOO_SOCKET_IFNAME=ib0 on each")


@pytest.mark.parametrize(
    ("rows", "value", "verdict"),
    [
        ("GPU0\t X \tNV18\t0-15\t0\nGPU1\tNV18\t X \t0-15\t0", "NV18 between 1 pair", "ok"),
        (
            "GPU0\t X \tNV4\tSYS\tSYS\t0-15\t0\nGPU1\tNV4\t X \tSYS\tSYS\t0-15\t0\n"
            "GPU2\tSYS\tSYS\t X \tNV4\t16-31\t1\nGPU3\tSYS\tSYS\tNV4\t X \t16-31\t1\nNIC0\tPIX\tPIX\tSYS\tSYS",
            "SYS between 4 pairs, NV4 between 2 pairs",
            "over PCIe: a fraction of NVLink's bandwidth",
        ),
        ("", "unknown", "nvidia-smi topo -m says nothing of them"),
    ],
)
def test_doctor_names_the_links_between_gpus(rows, value, verdict):
    assert _links(f"\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n{rows}\n\nLegend:\n  X = Self\n")[1:] == (value, verdict)
