from itertools import groupby

import pandas as pd
import pytest

from shardlab.plots import mesh_map, summary_of, weight_slices
from shardlab.plots.maps import COLUMNS, EVERY_RANK
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
    assert list(ranks.customdata[5]) == ["rank 5", "data 1, tensor 2"]
    assert summary_of(figure) == (
        "A mesh of 6 ranks, data 2 x tensor 3: tensor groups 0,1,2 and 3,4,5; data groups 0,3, 1,4 and 2,5."
    )


def test_a_mesh_that_cannot_be_drawn_is_refused():
    for axes in ({}, {"replica": 2, "shard": 2, "tensor": 2}, {"data": 0}):
        with pytest.raises(ValueError, match="one or two axes of size 1 or more"):
            mesh_map(axes)
    with pytest.raises(ValueError, match="hosts: 3 does not divide 4 ranks"):
        mesh_map({"data": 4}, hosts=3)
