"""Whether a strategy equals one process, and what differs first where it does not.

    class MyStrategy(Bucketed): ...

    print(check_strategy(MyStrategy))

Each model of ``nasty_models`` is trained at 2 and 3 ranks, by four loops: plain; micro-batches with ``no_sync()`` and
clipping; ``loss.backward()`` with evaluations between backward and step; two backwards that both send, and weights
written inside ``full_params(keep_changes=True)``. One process trains on all rows meanwhile. ``holdings()`` must name
whatever has memory of parameters and gradients. Not tried: checkpoints, precisions, checkpointed activations.

A strategy that rounds what it sends differs by that. Let the dtype on the wire be an argument, and check it unrounded
first: within a ``tolerance`` for 16 bits much that is wrong goes unseen.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import Engine, Strategy
from shardlab.launch import RankPool
from shardlab.testing.nasty_models import MODELS, SmallGPT

ROWS_PER_RANK = 2
STEPS = 4


class Loop(NamedTuple):
    """How a model is trained.

    Attributes:
        name: for the report.
        micro_batches: per step.
        clip: the largest norm of the gradients; None without clipping.
        is_plain: whether ``loss.backward()`` is called, and the model evaluated between backward and step.
        sends_all: every micro-batch, and not only the last; and the weights are halved after each step.
    """

    name: str
    micro_batches: int = 1
    clip: float | None = None
    is_plain: bool = False
    sends_all: bool = False


LOOPS = (
    Loop("a plain loop"),
    Loop("micro-batches inside no_sync(), clipped", 3, 0.05),
    Loop("loss.backward(), evaluated before the step", 2, 0.05, is_plain=True),
    Loop("two backwards that send, weights written by hand", 2, sends_all=True),
)


@dataclass
class Trained:
    """What a loop has computed, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    begins: dict[str, Tensor] = field(default_factory=dict)


def check_strategy(
    make: Callable[[], Strategy],
    ranks: Sequence[int] = (2, 3),
    models: Sequence[str] = tuple(MODELS),
    tolerance: float = 1e-10,
) -> str:
    """Train nasty models under a strategy and in one process.

    Args:
        make: returns a new strategy; the class itself will do.
        ranks: numbers of ranks to try.
        models: names of ``nasty_models.MODELS``.
        tolerance: by how much a loss, a norm or an element of a parameter may differ, in float64: of 1, or of the
            largest element where that is above 1. What training leaves as it was must not differ at all.

    Returns:
        A sentence that says what was equal.

    Raises:
        ValueError: an unknown model; or a strategy, of which each engine needs one of its own.
        AssertionError: something differs; the message says what differs first.
        RankError: the strategy raised.
        RankHang: ranks waited for each other, in different messages.
    """
    if isinstance(make, Strategy):
        raise ValueError(
            f"make: a strategy was given; give its class {type(make).__name__}, or a function that makes one"
        )
    if unknown := sorted(set(models) - MODELS.keys()):
        raise ValueError(f"models: {unknown[0]!r} is not one of {', '.join(MODELS)}")
    largest, place = 0.0, ""
    for num_ranks in ranks:
        with RankPool(num_ranks, timeout_s=30.0) as pool:
            for model in models:
                for loop in LOOPS:
                    where = f"at {num_ranks} ranks, model {model!r}, {loop.name}"
                    expected = _alone(model, loop, num_ranks)
                    for rank, found in enumerate(pool.run(_train, make, model, loop)):
                        difference, what = _differs(found, expected, f"{where}, rank {rank}", tolerance)
                        if difference > largest:
                            largest, place = difference, f", of {what} {where}"
    tried = f"{len(models)} models, {len(LOOPS)} loops, {' and '.join(map(str, ranks))} ranks"
    return f"equal to one process: {tried}; the largest difference is {largest:.1e}{place}"


def _train(rank: int, make: Callable[[], Strategy], model: str, loop: Loop) -> Trained:
    num_ranks, trained = torch.distributed.get_world_size(), Trained()
    with Mesh({"data": num_ranks}) as mesh:
        # Ranks that start different must end equal.
        module = _built(model, seed=rank)
        with Engine(module, _optimizer, mesh, make()) as engine:
            for step in range(STEPS):
                total = torch.zeros((), dtype=torch.float64)
                for number in range(loop.micro_batches):
                    x, y = (
                        part[rank * ROWS_PER_RANK :][:ROWS_PER_RANK] for part in _rows(model, step, number, num_ranks)
                    )
                    is_sent = loop.sends_all or number == loop.micro_batches - 1
                    with contextlib.nullcontext() if is_sent else engine.no_sync():
                        loss = _loss(engine(x), y) / loop.micro_batches
                        loss.backward() if loop.is_plain else engine.backward(loss)
                    total += loss.detach()
                if loop.clip is not None:
                    trained.norms.append(float(engine.clip_grad_norm_(loop.clip)))
                if loop.is_plain:
                    with torch.no_grad():
                        engine(x)
                engine.step()
                _check_holdings(engine)
                engine.zero_grad()
                if loop.sends_all:
                    with engine.full_params(keep_changes=True) as whole:
                        _halve(whole)
                trained.losses.append(float(engine.mean_over_ranks(total, tag="loss")))
                trained.states.append(engine.full_state_dict())
    return trained


