"""What nobody registered is seen, and the parts of a process add up to its resident set."""

import ctypes
import mmap

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab.analysis import at_rest, process_items
from shardlab.records.store import load_run, write_manifest
from shardlab.records.tables import ProcessPart
from shardlab.trace.memory_by_role import MemoryLedger, bytes_by_role, with_unattributed
from shardlab.trace.process_memory import ProcessMemory
from shardlab.vocabulary import Phase, Role
from tests.trace.training import Setting, train

MIB = 2**20
SIZE = 48 * MIB
CLOSE = 2 * MIB  # what a process that does something else beside may gain or lose


def test_a_leak_is_seen_at_rest(tmp_path):
    write_manifest(tmp_path, {"run": "single"})
    leaked = []

    def leak(engine, train_step):
        leaked.append(torch.ones(MIB // 4))

    train(0, Setting("single", steps=2, directory=tmp_path, at_rest=leak))
    rows = load_run(tmp_path).memory.query("where == 'rest' and role == 'unattributed'").set_index("step")["bytes"]
    assert rows[1] - rows[0] == MIB


def test_a_storage_that_somebody_named_is_not_unattributed():
    buffer, other = torch.zeros(100), torch.zeros(7)
    held = [bytes_by_role(with_unattributed(live))
            for live in ({Role.PARAMETER: [buffer]}, {Role.PARAMETER: [buffer[:3]], Role.OTHER: [other]})]  # fmt: skip
    assert [by_role[Role.PARAMETER] for by_role in held] == [400, 400]
    assert held[0][Role.UNATTRIBUTED] - held[1][Role.UNATTRIBUTED] == other.nbytes
    named = {Role.PARAMETER: [buffer], Role.UNATTRIBUTED: []}
    assert with_unattributed(named) is named  # who recorded a script has looked already


def parts_now():
    parts = ProcessMemory().parts(bytes_by_role(with_unattributed({})))
    if not parts:
        pytest.skip("not Linux, or not GNU's malloc")
    return parts


def grown(before, after):
    """The parts that have grown by about SIZE."""
    return [part for part in ProcessPart if abs(after[part] - before[part] - SIZE) < CLOSE]


def test_what_a_library_holds_in_the_heap_and_what_ranks_share_have_names_and_tensors_none():
    before = parts_now()
    malloc = ctypes.CDLL(None).malloc
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    held = malloc(SIZE)
    ctypes.memset(held, 1, SIZE)
    after = parts_now()
    ctypes.CDLL(None).free(ctypes.c_void_p(held))
    assert grown(before, after) == [ProcessPart.HEAP]
    before = parts_now()
    with mmap.mmap(-1, SIZE) as segment:  # anonymous and shared
        segment.write(b"1" * SIZE)
        assert grown(before, parts_now()) == [ProcessPart.SHARED_SEGMENTS]
    before = parts_now()
    tensor = torch.ones(SIZE // 4)
    assert grown(before, parts_now()) == []
    assert tensor.nbytes == SIZE


def test_the_items_of_a_run_add_up_to_its_resident_set(pools, tmp_path):
    write_manifest(tmp_path, {"run": "bucketed"})
    pools(2).run(train, Setting("bucketed", steps=2, directory=tmp_path))
    memory = load_run(tmp_path).memory
    items = process_items(memory)
    assert {"parameter", "heap", "libraries", "shared_segments"} <= set(items["item"])
    assert items["bytes"].sum() == pytest.approx(items["resident_bytes"].iloc[0], rel=0.03)
    assert set(at_rest(memory)["role"]) <= set(Role)  # the process is no role
    assert process_items(memory[memory["where"] == "rest"]).empty


def held_in_backward(wraps):
    """The most bytes of activation and of all else while backward runs, over a block of wide activations."""
    block = nn.Sequential(nn.Linear(10, 1000), nn.Tanh(), nn.Linear(1000, 10))
    x = torch.ones(50, 10, requires_grad=True)
    with MemoryLedger({Role.PARAMETER: block.parameters()}) as ledger:
        ledger.phase = Phase.FORWARD
        y = checkpoint(block, x, use_reentrant=False) if wraps else block(x)
        ledger.phase = Phase.BACKWARD
        y.sum().backward()
        ledger.classify({Role.GRADIENT: [param.grad for param in block.parameters()]})
    moments = [moment for moment in ledger.moments() if moment.phase is Phase.BACKWARD]
    return [max(moment.by_role[role] for moment in moments) for role in (Role.ACTIVATION, Role.OTHER)]


def test_what_backward_recomputes_is_an_activation():
    kept, recomputed = held_in_backward(wraps=False), held_in_backward(wraps=True)
    wide = 4 * 50 * 1000
    assert kept[0] >= wide
    assert recomputed[0] >= wide  # made in backward, and kept for it
    assert max(kept[1], recomputed[1]) < 2.5 * wide  # gradients of activations are other, the activations are not
