"""The CUDA allocator's figures, with its counters made by hand: what tensors do not account for has names."""

import json
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
import torch

from shardlab.analysis import allocator_items
from shardlab.records.tables import MEMORY
from shardlab.trace.memory_by_role import MemoryLedger, bytes_by_role, on_device
from shardlab.trace.process_memory import Allocator, memory_rows
from shardlab.vocabulary import Phase, Role

CUDA = torch.device("cuda", 0)
HELD = {**dict.fromkeys(Role, 0), Role.PARAMETER: 6000, Role.GRADIENT: 2500, Role.OFFLOADED: 7777}


def rows(allocator, rank=0, run="a", where="rest"):
    made = memory_rows(where, HELD, 0, Phase.STEP, None, allocator)
    keys = {"run": run, "source": "measured", "rank": rank, "step": 7, "time_us": 0.0}
    return [{name: value for name, value in (row | keys).items() if name != "time_ns"} for row in made]


def test_the_items_add_up_to_what_is_reserved():
    smaller, larger = Allocator(8500, 0, 0, 8500), Allocator(9000, 400, 1000, 12_000)
    table = MEMORY.frame([*rows(smaller), *rows(larger, rank=1)])
    for rank, allocator in enumerate((smaller, larger)):
        own = table[table["rank"] == rank]
        assert set(own["role"]) == set(Role)
        assert own.loc[own["role"] != Role.OFFLOADED, "bytes"].sum() == allocator.allocated_bytes
    items = allocator_items(table)
    assert items.set_index("item")["bytes"].to_dict() == {
        "parameter": 6000, "gradient": 2500, "library workspaces": 100, "rounding": 400, "fragmentation": 1000,
        "cached": 2000,
    }  # fmt: skip
    assert set(items["rank"]) == {1}
    assert items["bytes"].sum() == 12_000


def blocks_of(segments, *states, key="size"):
    return sum(block[key] for segment in segments for block in segment["blocks"] if block["state"] in states)


@pytest.fixture
def from_file(monkeypatch):
    """The allocator's statistics in a file, as torch nests them; its blocks, from which each figure can be counted."""
    kept = json.loads((Path(__file__).parent / "cuda_memory.json").read_text())
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", lambda device=None: kept["memory_stats"])
    return kept


def test_every_column_of_the_allocator_is_what_its_blocks_add_up_to(from_file):
    segments = from_file["memory_snapshot"]
    used = ("active_allocated", "active_pending_free")
    now = Allocator.now(CUDA)
    assert now.allocated_bytes == blocks_of(segments, "active_allocated")
    # A freed block that a stream still reads is no longer allocated, but rounded up as before.
    assert now.rounding_bytes == blocks_of(segments, *used) - blocks_of(segments, *used, key="requested_size")
    in_use = [segment for segment in segments if len(segment["blocks"]) > 1]
    assert now.fragmented_bytes == blocks_of(in_use, "inactive")
    assert now.reserved_bytes == sum(segment["total_size"] for segment in segments)
    assert now.allocated_bytes < now.reserved_bytes - now.fragmented_bytes  # a wholly free segment is cached, not torn


def test_on_cpu_there_is_no_allocator():
    table = MEMORY.frame(rows(Allocator()))
    assert table.loc[table["role"] == Role.WORKSPACE, "bytes"].tolist() == [0]
    assert table[["allocated_bytes", "rounding_bytes", "fragmented_bytes", "reserved_bytes"]].isna().all(axis=None)
    assert allocator_items(table).empty
    assert list(pd.DataFrame([asdict(Allocator())])) == list(table.columns[9:13])


def test_of_tensors_on_another_device_those_count_that_are_offloaded():
    """Here the device of the step is 'meta', whose tensors no ledger lists, so the CPU is elsewhere."""
    offloaded, counter = torch.zeros(10), torch.zeros(3)
    live = on_device({Role.OFFLOADED: [offloaded], Role.OTHER: [counter], Role.PARAMETER: [counter]}, "meta")
    held = bytes_by_role(live)
    assert {role: num_bytes for role, num_bytes in held.items() if num_bytes} == {Role.OFFLOADED: 40}
    ledger = MemoryLedger(live, "meta")
    with ledger:
        ledger.phase = Phase.BACKWARD
        batch, gradient = torch.ones(100), torch.ones(20)
        ledger.classify({Role.OFFLOADED: [offloaded, gradient]})
    assert batch.numel() == 100
    last = ledger.moments()[-1]
    assert {role: num_bytes for role, num_bytes in last.by_role.items() if num_bytes} == {Role.OFFLOADED: 120}
    assert last.num_bytes == 0
