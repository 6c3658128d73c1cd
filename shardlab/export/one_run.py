"""One run out of records that may hold several."""

import pandas as pd

from shardlab.analysis.rows import one_run
from shardlab.tables import TABLES
from shardlab.trace.store import Records


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
