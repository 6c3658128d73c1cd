"""One scenario on all ranks of a pool, held against one process; and what the ranks' answers mean together."""

import pickle
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from shardlab.launch import RankError, RankHang, RankPool
from tests.fuzzing.checkpoints import Load
from tests.fuzzing.engines import EngineSpec
from tests.fuzzing.modules import ModuleSpec
from tests.fuzzing.operation import Operation
from tests.fuzzing.optimizers import OptimizerSpec


@dataclass(frozen=True)
class Scenario:
    """What is trained, by what, and what the user does."""

    module: ModuleSpec  # see ``ModuleSpec``
    engine: EngineSpec  # see ``EngineSpec``
    # see ``OptimizerSpec``
    optimizer: OptimizerSpec = OptimizerSpec()  # noqa: RUF009 - it is frozen
    operations: tuple[Operation, ...] = ()  # in order; afterwards the engine is closed and its module trains alone
    deep: bool = False  # the whole state is put together after every operation, not only at the end
    pool: int = 0  # ranks that there are, if not those of the first engine's mesh

    @property
    def num_ranks(self) -> int:
        return self.pool or self.engine.num_ranks

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        """The first one and those that take its place."""
        return (self.engine, *(one.into for one in self.operations if isinstance(one, Load) and one.into is not None))


@dataclass(frozen=True)
class Verdict:
    """Of a whole scenario."""

    kind: str  # 'equal', 'refused' (as documented), 'different', 'hang', 'crash' or 'apart' (ranks answer differently)
    text: str = ""  # what, in words
    at: int | None = None  # number of the operation; None where it is not known
    steps: tuple[tuple[str, str], ...] = ()  # of every operation that was done, its kind and what came of it

    @property
    def is_find(self) -> bool:
        return self.kind not in ("equal", "refused")

    @property
    def signature(self) -> tuple[str, str]:
        """What two verdicts of one fault have in common, roughly."""
        text = re.sub(r"\([^()]*\)", "", self.text.splitlines()[0])  # an operation's fields
        words = re.sub(r"[-+]?\d[\d.e+-]*|'[^']*'|\b(enter|leave|blocks|spare)[\w.]*", "", text)
        return self.kind, words[:90]


def run_scenario(pool: RankPool, scenario: Scenario) -> Verdict:
    saves = any(type(operation).__name__ in ("Save", "Move") for operation in scenario.operations)
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


def close_meshes(pool: RankPool) -> None:
    """Leave nothing in the ranks of a pool that others go on using."""
    pool.run(_close_by_name)


def _by_name(rank: int, call: bytes) -> list[tuple[str, str]]:
    """Ranks import this package once; a pool would otherwise send its code, by value, with each call."""
    import pickle

    from tests.fuzzing import pipelines
    from tests.fuzzing import rank as whole_models

    scenario, directory = pickle.loads(call)
    of = pipelines if isinstance(scenario, pipelines.PipeScenario) else whole_models
    return of.on_rank(rank, scenario, directory)


def _close_by_name(rank: int) -> None:
    from tests.fuzzing.meshes import close_all

    close_all()


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


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
