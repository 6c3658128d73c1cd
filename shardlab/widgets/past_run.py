"""One run of a history: how it ended, and what it had recorded by then."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pandas as pd

from shardlab.experiment import CompareConfig, Comparison, load_comparison, load_saved
from shardlab.experiment.planned import Plan, plans_or_why
from shardlab.experiment.saved import config_of
from shardlab.experiment.summary import COLUMNS

STATE_FILE = "state.txt"


class State(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"  # by a person
    FAILED = "failed"  # a rank failed
    UNFINISHED = "unfinished"  # its process was killed, or is still running


@dataclass(frozen=True)
class PastRun:
    """A run, with the steps that all ranks had finished.

    Attributes:
        state: how it ended.
        comparison: its records and summary; None if no step was finished.
        config: its configuration; None if an earlier session ran it and no step was finished.
        note: why there is no comparison.
    """

    state: State
    comparison: Comparison | None
    config: CompareConfig | None
    note: str = ""

    @property
    def summary(self) -> pd.DataFrame:
        """One row per strategy; of a run without a finished step only ``strategy``, ``ranks`` and ``steps``."""
        if self.comparison is not None:
            return self.comparison.summary
        if self.config is None:
            return pd.DataFrame(columns=list(COLUMNS))
        first = {"strategy": self.config.strategies[0], "ranks": self.config.ranks, "steps": 0}
        return pd.DataFrame([dict.fromkeys(COLUMNS) | first])

    def manifest(self, strategy: str) -> Mapping[str, Any]:
        """What was written of one strategy before it ran; of a run without a finished step its configuration."""
        if self.comparison is not None:
            return self.comparison.records.manifests[strategy]
        assert self.config is not None
        return {"config": self.config.as_dict(strategy)}

    def plan(self, strategy: str) -> tuple[Plan | None, str | None]:
        """The plan of one strategy, None where the planner knows too little; and the error that planning raised.

        A workload of an earlier session cannot be planned: its manifest has only its name.
        """
        if self.config is None or isinstance(self.config.workload, str):
            return None, None
        plans, why = plans_or_why(self.config)
        return plans[strategy], why


def finished(comparison: Comparison, config: CompareConfig) -> PastRun:
    """A run that has just ended as it should."""
    return PastRun(State.FINISHED, comparison, config)


def ended_early(directory: Path, state: State, config: CompareConfig) -> PastRun:
    """A run that has just been stopped or has failed; the next session will find its state."""
    (directory / STATE_FILE).write_text(state)
    comparison, note = _recorded(directory)
    return PastRun(state, comparison, config, note)


def found(directory: Path) -> PastRun:
    """A run of an earlier session.

    Raises:
        ValueError: it is finished, and its records are damaged.
    """
    if (directory / "summary.json").is_file():
        comparison = load_comparison(directory)
        return PastRun(State.FINISHED, comparison, config_of(comparison.records))
    saved = directory / STATE_FILE
    state = State(saved.read_text()) if saved.is_file() else State.UNFINISHED
    recorded, note = _recorded(directory)
    return PastRun(state, recorded, None if recorded is None else config_of(recorded.records), note)


def _recorded(directory: Path) -> tuple[Comparison | None, str]:
    """What was recorded; or None and the reason."""
    try:
        return load_saved(directory)[0], ""
    except ValueError as error:
        return None, str(error)
