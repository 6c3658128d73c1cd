"""Holistic Trace Analysis finds the same overlap in a run as we do, and so does its definition by hand."""

import json
from statistics import median

import pytest

from shardlab.analysis.overlap import hidden_share
from shardlab.export import export_hta, import_profiler_trace
from shardlab.records.store import Records
from shardlab.records.tables import TABLES
from tests.export.records import hand_made


def ours(records, run):
    """Overlap over all timed steps together, by rank, in percent."""
    shares = hidden_share(records.collectives, records.spans, records.steps)
    return (100 * shares[shares["run"] == run].set_index("rank")["overlap"]).to_dict()


def hidden(comparison, strategy):
    """The column "hidden" of the summary, in percent."""
    return 100 * comparison.summary.set_index("strategy").at[strategy, "overlap"]


def by_definition(path):
    """The overlap of a trace of kernels, microsecond by microsecond: slow, and independent of all our code."""
    busy = {True: set(), False: set()}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["cat"] == "kernel":
            busy[event["name"].startswith("nccl")].update(range(event["ts"], event["ts"] + event["dur"]))
    return 100 * len(busy[True] & busy[False]) / len(busy[True])


def test_by_hand(tmp_path):
    paths = export_hta(hand_made(), tmp_path)
    assert [path.name for path in paths] == ["rank0.json", "rank1.json"]
    # rank 0: buckets [40, 90) and [90, 110) under backward [0, 80): 40 of 70 us; rank 1: [60, 90), [100, 110): 30 of 40
    assert by_definition(paths[0]) == pytest.approx(100 * 40 / 70)
    assert by_definition(paths[1]) == pytest.approx(75)
    assert ours(hand_made(), "a") == pytest.approx({0: 100 * 40 / 70, 1: 75})


@pytest.mark.parametrize("strategy", ["bucketed", "fsdp"])
def test_of_a_real_run(comparison, tmp_path, strategy):
    paths = export_hta(comparison.records, tmp_path, strategy)
    expected = ours(comparison.records, strategy)
    found = [by_definition(path) for path in paths]
    assert found == pytest.approx([expected[rank] for rank in range(4)], abs=0.1)  # whole microseconds
    assert median(found) == pytest.approx(hidden(comparison, strategy), abs=0.1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own use of pandas
@pytest.mark.parametrize("strategy", ["bucketed", "fsdp"])
def test_holistic_trace_analysis_says_the_same(comparison, tmp_path, strategy):
    hta = pytest.importorskip("hta.trace_analysis", reason="Holistic Trace Analysis is not installed")
    export_hta(comparison.records, tmp_path, strategy)
    table = hta.TraceAnalysis(trace_dir=str(tmp_path)).get_comm_comp_overlap(visualize=False)
    expected = ours(comparison.records, strategy)
    for row in table.itertuples():
        assert row.comp_comm_overlap_pctg == pytest.approx(expected[row.rank], abs=0.1)
    assert table["comp_comm_overlap_pctg"].median() == pytest.approx(hidden(comparison, strategy), abs=0.1)


def test_the_files_have_what_hta_looks_for(comparison, tmp_path):
    (path, *_) = export_hta(comparison.records, tmp_path, "bucketed")
    assert '"rank": 0' in path.read_text()  # it searches the text for this, with the space
    trace = json.loads(path.read_text())
    assert trace["distributedInfo"] == {"backend": "nccl", "rank": 0, "world_size": 4}
    events = trace["traceEvents"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    assert [event["name"] for event in steps] == ["ProfilerStep#1", "ProfilerStep#3", "ProfilerStep#4"]
    assert steps[-1]["dur"] == 0  # the last is what HTA leaves out
    kernels = [event for event in events if event["cat"] == "kernel"]
    launches = {event["args"]["correlation"]: event for event in events if event["cat"] == "cuda_runtime"}
    assert len(launches) == len(kernels)
    for kernel in kernels:
        assert kernel["args"]["stream"] == kernel["tid"]
        assert launches[kernel["args"]["correlation"]]["ts"] <= kernel["ts"] + 1
        assert all(isinstance(kernel[key], int) for key in ("ts", "dur"))
        assert kernel["dur"] >= 0


@pytest.mark.parametrize("strategy", ["bucketed", "fsdp"])
def test_what_is_exported_is_imported_again(comparison, tmp_path, strategy):
    export_hta(comparison.records, tmp_path, strategy)
    back = import_profiler_trace(tmp_path)
    moved = comparison.records.collectives
    counts = (moved["run"] == strategy) & moved["step"].isin([1, 3]) & (moved["phase"] != "metrics")
    moved = moved[counts].reset_index(drop=True)
    names = ["rank", "step", "axis", "op", "tag", "dtype", "numel", "bytes", "wire_bytes", "group_size"]
    assert back.collectives[names].to_dict("list") == moved[names].to_dict("list")
    assert set(back.steps["step"]) == {1, 3}
    again, expected = ours(back, "profiler"), ours(comparison.records, strategy)
    assert again == pytest.approx(expected, abs=0.1)


def test_where_there_is_nothing_it_refuses(tmp_path):
    records = hand_made()
    setup = Records(**{name: getattr(records, name).assign(step=-1) for name in TABLES}, manifests={})
    with pytest.raises(ValueError, match="a has no finished step"):
        export_hta(setup, tmp_path / "new")
