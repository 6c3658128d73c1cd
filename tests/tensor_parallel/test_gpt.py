"""The package's GPT, divided by the built-in plan, trains as one process does, with the collectives that are stated."""

import weakref

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.models import GPT, GPTConfig, next_token_loss
from shardlab.partition.slices import slices_of
from shardlab.tensor_parallel import gpt_plan, merge_state_dict, parallelize_module
from tests.comm.test_communicator import Log
from tests.tensor_parallel.test_engines import OPTIMIZERS, build, loss_of

SIZES = {"vocab_size": 12, "seq_len": 8, "num_layers": 2, "hidden": 16}
CONFIGS = {
    "tied": GPTConfig(**SIZES, num_heads=4),
    "untied": GPTConfig(**SIZES, num_heads=4, tied=False),
    "grouped": GPTConfig(**SIZES, num_heads=8, num_kv_heads=4),
}
PLANS = {
    "whole": {},
    "sequence": {"sequence_parallel": True},
    "regather": {"sequence_parallel": True, "regather": True},
    "logits in parts": {"sequence_parallel": True, "gather_logits": False},
}


def batch(step):
    tokens = torch.randint(0, 12, (3, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def train(model, optimizer, steps, comm=None):
    losses = []
    for step in range(steps):
        loss = loss_of(model, *batch(step), comm)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_all(rank, options, todo):
    return [train_parallel(rank, CONFIGS[key], options, *how) for key, *how in todo]


def train_parallel(rank, config, options, optimizer, steps):
    with Mesh({"tensor": torch.distributed.get_world_size()}) as mesh:
        comm = mesh["tensor"]
        model = parallelize_module(build(rank, config), gpt_plan(config, **options), comm)
        losses = train(model, OPTIMIZERS[optimizer](list(model.parameters())), steps, comm)
        slices = slices_of(model)
        replicated = {name: p.detach() for name, p in model.named_parameters() if name not in slices}
        return losses, merge_state_dict(model, comm), replicated


TODO = (("tied", "sgd", 4), ("untied", "adamw", 2), ("grouped", "sgd", 2))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("options", PLANS)
def test_trains_as_one_process(pools, options, num_ranks):
    """All models at 4 ranks, at 2 one of them by turns."""
    todo = TODO if num_ranks == 4 else (TODO[list(PLANS).index(options) % 3],)
    found_by_rank = pools(num_ranks).run(train_all, PLANS[options], todo)
    for (key, optimizer, steps), *results in zip(todo, *found_by_rank, strict=True):
        plain = build(config=CONFIGS[key])
        losses = train(plain, OPTIMIZERS[optimizer](list(plain.parameters())), steps)
        for found, state, replicated in results:
            assert found == pytest.approx(losses, abs=1e-10)
            torch.testing.assert_close(state, dict(plain.state_dict()), atol=1e-10, rtol=0)
            assert replicated
            for name, value in replicated.items():
                assert torch.equal(value, results[0][2][name]), name


def sent_in_a_step(rank):
    with Mesh({"tensor": 2}) as mesh:
        config = CONFIGS["untied"]
        model = parallelize_module(build(config=config), gpt_plan(config), mesh["tensor"])
        log = Log()
        with mesh.observed_by(log):
            loss = loss_of(model, *batch(0), mesh["tensor"])
            forward = len(log.events)
            loss.backward()
        events = [(str(e.op), e.tag, e.numel) for e in log.events]
        return events[:forward], events[forward:]


def of_block(events, index):
    return [(op, numel) for op, tag, numel in events if f"blocks.{index}." in tag]


BSH = 3 * 8 * 16


def test_a_block_costs_two_all_reduces_forward_and_two_backward(pools):
    """Outside of the blocks: the embedding's sum and the logits, and the sum of the head's input gradient backward."""
    for forward, backward in pools(2).run(sent_in_a_step):
        for index in (0, 1):
            assert of_block(forward, index) == of_block(backward, index) == [("all_reduce", BSH)] * 2
        outside = [event for event in forward + backward if "blocks" not in event[1]]
        assert outside == [
            ("all_reduce", "output of token_embedding", BSH),
            ("all_gather", "output of head", 3 * 8 * 12),
            ("all_reduce", "gradient of input of head", BSH),
        ]


def from_meta(rank, options):
    config = CONFIGS["tied"]
    with torch.device("meta"):
        model = GPT(config).double()
    with Mesh({"tensor": 2}) as mesh:
        torch.manual_seed(rank)
        made, largest = [], [0]

        def init_fn(name, module):
            # Full layers that have been made and are still there, also those that no module holds any more.
            made.extend(weakref.ref(param) for param in module.parameters())
            there = {param for ref in made if (param := ref()) is not None}
            there |= {param for param in model.parameters() if not param.is_meta}
            largest[0] = max(largest[0], sum(param.numel() for param in there))
            model.init_weights(name, module)

        parallelize_module(model, gpt_plan(config, **options), mesh["tensor"], init_fn=init_fn)
        assert not any(param.is_meta for param in model.parameters())
        assert model.head.weight is model.token_embedding.weight
        state = merge_state_dict(model, mesh["tensor"])
        plain = GPT(config).double()
        plain.load_state_dict(state)
        x, _ = batch(0)
        torch.testing.assert_close(model(x), plain(x), atol=1e-12, rtol=0)
        return state, largest[0]


def test_from_the_meta_device(pools):
    """No rank ever holds the whole model, and all ranks hold slices of the same one."""
    results = pools(2).run(from_meta, PLANS["sequence"])
    total = sum(param.numel() for param in build(config=CONFIGS["tied"]).parameters())
    for state, largest in results:
        assert largest < 0.7 * total
        for name, value in state.items():
            assert torch.equal(value, results[0][0][name])
        std = state["blocks.0.mlp.fc1.weight"].std()
        assert 0.015 < float(std) < 0.025


def inference(rank):
    """A refusal, inference mode, without gradients, and with them: nothing is remembered from one to the other."""
    with Mesh({"tensor": 2}) as mesh:
        config = CONFIGS["tied"]
        plain = build(config=config)
        model = parallelize_module(build(config=config), gpt_plan(config, sequence_parallel=True), mesh["tensor"])
        x, y = batch(0)
        odd = "dim -2 of output of token_embedding: 7 does not divide over 2 tensor-parallel ranks; use 6 or 8"
        with pytest.raises(ValueError, match=odd):
            model(torch.zeros(1, 7, dtype=torch.int64))
        with torch.inference_mode():
            torch.testing.assert_close(model(x), plain(x), atol=1e-12, rtol=0)
        with torch.no_grad():
            model(x)
        next_token_loss(model(x), y).backward()
        next_token_loss(plain(x), y).backward()
        weight = plain.final_norm.weight.grad
        torch.testing.assert_close(model.final_norm.weight.grad, weight, atol=1e-12, rtol=0)
        assert isinstance(model, GPT)
        assert isinstance(model.final_norm, nn.LayerNorm)


def test_a_forward_leaves_nothing_to_the_next(pools):
    pools(2).run(inference)
