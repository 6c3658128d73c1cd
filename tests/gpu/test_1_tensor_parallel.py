"""Tensor parallelism on a GPU: two ranks that share one, or NCCL where there are enough."""

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.launch import current
from shardlab.models import GPT, GPTConfig, next_token_loss
from shardlab.tensor_parallel import differing_by_rank, gpt_plan, merge_state_dict, parallelize_module

CONFIG = GPTConfig(vocab_size=12, seq_len=8, num_layers=2, num_heads=4, hidden=16)


def build(seed):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return GPT(CONFIG).double()


def train(model, device):
    optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1, momentum=0.9)
    for step in range(5):
        tokens = torch.randint(0, 12, (3, 9), generator=torch.Generator().manual_seed(step)).to(device)
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_parallel(rank, options):
    device = current().device
    with Mesh({"tensor": 2}) as mesh:
        model = parallelize_module(build(rank).to(device), gpt_plan(CONFIG, **options), mesh["tensor"])
        train(model, device)
        return {name: value.cpu() for name, value in merge_state_dict(model, mesh["tensor"]).items()}


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"sequence_parallel": True, "regather": True}])
def test_equals_one_process_on_the_cpu(gpu_pools, options):
    plain = build(0)
    train(plain, "cpu")
    for state in gpu_pools(2).run(train_parallel, options):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-9, rtol=0)


def draws(rank):
    device = current().device
    with Mesh({"tensor": 2}) as mesh:
        torch.manual_seed(0)
        before = torch.rand(8, device=device)
        with differing_by_rank(mesh["tensor"], device):
            inside = torch.rand(8, device=device)
        return before.cpu(), inside.cpu(), torch.rand(8, device=device).cpu()


def test_the_devices_generator_differs_inside_only(gpu_pools):
    (before, inside, after), (other_before, other_inside, other_after) = gpu_pools(2).run(draws)
    assert torch.equal(before, other_before)
    assert not torch.equal(inside, other_inside)
    assert torch.equal(after, other_after)


def from_meta(rank):
    with torch.device("meta"):
        model = GPT(CONFIG)
    with Mesh({"tensor": 2}) as mesh:
        parallelize_module(model, gpt_plan(CONFIG), mesh["tensor"], init_fn=model.init_weights)
        return {param.device.type for param in model.parameters()}


def test_a_model_on_the_meta_device_is_made_on_the_ranks_own(gpu_pools):
    assert gpu_pools(2).run(from_meta) == [{"cuda"}] * 2
