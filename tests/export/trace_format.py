"""The rules of the trace-event format, checked on a whole trace; written from the format's description alone."""

import json
from collections import defaultdict

REQUIRED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid"},
    "C": {"name", "ph", "ts", "pid", "args"},
    "M": {"name", "ph", "pid", "args"},
    "s": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ph", "ts", "pid", "tid", "id", "bp"},
}
METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}
METADATA |= {"thread_sort_index": "sort_index"}


def check(trace):
    """The events of a valid trace by phase; AssertionError names what is wrong."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    by_phase = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in REQUIRED, event
        assert event.keys() >= REQUIRED[event["ph"]], event
        by_phase[event["ph"]].append(event)
    times = [event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times)
    assert all(event["dur"] >= 0 for event in by_phase["X"])
    for event in by_phase["M"]:
        assert METADATA[event["name"]] in event["args"], event
    for event in by_phase["C"]:
        assert event["args"]
        assert all(isinstance(value, int | float) for value in event["args"].values())
    threads = check_nesting(by_phase["X"])
    check_flows(by_phase, threads)
    named = {(event["pid"], event["tid"]) for event in by_phase["M"] if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in by_phase["X"]} <= named
    return by_phase


def check_nesting(slices):
    """Slices of one thread nest or are apart."""
    threads = defaultdict(list)
    for event in slices:
        threads[event["pid"], event["tid"]].append(event)
    for own in threads.values():
        around = []
        for event in own:
            end = event["ts"] + event["dur"]
            while around and around[-1] <= event["ts"] + 1e-6:
                around.pop()
            assert not around or end <= around[-1] + 1e-6, event
            around.append(end)
    return threads


def check_flows(by_phase, threads):
    """Each arrow has one begin and one end, not earlier, both within a slice of their thread."""
    starts = {event["id"]: event for event in by_phase["s"]}
    ends = {event["id"]: event for event in by_phase["f"]}
    assert len(starts) == len(by_phase["s"]) == len(ends) == len(by_phase["f"])
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["ts"] <= end["ts"], (start, end)
        for event in (start, end):
            own = threads[event["pid"], event["tid"]]
            assert any(one["ts"] <= event["ts"] <= one["ts"] + one["dur"] + 1e-6 for one in own), event
