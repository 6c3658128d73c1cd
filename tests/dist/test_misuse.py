"""Habits that a sharded parameter refuses: what each is told to write instead, and that it is right."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.dist import cases
from tests.dist.every_engine import KINDS, SHARDED, assert_states, backward, engine_of


def units(key):
    return {"wrap": nn.Linear} if key.startswith("fsdp") else {}


def noisy(params):
    for param in params:
        if param.grad is not None:
            param.grad.add_(0.25)


LOADS = r"^load_state_dict: .*engine\.load_full_state_dict\(state\).*full_params\(keep_changes=True\)"
# What the user does with the module, after a backward, and what the refusal must name.
REFUSED = {
    "penalty": (lambda e, m: sum(p.abs().sum() for p in m.parameters()), r"penalty.*with engine\.full_params\(\)"),
    "norm": (lambda e, m: m[0].weight.norm(), r"with engine\.full_params\(\)"),
    "state dict": (lambda e, m: m.state_dict(), r"engine\.full_state_dict\(\)"),
    "all of them": (lambda e, m: torch._foreach_norm(list(m.parameters())), r"with engine\.full_params\(\)"),
    "in a list": (lambda e, m: torch.stack([m[0].weight]), r"with engine\.full_params\(\)"),
    "by a name": (lambda e, m: torch.add(torch.ones(1), other=m[0].weight), r"with engine\.full_params\(\)"),
    "transposed": (lambda e, m: (m[0].weight.T, m[0].weight.mT), r"with engine\.full_params\(\)"),
    "a layer": (lambda e, m: m[0](torch.ones(1, 7).double()), r"called (in|out)side engine"),
    "read": (lambda e, m: m[0].weight.tolist(), r"engine\.full_state_dict\(\)"),
    "copy": (lambda e, m: copy.deepcopy(m), r"copy it, or its module, inside 'with engine\.full_params\(\)"),
    "pickle": (lambda e, m: pickle.dumps(m), r"copy it, or its module, inside 'with engine\.full_params\(\)"),
    "convert": (lambda e, m: m.half(), r"convert the module before the engine is built"),
    "init": (lambda e, m: nn.init.normal_(m[0].weight), r"full_params\(keep_changes=True\)"),
    "decay": (lambda e, m: torch.no_grad()(m[0].weight.mul_)(0.9), r"full_params\(keep_changes=True\)"),
    "data": (lambda e, m: m[0].weight.data.mul_(0.9), r"keep_changes=True"),
    "load": (lambda e, m: m.load_state_dict(cases.build("MLP", seed=1).state_dict()), LOADS),
    "load a layer": (lambda e, m: m[2].load_state_dict(cases.build("MLP", seed=1)[2].state_dict()), LOADS),
    "clip": (lambda e, m: nn.utils.clip_grad_norm_(m.parameters(), 1.0), r"engine\.clip_grad_norm_\(max_norm\)"),
    "clip values": (
        lambda e, m: nn.utils.clip_grad_value_(m.parameters(), 0.1),
        r"clip_grad_value_.*takes engine\.step_tensors\(\) instead of model\.parameters\(\)",
    ),
    "noise": (lambda e, m: noisy(m.parameters()), r"noise.*takes engine\.step_tensors\(\)"),
    "read a gradient": (lambda e, m: m[0].weight.grad.norm(), r"engine\.full_gradients\(\)"),
}


def refused(rank, key, num_ranks):
    model = cases.build("MLP")
    told = {}
    with engine_of(key, num_ranks, model, "sgd", **units(key)) as engine:
        backward(engine)
        before = engine.full_state_dict()
        for name, (use, text) in REFUSED.items():
            with pytest.raises(RuntimeError, match=text) as caught:
                use(engine, model)
            told[name] = str(caught.value)
        assert_states([engine.full_state_dict()], before)
        engine.step()  # nothing of it has changed what follows
        engine.zero_grad()
        return told, engine.full_state_dict()


@pytest.mark.parametrize("key", SHARDED)
def test_each_habit_is_told_what_to_write_instead(pools, key):
    num_ranks = 2
    (told, _), *_ = results = pools(num_ranks).run(refused, key, num_ranks)
    assert all(texts == told for texts, _ in results)
    assert all(text.count(" is sharded") + text.count(" are sharded") <= 1 for text in told.values())
    expected = cases.reference("MLP", "sgd", num_ranks, steps=1)
    assert_states([state for _, state in results], expected.state)


def halve(param):
    param.grad.mul_(0.5)


def as_told(rank, key, num_ranks):
    """Loads, clips by value and adds noise, as the refusals say; hooks may come before the engine and after it."""
    model = cases.build("MLP")
    model[0].weight.register_hook(lambda gradient: 0.5 * gradient)
    with engine_of(key, num_ranks, model, "sgd", **units(key)) as engine:
        model[2].weight.register_hook(lambda gradient: 0.5 * gradient)
        model[4].weight.register_post_accumulate_grad_hook(halve)
        engine.load_full_state_dict(cases.build("MLP", seed=1).state_dict())
        with engine.full_params(keep_changes=True):
            model[2].load_state_dict(cases.build("MLP", seed=2)[2].state_dict())
        backward(engine)
        nn.utils.clip_grad_value_(engine.step_tensors(), 0.05)
        noisy(engine.step_tensors())
        gradients = engine.full_gradients()
        engine.step()
        return gradients, engine.full_state_dict()


@pytest.mark.parametrize("key", [*KINDS, "fsdp-dim0", "fsdp-no_shard"])
def test_what_the_refusals_say_is_right(pools, key):
    num_ranks = 3
    model = cases.build("MLP", seed=1)
    model[2].load_state_dict(cases.build("MLP", seed=2)[2].state_dict())
    x, y = cases.rows("MLP", 0, 0, num_ranks)
    cases.loss_of(model(x), y).backward()
    for layer in (0, 2, 4):
        model[layer].weight.grad.mul_(0.5)
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    noisy(model.parameters())
    optimizer = cases.OPTIMIZERS["sgd"](list(model.parameters()))
    optimizer.step()
    results = pools(num_ranks).run(as_told, key, num_ranks)
    assert_states([gradients for gradients, _ in results], {n: p.grad for n, p in model.named_parameters()})
    assert_states([state for _, state in results], model.state_dict())
