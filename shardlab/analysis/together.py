"""Rows of different ranks that are one collective: the n-th of its group in a step, on every rank."""

from collections.abc import Mapping

import pandas as pd

from shardlab.analysis.groups import RUN, with_group
from shardlab.analysis.rows import KEYS, bounds
from shardlab.vocabulary import Collective

# No rank is done before the last has come. (A broadcast's root does not wait, and a record does not say who that is.)
MEETING = (
    Collective.ALL_REDUCE,
    Collective.REDUCE_SCATTER,
    Collective.ALL_GATHER,
    Collective.ALL_TO_ALL,
    Collective.BARRIER,
)
SAME = [*RUN, "step", "axis", "group", "place"]
CLOCK_TOLERANCE_US = 1e3


def together(collectives: pd.DataFrame, axes: Mapping[str, int] | None = None) -> pd.DataFrame:
    """The collectives in which ranks meet, with ``group``, ``place`` (n-th of its axis in the step) and who came last.

    Steps that some rank has not recorded (of a run that was killed) are left out.

    Args:
        collectives: table ``collectives``.
        axes: see ``with_group``.

    Returns:
        The rows of ``collectives`` that are all-reduces, reduce-scatters, all-gathers, all-to-alls or barriers, and
        ``group``, ``place``, ``last_us`` (when the last rank began it) and ``last_rank``.

    Raises:
        ValueError: a column or time is missing, the ranks issued different collectives, or one rank had the result
            before another began, so that their clocks are not one axis.
    """
    rows = with_group(collectives, axes)
    bounds(rows, "start_us", "end_us", "collectives")
    rows = _whole_steps(rows[rows["op"].isin([str(op) for op in MEETING])])
    rows = rows.sort_values([*KEYS, "seq"], kind="stable", ignore_index=True)
    rows["place"] = rows.groupby([*KEYS, "axis"], sort=False).cumcount()
    _check_same(rows)
    # A rank that moved nothing (a barrier) has its place too: the last is who began latest.
    last = rows.loc[rows.groupby(SAME, sort=False)["start_us"].idxmax(), [*SAME, "rank", "start_us"]]
    rows = rows.merge(last.rename(columns={"rank": "last_rank", "start_us": "last_us"}), on=SAME)
    _check_clocks(rows)
    return rows


def _whole_steps(rows: pd.DataFrame) -> pd.DataFrame:
    all_ranks = rows.groupby(RUN)["rank"].transform("nunique")
    return rows[rows.groupby([*RUN, "step"])["rank"].transform("nunique") == all_ranks]


def _check_same(rows: pd.DataFrame) -> None:
    found = rows.groupby(SAME, sort=False).agg(
        ops=("op", "nunique"), sizes=("bytes", "nunique"), ranks=("rank", "size"), group_size=("group_size", "first")
    )
    wrong = found[(found["ops"] > 1) | (found["sizes"] > 1) | (found["ranks"] != found["group_size"])]
    if len(wrong):
        key = dict(zip(SAME, wrong.index[0], strict=True))
        apart = rows[(rows[SAME] == pd.Series(key)).all(axis=1)]
        issued = "; ".join(f"rank {row.rank} {row.op} of {row.bytes} bytes ({row.tag})" for row in apart.itertuples())
        raise ValueError(
            f"collectives: in step {key['step']} of run {key['run']} the ranks {key['group']} on axis {key['axis']} "
            f"did not issue the same collectives; number {key['place']} is: {issued}"
        )


def _check_clocks(rows: pd.DataFrame) -> None:
    early = rows[rows["end_us"] < rows["last_us"] - CLOCK_TOLERANCE_US]
    if len(early):
        row = early.iloc[0]
        raise ValueError(
            f"collectives: in step {row['step']} of run {row['run']} rank {row['rank']} had the result of {row['op']} "
            f"{row['tag']!r} {row['last_us'] - row['end_us']:.0f} us before rank {row['last_rank']} began it; "
            "the clocks of these ranks are not one axis (ranks of several hosts?)"
        )
