"""Every engine equals one process on the concatenated batch, in float64 to 1e-10, at 1, 2, 3 and 4 ranks.

One call of a pool trains the models of an engine, half of them with guards, each model by another loop: all of them at
3 ranks where engines are at other numbers too, a quarter of them at 2 ranks and at 4, and half of them where a strategy
is at one number only. Of the same code that is cut in other ways a quarter of the models, all by turns.
"""

import contextlib
from dataclasses import dataclass
from functools import cache
from math import inf

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from tests.dist import cases
from tests.dist.every_engine import ALL, ENGINES, OTHER_CUTS, assert_states, axes_of, engine_of, options_of, own_batch

# At every world size; the same code with other options at 3 ranks, which divide little, or where there are groups at 4.
MAIN = ("ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp", "fsdp-dim0")
PLACES = [
    *((key, num_ranks) for key in MAIN for num_ranks in (2, 3, 4)),
    *((key, 4 if "hybrid" in key else 3) for key in (*ENGINES, *OTHER_CUTS) if key not in MAIN),
]
STEPS = 3  # of which the second alone uses what only some rows choose


@dataclass(frozen=True)
class Loop:
    """How a user trains.

    Attributes:
        quiet: all micro-batches but the last are inside ``no_sync()``.
        plain: ``loss.backward()``, so that what is pending must be finished by the next verb.
        evaluates: a forward after each backward, and before the step.
    """

    optimizer: str
    micro_batches: int = 1
    clip: float | None = None
    norm_type: float = 2.0
    quiet: bool = True
    plain: bool = False
    evaluates: bool = False


# Clipping hides a gradient that is off by a factor, and so does Adam: at 3 ranks each engine has each of these.
LOOPS = (
    Loop("sgd"),
    Loop("adamw"),
    Loop("sgd", 3, 0.05),
    Loop("adam_large_eps", 2, plain=True),
    Loop("sgd", 3, evaluates=True),
    Loop("adamw", 2, 0.05, plain=True, evaluates=True),
    Loop("sgd", 2, 0.05, 1.0, quiet=False, plain=True),
    Loop("sgd", 2, 0.05, inf, quiet=False, plain=True),
)


def train_all(rank, key, todo):
    with Mesh(axes_of(key, torch.distributed.get_world_size())) as mesh:
        return [train(rank, key, mesh, *one) for one in todo]


def train(rank, key, mesh, kind, loop, options):
    num_ranks = torch.distributed.get_world_size()
    result = cases.Result()
    model = cases.build(kind, seed=rank)  # ranks that start different must end equal
    is_ours = not key.startswith("torch_")
    for buffer in model.buffers() if is_ours else ():
        buffer.add_(rank)
    with engine_of(key, num_ranks, model, loop.optimizer, mesh=mesh, **options_of(key, kind), **options) as engine:
        for step in range(STEPS):
            total = sum(micro_step(engine, kind, loop, step, number) for number in range(loop.micro_batches))
            if loop.clip is not None:
                result.norms.append(float(engine.clip_grad_norm_(loop.clip, loop.norm_type)))
            if loop.evaluates:
                with torch.no_grad():
                    engine(own_batch(engine, kind, step)[0])
            engine.step()
            engine.zero_grad()
            engine.mean_over_ranks(total, tag="loss")
            result.losses.append(float(total))
        assert engine.num_steps == STEPS
        result.state = engine.full_state_dict()
    if is_ours:
        assert_states([model.state_dict()], result.state, atol=0)
        x, y = own_batch(engine, kind)
        cases.loss_of(model(x), y).backward()  # alone again
    return result


def micro_step(engine, kind, loop, step, number):
    x, y = own_batch(engine, kind, step, number)
    is_quiet = loop.quiet and number < loop.micro_batches - 1
    with engine.no_sync() if is_quiet else contextlib.nullcontext():
        loss = cases.loss_of(engine(x), y) / loop.micro_batches
        loss.backward() if loop.plain else engine.backward(loss)
    if loop.evaluates:
        with torch.no_grad() if number % 2 else contextlib.nullcontext():
            engine(x)
    return loss.detach()


@cache
def reference(kind, loop, num_ranks):
    result = cases.reference(kind, loop.optimizer, num_ranks, STEPS, loop.micro_batches, loop.clip, loop.norm_type)
    assert loop.clip is None or max(result.norms) > loop.clip, "the clip must bite, or the test shows nothing"
    return result


@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_equals_one_process(pools, key, num_ranks):
    number = PLACES.index((key, num_ranks))
    every = 4 if key in OTHER_CUTS else 2
    if key in MAIN:
        every = 1 if num_ranks == 3 else 4
    todo = [
        (kind, LOOPS[(3 * (place // every) + number) % len(LOOPS)], {"guards": (place // every + number) % 2 == 0})
        for place, kind in enumerate(cases.MODELS)
        if (place + number) % every == 0
    ]
    assert_equal(pools(num_ranks).run(train_all, key, todo), todo, num_ranks)


def assert_equal(results_by_rank, todo, num_data_ranks):
    """What ``train_all`` has returned is what one process has come to."""
    for rank, results in enumerate(results_by_rank):
        for (kind, loop, options), result in zip(todo, results, strict=True):
            where, expected = f"{kind} by {loop} with {options}, rank {rank}", reference(kind, loop, num_data_ranks)
            assert result.losses == pytest.approx(expected.losses, abs=1e-10), where
            assert result.norms == pytest.approx(expected.norms, abs=1e-10), where
            assert_states([result.state], expected.state)


class WithoutElements(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.nothing = torch.nn.Parameter(torch.empty(0))

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
        expected = cases.reference(kind, "adamw", 1, steps=2, clip=0.05)
        result = cases.Result()
        with build_engine(strategy, cases.build(kind), cases.OPTIMIZERS["adamw"], **options) as built:
            for step in range(2):
                x, y = cases.rows(kind, step, 0, 1)
                loss = cases.loss_of(built(x), y)
                built.backward(loss)
                result.losses.append(float(loss.detach()))
                result.norms.append(float(built.clip_grad_norm_(0.05)))
                built.step()
                built.zero_grad()
            assert_states([built.full_state_dict()], expected.state, atol=0)
        assert (result.losses, result.norms) == (expected.losses, expected.norms)
