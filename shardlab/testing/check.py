"""Whether a strategy equals one process, and what differs first where it does not.

    class MyStrategy(Bucketed): ...

    print(check_strategy(MyStrategy))

Each model of ``nasty_models`` is trained at 2 and 3 ranks, by five loops: plain; micro-batches with ``no_sync()`` and
clipping; ``loss.backward()`` with evaluations between backward and step; two backwards that both send, and weights
written inside ``full_params(keep_changes=True)``; and one with frozen parameters, which saves a checkpoint that one of
our strategies loads, loads another that this has saved, and unfreezes all. One process trains on all rows meanwhile.
Whatever the strategy's ``bucket_bytes``, each model has several buckets. Every message must be waited for, something
must travel over each of the strategy's axes, whatever has memory of parameters and gradients must be in
``holdings()``, and each element of a parameter is to be stepped by as many ranks, as ``divisions()`` say. Not tried:
precisions, checkpointed activations.

A strategy that rounds what it sends differs by that. Let the dtype on the wire be an argument, and check it unrounded
first: within a ``tolerance`` for 16 bits much that is wrong goes unseen.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlab.comm.mesh import Mesh
from shardlab.comm.same_on_all_ranks import share_json
from shardlab.engines import Strategy
from shardlab.engines.guards.strategy_checks import check_strategy as refuse_no_strategy
from shardlab.launch import RankPool
from shardlab.testing.loops import LOOPS, STEPS, Loop, Trained, alone, train
from shardlab.testing.nasty_models import MODELS
from shardlab.vocabulary import class_of


class Verdict(NamedTuple):
    """What a rank says of a loop.

    Attributes:
        failure: what differs first; empty if nothing does by more than the tolerance.
        largest: the largest difference.
        place: of what.
    """

    failure: str
    largest: float
    place: str


def check_strategy(
    make: Callable[[], Strategy],
    ranks: Sequence[int] = (2, 3),
    models: Sequence[str] = tuple(MODELS),
    tolerance: float = 1e-10,
    mesh: Mapping[str, int] | None = None,
    loops: Sequence[Loop] = LOOPS,
) -> str:
    """Train nasty models under a strategy and in one process.

    Args:
        make: returns a new strategy; the class itself will do.
        ranks: numbers of ranks to try; for a strategy of two axes, such as FSDP in groups, numbers that are no primes.
        models: names of ``nasty_models.MODELS``.
        tolerance: by how much a loss, a norm or an element of a parameter may differ, in float64: of 1, or of the
            largest element where that is above 1. What training leaves as it was must not differ at all.
        mesh: sizes of the strategy's axes by name, instead of ``ranks``; an axis of one rank is right too.
        loops: those to train in; by default all.

    Returns:
        A sentence that says what was equal.

    Raises:
        ValueError: an unknown model; a strategy, of which each engine needs one of its own; one whose ranks differ by
            design; or a number of ranks that does not divide into its axes.
        AssertionError: something differs; the message says what differs first.
        RankError: the strategy raised.
        RankHang: ranks waited for each other, in different messages.
    """
    axes = [_axes_of(make, num_ranks, mesh) for num_ranks in (ranks if mesh is None else [prod(mesh.values())])]
    if unknown := sorted(set(models) - MODELS.keys()):
        raise ValueError(f"models: {unknown[0]!r} is not one of {', '.join(MODELS)}")
    largest, place = 0.0, ""
    for sizes in axes:
        num_ranks = prod(sizes.values())
        with RankPool(num_ranks, timeout_s=30.0) as pool, tempfile.TemporaryDirectory() as directory:
            for model in models:
                # All ranks have the verdicts of all.
                said = pool.run(_try, make, sizes, model, tolerance, directory, loops)[0]
                for loop, verdicts in zip(loops, said, strict=False):
                    where = f"at {num_ranks} ranks, model {model!r}, {loop.name}"
                    for rank, verdict in enumerate(verdicts):
                        if verdict.failure:
                            raise AssertionError(f"{where}, rank {rank}: {verdict.failure}")
                        if verdict.largest > largest:
                            largest, place = verdict.largest, f", of {verdict.place} {where}"
    counts = " and ".join(str(prod(sizes.values())) for sizes in axes)
    tried = f"{len(models)} model{'s' * (len(models) != 1)}, {len(loops)} loops, {counts} ranks"
    return f"equal to one process: {tried}; the largest difference is {largest:.1e}{place}"


def _axes_of(make: Callable[[], Strategy], num_ranks: int, mesh: Mapping[str, int] | None) -> dict[str, int]:
    """The mesh for a strategy."""
    if isinstance(make, Strategy):
        raise ValueError(
            f"make: a strategy was given; give its class {type(make).__name__}, or a function that makes one"
        )
    strategy: Any = make()
    if not isinstance(strategy, Strategy):
        raise ValueError(f"make: it returned {class_of(strategy)}; give a function that returns a new Strategy")
    refuse_no_strategy(strategy)
    if strategy.ranks_differ:
        raise ValueError(
            f"make: ranks of {strategy.name!r} differ by design (ranks_differ), so nothing must equal one process; "
            "compare(...) shows how far they are from it"
        )
    if mesh is not None:
        if missing := [str(axis) for axis in strategy.axes if axis not in mesh]:
            raise ValueError(f"mesh: {dict(mesh)} has no axis {missing[0]!r}, over which {strategy.name!r} averages")
        return dict(mesh)
    if len(strategy.axes) == 1:
        return {strategy.axes[0]: num_ranks}
    inner = next((size for size in range(num_ranks // 2, 1, -1) if num_ranks % size == 0), 0)
    if len(strategy.axes) > 2 or not inner:
        raise ValueError(
            f"ranks: {num_ranks} do not divide into the axes {' and '.join(strategy.axes)}, each of 2 or more; for two "
            "axes give ranks=(4,)"
        )
    return {strategy.axes[0]: num_ranks // inner, strategy.axes[1]: inner}


def _try(
    rank: int, make: Callable[[], Strategy], axes: dict[str, int], model: str, tolerance: float, directory: str,  # noqa: ARG001
    loops: Sequence[Loop],
) -> list[list[Verdict]]:  # fmt: skip
    with Mesh(axes) as mesh:
        return try_loops(mesh, make, model, tolerance, Path(directory) / model, loops)


def try_loops(
    mesh: Mesh, make: Callable[[], Strategy], model: str, tolerance: float, directory: Path, loops: Sequence[Loop] =
    LOOPS,
) -> list[list[Verdict]]:  # fmt: skip
    """What all ranks say of each loop, to the first in which something differs; called by every rank of the mesh."""
    found: list[list[Verdict]] = []
    for loop in loops:
        expected = alone(model, loop, len(mesh.ranks))
        try:
            trained = train(mesh, make, model, loop, directory)
        except Exception as error:
            error.add_note(f"check_strategy: model {model!r}, {loop.name}")
            raise
        shared = share_json(mesh.communicators, mesh.device, [_verdict(trained, expected, tolerance), trained.owned])
        verdicts = [Verdict(*verdict) for verdict, _ in shared]
        if unequal := _stepped_unequally([owned for _, owned in shared], expected.begins):
            verdicts[0] = verdicts[0]._replace(failure=verdicts[0].failure or unequal)
        found.append(verdicts)
        if any(each.failure for each in verdicts):
            break
    return found


def _verdict(found: Trained, expected: Trained, tolerance: float) -> Verdict:
    if failure := found.fault or _dead(found, expected) or _stepped_unused(found, expected):
        return Verdict(failure, 0.0, "")
    largest, place = 0.0, ""
    for step, what, one, other in _numbers(found, expected):
        scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        difference = float((one - other).abs().max()) / scale if one.numel() else 0.0
        if not difference <= tolerance:
            return Verdict(f"after step {step}, {what} differs from one process by {difference:.1e}", 0.0, "")
        if difference > largest:
            largest, place = difference, what
    return Verdict("", largest, place)


def _dead(found: Trained, expected: Trained) -> str:
    """A sentence if nothing was trained, of which a tolerance may see nothing; else empty."""
    one = expected.states
    moved = [name for name, value in one[-1].items() if not torch.equal(value, one[0][name])]
    if not moved or any(not torch.equal(found.states[-1][name], found.states[0][name]) for name in moved):
        return ""
    return (
        f"nothing is trained: {moved[0]!r} and all other parameters stay what they were after the first step; means "
        "belong at the .grad of the tensors that lay_out() returned"
    )


def _stepped_unused(found: Trained, expected: Trained) -> str:
    """A sentence if something has changed, by however little, that a step in one process leaves alone; else empty."""
    befores = [expected.begins, *found.loaded, *found.states[len(found.loaded) :]]
    for step, (one, own) in enumerate(zip([expected.begins, *expected.states[:-1]], befores, strict=False)):
        for name, value in expected.states[step].items():
            if torch.equal(value, one[name]) and not torch.equal(found.states[step][name], own[name]):
                why = UNUSED if name in expected.without_gradient[step] else "it is frozen, or a buffer"
                return f"in step {step}, {name!r} has changed, which one process leaves as it is: {why}"
    return ""


UNUSED = (
    "no rank used it, so it has no gradient, and neither momentum nor weight decay moves it; the engine clears the "
    "'.grad' of what lay_out() has returned as stepped, so the mean of this parameter must be there"
)


def _stepped_unequally(owned: Sequence[Mapping[str, tuple[int, int]]], params: Mapping[str, Tensor]) -> str:
    """A sentence if ranks step some elements of a parameter less often than others; else empty.

    Args:
        owned: by rank, the elements (start, stop) that it steps of each parameter.
        params: whole.
    """
    for name in owned[0]:
        num_owners = torch.zeros(params[name].numel())
        for start, stop in (each[name] for each in owned):
            num_owners[start:stop] += 1
        if len(others := (num_owners != num_owners[0]).nonzero()):
            return (
                f"divisions(): they give elements of {name!r} to different numbers of ranks, from or to element "
                f"{int(others[0])} of {params[name].numel()}; each needs as many"
            )
    return ""


def _numbers(found: Trained, expected: Trained) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    """The step, what, and both numbers, in the order in which they come."""
    for step in range(STEPS):
        if expected.norms:
            yield step, "the norm of the gradients", _number(found.norms[step]), _number(expected.norms[step])
        yield step, "the loss", _number(found.losses[step]), _number(expected.losses[step])
        for name, value in expected.states[step].items():
            yield step, f"parameter {name!r}", found.states[step][name].double(), value.double()
            if step < len(found.loaded):
                loader = "one of ours" if step == 0 else "it"
                what = f"parameter {name!r} of a checkpoint that {loader} loads"
                yield step, what, found.loaded[step][name].double(), value.double()


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
