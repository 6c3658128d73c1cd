"""One scenario on all ranks, held against one process; and what the ranks' answers mean together."""

import contextlib
import logging
import pickle
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardlab.comm.mesh import Mesh
from shardlab.launch import RankError, RankHang, RankPool, current
from tests.fuzzing.checks import checks_after_close, deep_checks, differences, local_checks
from tests.fuzzing.engines import PEERS, EngineSpec, OptimizerSpec
from tests.fuzzing.modules import ModuleSpec, Planted
from tests.fuzzing.operations import Operation
from tests.fuzzing.states import Save
from tests.fuzzing.world import Ours, Plain, World

DOCUMENTED = (
    # Units that only some ranks use.
    r"\(parameters of .*\) on rank \d of the group meets ",
    r" on rank \d of the group meets .*\(parameters of ",
    r"it comes in parts.*use_reentrant=False",
    r"the layout over ranks is fixed; build a new",
    r"load: leave 'with engine\.full_params\(\):' first",
)
"""Refusals that the package documents, of what plain torch does; others are in ``_is_documented``."""


@dataclass(frozen=True)
class Scenario:
    """What is trained, by what, and what the user does.

    Attributes:
        module: see ``ModuleSpec``.
        engine: see ``EngineSpec``.
        optimizer: see ``OptimizerSpec``.
        operations: in order; afterwards the engine is closed and its module trains alone.
        deep: the whole state is put together after every operation, not only at the end.
    """

    module: ModuleSpec
    engine: EngineSpec
    optimizer: OptimizerSpec = OptimizerSpec()  # noqa: RUF009 - it is frozen
    operations: tuple[Operation, ...] = ()
    deep: bool = False


class Different(AssertionError):  # noqa: N818 - it is an answer
    """A rank has found that the engine is not as one process."""


@dataclass(frozen=True)
class Verdict:
    """Of a whole scenario.

    Attributes:
        kind: 'equal', 'refused' (as documented), 'different', 'hang', 'crash' or 'apart' (ranks answer differently).
        text: what, in words.
        at: number of the operation; None where it is not known.
        steps: of every operation that was done, its kind and what came of it.
    """

    kind: str
    text: str = ""
    at: int | None = None
    steps: tuple[tuple[str, str], ...] = ()

    @property
    def is_find(self) -> bool:
        """Whether it is neither equal nor refused as documented."""
        return self.kind not in ("equal", "refused")

    @property
    def signature(self) -> tuple[str, str]:
        """What two verdicts of one fault have in common, roughly."""
        words = re.sub(r"[-+]?\d[\d.e+-]*|'[^']*'|\b(enter|leave|blocks|spare)[\w.]*", "", self.text.splitlines()[0])
        return self.kind, words[:60]


_MESHES: dict[Any, Mesh] = {}  # of this rank, kept between scenarios, for a mesh takes longer than a step


def run_scenario(pool: RankPool, scenario: Scenario) -> Verdict:
    """The verdict over all ranks of the pool."""
    saves = any(isinstance(operation, Save) for operation in scenario.operations)
    directory = tempfile.mkdtemp(prefix="fuzz-") if saves else None
    progress: dict[int, int] = {}
    try:
        results = pool.run(_by_name, pickle.dumps((scenario, directory)), on_message=progress.__setitem__)
    except RankHang as error:
        return Verdict("hang", _first_line(error), max(progress.values(), default=None))
    except RankError as error:
        return Verdict("crash", _first_line(error), progress.get(error.rank))
    finally:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
    return _together(results)


def _by_name(rank: int, call: bytes) -> list[tuple[str, str]]:
    """Ranks import this package once; a pool would otherwise send its code, by value, with each call."""
    import pickle

    from tests.fuzzing.run import on_rank

    return on_rank(rank, *pickle.loads(call))


def _together(results: Sequence[list[tuple[str, str]]]) -> Verdict:
    """All ranks must have done the same and been answered alike."""
    steps = tuple(results[0])
    for place, answers in enumerate(zip(*results, strict=False)):
        for rank, (_, answer) in enumerate(answers):
            if answer.startswith(("different", "crash")):
                kind, _, text = answer.partition(": ")
                return Verdict(kind, f"rank {rank}: {text}", place, steps)
        if len({answer.split(":")[0] for _, answer in answers}) > 1:
            return Verdict("apart", f"ranks were answered {[answer for _, answer in answers]}", place, steps)
    refused = next((answer for _, answer in steps if answer.startswith("refused")), "")
    return Verdict("refused" if refused else "equal", refused, None, steps)


def on_rank(rank: int, scenario: Scenario, directory: str | None) -> list[tuple[str, str]]:
    """Do the scenario up to the first operation that is not answered equal; of each its kind and what came of it."""
    with _quietly():
        done: list[tuple[str, str]] = []
        control = _control(scenario.engine)
        world = _begin(rank, scenario, directory)
        if isinstance(world, str):
            return [("build", world)]
        worst = 0
        for number, operation in enumerate(scenario.operations):
            current().emit(number)
            answer = _answer(partial(_do, world, operation, scenario.deep))
            done.append((type(operation).__name__, answer))
            worst = _worst(control, answer)
            if worst:
                break
        if worst < BAD:
            done.append(("end", _answer(partial(_end, world))))
            worst = max(worst, _worst(control, done[-1][1]))
        if worst:
            _MESHES.pop(_key(scenario.engine), None)  # something may be left in it
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


