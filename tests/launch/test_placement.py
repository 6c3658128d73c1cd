"""Which device and backend ranks get on machines with any number of GPUs."""

import socket
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from shardlab.launch import place
from shardlab.launch.doctor import doctor


@pytest.fixture
def machine(monkeypatch):
    def with_gpus(num_gpus, nccl=True):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)

    return with_gpus


def test_no_gpu(machine):
    machine(0)
    placement = place(3)
    assert (placement.device_type, placement.backend, placement.devices) == ("cpu", "gloo", ("cpu",) * 3)
    assert (placement.staged, placement.banner) == (False, None)


def test_a_gpu_for_every_rank(machine):
    machine(4)
    placement = place(2)
    assert (placement.device_type, placement.backend, placement.devices) == ("cuda", "nccl", ("cuda:0", "cuda:1"))
    assert (placement.staged, placement.banner) == (False, None)


def test_ranks_share_gpus(machine):
    machine(2)
    placement = place(3)
    assert (placement.device_type, placement.backend) == ("cuda", "gloo")
    assert placement.devices == ("cuda:0", "cuda:1", "cuda:0")
    assert placement.staged
    assert "3 ranks share 2 GPUs (NCCL refuses two ranks on one GPU)" in placement.banner


def test_torch_without_nccl(machine):
    machine(2, nccl=False)
    placement = place(2)
    assert (placement.backend, placement.staged) == ("gloo", True)
    assert "without NCCL" in placement.banner


def test_cpu_is_cpu_on_any_machine(machine):
    machine(8)
    assert place(2, "cpu").devices == ("cpu", "cpu")


def test_cuda_without_gpu(machine):
    machine(0)
    with pytest.raises(ValueError, match=r"device: 'cuda' is given.*allowed values here are auto, cpu"):
        place(2, "cuda")


@pytest.mark.parametrize("world_size", [0, -2, 1.5, True, "2"])
def test_bad_world_size(world_size):
    with pytest.raises(ValueError, match="world_size"):
        place(world_size)


def test_unknown_device():
    with pytest.raises(ValueError, match=r"device: 'tpu'.*auto, cpu, cuda"):
        place(2, "tpu")


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
