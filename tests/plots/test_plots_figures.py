import numpy as np
import pandas as pd
import pytest

from shardlab import analysis, plots
from shardlab.analysis.rows import step_lengths
from shardlab.plots.show import plain_json
from shardlab.plots.theme import COLLECTIVE_COLOURS, ROLE_COLOURS, STRATEGY_COLOURS
from shardlab.records.tables import COLLECTIVES, MEMORY, SPANS
from tests.plots.sample_records import BYTES_BY_ROLE, NUM_RANKS, NUM_STEPS, NUMEL, RUNS, trace


def by_run(figure, name):
    """The lengths of its bars."""
    bars = trace(figure, name)
    return dict(zip(bars.y, bars.x, strict=True))


def every_figure(records):
    overlaps = analysis.overlap(records.collectives, records.spans)
    return {
        "loss": plots.loss_curves(records.steps),
        "difference": plots.loss_difference(records.steps),
        "rest": plots.memory_by_role(records.memory),
        "peak": plots.memory_by_role(records.memory, "peak"),
        "timeline": plots.collective_timeline(records.collectives, records.spans, run="zero1", step=3),
        "overlap": plots.overlap_bars(overlaps),
        "volume": plots.wire_volume(records.collectives),
        "steps": plots.step_times(records.steps),
        "shards": plots.shard_map(records.shards, run="zero1", role="optimizer_state"),
        "traffic": plots.traffic_matrix(records.collectives, run="zero1"),
    }


def test_every_figure_has_title_units_summary_and_finite_json(records):
    figures = every_figure(records)
    for name, figure in figures.items():
        assert figure.layout.title.text, name
        summary = plots.summary_of(figure)
        assert summary.endswith("."), name
        assert any(letter.isdigit() for letter in summary), name
        assert len(str(plain_json(figure))) < 40_000, name
    units = {"rest": "(MB)", "timeline": "(ms)", "overlap": "(ms)", "volume": "(MB)", "steps": "(ms)", "shards": "(M)"}
    for name, unit in units.items():
        assert unit in figures[name].layout.xaxis.title.text, name


def test_memory_bars_are_the_bytes_of_the_table_in_the_colour_of_the_role(records):
    figure = plots.memory_by_role(records.memory)
    assert [bar.name for bar in figure.data] == ["parameter", "optimizer state", "gradient", "end"]
    for role in ("parameter", "gradient", "optimizer_state"):
        name = role.replace("_", " ")
        assert by_run(figure, name) == {run: BYTES_BY_ROLE[run][role] / 1e6 for run in RUNS}
        assert trace(figure, name).marker.color == ROLE_COLOURS[role]
    assert list(trace(figure, "end").text) == [" 19.2 MB", " 19.2 MB", " 19.2 MB", " 12.0 MB"]
    assert "zero1 12.0 MB" in plots.summary_of(figure)
    for rank, memory in ((NUM_RANKS - 1, records.memory), (1, records.memory[records.memory["rank"] == 1])):
        peak = plots.memory_by_role(memory, "peak")  # of the largest rank
        assert by_run(peak, "activation")["ddp"] == (9_000_000 + 1_000 * rank + 10 * (NUM_STEPS - 1)) / 1e6


def test_loss_curves_hold_the_losses(records):
    figure = plots.loss_curves(records.steps)
    steps = records.steps
    for run in RUNS:
        expected = steps[(steps["run"] == run) & (steps["rank"] == 0)]["loss"].tolist()
        assert list(trace(figure, run).y) == pytest.approx(expected)
        assert trace(figure, run).line.color == STRATEGY_COLOURS[run]
    widths = [line.line.width for line in figure.data]
    assert widths == sorted(widths, reverse=True)


def test_losses_that_are_not_finite_are_gaps_and_named(records):
    steps = records.steps.copy()
    steps.loc[(steps["run"] == "ddp") & (steps["step"] == 3), "loss"] = np.inf
    steps.loc[steps["run"] == "zero1", "loss"] = np.nan
    words = "ithout a finite loss: ddp (first at step 3) and zero1 (first at step 0)"
    for draw in (plots.loss_curves, plots.loss_difference):
        figure = draw(steps)
        assert words in plots.summary_of(figure)
        assert words in figure.layout.title.subtitle.text
        assert [np.isnan(y) for y in trace(figure, "ddp").y] == [step == 3 for step in range(NUM_STEPS)]
        assert np.isnan(trace(figure, "zero1").y).all()
    assert "zero1 from" not in plots.summary_of(plots.loss_curves(steps))
    progress = plots.training_progress(steps, records.memory)
    assert "zero1, step 9: loss not finite" in plots.summary_of(progress)
    assert np.isnan(trace(progress, "ddp").y[3])


