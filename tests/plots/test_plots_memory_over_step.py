import numpy as np
import pandas as pd
import pytest

from shardlab.plots import memory_by_role, memory_over_step, summary_of
from shardlab.plots.theme import ROLE_COLOURS
from shardlab.records.tables import MEMORY
from tests.plots.sample_records import trace

NOTHING = dict.fromkeys(MEMORY.column_names[-5:], pd.NA)
# (time in µs, unit, phase, activations): the gradient appears in backward, the peak is in blocks.1
COURSE = [
    (1000.0, "model", "data", 0),
    (2000.0, "blocks.0", "forward", 4_000_000),
    (3000.0, "blocks.1", "forward", 8_000_000),
    (5000.0, "blocks.1", "backward", 9_000_000),
    (7000.0, "blocks.0", "backward", 4_000_000),
    (9000.0, "model", "step", 0),
]


def row(where, time_us, phase, role, size, source="measured", rank=0):
    key = {"run": "zero1", "source": source, "rank": rank, "step": 2}
    return {**key, "time_us": time_us, "phase": phase, "where": where, "role": role, "bytes": size, **NOTHING}


def course(rank=0, extra=0):
    rows = []
    for time_us, unit, phase, activations in COURSE:
        held = {"parameter": 2_000_000, "gradient": 0 if time_us < 5000 else 2_000_000, "activation": activations}
        rows += [row(unit, time_us, phase, role, size + extra, rank=rank) for role, size in held.items()]
    rows += [row("rest", 9000.0, "step", role, 2_000_000, rank=rank) for role in ("parameter", "gradient")]
    highest = {"parameter": 2_000_000, "gradient": 2_000_000, "activation": 9_000_000}
    rows += [row("peak", 5000.0, "backward", role, size + extra, rank=rank) for role, size in highest.items()]
    return rows


@pytest.fixture
def memory():
    return MEMORY.frame(course())


def test_each_role_is_stacked_in_its_colour_against_the_time_in_the_step(memory):
    figure = memory_over_step(memory)
    activation = trace(figure, "activation")
    assert (list(activation.x), list(activation.y)) == ([0, 1, 2, 4, 6, 8], [0, 4, 8, 9, 4, 0])
    assert activation.fillcolor == ROLE_COLOURS["activation"]
    names = [part.name for part in figure.data if part.stackgroup]
    assert names == ["parameter", "gradient", "activation"], "what stays lies below what comes and goes"
    assert trace(figure, "all").customdata[3] == "<b>13.0 MB</b> in blocks.1, backward"
    mark = trace(figure, "peak")
    assert (list(mark.x), list(mark.y), list(mark.text)) == ([4], [13.0], ["13.0 MB<br>\u25bc"])
    assert [note.text for note in figure.layout.annotations] == ["data", "forward", "backward"]


def test_the_predicted_outline_is_a_dashed_line_at_what_is_held_at_rest(memory):
    assert not memory_over_step(memory).layout.shapes[-1].line.dash
    predicted = [row("rest", np.nan, "step", role, 2_100_000, "predicted") for role in ("parameter", "gradient")]
    figure = memory_over_step(pd.concat([memory, MEMORY.frame(predicted).assign(step=0)]))
    line = figure.layout.shapes[-1]
    assert line.line.dash == "dash"
    assert line.y0 == pytest.approx(4.2)
    assert figure.layout.annotations[-1].text == "predicted<br>at rest:<br>4.20 MB"
    assert summary_of(figure).endswith("At rest 4.00 MB. Predicted at rest 4.20 MB.")


def test_the_rank_with_the_highest_moment_is_shown_unless_one_is_named_that_was_traced(memory):
    both = MEMORY.frame([*course(), *course(rank=1, extra=100)])
    assert "rank 1" in memory_over_step(both).layout.title.text
    assert "rank 0" in memory_over_step(both, rank=0).layout.title.text
    with pytest.raises(ValueError, match="no step was traced"):
        memory_over_step(memory[memory["where"] == "rest"])
    with pytest.raises(ValueError, match="step: 7 was not traced; there are 2"):
        memory_over_step(memory, step=7)
    assert "no memory recorded" in summary_of(memory_over_step(memory[:0]))


def test_the_peak_by_strategy_says_in_which_unit_it_was(memory):
    figure = memory_by_role(memory, "peak")
    assert "blocks.1, backward" in figure.layout.yaxis.ticktext[0]
    assert "zero1 13.0 MB (in blocks.1, backward)" in summary_of(figure)
