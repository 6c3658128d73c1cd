"""The optimizer's state by parameter name: that of one process under every engine, and back into any other."""

import pytest
import torch

from tests.dist import cases
from tests.dist.every_engine import KINDS, assert_states, engine_of, one_step, options_of
from tests.dist.telling import StepTensorsAlone


def in_groups(tensors):
    """Biases first, so that numbers are not those of the module's order."""
    return torch.optim.AdamW(
        [
            {"params": tensors.where(lambda name: name.endswith("bias")), "weight_decay": 0.0},
            {"params": tensors.where(lambda name: not name.endswith("bias"))},
        ],
        lr=1e-2,
        eps=1e-3,
    )


def step(engine, kind, number):
    one_step(engine, kind, number)
    engine.zero_grad()


def handed_on(rank, key, kind, num_ranks):
    """Out of one engine with groups into another without, which takes the next step."""
    more = {"optimizer_fn": in_groups, **options_of(key, kind)}
    with engine_of(key, num_ranks, cases.build(kind, seed=rank), **more) as engine:
        before = engine.named_optimizer_state()
        for number in range(2):
            step(engine, kind, number)
        parameters, state = engine.full_state_dict(), engine.named_optimizer_state()
    more["optimizer_fn"] = lambda tensors: torch.optim.AdamW(tensors, lr=1e-2, eps=1e-3)
    with engine_of(key, num_ranks, cases.build(kind), **more) as engine:
        engine.load_full_state_dict(parameters)
        engine.load_named_optimizer_state(state)
        lr = engine.learning_rate
        step(engine, kind, 2)
        return before, state, lr, engine.full_state_dict()


@pytest.mark.parametrize("key", [*KINDS, "zero2-round_robin", "fsdp-hybrid"])
def test_it_is_that_of_one_process_and_goes_on_elsewhere(pools, key):
    num_ranks = 4 if "hybrid" in key else 3
    for kind in ("SmallGPT", "Unused") if "hybrid" in key else ("Uneven", "Unused", "Tied"):
        model = cases.build(kind)
        optimizer = in_groups(StepTensorsAlone(model))

        def train(number, optim):
            x, y = cases.rows(kind, number, 0, num_ranks)  # noqa: B023
            cases.loss_of(model(x), y).backward()  # noqa: B023
            optim.step()
            optim.zero_grad()

        for number in range(2):
            train(number, optimizer)
        params = dict(model.named_parameters())
        expected = {name: dict(optimizer.state[param]) for name, param in params.items() if param in optimizer.state}
        expected = {name: {key: value.clone() for key, value in state.items()} for name, state in expected.items()}
        second = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        for name, param in params.items():
            if name in expected:
                second.state[param] = {key: value.clone() for key, value in expected[name].items()}
        train(2, second)
        results = pools(num_ranks).run(handed_on, key, kind, num_ranks)
        for before, state, lr, _ in results:
            assert before == {}
            assert lr == 1e-2
            assert list(state) == [name for name in params if name in expected]
            for name, values in expected.items():
                assert_states([state[name]], values)
        assert_states([after for *_, after in results], model.state_dict())


def partly(rank):
    with engine_of("zero2", 2, cases.build("MLP"), "adamw") as engine:
        step(engine, "MLP", 0)
        state = engine.named_optimizer_state()
        with pytest.raises(ValueError, match="state: 'head' is no parameter of this engine's optimizer"):
            engine.load_named_optimizer_state({**state, "head": {}})
        with pytest.raises(ValueError, match=r"'exp_avg' of parameter '0.weight' has shape \(3,\)"):
            engine.load_named_optimizer_state({"0.weight": {"exp_avg": torch.zeros(3)}})
        assert engine.named_optimizer_state().keys() == state.keys()
        state["0.weight"]["exp_avg"].fill_(7.0)  # a copy
        one = state["2.bias"]
        engine.load_named_optimizer_state({"2.bias": one})
        return one, engine.named_optimizer_state()


def test_what_is_not_in_it_begins_anew(pools):
    for one, after in pools(2).run(partly):
        assert list(after) == ["2.bias"]
        assert_states([after["2.bias"]], one)
