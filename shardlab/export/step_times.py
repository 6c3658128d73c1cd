"""When each step was on each rank: from the first to the last thing that its host did."""

import pandas as pd

PLACE = ["rank", "step"]
TIMES = (("start_us", "end_us"), ("issue_us", "issue_us"), ("wait_start_us", "wait_end_us"))


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
