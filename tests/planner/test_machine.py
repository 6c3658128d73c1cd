"""What a calibration says, and how it is kept."""

import json
from dataclasses import replace

import pytest

from shardlab.forecast.machine import Line, Machine, RankCosts

LINE = Line([100.0, 10_000.0], [1e-6, 1e-4])
COSTS = RankCosts(
    floors={"forward": 1e-5, "backward": 2e-5, "optimizer": 1e-6}, products={"forward": LINE},
    operations={"add": LINE, "gelu": Line([100.0], [5e-6])}, messages={"all_reduce": LINE}, meeting=1e-4, host={},
    slows_compute=0.2, slowed_by_compute=0.5,
)  # fmt: skip


def test_between_two_sizes_the_logarithm_is_a_line_and_beyond_the_last_seconds_grow_with_the_size():
    assert LINE.at(1_000) == pytest.approx(1e-5)
    assert LINE.at(50) == 1e-6
    assert LINE.at(40_000) == pytest.approx(4e-4)


def test_small_products_cost_their_share_and_operations_without_a_name_what_an_addition_does():
    assert COSTS.product("forward", 10.0) == pytest.approx(1e-7)
    assert COSTS.operation("gelu", 10.0) == 5e-6
    assert COSTS.operation("atan2", 1_000) == COSTS.operation("add", 1_000) == pytest.approx(1e-5)
    assert COSTS.message("broadcast", 100) == 1e-6


def test_a_forecast_says_how_far_others_missed_here():
    machine = Machine("here", {}, 2, {"2": COSTS})
    assert machine.misses("fsdp", 2, 0.1).endswith("was not measured: shardlab validate")
    validated = (("fsdp", 2, 0.011, 0.010), ("fsdp", 2, 0.08, 0.10), ("ddp", 2, 0.095, 0.10))
    known = replace(machine, validated=validated)
    assert known.misses("fsdp", 2, 0.1) == (
        "3 steps here were missed by 10% in the median, 20% at most; the nearest step that was run, fsdp on 2 ranks in "
        "100 ms, by -20%"
    )
    assert known.misses("zero1", 2, 0.1) == ("how far this misses is not known; no step of zero1 on 2 ranks was run")
    assert known.misses("fsdp", 2, 3.0) == (
        "how far this misses is not known; the nearest step that was run, fsdp on 2 ranks in 100 ms, is not like it"
    )


def test_a_calibration_is_a_file_that_reads_as_text(tmp_path):
    machine, path = (
        Machine("here", {"torch": "2.13"}, 2, {"2": COSTS}, (("ddp", 2, 0.1, 0.2),), probes=(0.1, 0.2)),
        tmp_path / "machine.json",
    )
    machine.write(path)
    assert json.loads(path.read_text())["name"] == "here"
    assert Machine.load(path) == machine
    with pytest.raises(ValueError, match=r"^ranks: 3 is given; here was calibrated for 2$"):
        machine.costs(3)


@pytest.mark.parametrize("text", ["", "[]", "5", "{}", '{"format": 0}', '{"format": 2, "ranks": {"2": {}}}'])
def test_a_file_that_is_none_is_refused(tmp_path, text):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^calibration: .*machine.json cannot be read .*shardlab calibrate"):
        Machine.load(path)
    with pytest.raises(ValueError, match=r"^calibration: .*missing.json cannot be read"):
        Machine.load(tmp_path / "missing.json")
    path.write_bytes(b"\xff\x00 secret")
    with pytest.raises(ValueError, match=r"cannot be read \(it is no text\); make one by"):
        Machine.load(path)
