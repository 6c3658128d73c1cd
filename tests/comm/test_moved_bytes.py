"""Bytes that torch's gloo groups move, against what the kernel says that this process sent on its TCP sockets."""

import os
import socket
import struct
from math import isnan
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.partition import ring_cost
from shardlab.recording.script_collectives import TorchCalls
from shardlab.trace.observed import moved_bytes, wire_bytes
from shardlab.vocabulary import Collective
from tests.comm.test_communicator import Log

NUMEL = 144_000  # divisible by 2, 3 and 4, in chunks that are large against gloo's headers
BYTES_SENT = 200  # offset of tcpi_bytes_sent in Linux' struct tcp_info, before tcpi_bytes_retrans; both 64 bits


def sent_by_sockets():
    """Bytes that the TCP sockets of this process have sent, without what was sent twice."""
    total = 0
    links = list(Path("/proc/self/fd").iterdir())
    for path in (path for path in links if path.is_symlink() and str(path.readlink()).startswith("socket:")):
        with socket.socket(fileno=os.dup(int(path.name))) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent, again = struct.unpack_from("QQ", info, BYTES_SENT)
                total += sent - again
    return total


def every_verb(num_ranks, rank):
    """One call of each; the last rank is the root where there is one."""
    whole, part, root = torch.ones(NUMEL), torch.ones(NUMEL // num_ranks), num_ranks - 1
    chunks, is_root = list(torch.ones(NUMEL).chunk(num_ranks)), rank == num_ranks - 1
    group = dist.distributed_c10d._get_default_group()
    uneven = [NUMEL // 4, *[0] * (num_ranks - 2), NUMEL - NUMEL // 4]  # to each rank: rank 0 keeps a quarter
    received = [uneven[rank]] * num_ranks
    return (
        lambda: dist.all_reduce(whole),
        lambda: dist.broadcast(whole, root),
        lambda: dist.reduce(whole, root),
        lambda: dist.all_gather(chunks, part),
        lambda: dist.all_gather_into_tensor(whole, part),
        lambda: dist.reduce_scatter(part, chunks),
        lambda: dist.reduce_scatter_tensor(part, whole),
        lambda: group.reduce_scatter_tensor_coalesced([part], [whole]).wait(),
        lambda: group.allgather_into_tensor_coalesced([whole], [part]).wait(),
        lambda: dist.all_to_all_single(torch.empty(NUMEL), whole),
        lambda: dist.all_to_all_single(torch.empty(sum(received)), whole, received, uneven),
        lambda: dist.gather(part, chunks if is_root else None, root),
        lambda: dist.scatter(part, chunks if is_root else None, root),
    )


def said_and_seen(rank, num_ranks):
    """(collective, bytes in its event, bytes the sockets sent) of each verb, in parts of the whole buffer."""
    found, heard = [], Log()
    with TorchCalls(heard, lambda *_: ""), torch.no_grad():
        for call in every_verb(num_ranks, rank):
            dist.barrier()
            before = sent_by_sockets()
            call()
            dist.barrier()  # by then all have received, so all has been sent
            event = heard.events[-2]
            found.append((str(event.op), moved_bytes(event) / 4 / NUMEL, (sent_by_sockets() - before) / 4 / NUMEL))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.filterwarnings("ignore")  # torch 2.13 warns at names that 2.11 has
def test_each_verb_moves_what_its_event_says(pools, num_ranks):
    for rank, found in enumerate(pools(num_ranks).run(said_and_seen, num_ranks)):
        assert len(found) == 13
        for op, said, seen in found:
            assert said == pytest.approx(seen, abs=0.02), (op, rank)  # headers are 1 %


def sent_by(verb, *args, **kwargs):
    """Bytes that this process sends in a collective, in parts of the whole buffer."""
    dist.barrier()
    before = sent_by_sockets()
    verb(*args, **kwargs).wait()
    dist.barrier()
    return (sent_by_sockets() - before) / 8 / NUMEL


def composed_and_torchs(rank, num_ranks, root):
    """(result, bytes sent) of our broadcast and all-to-all over gloo, and of torch's."""
    whole = torch.arange(NUMEL) + rank
    copies, exchanged = (whole.clone(), whole.clone()), whole.new_empty(2, NUMEL)
    with Mesh({"data": num_ranks}, device="cpu", transport="gloo") as mesh:
        sent = (sent_by(mesh.data.broadcast, copies[0], root), sent_by(mesh.data.all_to_all, exchanged[0], whole))
    of_torch = (
        sent_by(dist.broadcast, copies[1], root, async_op=True),
        sent_by(dist.all_to_all_single, exchanged[1], whole, async_op=True),
    )
    return sent, of_torch, torch.equal(*copies) and torch.equal(*exchanged)


@pytest.mark.parametrize(("num_ranks", "root"), [(2, 1), (3, 0), (4, 1)])
def test_a_composed_broadcast_and_exchange_send_what_torchs_do(pools, num_ranks, root):
    for sent, of_torch, are_equal in pools(num_ranks).run(composed_and_torchs, num_ranks, root):
        assert are_equal
        assert sent == pytest.approx(of_torch, abs=0.02)


def step_of(rank, strategy, num_ranks):
    """(needed, moved, seen by the sockets) of one step, in parts of the parameters."""
    heard = Log()
    with Mesh({"data": num_ranks}, device="cpu", transport="gloo") as mesh:
        model = torch.nn.Linear(480, 300, bias=False)
        with build_engine(strategy, model, lambda tensors: torch.optim.SGD(tensors, lr=0.1), mesh) as engine:
            for _ in range(3):
                dist.barrier()
                heard.events.clear()
                before = sent_by_sockets()
                with mesh.observed_by(heard):
                    engine.backward(engine(torch.ones(1, 480)).sum())
                    engine.step()
                    engine.zero_grad()
                dist.barrier()
                seen = sent_by_sockets() - before
    sums = sum(wire_bytes(event) for event in heard.events), sum(moved_bytes(event) for event in heard.events), seen
    return [total / 4 / model.out_features / model.in_features for total in sums]


@pytest.mark.parametrize("strategy", ["torch_ddp", "torch_zero1", "torch_fsdp2", "bucketed", "zero2", "fsdp"])
def test_a_step_moves_what_its_record_says(pools, strategy):
    for needed, moved, seen in pools(3).run(step_of, strategy, 3):
        assert moved == pytest.approx(seen, abs=0.02)
        if not strategy.startswith("torch"):
            assert needed == moved
        elif strategy == "torch_fsdp2":
            assert moved == pytest.approx(needed * 4 / 3)  # two gathers and a reduce-scatter that is an all-reduce


def test_what_is_not_known_is_no_number():
    assert isnan(ring_cost.moved_bytes("nccl", Collective.ALL_REDUCE, 100, 2))
    for op in Collective:  # without a root: the average over all roots
        of_roots = [ring_cost.moved_bytes("gloo", op, 120, 4, 1, root) for root in range(4)]
        assert ring_cost.moved_bytes("gloo", op, 120, 4, 1) == pytest.approx(sum(of_roots) / 4), op
