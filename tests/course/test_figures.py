from itertools import groupby

import numpy as np
import pandas as pd
import pytest

from shardlab import analysis
from shardlab.course import bucket_curve, gathered_over_a_step, mesh_map, message_times, throughput, weight_slices
from shardlab.course.divided_weights import COLUMNS, EVERY_RANK
from shardlab.plots import summary_of
from shardlab.plots.show import plain_json
from shardlab.plots.theme import ALL_RANKS, AXIS_COLOURS, RANKS
from shardlab.vocabulary import MeshAxis
from tests.plots.sample_records import trace

# An 8 x 4 matrix cut by outputs with its bias, a 4 x 8 one cut by inputs with a bias that every rank has.
ROWS = [
    *(("up.weight", 8, 4, rank, 0, 8, 2 * rank, 2 * rank + 2) for rank in (0, 1)),
    *(("up.bias", 1, 4, rank, 0, 1, 2 * rank, 2 * rank + 2) for rank in (0, 1)),
    *(("down.weight", 4, 8, rank, 2 * rank, 2 * rank + 2, 0, 8) for rank in (0, 1)),
    ("down.bias", 1, 8, EVERY_RANK, 0, 1, 0, 8),
]
TABLE = pd.DataFrame(ROWS, columns=list(COLUMNS))


def test_slices_are_drawn_to_scale_and_do_not_overlap():
    figure = weight_slices(TABLE)
    assert [part.name for part in figure.data] == ["rank 0", "rank 1", "every rank"]
    first, second = trace(figure, "rank 0"), trace(figure, "rank 1")
    assert list(first.width) == [2, 2, 8]
    assert (first.y[0], first.y[2]) == (8, 2)
    assert (second.x[0], second.base[0]) == (first.x[0] + 2, first.base[0])
    assert second.base[2] == first.base[2] + 2
    assert (first.marker.color, trace(figure, "every rank").marker.color) == (RANKS[0], ALL_RANKS)
    weight, bias, down = range(3)  # a bias lies below its weight, and modules side by side
    assert first.base[bias] > first.base[weight] + first.y[weight]
    assert first.x[bias] == first.x[weight]
    assert (first.x[down], first.base[down]) != (first.x[weight], first.base[weight])
    plain_json(figure)
    assert summary_of(figure) == (
        "Who holds which slice of each weight: of 76 elements rank 0 45 %, rank 1 45 % and every rank 11 %."
    )


def lines_of(bands):
    """The (x, y) of each band."""
    points = zip(bands.x, bands.y, strict=True)
    return [[*line] for drawn, line in groupby(points, lambda point: point[0] is not None) if drawn]


def test_the_mesh_joins_the_ranks_of_each_group():
    figure = mesh_map({"data": 2, "tensor": 3}, hosts=2)
    data, tensor = trace(figure, "data groups"), trace(figure, "tensor groups")
    assert lines_of(tensor) == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (1, 1), (2, 1)]]
    assert lines_of(data) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)], [(2, 0), (2, 1)]]
    assert tensor.line.color == AXIS_COLOURS[MeshAxis.TENSOR]
    ranks = trace(figure, "ranks")
    assert [text.split("<")[1][2:] for text in ranks.text] == [str(rank) for rank in range(6)]
    assert "host 0" in ranks.text[2]
    assert "host 1" in ranks.text[3]
    assert ranks.hovertext[5] == "data 1, tensor 2"
    assert summary_of(figure) == (
        "A mesh of 6 ranks, data 2 x tensor 3: tensor groups 0,1,2 and 3,4,5; data groups 0,3, 1,4 and 2,5."
    )


def speeds():
    rows = [("1 rank", 2, 100.0), ("1 rank", 8, 110.0), ("2 ranks", 2, 60.0), ("2 ranks", 8, 190.0)]
    table = pd.DataFrame(rows, columns=["run", "rows", "tokens_per_s"])
    return pd.concat([table.assign(source="measured"), table.assign(source="predicted")])


def test_predictions_are_lines_in_the_colour_of_the_marks():
    figure = throughput(speeds())
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    marks = [trace for trace in figure.data if trace.mode == "markers"]
    assert len(lines) == len(marks) == 2
    assert [line.line.color for line in lines] == [mark.marker.color for mark in marks]
    assert all(mark.showlegend for mark in marks)
    assert list(figure.layout.xaxis.tickvals) == [2, 8]
    assert "2 ranks 60 with 2 rows a rank and 190 with 8" in summary_of(figure)


def sweeps(source="measured"):
    size = np.array([1e3, 1e6, 1e8])
    messages = pd.DataFrame({"op": "all_reduce", "bytes": size, "time_us": 100 + size / 1e4, "source": source})
    steps = {"step_us": [9e3, 5e3, 8e3], "exposed_comm_us": 1e3, "source": source}
    return message_times(analysis.with_fit(messages)), bucket_curve(
        pd.DataFrame({"run": "r", "bucket_bytes": size} | steps)
    )


def test_sweeps_are_logarithmic_and_a_ring_is_at_the_best_size():
    messages, buckets = sweeps()
    assert list(trace(messages, "all reduce").y) == pytest.approx([100.1, 200, 10_100])
    assert messages.layout.xaxis.type == messages.layout.yaxis.type == buckets.layout.xaxis2.type == "log"
    assert summary_of(messages) == "Time of a message: all_reduce 100 µs for 1.00 kB and 10.1 ms for 100 MB."
    ring = next(part for part in buckets.data if part.marker.symbol == "circle-open")
    assert (list(ring.x), list(ring.y)) == ([1e6], [5])
    assert "r is fastest with buckets of 1.00 MB: 5.00 ms a step, 1.00 ms exposed" in summary_of(buckets)
    for figure in sweeps("emulated"):
        assert "emulated link" in figure.layout.title.subtitle.text
        assert "NaN" not in str(plain_json(figure))


def test_gathered_units_are_stacked_by_moment_and_named_where_they_begin():
    moments = ["a.b forward", "a.b forward done", "a.b backward", "end"]
    rows = [
        (at, moment, unit, size)
        for at, moment in enumerate(moments)
        for unit, size in (("a.b", 100 * (at != 3)), ("c", 0))
    ]
    figure = gathered_over_a_step(pd.DataFrame(rows, columns=["sample", "moment", "unit", "bytes"]), 200, "Gathered")
    assert list(trace(figure, "a.b").y) == [100, 100, 100, 0]
    assert dict(zip(figure.layout.xaxis.tickvals, figure.layout.xaxis.ticktext, strict=True)) == {0: "b", 2: "b"}
    assert [shape.x0 for shape in figure.layout.shapes if shape.x0 == shape.x1] == [1.5]
    assert "2 units: at most 100 B in 1 units at once, predicted 200 B" in summary_of(figure)
