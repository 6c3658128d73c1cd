"""What one rank of the pool does of a scenario, in step with the others."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from shardlab.launch import current
from tests.fuzzing.checks import checks_after_close, deep_checks, differences, local_checks
from tests.fuzzing.engines import PEERS
from tests.fuzzing.meshes import Meshes
from tests.fuzzing.operation import Operation

from tests.fuzzing.refusals import (  # isort: skip
    Different, check_refusal, first_line, has_met, is_about_optimizer, is_documented, refuses_at_once,
)  # fmt: skip
from tests.fuzzing.run import Scenario
from tests.fuzzing.states import FullParams
from tests.fuzzing.training import Backward, ScaledStep
from tests.fuzzing.world import Ours, Plain, World, copied

ROUNDED = 1e-4  # float32 beside float64, over some steps
NORMED = 1e-3  # the same through BatchNorm, whose few rows may lie close together
EXACT = 1e-10
BAD = 2


def on_rank(rank: int, scenario: Scenario, directory: str | None) -> list[tuple[str, str]]:
    """Do the scenario up to the first operation that is not answered equal; of each its kind and what came of it."""
    with _quietly():
        meshes = Meshes(rank, scenario.num_ranks)
        world = _begin(meshes, scenario, directory)
        if isinstance(world, str):
            return [("build", world)]
        done: list[tuple[str, str]] = []
        worst = 0
        for number, operation in enumerate(scenario.operations):
            current().emit(number)
            answer = _answer(partial(_do, world, operation, scenario.deep))
            done.append((type(operation).__name__, answer))
            worst = _worst(meshes, answer)
            if worst:
                break
        if worst < BAD:
            done.append(("end", _answer(partial(_end, world))))
            worst = max(worst, _worst(meshes, done[-1][1]))
            meshes.close_those_of_torch()
        if worst:
            meshes.forget()
        return done


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the warnings that a scheduler, a reentrant checkpoint or torch's engines have for a random user."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _begin(meshes: Meshes, scenario: Scenario, directory: str | None) -> World | str:
    """Both sides; or what an engine says that cannot bear this module or optimizer."""
    mesh, refused = meshes.of(scenario.engine), ""
    try:
        ours = Ours(scenario.engine, scenario.module, scenario.optimizer, mesh)
    except (ValueError, NotImplementedError) as error:
        if scenario.engine.name not in PEERS and not is_about_optimizer(error, scenario.optimizer.kind):
            raise
        refused = f"refused: {first_line(error)}"
    if meshes.largest([bool(refused)])[0]:
        return refused or ("refused" if not mesh.is_member else "different: other ranks refuse the engine")
    plain = Plain(scenario.module, scenario.optimizer, scenario.engine.num_data_ranks)
    rounded = NORMED if any(block.kind == "batchnorm" for block in scenario.module.blocks) else ROUNDED
    tolerance = rounded if any(engine.rounds for engine in scenario.engines) else EXACT
    return World(ours, plain, meshes, None if directory is None else Path(directory), tolerance)


def _answer(look: Callable[[], str]) -> str:
    try:
        return look()
    except Different as error:
        return f"different: {error}"
    except Exception as error:
        return f"crash: {type(error).__name__}: {first_line(error)}"


def _worst(meshes: Meshes, answer: str) -> int:
    """0 to go on, 1 to end here, 2 for what must not be; also where the ranks were answered apart.

    The ranks tell each other, so that none goes on alone.
    """
    code = BAD if answer.startswith(("different", "crash")) else int(answer.startswith("refused"))
    largest, smallest = meshes.largest([code, -code])
    return BAD if largest != -smallest else int(largest)


def _do(world: World, operation: Operation, deep: bool) -> str:
    """Do an operation on both sides and look; what came of it."""
    if not operation.applies(world):
        return "skipped"
    before, optimizer = world.plain.states(), copied(world.plain.optimizer.state_dict())
    operation.prepare(world)
    takes_part = operation.takes_part(world)
    if operation.drops:
        world.ours.losses.clear()
    ours = _attempt(operation.ours, world) if takes_part else {}
    if world.meshes.largest([isinstance(ours, Exception)])[0] and not takes_part:
        ours = RuntimeError("another rank's")
    if operation.is_habit and isinstance(ours, Exception):
        return "declined: " + (check_refusal(ours) if takes_part else "")
    if operation.drops:
        world.plain.losses.clear()
    plain = _attempt(operation.plain, world)
    if isinstance(ours, Exception) and isinstance(plain, Exception):
        if refuses_at_once(ours):
            # Which has written into buffers, or has stepped, before it raised.
            world.plain.restore(before)
            world.plain.optimizer.load_state_dict(optimizer)
        elif "backward: it was called inside" in str(ours):
            world.restore_buffers()  # refused before it has computed again what plain torch has
        world.recover()
        _raise_first(operation, _looks(world, deep))
        return "raised alike"
    if isinstance(plain, Exception):
        raise Different(f"{operation}: plain torch refuses it ({first_line(plain)}), the engine does not")
    if isinstance(ours, Exception):
        if takes_part and not is_documented(ours, world):
            raise Different(f"{operation}: refused, as plain torch does not: {type(ours).__name__}: {first_line(ours)}")
        world.plain.restore(before)  # as it was: a refusal must leave everything so
        if isinstance(operation, Backward | FullParams | ScaledStep):
            world.restore_buffers()
        world.has_met = has_met(ours)
        if not world.has_met:
            world.recover()
        return f"refused: {first_line(ours)}"
    operation.after(world)
    seen = differences(ours, plain, world.tolerance) if world.ours.is_member else ()
    _raise_first(operation, chain(seen, _looks(world, deep)))  # to the end: other ranks are in the same collectives
    return "equal"


def _end(world: World) -> str:
    if world.meshes.largest([world.has_met])[0] or not world.ours.is_member:
        return "equal"
    found = list(deep_checks(world))
    world.ours.engine.close()
    for comm in world.ours.mesh.communicators:  # nothing is left in them that another rank never sent
        number = torch.ones(1, dtype=torch.float64, device=current().device)
        comm.all_reduce(number, tag="after close()").wait()
        found += [] if number.item() == comm.num_ranks else ["ranks have mixed up their collectives"]
    if not world.ours.spec.name.startswith("torch_fsdp2"):
        found += checks_after_close(world)
    _raise_first("the end", found)  # last: another rank, which found nothing, goes through the same collectives
    return "equal"


def _looks(world: World, deep: bool) -> Iterator[str]:
    if not world.ours.is_member:
        return
    yield from local_checks(world)
    if deep and world.gradients != "changed":  # else a refusal may wait, which the look's exchange tells
        yield from deep_checks(world)


def _attempt(side: Any, world: World) -> Any:
    try:
        return side(world) or {}
    except (ValueError, RuntimeError, ArithmeticError, NotImplementedError) as error:
        return error


def _raise_first(operation: Any, texts: Iterable[str]) -> None:
    found = list(texts)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise Different(f"after {operation}: {found[0]}{more}")