def close_meshes(pool: RankPool) -> None:
    """Leave nothing in the ranks of a pool that others go on using."""
    pool.run(_close_by_name)


def _close_by_name(rank: int) -> None:
    from tests.fuzzing.run import _MESHES

    while _MESHES:
        _MESHES.popitem()[1].close()


def _begin(rank: int, scenario: Scenario, directory: str | None) -> World | str:
    """Both sides; or, where an engine of torch cannot bear this module, what it says."""
    mesh = _mesh_of(scenario.engine)
    try:
        ours = Ours(scenario.engine, scenario.module, scenario.optimizer, mesh, rank)
    except ValueError as error:
        if scenario.engine.name in PEERS:
            return f"refused: {_line(error)}"
        raise
    plain = Plain(scenario.module, scenario.optimizer, scenario.engine.num_ranks)
    return World(ours, plain, None if directory is None else Path(directory))


def _answer(look: Callable[[], str]) -> str:
    try:
        return look()
    except Different as error:
        return f"different: {error}"
    except Exception as error:
        return f"crash: {type(error).__name__}: {_line(error)}"


BAD = 2


def _code(answer: str) -> int:
    """0 to go on, 1 to end here, 2 for what must not be."""
    return BAD if answer.startswith(("different", "crash")) else int(answer.startswith("refused"))


def _worst(control: Mesh | None, answer: str) -> int:
    """The ranks tell each other, so that none goes on alone; where they were answered apart that is bad."""
    code = torch.tensor([float(_code(answer)), -float(_code(answer))], dtype=torch.float64)
    if control is not None:
        control.data.all_reduce(code, reduction="max", tag="answer").wait()
    return BAD if code[0] != -code[1] else int(code[0])


def _do(world: World, operation: Operation, deep: bool) -> str:
    """Do an operation on both sides and look; what came of it."""
    if not operation.applies(world):
        return "skipped"
    before = world.snapshot()
    ours = _attempt(operation.ours, world)
    if operation.is_habit and isinstance(ours, Exception):
        return "declined: " + _check_refusal(ours)
    plain = _attempt(operation.plain, world)
    if isinstance(ours, Exception) and isinstance(plain, Exception):
        world.recover()
        _raise_first(operation, _looks(world, deep))
        return "raised alike"
    if isinstance(plain, Exception):
        raise Different(f"{operation}: plain torch refuses it ({_line(plain)}), the engine does not")
    if isinstance(ours, Exception):
        if not _is_documented(ours, world):
            raise Different(f"{operation}: refused, as plain torch does not: {type(ours).__name__}: {_line(ours)}")
        world.plain.load(before)
        world.recover()
        return f"refused: {_line(ours)}"
    operation.after(world)
    _raise_first(operation, differences(ours, plain))
    _raise_first(operation, _looks(world, deep))
    return "equal"


def _end(world: World) -> str:
    """Look at everything, close, and train alone."""
    for name in sorted(world.held):
        world.ours.engine.reshard(name)  # type: ignore[attr-defined]
    _raise_first("the end", deep_checks(world))
    world.ours.engine.close()
    for comm in world.ours.mesh.communicators:  # nothing is left in them that another rank never sent
        number = torch.ones(1, dtype=torch.float64)
        comm.all_reduce(number, tag="after close()").wait()
        _raise_first("close()", [] if number.item() == comm.num_ranks else ["ranks have mixed up their collectives"])
    if not world.ours.spec.name.startswith("torch_fsdp2"):
        _raise_first("close()", checks_after_close(world))
    return "equal"


def _looks(world: World, deep: bool) -> Iterator[str]:
    yield from local_checks(world)
    if deep:
        yield from deep_checks(world)


def _attempt(side: Any, world: World) -> Any:
    try:
        return side(world)
    except (ValueError, RuntimeError, ArithmeticError, NotImplementedError) as error:
        return error


def _raise_first(operation: Any, texts: Iterable[str]) -> None:
    found = list(texts)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise Different(f"after {operation}: {found[0]}{more}")


def _is_documented(error: Exception, world: World) -> bool:
    """Whether the package documents that it refuses this, here."""
    if isinstance(error, Planted):
        return False
    if "modified by an inplace operation" in str(error):
        return world.may_clash
    return any(re.search(pattern, str(error)) for pattern in DOCUMENTED)


def _check_refusal(error: Exception) -> str:
    """A habit may be refused, in a sentence that says what to write instead."""
    if "engine." not in str(error):
        raise Different(f"a refusal that does not say what to write instead: {_line(error)}") from error
    return _line(error)


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def _key(spec: EngineSpec) -> Any:
    return spec.axes, spec.transport


def _mesh_of(spec: EngineSpec) -> Mesh:
    """The ranks' mesh; it is kept, but for torch's engines, which make groups of their own in it."""
    if spec.num_ranks == 1:
        return Mesh(dict(spec.axes))
    if spec.name.startswith("torch"):
        return Mesh(dict(spec.axes), transport=spec.transport)
    if _key(spec) not in _MESHES:
        _MESHES[_key(spec)] = Mesh(dict(spec.axes), transport=spec.transport)
    return _MESHES[_key(spec)]


def _control(spec: EngineSpec) -> Mesh | None:
    """A mesh beside the engine's, over which the ranks tell each other how they were answered."""
    if spec.num_ranks > 1 and "control" not in _MESHES:
        _MESHES["control"] = Mesh({"data": spec.num_ranks})
    return _MESHES.get("control")
