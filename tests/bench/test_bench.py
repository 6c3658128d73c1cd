"""A tiny bench from end to end, its arithmetic on made-up times, what is refused, and causes put in on purpose."""

import json
from collections import Counter
from dataclasses import replace
from math import isfinite

import pytest
from typer.testing import CliRunner

from shardlab.bench.against_torch import PAIRS, BenchConfig, RankTimes, bench, row_of, sessions
from shardlab.bench.turns import Workload
from shardlab.bench.turns import turn_of as built
from shardlab.cli import app
from shardlab.course.why_matrix import INJECTED, why_matrix

TINY = Workload("tiny", "gpt-1m", rows=1, seq_len=4)
PEAKS = {"ours": 1, "theirs": 1}
KEYS = {
    "workload", "ranks", "ours", "theirs", "ratio_median", "ratio_q1", "ratio_q3", "peak_ratio", "ours_ms",
    "theirs_ms", "floor_ms", "ours_over_floor", "theirs_over_floor", "ours_peak_bytes", "theirs_peak_bytes", "rounds",
    "transport",
}  # fmt: skip


def test_a_tiny_bench_from_end_to_end():
    config = BenchConfig(ranks=2, rounds=2, workloads=(TINY,), device="cpu")
    done = []
    rows = list(bench(config, on_progress=done.append))
    assert [(row.ours, row.theirs) for row in rows] == [
        ("bucketed", "torch_ddp"), ("zero1", "torch_zero1"), ("fsdp", "torch_fsdp2"), ("tensor_parallel", "torch_tp"),
        ("pipeline", "torch_pipeline"), ("itself", "bucketed"),
    ]  # fmt: skip
    assert len(done) == config.num_rounds == 12
    for row in rows:
        assert (row.workload, row.ranks, row.rounds, row.transport) == ("tiny", 2, 2, "shared_memory")
        assert 0 < row.ratio_q1 <= row.ratio_median <= row.ratio_q3
        assert min(row.ours_ms, row.theirs_ms, row.floor_ms) > 0
        assert min(row.ours_over_floor, row.theirs_over_floor) > 0
        assert row.peak_ratio == row.ours_peak_bytes / row.theirs_peak_bytes
    whole = 4 * 1_028_480  # bytes of gpt-1m's parameters at 4 positions, about
    assert rows[0].ours_peak_bytes > 4 * whole  # parameters, gradients and state
    assert 2 * whole < rows[2].ours_peak_bytes < rows[0].ours_peak_bytes  # half of all, and what is gathered
    assert rows[-1].peak_ratio == 1  # the same engine twice


@pytest.mark.parametrize("measured", [2, 0])
def test_what_was_measured_before_an_interrupt_is_shown_and_written(tmp_path, monkeypatch, measured):
    row = row_of(TINY, PAIRS["fsdp"], [RankTimes({key: [1, 2] for key in ("ours", "theirs", "floor")}, PEAKS, "")])

    def interrupted(config, *, on_progress):
        for _ in range(measured):
            yield replace(row, workload=config.workloads[0].name)
        raise KeyboardInterrupt

    monkeypatch.setattr("shardlab.bench.against_torch.bench", interrupted)
    result = CliRunner().invoke(app, ["bench", "--quick", "--device", "cpu", "--json", str(tmp_path / "rows.json")])
    assert result.exit_code == 130
    if measured:
        assert "interrupted: 2 of 18 rows were measured, which follow" in result.output
        assert result.output.count("torch_fsdp2") == len(json.loads((tmp_path / "rows.json").read_text())) == 2


def test_ours_can_send_as_torch_does_and_one_rank_shows_what_an_engine_costs_besides_sending():
    config = BenchConfig(rounds=2, workloads=(TINY,), pairs=(PAIRS["bucketed"],), device="cpu", transport="gloo")
    assert [row.transport for row in bench(config)] == ["gloo"]
    config = replace(config, ranks=1, pairs=(PAIRS["fsdp"],), transport="shared_memory")
    (row,) = bench(config)
    assert (row.ranks, row.ours, row.theirs) == (1, "fsdp", "torch_fsdp2")


def test_a_round_is_as_slow_as_its_slowest_rank_and_ratios_are_within_rounds():
    ranks = [
        RankTimes({"ours": [1, 9, 3], "theirs": [2, 2, 6], "floor": [1, 1, 1]}, {"ours": 50, "theirs": 100}, "gloo"),
        RankTimes({"ours": [4, 1, 3], "theirs": [1, 3, 1], "floor": [1, 1, 2]}, {"ours": 70, "theirs": 90}, "gloo"),
    ]
    row = row_of(TINY, PAIRS["fsdp"], ranks)
    assert (row.ratio_q1, row.ratio_median, row.ratio_q3) == (1.25, 2, 2.5)  # of 4/2, 9/3, 3/6
    assert (row.ours_ms, row.theirs_ms, row.floor_ms) == (4e-6, 3e-6, 1e-6)
    assert (row.ours_over_floor, row.theirs_over_floor) == (4, 3)  # of 4/1, 9/1, 3/2 and 2/1, 3/1, 6/2
    assert (row.ours, row.theirs, row.peak_ratio) == ("fsdp", "torch_fsdp2", 0.7)


