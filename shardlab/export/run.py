"""What an export writes: one run of the records, and the times of its steps."""

import pandas as pd

from shardlab.analysis.rows import one_run
from shardlab.tables import TABLES
from shardlab.trace.store import Records

PLACE = ["rank", "step"]
TIMES = (("start_us", "end_us"), ("issue_us", "issue_us"), ("wait_start_us", "wait_end_us"))


def run_of(records: Records, run: str | None) -> tuple[str, Records]:
    """The name and the records of ``run``; None if there is only one.

    Raises:
        ValueError: there is no such run, there are several and none is named, or there are no spans and no collectives.
    """
    both = pd.concat([records.spans[["run", "source"]], records.collectives[["run", "source"]]])
    if not len(both):
        raise ValueError("run: these records have no spans and no collectives, so there is nothing to export")
    name, source = one_run(both, run)[["run", "source"]].iloc[0]
    tables = {table: getattr(records, table) for table in TABLES}
    own = {
        table: rows[(rows["run"] == name) & (rows["source"] == source)].reset_index(drop=True)
        for table, rows in tables.items()
    }
    return name, Records(**own, manifests={name: records.manifests.get(name, {})})


def step_times(spans: pd.DataFrame, collectives: pd.DataFrame) -> dict[tuple[int, int], tuple[float, float]]:
    """Beginning and end of each (rank, step) on the host, in microseconds; the end of a collective does not count."""
    events = pd.concat(
        [
            (spans if begin == "start_us" else collectives)[[*PLACE, begin, end]].set_axis(
                [*PLACE, "begin", "end"], axis=1
            )
            for begin, end in TIMES
        ]
    )
    found = events.groupby(PLACE).agg(begin=("begin", "min"), end=("end", "max"))
    return {
        (int(rank), int(step)): (float(begin), float(end))
        for (rank, step), begin, end in zip(found.index, found["begin"], found["end"], strict=True)
    }
