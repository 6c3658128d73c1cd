"""A fault happens at its rank, in its step and phase, and nothing else changes."""

from itertools import product

import pytest

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.experiment import compare, load_comparison
from shardlab.experiment.told.losses import verdict
from shardlab.experiment.told.verdicts import verdicts

from shardlab.course import (  # isort: skip
    DeadRank, Happened, LossyLink, NaN, OutOfMemory, SkippedCall, SkippedCollective, SlowLink, Straggler, inject,
)  # fmt: skip
from shardlab.course.faults.kinds import PHASES
from shardlab.launch import RankDied, RankError, RankHang, RankPool
from tests.course.faults.program import STEPS, train, workload
from tests.dist import cases
from tests.dist.every_engine import adamw, one_step


@pytest.mark.parametrize("strategy", ["bucketed", "zero2", "fsdp", "torch_fsdp2"])
def test_late_ranks_change_nothing_and_say_when_they_were_late(pools, strategy):
    pool, heard = pools(2), []
    faults = [Straggler(rank, step, phase, 0.01) for rank, step, phase in product((0, 1), (0, 2), PHASES)]
    if not strategy.startswith("torch_"):
        faults += [SlowLink(1, 1, seconds=0.01), LossyLink(0, 1, "step", lost=0.5, resend_s=0.01)]
    right = pool.run(train, strategy, None, ())
    assert pool.run(train, strategy, None, faults, on_message=lambda *message: heard.append(message)) == right
    assert len(heard) == len(faults)
    assert {message.fault for _, message in heard} == set(faults)
    assert all(isinstance(message, Happened) and message.fault.rank == rank for rank, message in heard)
    for rank in (0, 1):
        order = [message.fault for sender, message in heard if sender == rank]
        assert order == sorted(order, key=lambda fault: (fault.step, PHASES.index(fault.phase)))


def skips(rank, phase):
    with Mesh({"data": 2}) as mesh, build_engine("bucketed", cases.build("MLP"), adamw, mesh) as engine:
        with inject(engine, SkippedCall(1, 1, phase)):
            for step in range(2):
                one_step(engine, step=step)
                engine.zero_grad()
        return engine.num_backwards, engine.num_steps, {"backward", "step"} & vars(engine).keys()


def test_a_skipped_backward_is_skipped_once(pools):
    assert pools(2).run(skips, "backward") == [(2, 2, set()), (1, 2, set())]


def test_a_skipped_step_leaves_the_others_in_theirs():
    told = r"rank 0 in all_reduce 'whether a rank refuses' .*Not in it: rank 1"
    with RankPool(2, device="cpu", timeout_s=2.0) as pool, pytest.raises(RankHang, match=told):
        pool.run(skips, "step")


def test_a_fault_that_never_happened_is_an_error(pools):
    words = "faults: SkippedCollective on rank 1 in the forward of step 1 never happened; this rank came to step 4"
    with pytest.raises(RankError, match=f"rank 1 raised RuntimeError: {words}"):
        pools(2).run(train, "bucketed", None, [SkippedCollective(1, 1, "forward")])


BEGAN = "it began on rank 1, with the"


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("forward", f"In zero3 {BEGAN} loss of its own rows in step 2."),
        ("backward", f"In zero3 {BEGAN} gradients of its own rows in step 2."),
        ("step", "are NOT finite"),
    ],
)
def test_compare_meets_the_fault_of_a_model_that_has_one(pools, tmp_path, phase, words):
    broken = workload([NaN(1, 2, phase)])
    result = compare(broken, tmp_path / "out", pool=pools(2), strategies=("single", "zero3"), ranks=2, steps=STEPS)
    for comparison in (result, load_comparison(result.directory)):
        assert words in verdict(comparison)
    assert f"that of zero3 from step {2 if phase == 'forward' else 3} on" in verdict(result)


def test_the_rank_is_named_whose_backward_made_a_nan_under_every_strategy(pools, tmp_path):
    strategies = ("bucketed", "zero2", "fsdp", "torch_ddp", "torch_zero1")
    broken = workload([NaN(1, 1)])
    result = compare(broken, tmp_path / "out", pool=pools(2), strategies=strategies, ranks=2, steps=4)
    for strategy in strategies:
        assert f"In {strategy} {BEGAN} gradients of its own rows in step 1." in verdict(result)


def test_a_nan_of_the_last_backward_is_told_though_no_loss_has_shown_it(pools, tmp_path):
    broken = workload([NaN(1, 1)])
    result = compare(broken, tmp_path / "out", pool=pools(2), strategies="zero2", ranks=2, steps=2)
    assert "Gradients are NOT finite: in zero2 on rank 1, in step 1." in verdicts(result)


def test_a_nan_on_all_ranks_is_of_none(pools, tmp_path):
    broken = workload([NaN(0, 1), NaN(1, 1)])
    result = compare(broken, tmp_path / "out", pool=pools(2), strategies="bucketed", ranks=2, steps=3)
    assert "NOT finite" in verdict(result)
    assert "it began on" not in verdict(result)


@pytest.mark.parametrize("phase", PHASES)
def test_death_and_lack_of_memory_come_where_they_should(pools, phase):
    with pytest.raises(RankDied, match="rank 0 died: killed by SIGKILL"):
        pools(2).run(train, "zero1", None, [DeadRank(0, 1, phase)])
    with pytest.raises(RankError, match=r"rank 1 raised RuntimeError: .*memory") as caught:
        pools(2).run(train, "zero1", None, [OutOfMemory(1, 1, phase)])
    line = {"forward": "_loss(engine", "backward": "engine.backward(loss)", "step": "engine.step()"}[phase]
    assert line in caught.value.traceback_text


def test_bad_fields_are_refused():
    for make, words in (
        (lambda: NaN(-1), "rank: -1 is given; allowed values are integers from 0"),
        (lambda: NaN(0, 1.5), "step: 1.5 is given; allowed values are integers from 0"),
        (lambda: NaN(0, 0, "clip"), "phase: 'clip' is given; allowed values are forward, backward, step"),
        (lambda: SkippedCall(0, 0, "forward"), "phase: 'forward' is given; allowed values are backward, step"),
        (lambda: Straggler(0, seconds=0), "seconds: 0 is given; allowed values are seconds above 0"),
        (lambda: LossyLink(0, lost=1.0), "lost: 1.0 is given; allowed values are shares from 0 to 0.9"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_a_rank_that_is_not_there_is_refused(pools):
    with pytest.raises(
        RankError, match="rank: NaN on rank 5 in the backward of step 0 is given; allowed are ranks 0, 1"
    ):
        pools(2).run(train, "ddp", None, [NaN(5)])