def test_every_session_goes_through_all_orders_and_begins_with_another():
    whole = list(sessions(14))
    assert [len(orders) for orders in whole] == [6, 6, 2]
    assert all(len(set(orders)) == 6 for orders in whole[:2])
    assert len({orders[0] for orders in whole}) == 3


def sent_by(rank, contender):
    """Collectives of a step of torch's engine, as the bench builds it, by kind; whether DDP has a static graph."""
    listened_to = replace(contender, options={**contender.options, "observed": True})
    with built(listened_to, TINY, None) as turn:
        turn.warm_up()
        calls, engine = Calls(), turn.live.__self__
        with turn.mesh.observed_by(calls):
            turn.step()
        return calls.ops, engine._ddp.static_graph if contender.strategy != "torch_fsdp2" else None


class Calls:
    """Counts the collectives that are issued, by kind."""

    def __init__(self):
        self.ops = Counter()

    def issued(self, event):
        self.ops[event.op] += 1

    def started(self, event):
        """Nothing."""

    completed = waited = started


BEST = {  # what torch sends in a step, and whether DDP has a static graph
    "bucketed": ({"all_reduce": 1}, True),
    "zero1": ({"all_reduce": 1, "broadcast": 2}, True),  # one for each owner, not one for each parameter
    # 5 units twice, and the root, which backward begins with, once
    "fsdp": ({"all_gather": 11, "reduce_scatter": 6}, None),
}


def test_torch_runs_at_its_best_without_anybody_listening(pools):
    for pair, best in BEST.items():
        assert PAIRS[pair].theirs.options["observed"] is False
        assert pools(2).run(sent_by, PAIRS[pair].theirs) == [best] * 2
    itself = PAIRS["itself"]
    assert (itself.ours.strategy, itself.ours.options) == (itself.theirs.strategy, itself.theirs.options)


def test_a_wrong_field_is_refused():
    for wrong, message in (
        ({"ranks": 0}, "ranks: 0 is below 1"),
        ({"rounds": 1}, "rounds: 1 is below 2"),
        ({"workloads": ()}, "workloads: none; at least one is needed"),
        ({"pairs": (PAIRS["fsdp"], PAIRS["fsdp"])}, "pairs: fsdp, fsdp; .* each only once"),
        ({"transport": "udp"}, "transport: 'udp' is not one of shared_memory, gloo"),
        ({"ranks": 3}, "ranks: 3 ranks do not divide the heads of gpt-30m; leave out 'tensor_parallel'"),
    ):
        with pytest.raises(ValueError, match=message):
            BenchConfig(**{"device": "cpu", **wrong})
    BenchConfig(ranks=4, device="cpu")  # all pairs and workloads


def test_the_command_refuses_before_a_rank_starts():
    for arguments, message in (
        (["--workloads", "compute,x"], "workloads: 'x' is not one of compute, communication, latency"),
        (["--pairs", "ddp"], "pairs: 'ddp' is not one of bucketed, zero1, fsdp, tensor_parallel, pipeline, itself"),
        (["--pairs", ""], "pairs: none; at least one is needed"),
        (["--json", "/nowhere/at/all.json"], "json: /nowhere/at/all.json cannot be written"),
    ):
        result = CliRunner().invoke(app, ["bench", "--quick", "--device", "cpu", *arguments])
        assert result.exit_code == 2
        assert message in result.output


def test_the_command_writes_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("shardlab.bench.against_torch.WORKLOADS", {"latency": replace(TINY, name="latency")})
    path = tmp_path / "bench.json"
    arguments = ["bench", "--rounds", "2", "--workloads", "latency", "--pairs", "bucketed", "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(path.read_text())
    assert row.keys() == KEYS
    assert (row["workload"], row["ours"], row["theirs"], row["rounds"]) == ("latency", "bucketed", "torch_ddp", 2)
    assert "torch_ddp" in result.output


FEW_ROWS = 16  # much compute hides messages, and on cores that others use it is more: then nothing would be wrong


def test_small_buckets_and_a_reduction_in_every_micro_batch_are_named_and_mended(monkeypatch):
    """Of the matrix that ``bench --why`` prints: a cause whose change is an option, and one that is taken out again."""
    wrong = ("small buckets", "every micro-batch")
    for name in wrong:
        monkeypatch.setitem(INJECTED, name, replace(INJECTED[name], rows=FEW_ROWS))
    rows = list(why_matrix(2, ("bucketed",), wrong))
    assert [(row.engine, row.ranks, row.injected) for row in rows] == [("bucketed", 2, name) for name in wrong]
    for row in rows:
        assert row.named == INJECTED[row.injected].cause
        assert row.is_right
        assert 0 < row.predicted_us < row.step_us
        assert isfinite(row.measured_us)  # the change was made
