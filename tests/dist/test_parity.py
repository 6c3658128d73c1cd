"""Every engine equals one process on the concatenated batch, in float64 to 1e-10, at 1, 2, 3 and 4 ranks."""

import contextlib
from math import inf

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from tests.dist import cases
from tests.dist.every_engine import ALL, OTHER_CUTS, assert_states, engine_of, options_of, own_batch

# Every model at every world size, and the same code with other options: the nastier models, at 3 ranks.
MAIN = ("ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp", "fsdp-dim0")
MORE = (*OTHER_CUTS, "zero1-balanced")
WORLD_SIZES = (2, 3, 4)


def train(rank, key, kind, optimizer, steps=5, micro_batches=1, clip=None, norm_type=2.0, plain_backward=False):
    num_ranks = torch.distributed.get_world_size()
    result = cases.Result()
    # Ranks that start different must end equal.
    model = cases.build(kind, seed=rank)
    for buffer in model.buffers():
        buffer.add_(rank)
    with engine_of(key, num_ranks, model, optimizer, **options_of(key, kind)) as engine:
        for step in range(steps):
            total = 0.0
            for micro_batch in range(micro_batches):
                x, y = own_batch(engine, kind, step, micro_batch)
                is_last = micro_batch == micro_batches - 1
                with contextlib.nullcontext() if is_last or plain_backward else engine.no_sync():
                    loss = cases.loss_of(engine(x), y) / micro_batches
                    loss.backward() if plain_backward else engine.backward(loss)
                total += float(loss.detach())
            if clip is not None:
                result.norms.append(float(engine.clip_grad_norm_(clip, norm_type)))
            engine.step()
            engine.zero_grad()
            mean = torch.tensor(total, dtype=torch.float64)
            engine.mesh.data.all_reduce(mean).wait()
            result.losses.append(float(mean) / num_ranks)
        assert engine.num_steps == steps
        result.state = engine.full_state_dict()
    return result


def assert_equal(results, expected):
    for rank, result in enumerate(results):
        assert result.losses == pytest.approx(expected.losses, abs=1e-10), f"losses of rank {rank}"
        assert result.norms == pytest.approx(expected.norms, abs=1e-10), f"norms of rank {rank}"
    assert_states([result.state for result in results], expected.state)


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("engine", MAIN)
def test_equals_one_process(pools, engine, num_ranks):
    for kind, optimizer in [*((kind, "adamw") for kind in cases.MODELS), ("Tied", "sgd"), ("Unused", "sgd")]:
        expected = cases.reference(kind, optimizer, num_ranks)
        assert_equal(pools(num_ranks).run(train, engine, kind, optimizer), expected)


@pytest.mark.parametrize("engine", MORE)
def test_other_options_equal_one_process(pools, engine):
    for kind, optimizer, how in (
        ("Uneven", "adamw", {}),
        ("Tied", "sgd", {}),
        ("Unused", "adam_large_eps", {"micro_batches": 3, "clip": 0.05}),
    ):
        expected = cases.reference(kind, optimizer, 3, **how)
        assert_equal(pools(3).run(train, engine, kind, optimizer, **how), expected)


@pytest.mark.parametrize("engine", MAIN)
def test_accumulation_and_clipping_equal_one_process(pools, engine):
    num_ranks = 4
    for kind in ("Unused", "SmallGPT"):
        expected = cases.reference(kind, "adam_large_eps", num_ranks, steps=3, micro_batches=3, clip=0.05)
        assert max(expected.norms) > 0.05, "the clip must bite, or the test shows nothing"
        results = pools(num_ranks).run(train, engine, kind, "adam_large_eps", steps=3, micro_batches=3, clip=0.05)
        assert_equal(results, expected)


@pytest.mark.parametrize("engine", MAIN)
def test_plain_backward_and_communicating_micro_batches_and_norm_types(pools, engine):
    """``loss.backward()`` for every micro-batch, each outside ``no_sync``: what is pending is finished in between."""
    for kind, norm_type in (("SmallGPT", 2.0), ("Unused", 1.0), ("Unused", inf)):
        expected = cases.reference(kind, "sgd", 3, steps=3, micro_batches=2, clip=0.05, norm_type=norm_type)
        how = {"micro_batches": 2, "plain_backward": True, "clip": 0.05, "norm_type": norm_type}
        assert max(expected.norms) > 0.05
        assert_equal(pools(3).run(train, engine, kind, "sgd", steps=3, **how), expected)


def in_float32(rank):
    states = {}
    for key in MAIN:
        with engine_of(key, 3, cases.build("MLP").float(), "sgd") as engine:
            for step in range(2):
                x, y = (part.float() for part in own_batch(engine, "MLP", step))
                engine.backward(cases.loss_of(engine(x), y))
                engine.step()
                engine.zero_grad()
            states[key] = engine.full_state_dict()
    return states


def test_float32_equals_one_process(pools):
    expected = {name: value.float() for name, value in cases.reference("MLP", "sgd", 3, steps=2).state.items()}
    for states in pools(3).run(in_float32):
        assert_states(states.values(), expected, atol=1e-5)


class WithoutElements(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return super().forward(x) + self.nothing.sum()


def largest_beside_nothing(rank):
    norms = []
    with Mesh({"data": 2}) as mesh:
        for key in (*MAIN, "torch_ddp", "torch_zero1"):
            strategy, options = ALL[key]
            torch.manual_seed(0)
            with build_engine(strategy, WithoutElements(), torch.optim.Adam, mesh, **options) as engine:
                engine.backward(engine(torch.ones(2, 3)).square().mean())
                norms.append(float(engine.clip_grad_norm_(1.0, inf)))
    return norms


def test_the_largest_gradient_beside_a_parameter_without_elements_is_equal(pools):
    for norms in pools(2).run(largest_beside_nothing):
        assert norms == pytest.approx([norms[0]] * len(norms))


@pytest.mark.parametrize("engine", ["single", *MAIN])
def test_one_rank_is_plain_torch_bit_for_bit(engine):
    strategy, options = ALL[engine]
    for kind in cases.MODELS:
        if kind == "NonContiguous" and strategy.startswith(("zero", "fsdp")):
            continue  # its parameters become contiguous, for which the matrix product sums in another order
        expected = cases.reference(kind, "adamw", 1, clip=0.05)
        model = cases.build(kind)
        result = cases.Result()
        with build_engine(strategy, model, cases.OPTIMIZERS["adamw"], **options) as built:
            for step in range(5):
                x, y = cases.rows(kind, step, 0, 1)
                loss = cases.loss_of(built(x), y)
                built.backward(loss)
                result.losses.append(float(loss.detach()))
                result.norms.append(float(built.clip_grad_norm_(0.05)))
                built.step()
                built.zero_grad()
            result.state = built.full_state_dict()
        assert result.losses == expected.losses
        assert result.norms == expected.norms
        for name, value in expected.state.items():
            assert torch.equal(result.state[name], value), (kind, name)
