"""What an export writes of: one run out of records that may hold several, and when its steps were."""

import pandas as pd

from shardlab.analysis.rows import one_run
from shardlab.tables import TABLES
from shardlab.trace.store import Records

PLACE = ["rank", "step"]
TIMES = (("start_us", "end_us"), ("issue_us", "issue_us"), ("wait_start_us", "wait_end_us"))


def run_of(records: Records, run: str | None) -> tuple[str, Records]:
    """The name and the records of ``run``; None where there is only one.

    Raises:
        ValueError: no such run, or several and none named; or there are neither spans nor collectives in it.
    """
    both = pd.concat([records.spans[["run", "source"]], records.collectives[["run", "source"]]])
    if not len(both):
        raise ValueError("run: there are neither spans nor collectives in these records, so there is nothing to draw")
    name, source = one_run(both, run)[["run", "source"]].iloc[0]
    tables = {table: getattr(records, table) for table in TABLES}
    own = {
        table: rows[(rows["run"] == name) & (rows["source"] == source)].reset_index(drop=True)
        for table, rows in tables.items()
    }
    return name, Records(**own, manifests={name: records.manifests.get(name, {})})


def step_times(spans: pd.DataFrame, collectives: pd.DataFrame) -> dict[tuple[int, int], tuple[float, float]]:
    """Begin and end of each (rank, step), in microseconds. A collective that goes on meanwhile does not lengthen it."""
    doings = pd.concat(
        [
            (spans if begin == "start_us" else collectives)[[*PLACE, begin, end]].set_axis(
                [*PLACE, "begin", "end"], axis=1
            )
            for begin, end in TIMES
        ]
    )
    found = doings.groupby(PLACE).agg(begin=("begin", "min"), end=("end", "max"))
    return {
        (int(rank), int(step)): (float(begin), float(end))
        for (rank, step), begin, end in zip(found.index, found["begin"], found["end"], strict=True)
    }
