"""Allocation stacks of the peak: which line made what is alive then."""

import pickle
import warnings

import pytest
import torch

from shardlab.trace.allocation_stacks import Allocations, allocation_stacks

KIB = 1024


def kept(numel):
    return torch.zeros(numel)


def passing(numel):
    return torch.ones(numel).sum()


def line_of(function):
    return f"{__file__}:{function.__code__.co_firstlineno + 1}"


def test_what_is_alive_at_the_peak_by_line():
    before = torch.zeros(1 << 20)
    with allocation_stacks() as made:
        held = [kept(256) for _ in range(3)]  # 1 KiB each
        passing(2048)  # 8 KiB, gone at the end, but there at the peak
        view = before.view(2, -1)[0].detach()  # nothing new
        held.append(kept(512))
    found = made.at_peak()
    found = found[found["bytes"] >= KIB]
    assert found["bytes"].tolist() == [8 * KIB, 3 * KIB]
    assert found["blocks"].tolist() == [1, 3]
    assert found["where"].tolist() == [line_of(passing), line_of(kept)]
    assert "aten.ones" in found["stack"].iloc[0]
    assert "test_what_is_alive_at_the_peak_by_line" in found["stack"].iloc[1]
    assert view.numel() == 1 << 19


def test_memory_viz_reads_the_file(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.cuda import _memory_viz

    with allocation_stacks() as made:
        held = kept(1 << 18)
        del held
    path = made.save(tmp_path / "peak.pickle")
    snapshot = pickle.loads(path.read_bytes())
    assert "MEM[1:1.0MiB]" in _memory_viz.trace(snapshot)
    assert "<body>" in _memory_viz.trace_plot(snapshot)
    assert [frame["name"] for entry in snapshot["device_traces"][0] for frame in entry["frames"]][1] == "kept"
    with pytest.raises(ValueError, match=r"path: .* cannot be written"):
        made.save(tmp_path / "no" / "peak.pickle")


def test_a_block_of_cuda_that_was_there_before_does_not_count():
    entries = [
        {"action": "free_completed", "addr": 7, "size": 100, "frames": []},
        {"action": "alloc", "addr": 7, "size": 60, "frames": [{"filename": "a.py", "line": 3, "name": "f"}]},
        {"action": "segment_alloc", "addr": 0, "size": 2000, "frames": []},
        {"action": "free_requested", "addr": 7, "size": 60, "frames": []},
        {"action": "free_completed", "addr": 7, "size": 60, "frames": []},
    ]
    (row,) = Allocations(entries).at_peak().to_dict("records")
    assert row == {"bytes": 60, "blocks": 1, "where": "a.py:3", "stack": "a.py:3 f"}