def _alone(model: str, loop: Loop, num_ranks: int) -> Trained:
    """The same training by plain torch, on the rows of all ranks."""
    module, trained = _built(model, seed=0), Trained()
    trained.begins = {name: value.detach().clone() for name, value in module.state_dict().items()}
    optimizer = _optimizer(list(module.parameters()))
    for step in range(STEPS):
        total = 0.0
        for number in range(loop.micro_batches):
            x, y = _rows(model, step, number, num_ranks)
            loss = _loss(module(x), y) / loop.micro_batches
            loss.backward()
            total += float(loss.detach())
        trained.losses.append(total)
        if loop.clip is not None:
            trained.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), loop.clip)))
        optimizer.step()
        optimizer.zero_grad()
        if loop.sends_all:
            _halve(module)
        trained.states.append({name: value.detach().clone() for name, value in module.state_dict().items()})
    return trained


def _halve(module: nn.Module) -> None:
    for param in module.parameters():
        param.data = param.data / 2  # which ``full_params(keep_changes=True)`` promises to keep, as writes in place


def _check_holdings(engine: Engine) -> None:
    """Check that whatever has memory of a parameter, a piece or a gradient is in one of ``holdings()``."""
    held = {holding.tensor.untyped_storage().data_ptr() for holding in engine.holdings()}
    for name, tensor in (*engine.params.items(), *engine.step_tensors().items()):
        for what, one in (("the parameter", tensor), ("the gradient", tensor.grad)):
            if one is not None and one.untyped_storage().nbytes() >= one.numel() * one.element_size() > 0:
                assert one.untyped_storage().data_ptr() in held, (
                    f"holdings() of {engine.name!r}: {what} of {name!r} is in none, so that no table would count it"
                )


def _differs(found: Trained, expected: Trained, where: str, tolerance: float) -> tuple[float, str]:
    """The largest difference, and of what; raises for the first that is too large."""
    largest, place = 0.0, ""
    for step, what, one, other in _numbers(found, expected):
        scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        difference = float((one - other).abs().max()) / scale if one.numel() else 0.0
        if not difference <= tolerance:
            raise AssertionError(f"{where}: after step {step}, {what} differs from one process by {difference:.1e}")
        if difference > largest:
            largest, place = difference, what
    for name, value in found.states[-1].items():
        if torch.equal(expected.states[-1][name], expected.begins[name]) and not torch.equal(
            value, expected.begins[name]
        ):
            raise AssertionError(
                f"{where}: {name!r} is what it was in one process, where no gradient came to it; here it was stepped"
            )
    return largest, place


def _numbers(found: Trained, expected: Trained) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    for step in range(STEPS):
        if expected.norms:
            yield step, "the norm of the gradients", _number(found.norms[step]), _number(expected.norms[step])
        yield step, "the loss", _number(found.losses[step]), _number(expected.losses[step])
        for name, value in expected.states[step].items():
            yield step, f"parameter {name!r}", found.states[step][name].double(), value.double()


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _built(model: str, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[model]().double()


def _optimizer(tensors: object) -> torch.optim.Optimizer:
    # Adam forgives a gradient that is off by a factor; this does not, nor one that is 0 where nobody used a parameter.
    return torch.optim.SGD(tensors, lr=1e-2, momentum=0.9, weight_decay=0.1)  # type: ignore[arg-type]


def _rows(model: str, step: int, micro_batch: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """The rows of all ranks; the first feature's sign, by which ``Unused`` chooses, differs by row, so also by rank."""
    generator, num_rows = torch.Generator().manual_seed(1000 * step + micro_batch), num_ranks * ROWS_PER_RANK
    if MODELS[model] is SmallGPT:
        tokens = torch.randint(0, 11, (num_rows, 7), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(num_rows, 7, generator=generator, dtype=torch.float64)
    x[:, 0] = -x[:, 0].abs()
    if step % 2:
        x[-1, 0] = 1.0  # used by some ranks in odd steps, by none in even ones
    return x, torch.randn(num_rows, 5, generator=generator, dtype=torch.float64)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    if target.dtype == torch.int64:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
    return nn.functional.mse_loss(output, target)