def test_small_losses_are_not_written_as_zero(records):
    one = records.steps[(records.steps["run"] == "single") & (records.steps["step"] == 0)].assign(loss=2.85e-5)
    figure = plots.loss_curves(one)
    assert plots.summary_of(figure) == "Loss over 1 step: single from 2.85e-05 to 2.85e-05."
    assert max(figure.layout.yaxis.range) < 1e-4
    assert "loss 2.85e-05" in plots.summary_of(plots.training_progress(one, records.memory))


def test_overlap_bars_are_medians_and_say_where_there_is_no_number(records):
    table = analysis.overlap(records.collectives, records.spans)
    figure = plots.overlap_bars(table)
    exposed = by_run(figure, "exposed")
    assert exposed["ddp"] == 10
    assert exposed["bucketed"] == table[table["run"] == "bucketed"]["exposed_us"].median() / 1e3
    words = dict(zip(trace(figure, "end").y, map(str.strip, trace(figure, "end").text), strict=True))
    assert (words["single"], words["ddp"], words["bucketed"]) == ("no communication", "0 % hidden", "69 % hidden")


def test_wire_volume_is_per_rank_and_step_and_keeps_silent_runs(records):
    figure = plots.wire_volume(records.collectives, runs=RUNS)
    sent = 4 * NUMEL * (NUM_RANKS - 1) / NUM_RANKS / 1e6
    assert by_run(figure, "all reduce")["ddp"] == pytest.approx(2 * sent)
    assert by_run(figure, "all gather")["zero1"] == pytest.approx(sent)
    assert trace(figure, "all gather").marker.color == COLLECTIVE_COLOURS["all_gather"]
    assert next(iter(trace(figure, "end").text)) == " 0 B"
    with pytest.raises(ValueError, match=r"runs: 'ddp' is given; give a list of names, such as \['ddp'\]"):
        plots.wire_volume(records.collectives, runs="ddp")


def test_traced_steps_have_no_time(records):
    slow = records.steps.assign(step_us=records.steps["step_us"].where(~records.steps["traced_memory"], 9e9))
    shown = trace(plots.step_times(slow), "zero1")
    timed = step_lengths(slow)["zero1"]  # of the tables
    assert shown.x[0] == pytest.approx(timed.median() / 1e3)
    assert shown.error_x.array[0] == pytest.approx((timed.quantile(0.75) - timed.median()) / 1e3)
    loss, time = (part for part in plots.training_progress(slow, records.memory).data if part.name == "zero1")
    assert list(loss.x) == list(range(NUM_STEPS))
    assert list(time.x) == list(range(1, NUM_STEPS)), "step 0 was traced"
    assert max(time.y) < 1e3
    only_traced = plots.training_progress(slow[slow["step"] == 0], records.memory)
    assert "memory traced" in plots.summary_of(only_traced)


def test_a_run_with_traced_steps_only_has_their_times_as_in_the_tables(records):
    only = records.steps[(records.steps["step"] == 0) & (records.steps["run"] == "zero1")]
    assert "zero1 68.0 ms" in plots.summary_of(plots.step_times(only))


def test_the_words_of_a_median_stay_inside_of_the_axes(records):
    slow = records.steps.assign(step_us=records.steps["step_us"].where(records.steps["run"] != "single", 3e6))
    figure = plots.step_times(slow)
    assert trace(figure, "single").textposition == "top left"
    assert {trace(figure, run).textposition for run in RUNS[1:]} == {"top right"}


def test_a_long_name_of_a_unit_is_cut_in_the_middle_and_no_markup(records):
    name = f"model.{'encoder.' * 9}<b>last</b>"
    rows = records.memory[records.memory["run"] == "ddp"]
    inside = rows[(rows["where"] == "peak")].assign(where=name)
    figure = plots.memory_by_role(pd.concat([rows, inside]), "peak")
    (words,) = figure.layout.yaxis.ticktext
    assert "&gt;last&lt;/b&gt;, step" in words
    assert "…" in words
    assert len(words) < 120
    assert name in plots.summary_of(figure)


def test_a_tick_near_the_end_of_a_bar_stands_before_its_words(records):
    figure = plots.memory_by_role(records.memory, with_peak=True)
    ticks, ends = trace(figure, "peak of a step"), trace(figure, "end")
    assert all(end == tick or tick > end + 3 for end, tick in zip(ends.x, ticks.x, strict=True))
    near = records.memory.copy()
    near.loc[near["role"] == "activation", "bytes"] = 1_000_000
    figure = plots.memory_by_role(near, with_peak=True)
    assert list(trace(figure, "end").x) == list(trace(figure, "peak of a step").x)


