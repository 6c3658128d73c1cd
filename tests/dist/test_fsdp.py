"""What is special about FSDP: what leaves its messages as they are, and units of which a part is frozen."""

import pytest
import torch

from shardlab.vocabulary import Collective
from tests.comm.test_communicator import Log
from tests.dist import cases

from tests.dist.every_engine import (  # isort: skip
    adamw, assert_states, engine_of, one_step, own_batch, plain_steps, sgd,
)  # fmt: skip
from tests.dist.nasty import Deep, Stack


def build(kind=Deep):
    return cases.seeded(kind).double()


def seeded(name, module):
    """The same numbers for a module whatever the order of initialisation."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    for param in module.parameters(recurse=False):
        param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype) / 4)


def three_steps(engine):
    for step in range(3):
        one_step(engine, step=step)
        engine.zero_grad()
    return engine.full_state_dict()


def half_frozen():
    model = build()
    for block in model.blocks:
        block.inner.weight.requires_grad_(False)
    return model


def frozen_part(rank, key):
    log = Log()
    with engine_of(key, 2, half_frozen(), optimizer_fn=adamw) as engine, engine.mesh.observed_by(log):
        state = three_steps(engine)
        return state, {event.tag for event in log.events if event.op == "reduce_scatter"}


@pytest.mark.parametrize("key", ["fsdp", "fsdp-dim0"])
def test_frozen_weights_of_a_unit_are_gathered_but_never_reduced(pools, key):
    results = pools(2).run(frozen_part, key)
    assert_states([state for state, _ in results], plain_steps(half_frozen(), adamw, 2, 0, 1, 2))
    assert results[0][1] == {"gradients of root", *(f"gradients of blocks.{n} part 1" for n in range(3))}


def cleared_or_evaluated(rank, between):
    """What the third backward sends."""
    log = Log()
    with engine_of("fsdp", 2, build(), optimizer_fn=sgd) as engine:
        for step in range(3):
            x, y = own_batch(engine, step=step)
            loss = cases.loss_of(engine(x), y)
            if between == "cleared":
                engine.zero_grad()
            log.events.clear()
            with engine.mesh.observed_by(log):
                engine.backward(loss)
            engine.step()
            engine.zero_grad()
            if between == "evaluated":
                with torch.no_grad():
                    for _ in range(2):
                        engine(x)
        return [event.tag for event in log.events]


def test_clearing_and_evaluations_leave_the_messages_of_a_backward_as_they_are(pools):
    """The usual loops of torch's pages."""
    usual, cleared, evaluated = (pools(2).run(cleared_or_evaluated, how) for how in ("", "cleared", "evaluated"))
    assert cleared == evaluated == usual


def a_graph_kept_by_one_rank(rank, keeps):
    log = Log()
    with engine_of("fsdp", 2, build(Stack), optimizer_fn=sgd, precision="bf16") as engine:
        x, _ = own_batch(engine)
        kept = [engine(x)] if rank in keeps else [engine(x).detach()]
        engine.full_state_dict()
        with engine.mesh.observed_by(log):
            engine.backward(engine(x).double().square().mean())
        return [event.tag for event in log.events if event.op is not Collective.ALL_REDUCE], len(kept)


def test_a_graph_that_a_rank_keeps_changes_nothing_that_is_sent(pools):
    usual = pools(2).run(a_graph_kept_by_one_rank, ())
    for keeps in ((0,), (0, 1)):
        assert pools(2).run(a_graph_kept_by_one_rank, keeps) == usual
