"""A calibration is measured part by part; what is measured is kept, and not measured again."""

import json
import platform
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from shardlab.bench import calibrate
from shardlab.bench.calibrate import Calibration, KeptParts, Part
from shardlab.bench.operation_times import QUICK
from shardlab.cli import app
from shardlab.forecast.machine import Line, Machine
from shardlab.installed import num_cores

LINE = Line([100.0, 1_000.0], [1e-6, 1e-5])
VALUES = {
    "floors": dict.fromkeys(("forward", "backward", "optimizer"), 1e-6), "meeting": 1e-4, "contention": (0.2, 0.5),
    "host": 1e-5, "pace": 1.25,
}  # fmt: skip


@pytest.fixture
def measured(monkeypatch):
    """The parts that are measured, in their order, without ranks."""
    found = []

    def measure(self, pool, part, effort):
        if len(found) == measure.stops_after:
            raise KeyboardInterrupt
        found.append(part)
        return VALUES.get(part.field, LINE)

    measure.stops_after = -1
    monkeypatch.setattr(Calibration, "_measured", measure)
    monkeypatch.setattr(calibrate, "RankPool", lambda *_, **__: nullcontext())
    monkeypatch.setattr(calibrate, "probe_seconds", lambda: 1e-3)
    return SimpleNamespace(parts=found, measure=measure)


def test_a_quick_one_measures_two_engines_and_takes_the_others_to_be_like_them(tmp_path, measured):
    quick, full = (Calibration([2], is_quick=is_quick, path=tmp_path / "parts") for is_quick in (True, False))
    assert quick.measure()
    assert len(quick.parts) == len(full.parts) - 8
    costs = quick.machine().costs(2)
    assert costs.host.keys() == costs.pace.keys() == {"ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp"}


@pytest.mark.parametrize(
    ("probes", "pace", "said"),
    [
        ((1.0, 1.0), 1.0, ""), ((1.0, 1.0), 1.1, ""), ((1.0, 1.2), 1.3, ""), ((), 9.0, ""),
        ((1.0, 1.0), 2.0, "when little work took 0.50 times as long as now"),
        ((1.0, 1.2), 0.5, "when little work took 2.00 times as long as now"),
        ((1.0, 2.0), 1.5, "while its pace changed by a factor of 2.0"),
    ],
)  # fmt: skip
def test_a_machine_whose_pace_has_changed_differs(monkeypatch, probes, pace, said):
    monkeypatch.setattr(calibrate, "probe_seconds", lambda: pace)
    assert calibrate.differs_here(Machine(platform.node(), calibrate.VERSIONS, num_cores(), {}, probes=probes)) == said


def test_a_calibration_that_is_resumed_at_another_pace_says_so(tmp_path, measured, monkeypatch):
    path, paces = tmp_path / "parts", iter((1.0, 1.1, 2.0, 1.2))
    monkeypatch.setattr(calibrate, "probe_seconds", lambda: next(paces))
    measured.measure.stops_after = 40
    with pytest.raises(KeyboardInterrupt):
        Calibration([2, 3], path=path).measure()
    assert Calibration([2, 3], path=path).kept.probes == [1.0]
    measured.measure.stops_after = -1
    again = Calibration([2, 3], path=path)
    again.measure()
    assert again.machine().probes == (1.0, 2.0)
    monkeypatch.setattr(calibrate, "probe_seconds", lambda: 1.5)
    assert calibrate.differs_here(again.machine()) == "while its pace changed by a factor of 2.0"


def test_an_interrupted_calibration_goes_on_where_it_was(tmp_path, measured):
    path = tmp_path / "machine.json.part"
    measured.measure.stops_after = 30
    with pytest.raises(KeyboardInterrupt):
        Calibration([2, 3], path=path).measure()
    measured.measure.stops_after = -1
    again = Calibration([2, 3], path=path)
    assert len(again.missing) == len(again.parts) - 30
    told = []
    assert again.measure(told.append)
    assert len(told) == len(again.parts) - 30
    assert measured.parts == again.parts  # each once, in its order
    machine = again.machine()
    machine.write(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine
    costs = machine.costs(3)
    assert (costs.slows_compute, costs.slowed_by_compute, costs.meeting) == (0.2, 0.5, 1e-4)
    assert costs.pace["fsdp"] == 1.25
    assert costs.host.keys() == costs.pace.keys() == {"ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp"}
    assert costs.operations["gelu"] == costs.messages["all_gather"] == costs.products["attention"] == LINE
    assert machine.costs(1, single=True).floors == VALUES["floors"]


def test_no_part_begins_after_the_limit(tmp_path, measured, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(calibrate, "perf_counter", lambda: next(now))
    begun = Calibration([2], path=tmp_path / "parts")
    assert not begun.measure(limit_s=5)
    assert len(measured.parts) == 5


def test_parts_of_another_machine_or_a_damaged_file_are_not_taken(tmp_path, measured):
    path = tmp_path / "parts"
    Calibration([2], path=path).measure()
    assert not Calibration([2], path=path).missing
    assert Calibration([2], is_quick=True, path=path).missing
    found = json.loads(path.read_text())
    every = Calibration([2], path=path).parts
    for text in (json.dumps(found | {"head": found["head"] | {"cores": 1000}}), "{", "[]", "{}"):
        path.write_text(text)
        assert Calibration([2], path=path).missing == every
    assert measured.parts == every


def test_the_command_keeps_says_and_resumes(tmp_path, measured, monkeypatch):
    monkeypatch.chdir(tmp_path)
    measured.measure.stops_after = 7
    done = CliRunner().invoke(app, ["calibrate", "--ranks", "2,2", "--quick"])
    said = "Stopped: 7 of 45 parts are measured, and kept in machine.json.part; the same command goes on\n"
    assert (done.exit_code, done.stderr.lstrip()) == (130, said)
    done = CliRunner().invoke(app, ["calibrate", "--ranks", "2,2", "--quick", "--limit", "1e-9"])
    assert (done.exit_code, done.stderr.lstrip()) == (1, said)
    assert not (tmp_path / "machine.json").exists()
    measured.measure.stops_after = -1
    done = CliRunner().invoke(app, ["calibrate", "--ranks", "2,2", "--quick"])
    assert done.exit_code == 0, done.output
    assert "7 of 45 parts were measured before; remove machine.json.part to measure them again" in done.output
    assert Machine.load("machine.json").is_quick
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]


@pytest.mark.parametrize(
    "part",
    [("2", "floors", ""), ("2", "operations", "add"), ("2", "messages", "all_gather"), ("2", "contention", ""),
     ("single", "operations", "add")],
)  # fmt: skip
def test_a_part_is_measured_on_ranks(tmp_path, pools, part):
    found = KeptParts(tmp_path / "parts", {})
    found.keep(Part(*part), Calibration([2], path=found.path)._measured(pools(2), Part(*part), QUICK))
    costs = found.costs(part[0])
    assert costs.floors or costs.operations or costs.messages or costs.slowed_by_compute >= 0
    for line in (*costs.operations.values(), *costs.messages.values()):
        assert all(seconds > 0 for seconds in line.seconds)
        assert list(line.sizes) == sorted(line.sizes)
