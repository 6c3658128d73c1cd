"""One scenario on all ranks, held against one process; and what the ranks' answers mean together."""

import pickle
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardlab.comm import Mesh
from shardlab.launch import RankError, RankHang, RankPool
from tests.fuzzing.checks import checks_after_close, deep_checks, differences, local_checks
from tests.fuzzing.engines import EngineSpec, OptimizerSpec
from tests.fuzzing.modules import ModuleSpec, Planted
from tests.fuzzing.operations import Operation
from tests.fuzzing.states import Save
from tests.fuzzing.world import Ours, Plain, World

DOCUMENTED = (
    # The docstring of shardlab.engines.base, and of second_backward.
    r"a second loss\.backward\(\) has come while the first is being reduced",
    r"the layout over ranks is fixed; build a new",
    r"load: leave 'with engine\.full_params\(\):' first",
)
"""Refusals of what plain torch does that the package documents. What is not among them is a find."""


@dataclass(frozen=True)
class Scenario:
    """What is trained, by what, and what the user does.

    Attributes:
        module: see ``ModuleSpec``.
        optimizer: see ``OptimizerSpec``.
        engine: see ``EngineSpec``.
        operations: in order; afterwards the engine is closed and its module trains alone.
        deep: the whole state is put together after every operation, not only at the end.
    """

    module: ModuleSpec = ModuleSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    engine: EngineSpec = EngineSpec()
    operations: tuple[Operation, ...] = ()
    deep: bool = False


class Different(AssertionError):
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
        kind = "different" if error.exception_type == "Different" else "crash"
        at = progress.get(error.rank)
        return Verdict(kind, f"rank {error.rank}: {_summary(error)}", at)
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
        if len({kind for _, kind in answers}) > 1 or len({len(result) for result in results}) > 1:
            return Verdict("apart", f"ranks were answered {[kind for _, kind in answers]}", place, steps)
    refused = next((kind for _, kind in steps if kind.startswith("refused")), "")
    return Verdict("refused" if refused else "equal", refused, None, steps)


def on_rank(rank: int, scenario: Scenario, directory: str | None) -> list[tuple[str, str]]:
    """Do the scenario; of every operation its kind and what came of it.

    Raises:
        Different: something is not as in one process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done: list[tuple[str, str]] = []
        mesh = _mesh_of(scenario.engine)
        ours = Ours(scenario.engine, scenario.module, scenario.optimizer, mesh, rank)
        plain = Plain(scenario.module, scenario.optimizer, scenario.engine.num_ranks)
        world = World(ours, plain, None if directory is None else Path(directory))
        for number, operation in enumerate(scenario.operations):
            answer = _do(world, operation, number, scenario.deep)
            done.append((type(operation).__name__, answer))
            if answer.startswith("refused"):
                break
        _end(world)
        return done


def _do(world: World, operation: Operation, number: int, deep: bool) -> str:
    """Do an operation on both sides and look; what came of it."""
    from shardlab.launch import current

    current().emit(number)
    if not operation.applies(world):
        return "skipped"
    before = world.snapshot()
    ours, plain = _attempt(operation.ours, world), None
    if operation.is_habit and isinstance(ours, Exception):
        return "declined: " + _check_refusal(ours)
    plain = _attempt(operation.plain, world)
    if isinstance(ours, Exception) and isinstance(plain, Exception):
        world.recover()
        _raise_first(operation, number, _looks(world, deep))
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
    _raise_first(operation, number, differences(ours, plain))
    _raise_first(operation, number, _looks(world, deep))
    return "equal"


def _end(world: World) -> None:
    """Look at everything, close, and train alone."""
    for name in sorted(world.held):
        world.ours.engine.reshard(name)  # type: ignore[attr-defined]
    _raise_first("the end", -1, deep_checks(world))
    world.ours.engine.close()
    if not world.ours.spec.name.startswith("torch_fsdp2"):
        _raise_first("close()", -1, checks_after_close(world))


def _looks(world: World, deep: bool) -> Iterator[str]:
    yield from local_checks(world)
    if deep:
        yield from deep_checks(world)


def _attempt(side: Any, world: World) -> Any:
    try:
        return side(world)
    except (ValueError, RuntimeError, ArithmeticError, NotImplementedError) as error:
        return error


def _raise_first(operation: Any, number: int, texts: Iterator[str]) -> None:
    found = list(texts)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise Different(f"after {operation}: {found[0]}{more}")


def _is_documented(error: Exception, world: World) -> bool:
    if isinstance(error, Planted):
        return False
    if world.may_clash and "modified by an inplace operation" in str(error):
        return True
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


def _summary(error: RankError) -> str:
    lines = [line for line in error.traceback_text.strip().splitlines() if line.strip()]
    return re.sub(r"^.*\bDifferent: ", "", lines[-1]) if lines else _first_line(error)


def _mesh_of(spec: EngineSpec) -> Mesh:
    key = (spec.axes, spec.transport)
    if spec.num_ranks == 1 or spec.name.startswith("torch"):
        return Mesh(dict(spec.axes), transport=None if spec.num_ranks == 1 else spec.transport)
    if key not in _MESHES:
        _MESHES[key] = Mesh(dict(spec.axes), transport=spec.transport)
    return _MESHES[key]


def without(scenario: Scenario, number: int) -> Scenario:
    """The scenario without one operation."""
    return replace(scenario, operations=scenario.operations[:number] + scenario.operations[number + 1 :])
