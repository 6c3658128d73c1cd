"""Traces for Perfetto: valid by the format's rules, and true to the tables."""

import gzip
import json
from collections import Counter

import pandas as pd
import pytest

from shardlab.export import perfetto_trace, write_perfetto
from shardlab.records.store import Records
from shardlab.records.tables import TABLES
from tests.export.records import hand_made
from tests.export.trace_format import check


def test_a_hand_made_step():
    events = check(perfetto_trace(hand_made()))
    names = {event["args"]["name"] for event in events["M"] if "name" in event["args"]}
    assert names == {"rank 0 (a)", "rank 1 (a)", "steps", "model", "units", "host", "data axis"}
    slices = {(event["pid"], event["cat"], event["name"]): event for event in events["X"]}
    bucket = slices[0, "all_reduce", "bucket 0"]
    assert (bucket["ts"], bucket["dur"]) == (40, 50)
    assert (bucket["args"]["bytes"], bucket["args"]["transport"]) == (1000, "gloo")
    assert bucket["args"]["bus_gb_per_s"] == pytest.approx(1000 / 50e3)
    half = slices[1, "backward", "half 1 backward"]
    assert (half["ts"], half["dur"]) == (0, 60)
    assert slices[0, "step", "step 0"]["args"]["loss"] == 1.5
    assert (slices[0, "wait", "wait: bucket 0"]["ts"], slices[0, "wait", "wait: bucket 0"]["dur"]) == (80, 10)


def test_counters_are_the_live_bytes():
    events = check(perfetto_trace(hand_made()))
    seen = [(one["ts"], one["args"]) for one in events["C"] if one["pid"] == 0 and one["name"] == "live bytes"]
    assert seen == [  # a role that is never held is left out
        (10, {"parameter": 40, "activation": 20}),
        (50, {"parameter": 40, "activation": 50}),
        (130, {"parameter": 40, "activation": 0}),
    ]
    assert [event["args"] for event in events["C"] if event["name"] == "resident bytes"] == [{"resident": 5000}] * 2


def test_arrows_from_issue_from_end_and_from_the_last_rank():
    events = check(perfetto_trace(hand_made()))
    arrows = Counter(event["name"] for event in events["s"])
    assert arrows == {"issued": 4, "waited for": 3, "the last has come": 2}
    last = [event for event in events["s"] if event["name"] == "the last has come"]
    assert {(event["pid"], event["ts"]) for event in last} == {(1, 60), (1, 100)}
    other = [event for event in events["f"] if event["name"] == "the last has come"]
    assert {event["pid"] for event in other} == {0}


@pytest.mark.parametrize("strategy", ["bucketed", "fsdp"])
def test_a_real_run_is_valid_and_whole(comparison, strategy):
    records = comparison.records
    events = check(perfetto_trace(records, strategy))
    moved = records.collectives[records.collectives["run"] == strategy]
    assert sum(event["cat"] in set(moved["op"]) for event in events["X"]) == len(moved)
    assert {event["pid"] for event in events["X"]} == {0, 1, 2, 3}
    axes = {event["args"]["name"] for event in events["M"] if "axis" in str(event["args"].get("name"))}
    assert axes == ({"data axis"} if strategy == "bucketed" else {"shard axis", "replica axis"})
    assert sum(event["name"] == "issued" for event in events["s"]) == len(moved)
    # of each group, the last rank points at the others: 3 of 4, or 1 of 2 on each axis
    meeting = moved[moved["op"] != "broadcast"]
    expected = sum(3 / 4 if size == 4 else 1 / 2 for size in meeting["group_size"])
    assert sum(event["name"] == "the last has come" for event in events["s"]) == expected
    lengths = moved["end_us"] - moved["start_us"]
    drawn = sum(event["dur"] for event in events["X"] if event["cat"] in set(moved["op"]))
    assert drawn == pytest.approx(lengths.sum(), rel=1e-6)
    assert any(event["name"] == "live bytes" for event in events["C"])


def test_files_are_written_plain_or_compressed(tmp_path):
    names = ("trace.json", "made/here/trace.json.gz")
    plain, packed = (write_perfetto(hand_made(), tmp_path / name) for name in names)
    assert json.loads(plain.read_text()) == json.loads(gzip.decompress(packed.read_bytes()))
    with pytest.raises(ValueError, match=r"output: .* cannot be written"):
        write_perfetto(hand_made(), plain / "trace.json")


def test_what_cannot_be_drawn_is_refused():
    records = hand_made()
    tables = {name: getattr(records, name) for name in TABLES}
    both = {name: pd.concat([table, table.assign(run="b")]) for name, table in tables.items()}
    late = Records(**tables | {"collectives": records.collectives.assign(end_us=0.0)}, manifests={})
    empty = Records(**{name: table.iloc[:0] for name, table in tables.items()}, manifests={})
    for of, run, words in (
        (empty, None, "no spans and no collectives"),
        (records, "b", "run: 'b' is not one of a"),
        (Records(**both, manifests={}), None, "holds 2 runs, name one of a, b"),
        (late, None, "the clock ran backwards"),
    ):
        with pytest.raises(ValueError, match=words):
            perfetto_trace(of, run)
    alone = {name: table[table["rank"] == 0] for name, table in tables.items()}  # without arrows to others
    events = check(perfetto_trace(Records(**alone, manifests={})))
    assert {event["name"] for event in events["s"]} == {"issued", "waited for"}
