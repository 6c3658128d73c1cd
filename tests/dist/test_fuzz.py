"""A short run of the fuzz with fixed seeds; ``python tests/fuzz.py --minutes 60`` is the long one."""

import warnings

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzzing.drawn import Menu
from tests.fuzzing.engines import OURS
from tests.fuzzing.features import ON

from tests.fuzzing.replay import (  # isort: skip
    Backward, BlockSpec, Clip, EngineSpec, Evaluate, FailsAlone, Forward, FullParams, ModuleSpec, NamedOut, Scenario,
    Step,
)  # fmt: skip
from tests.fuzzing.run import close_meshes, run_scenario
from tests.fuzzing.scenarios import scenarios
from tests.fuzzing.script import script_of

TRAINING = (Forward(1), Backward(), Clip(0.1), Step())


def test_what_users_do_at_random_trains_as_one_process_or_is_refused(pools):
    seen = []

    def check_sequences(num_ranks, how_many):
        @settings(
            max_examples=how_many, deadline=None, database=None, derandomize=True,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(scenarios(Menu(num_ranks, OURS, ON, most=8)))
        def check(scenario):
            verdict = run_scenario(pools(num_ranks), scenario)
            seen.append(verdict.kind)
            assert not verdict.is_find, f"\n{script_of(scenario, verdict)}"

        check()
        close_meshes(pools(num_ranks))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Hypothesis, about a test inside a test
        for num_ranks, how_many in {1: 3, 2: 7, 3: 5, 4: 3}.items():
            check_sequences(num_ranks, how_many)
    # A machine that refuses everything finds nothing; of so few sequences at one size chance could refuse three.
    assert seen.count("refused") <= 0.25 * len(seen)


AGAIN = (BlockSpec("counter", "whole reentrant"), *[BlockSpec("sometimes")] * 2, BlockSpec("sometimes", "whole"))
MODULE = ModuleSpec(5, AGAIN, (0, 1, 2, 3), enter="embedding")
IN_PARTS = ModuleSpec(blocks=(BlockSpec(checkpoint="whole reentrant"),) * 2, path=(0, 1, 0), tied="blocks")
FOUND = {
    "a unit that is computed again goes behind one of which a rank has no gradients": (
        MODULE,
        EngineSpec("fsdp", (("sharding", "hybrid_shard"), ("replicate_below", 8)), (("replica", 2), ("shard", 2))),
        (Forward(6, 2, quiet=True), Backward(quiet=True), Forward(8), Backward()),
        "equal",
    ),
    "a plain backward adds to placeholders, through other nodes than the parameters have by then": (
        ModuleSpec(), EngineSpec("zero1", (("precision", "float32, summed in float64"),)),
        (Forward(quiet=True), Backward(quiet=True), FullParams(), Forward(), FullParams(), Backward("plain")),
        "equal",
    ),
    "nobody has changed anything in full_params(keep_changes=True) between forward and backward": (
        ModuleSpec(), EngineSpec("zero3", guards=False), (Forward(), FullParams(keep=True), Backward()), "equal",
    ),
    "parameters stay gathered for the loss that waits, though what is read ends the plain backward before it": (
        MODULE, EngineSpec("fsdp", (("sharding", "shard_grad_op"),), (("data", 4),)),
        (Forward(), Backward("plain"), Forward(), NamedOut(), Backward()), "equal",
    ),
    "a backward that all ranks refuse, each by itself, raises on one of them for another reason": (
        IN_PARTS, EngineSpec("zero2", (("bucket_bytes", 128),)), (FailsAlone(0, 1), Forward(), Backward()), "refused",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_stays_mended(pools, what):
    module, engine, operations, answer = FOUND[what]
    num_ranks = 4 if engine.name == "fsdp" else 2
    assert run_scenario(pools(num_ranks), Scenario(module, engine, operations=operations)).kind == answer
    close_meshes(pools(num_ranks))


def _clipped_before_the_reduction(engine):
    engine.finish_gradients = engine._make_means = lambda: None
    return engine


def _dropped_buffer(engine):
    engine.module.blocks[0].count = torch.zeros((), dtype=torch.float64)
    engine.module.register_forward_hook(lambda *_: engine.module.blocks[0].count.zero_())
    return engine


def _zeroed_too_early(engine):
    step = engine.step
    engine.step = lambda: (engine.zero_grad(), step())
    return engine


def _never_reshards(engine):
    for unit in engine.strategy.units:
        unit.reshard = lambda: None
    return engine


FAULTS = {
    "clipped before the reduction": _clipped_before_the_reduction,
    "dropped buffer": _dropped_buffer,
    "zeroed too early": _zeroed_too_early,
    "evaluation leaves units gathered": _never_reshards,
}
EVERYWHERE = {"clipped before the reduction": "ddp", "dropped buffer": "zero1", "zeroed too early": "fsdp"}
SOMEWHERE = {
    "evaluation leaves units gathered": Scenario(
        ModuleSpec(blocks=(BlockSpec(),), path=(0,)), EngineSpec("fsdp"), operations=(Evaluate(1),)
    ),
}


def with_fault(rank, scenario, fault):
    """The scenario with an engine that a fault has been planted in."""
    from tests.fuzzing.rank import on_rank

    build = EngineSpec.build

    def build_faulty(spec, *arguments):
        return FAULTS[fault](build(spec, *arguments))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineSpec, "build", build_faulty)
        return on_rank(rank, scenario, None)


@pytest.mark.parametrize("fault", EVERYWHERE)
def test_a_planted_fault_is_found(pools, fault):
    module = ModuleSpec(blocks=(BlockSpec("counter"),), path=(0,))
    assert_found(pools, Scenario(module, EngineSpec(EVERYWHERE[fault]), operations=TRAINING), fault)


@pytest.mark.parametrize("fault", SOMEWHERE)
def test_a_planted_fault_of_some_scenarios_is_found(pools, fault):
    assert_found(pools, SOMEWHERE[fault], fault)


def assert_found(pools, scenario, fault):
    assert run_scenario(pools(2), scenario).kind == "equal"
    for steps in pools(2).run(with_fault, scenario, fault):
        assert steps[-1][1].startswith(("different", "crash"))
    close_meshes(pools(2))
