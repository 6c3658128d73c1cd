"""A class's strategies beside ours: points, what was lost and gained, on a run and on the virtual clock."""

from contextlib import nullcontext

import pytest
import torch

from shardlab import CompareConfig
from shardlab.comm import Pending
from shardlab.course import score
from shardlab.course.capstone import LINK, _play
from shardlab.course.exercises.ladder import WHOLE, solution_of
from shardlab.engines import DDP, Bucketed, ZeRO1
from shardlab.partition.ring_cost import Link
from tests.strategies.test_own_beside_ours import SMALL, Hierarchical


class Mine(ZeRO1):
    name = "mine"


class PlainDDP(DDP):
    name = "plain_ddp"


class Sums(DDP):
    name = "sums"

    def make_means(self):
        super().make_means()
        for param in self.params.values():
            if param.grad is not None:
                param.grad *= self.num_ranks


class WaitsAtOnce(Bucketed):
    name, rounds = "waits_at_once", True

    def reduce(self, bucket):
        half = bucket.buffer.to(torch.bfloat16)
        self.comm.all_reduce(half, tag=f"gradients of bucket {bucket.index}").wait()
        bucket.buffer.copy_(half)
        return Pending()


class Lost(WaitsAtOnce):
    name = "lost"

    def reduce(self, bucket):
        bucket.buffer.fill_(torch.nan)
        return super().reduce(bucket)


# The printed one, which frees what it has gathered: between steps its parameters have no memory.
(_ZERO3,) = (exercise for exercise in WHOLE if exercise.name == "whole.zero3")
exec(solution_of(_ZERO3).partition("```python\n")[2].removesuffix("```"))


@pytest.fixture
def ranks_of(monkeypatch, pools):
    monkeypatch.setattr("shardlab.testing.check.RankPool", lambda ranks, **_: nullcontext(pools(ranks)))
    return pools


def test_points_are_what_a_count_by_hand_gives(tmp_path, ranks_of):
    own = {Mine: "zero1", PlainDDP: "zero1", Sums: "ddp", WaitsAtOnce: "ddp", Lost: "ddp"}
    scores = score(own, tmp_path / "run", pool=ranks_of(2), ranks=2, steps=3, bucket_mib=0.02, **SMALL)
    table = scores.table
    assert table.loc["mine"].drop("points").equals(table.loc["zero1"].drop("points")), "ours by another name"
    assert table["points"].dropna().to_dict() == {"mine": 5, "plain_ddp": 2, "waits_at_once": 5, "lost": 0}
    mine, plain, sums, half, lost = scores.said()
    assert mine == "mine: 5 of 5 points"
    assert plain.startswith("plain_ddp: 2 of 5 points; ")
    assert " MB at rest, where zero1 takes " in plain
    assert " ms exposed, where zero1 takes " in plain
    assert sums.startswith(
        "sums: 0 of 5 points, it is not right: at 2 ranks, model 'Unused', a plain loop, rank 0: after"
    )
    assert half == "waits_at_once: 5 of 5 points"
    assert lost == "lost: 0 of 5 points, it is not right: its losses differ from those of one process"
    assert table.loc[["torch_ddp", "torch_zero1"], "exposed (ms)"].isna().all()
    # Of ddp nothing is hidden: its messages, one after another, over the link.
    sent = scores.comparison.records.collectives.query(
        "run == 'ddp' and rank == 0 and step == 2 and phase != 'metrics'"
    )
    alone = sum(Link.parse(LINK).ring_time_us(op, size, 2) for op, size in zip(sent["op"], sent["bytes"], strict=True))
    assert table.loc["ddp", "exposed (ms)"] == pytest.approx(alone / 1e3)
    gained = scores.gained("ddp", "waits_at_once")
    assert " MB sent and not " in gained
    assert "(-50%)" in gained
    assert gained.endswith("; the same at rest and at the peak; it rounds")
    assert scores.gained("zero1", "mine") == "mine instead of zero1: no number changes"
    assert "exposed" not in scores.gained("torch_ddp", "ddp"), "torch's is not known"


def test_a_strategy_that_frees_parameters_is_compared(tmp_path, ranks_of):
    scores = score({whole_zero3: "zero3"}, tmp_path / "run", pool=ranks_of(2), ranks=2, steps=3, **SMALL)  # noqa: F821
    assert scores.table.loc["whole_zero3", "right"] == "yes"
    assert scores.comparison.summary["as_planned"].all()


def test_groups_gain_where_the_link_inside_a_host_is_faster():
    config = CompareConfig(("bucketed", Hierarchical()), ranks=4, steps=3, **SMALL)
    slow, fast = Link.parse("1Gbps,1us"), Link.parse("100Gbps,1us")
    exposed = {
        inside: {name: one.steps["exposed_comm_us"].iloc[-1] for name, one in
                 _play(config, config.strategies, slow, inside).items()}
        for inside in (slow, fast)
    }  # fmt: skip
    assert exposed[fast]["bucketed"] == exposed[slow]["bucketed"]
    assert exposed[fast]["hierarchical"] < 0.5 * exposed[fast]["bucketed"] < exposed[slow]["hierarchical"]


def test_a_strategy_beside_none_of_ours_is_refused():
    with pytest.raises(ValueError, match=r"own: 'zero4' is no strategy to be beside; take one of ddp, bucketed, zero1"):
        score({Mine: "zero4"})
