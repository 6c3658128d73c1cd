import numpy as np
import pandas as pd
import pytest

from shardlab.plots import collective_timeline, summary_of
from shardlab.plots.theme import COLLECTIVE_COLOURS, SPAN_COLOURS
from shardlab.plots.timeline import drawn_levels
from shardlab.records.tables import COLLECTIVES, SPANS
from tests.plots.sample_records import NUM_BLOCKS, NUM_RANKS


def bars(figure, name):
    return [part for part in figure.data if part.name == name]


def test_bars_are_the_collectives_in_ms_from_the_start_of_the_step(records):
    figure = collective_timeline(records.collectives, records.spans, run="zero1", step=3)
    (reduced,) = bars(figure, "reduce scatter")
    assert len(reduced.x) == NUM_RANKS * NUM_BLOCKS
    assert set(reduced.x) == {6.0}
    rows = records.collectives
    rows = rows[(rows["run"] == "zero1") & (rows["step"] == 3) & (rows["op"] == "reduce_scatter")]
    assert sorted(reduced.base) == pytest.approx(sorted((rows["start_us"] - 300_000) / 1e3))
    assert reduced.marker.color == COLLECTIVE_COLOURS["reduce_scatter"]
    (queued,) = bars(figure, "queued")
    assert max(queued.x) == pytest.approx(0.3)


def test_hover_and_summary_have_the_numbers(records):
    figure = collective_timeline(records.collectives, records.spans, run="zero1", step=3)
    text = bars(figure, "reduce scatter")[0].hovertext[0]
    for part in ("gradients of bucket 0", "1.20 MB float32", "sends 900 kB", "bus 0.15 GB/s", "queued 300 µs",
                 "waited 500 µs", "took 6.00 ms", "issued in backward"):  # fmt: skip
        assert part in text
    text = summary_of(collective_timeline(records.collectives, records.spans, run="ddp"))
    assert text.startswith("Step 9 of run ddp: 4 ranks")
    assert "4 collectives a rank send 7.20 MB; 0 % of communication is hidden by compute, 10.0 ms exposed" in text
    text = summary_of(collective_timeline(records.collectives, records.spans, run="single"))
    assert text.endswith("No communication.")


def test_the_level_drawn_is_the_blocks_with_the_model_as_ground(records):
    figure = collective_timeline(records.collectives, records.spans, run="ddp", until_ms=250.0)
    ground, solid = bars(figure, "backward")
    assert len(ground.x) == NUM_RANKS
    assert ground.opacity < 1
    assert len(solid.x) == NUM_RANKS * NUM_BLOCKS
    assert {text.split("</b>")[0] for text in solid.hovertext} == {f"<b>blocks.{i}" for i in range(NUM_BLOCKS)}
    assert solid.marker.color == SPAN_COLOURS["backward"]
    assert figure.layout.xaxis.range == (0, 250)
    names = figure.layout.yaxis.ticktext
    assert names[:2] == ("<b>rank 0</b>  compute", "data axis")
    assert len(names) == 2 * NUM_RANKS


def test_what_was_sent_before_the_first_step_is_no_step(records):
    sent = records.collectives[records.collectives["step"] == 0].assign(step=-1)
    collectives = pd.concat([sent, records.collectives])
    for step in (-1, 10):
        with pytest.raises(ValueError, match=f"step: {step} was not recorded; there are 0 to 9"):
            collective_timeline(collectives, records.spans, run="ddp", step=step)


def test_a_prediction_of_the_same_run_stays_apart(records):
    both = [pd.concat([table, table.assign(source="predicted")]) for table in (records.collectives, records.spans)]
    with pytest.raises(ValueError, match="'ddp' is not one of single · measured, ddp · measured"):
        collective_timeline(*both, run="ddp")
    figure = collective_timeline(*both, run="ddp · predicted", step=2)
    assert len(bars(figure, "all reduce")[0].x) == NUM_RANKS * NUM_BLOCKS
    assert figure.layout.title.subtitle.text.startswith("predicted, not run")


def units_drawn(rows):
    """The units that get a bar, of backward spans given as (start, end, unit)."""
    common = {"run": "r", "source": "measured", "rank": 0, "step": 0, "kind": "backward"}
    spans = SPANS.frame([common | {"start_us": start, "end_us": end, "unit": unit} for start, end, unit in rows])
    drawn = drawn_levels(spans)
    return sorted(drawn.loc[~drawn["ground"], "unit"])


def test_a_unit_as_long_as_the_model_is_inside_of_it_and_what_overlaps_is_not():
    """So it is where waiting cuts spans: what is left of the model is then just the unit, or just the unit's part."""
    assert units_drawn([(0.0, 10.0, "a"), (8.0, 20.0, "b"), (9.0, 12.0, "c")]) == ["a", "b"]
    parts = [(0.0, 5.0, "blocks.4.mlp"), (0.0, 5.0, "blocks.4"), (0.0, 5.0, "model")]
    assert units_drawn([*parts, (5.0, 9.0, "model"), (6.0, 8.0, "blocks.3")]) == ["blocks.3", "blocks.4"]


def test_a_hundred_thousand_collectives_are_merged_with_their_strips():
    count = 100_000
    begin = np.arange(count) * 10.0
    times = {"issue_us": 0.0, "start_us": 2.0, "end_us": 8.0, "wait_start_us": 3.0, "wait_end_us": 8.0}
    collectives = pd.DataFrame({
        "run": "r", "source": "measured", "rank": 0, "step": 0, "seq": np.arange(count), "axis": "data",
        "op": "all_reduce", "tag": "gradient", "phase": "backward", "dtype": "float32", "numel": 1, "bytes": 4,
        "wire_bytes": 4.0, "group_size": 2, "transport": "gloo", **{name: begin + at for name, at in times.items()},
    })  # fmt: skip
    span = {"run": "r", "source": "measured", "rank": 0, "step": 0, "unit": "model", "kind": "backward"}
    spans = SPANS.frame([span | {"start_us": 0.0, "end_us": count * 10.0}])
    figure = collective_timeline(COLLECTIVES.frame(collectives), spans)
    assert [part.name for part in figure.data] == ["backward", "rank waits", "queued", "all reduce"]
    assert sum(len(part.x) for part in figure.data) < 5_000
    assert figure.layout.title.subtitle.text.startswith("100,001 spans and collectives drawn as")


def test_a_rank_off_the_cpu_has_a_bar_of_its_own():
    times = {"forward": (0, 100), "off_cpu": (100, 500), "backward": (500, 600)}
    base = {"run": "ddp", "source": "measured", "rank": 1, "step": 0, "unit": "model"}
    rows = [base | {"kind": kind, "start_us": start, "end_us": end} for kind, (start, end) in times.items()]
    figure = collective_timeline(COLLECTIVES.frame([]), SPANS.frame(rows))
    bar = next(trace for trace in figure.data if trace.name == "off the CPU")
    assert (bar.base[0], bar.x[0], bar.marker.color) == (0.1, 0.4, SPAN_COLOURS["off_cpu"])
    assert (bar.marker.pattern.shape, bar.text, "off the CPU" in bar.hovertext[0]) == ("/", None, True)
    assert "Rank 1 is off the CPU for 400 µs of it." in summary_of(figure)
