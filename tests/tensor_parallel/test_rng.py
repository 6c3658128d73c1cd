"""Random numbers: different in parts, equal where activations are alike, reproducible, the same when recomputed."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab.comm.mesh import Mesh
from shardlab.models import GPT, GPTConfig
from shardlab.tensor_parallel import OwnDropout, differing_by_rank, gpt_plan, parallelize_module

CONFIG = GPTConfig(vocab_size=12, seq_len=8, num_layers=1, num_heads=4, hidden=16, dropout=0.5)


def draws(rank, seed):
    with Mesh({"tensor": 2}) as mesh:
        torch.manual_seed(seed)
        found = [torch.rand(4)]
        for _ in range(2):
            with differing_by_rank(mesh["tensor"]):
                found.append(torch.rand(4))
            found.append(torch.rand(4))
        with pytest.raises(RuntimeError, match="must match"), differing_by_rank(mesh["tensor"]):
            torch.rand(3) + torch.rand(2)
        return [*found, torch.rand(4)]  # an error leaves the shared stream, too


def test_inside_it_differs_outside_it_is_equal(pools):
    first, second = pools(2).run(draws, 1)
    for place, (mine, other) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(mine, other) == (place not in (1, 3)), place
    assert len({tuple(values.tolist()) for values in first}) == 6
    again = pools(2).run(draws, 1)
    assert all(torch.equal(a, b) for a, b in zip(first + second, again[0] + again[1], strict=True))
    assert not torch.equal(first[1], pools(2).run(draws, 2)[0][1])


def masks(rank, plan_options):
    """The masks of every dropout of a GPT whose ranks were seeded differently, as they see zeros."""
    with Mesh({"tensor": 2}) as mesh:
        torch.manual_seed(100 + rank)
        model = parallelize_module(GPT(CONFIG), gpt_plan(CONFIG, **plan_options), mesh["tensor"])
        seen = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(lambda _, __, out, name=name: seen.setdefault(name, []).append(out == 0))
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        model(tokens)
        model.eval()
        with torch.no_grad():
            quiet = model(tokens)
        return seen, quiet


def test_a_whole_activation_is_dropped_alike_and_parts_differently(pools):
    for options, alike in (({}, True), ({"sequence_parallel": True}, False)):
        (first, quiet), (second, other_quiet) = pools(2).run(masks, options)
        assert first.keys() == {"dropout", "blocks.0.dropout"}
        for name, seen in first.items():
            for mine, other in zip(seen, second[name], strict=True):
                if mine.any():  # the evaluation drops nothing
                    assert torch.equal(mine, other) == alike, name
        assert torch.equal(quiet, other_quiet)


def recomputed(rank):
    """The gradient of a checkpointed region is that of the masks of its forward."""
    with Mesh({"tensor": 2}) as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.5))
        parallelize_module(model, {"0": OwnDropout()}, mesh["tensor"])
        x = torch.ones(64, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=False)
        torch.rand(3)
        y.sum().backward()
        return torch.equal(x.grad, y.detach()), torch.rand(3)


def test_activation_checkpointing_draws_the_same_masks(pools):
    (first, after), (second, other_after) = pools(2).run(recomputed)
    assert first
    assert second
    assert torch.equal(after, other_after)