def test_shard_map_tiles_the_parameters(records):
    figure = plots.shard_map(records.shards, run="zero1", role="optimizer_state")
    covered = sorted((base, base + x) for part in figure.data for base, x in zip(part.base, part.x, strict=True))
    assert covered[0][0] == 0
    assert covered[-1][1] == pytest.approx(NUMEL / 1e6)
    assert [end for _, end in covered[:-1]] == pytest.approx([start for start, _ in covered[1:]])
    assert "each of 4 ranks holds 300,000 elements (25 %)" in plots.summary_of(figure)


def test_a_shard_map_of_some_ranks_is_refused(records):
    with pytest.raises(ValueError, match=r"shards: no rank holds all of 'blocks.1.w'; give the rows of all ranks"):
        plots.shard_map(records.shards[records.shards["rank"] == 2], run="zero1", role="optimizer_state")
    one = plots.shard_map(records.shards, run="single")
    assert f"the one rank holds {NUMEL:,} elements (100 %)" in plots.summary_of(one)


def test_a_bar_at_rest_is_what_one_rank_holds():
    held = {0: {"parameter": 10_000, "other": 500}, 1: {"parameter": 9_000, "other": 900}}
    keys = dict.fromkeys(MEMORY.column_names) | {"run": "fsdp", "source": "measured", "step": 0, "where": "rest"}
    rows = [{**keys, "rank": rank, "role": role, "bytes": num} for rank in held for role, num in held[rank].items()]
    figure = plots.memory_by_role(MEMORY.frame(rows))
    assert trace(figure, "end").text == (" 10.5 kB",)
    assert by_run(figure, "other") == {"fsdp": 0.5}


def test_what_reports_a_loss_after_its_step_is_not_of_the_step(records):
    last = records.collectives[records.collectives["op"] == "all_reduce"]
    last = last.drop_duplicates(["run", "rank", "step"], keep="last")
    late = {column: last[column] + 9e4 for column in ("issue_us", "start_us", "end_us", "wait_start_us", "wait_end_us")}
    told = pd.concat([records.collectives, last.assign(phase="metrics", seq=last["seq"] + 100, **late)])
    for draw in (
        lambda sent: plots.collective_timeline(sent, records.spans, run="ddp", step=3),
        lambda sent: plots.wire_volume(sent), lambda sent: plots.traffic_matrix(sent, run="ddp", step=3),
    ):  # fmt: skip
        assert plots.summary_of(draw(told)) == plots.summary_of(draw(records.collectives))


def test_emulated_and_predicted_are_said(records):
    both = pd.concat([records.memory, records.memory.assign(source="predicted")])
    figure = plots.memory_by_role(both)
    assert "predicted, not run" in figure.layout.title.subtitle.text
    assert "zero1 · predicted" in trace(figure, "parameter").y
    emulated = {"source": "emulated"}
    moved, worked = records.collectives.assign(**emulated), records.spans.assign(**emulated)
    drawn = plots.collective_timeline(moved, worked, run="ddp")
    assert "emulated link" in drawn.layout.title.subtitle.text


def test_empty_tables_say_so_and_what_is_wrong_is_named(records):
    for figure in (
        plots.loss_curves(records.steps[:0]),
        plots.memory_by_role(records.memory[:0]),
        plots.wire_volume(records.collectives[:0]),
        plots.collective_timeline(COLLECTIVES.frame([]), SPANS.frame([])),
        plots.step_times(records.steps[:0]),
        plots.shard_map(records.shards[:0]),
    ):
        assert "no" in plots.summary_of(figure)
        assert len(figure.layout.annotations) == 1
    overlaps = analysis.overlap(records.collectives, records.spans)
    for draw, words in (
        (lambda: plots.loss_curves(records.steps.drop(columns="loss")), r"table 'steps': missing columns \['loss'\]"),
        (lambda: plots.overlap_bars(overlaps.drop(columns="exposed_us")), "missing columns .'exposed_us'"),
        (lambda: plots.memory_by_role(records.memory, "later"), "where: 'later'"),
        (lambda: plots.loss_difference(records.steps, reference="solo"), "'solo' is not one of single, ddp"),
        (lambda: plots.shard_map(records.shards), "name one of single, ddp, bucketed, zero1"),
    ):
        with pytest.raises(ValueError, match=words):
            draw()
