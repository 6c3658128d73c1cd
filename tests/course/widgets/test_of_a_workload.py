"""Widgets take what ``compare`` takes: a workload of one's own, trained on real ranks."""

import pytest

from shardlab import Workload
from shardlab.course import live, step_through, workbench
from shardlab.plots import summary_of
from tests.course.widgets.test_choices import loss, make_model, samples


@pytest.fixture(scope="module")
def own():
    return Workload(make_model, samples(), loss, name="own")


def test_a_step_of_a_workload_is_recorded_and_shown(own, pools):
    view = step_through(own, strategies="zero3", pool=pools(2), device="cpu")
    assert (view.run, view.step) == ("zero3", 2)
    assert view.events["event"].isin(["gathers"]).any()
    three = step_through(make_model, samples(), loss, strategies="zero1", pool=pools(2), device="cpu")
    assert three.run == "zero1"
    with pytest.raises(TypeError, match="step_through: 1 and 0 more arguments were given; give a Workload"):
        step_through(1)


def test_a_workload_is_compared_and_watched(own, pools, tmp_path):
    view = live(own, tmp_path / "run", strategies="zero1", ranks=2, steps=3, pool=pools(2), device="cpu")
    assert view.comparison.summary["strategy"].tolist() == ["zero1"]
    assert view.message.text == "Ended: zero1, step 2."
    assert "zero1, step 2: loss" in summary_of(view.curves.content)
    with pytest.raises(TypeError, match=r"live: .* is watched, and nothing is run"):
        live(tmp_path, steps=3)


def test_the_workbench_trains_a_workload(own, tmp_path):
    bench = workbench(own, tmp_path, steps=3, device="cpu")
    assert bench.run(batch=8) == 1
    assert bench.run(strategies="fsdp", accumulation=2, prefetch=2, wrap="root", clip=1.0) == 2
    table = bench.table.content.set_index("run")
    chosen = table[["strategy", "accumulation", "prefetch", "wrap", "clip"]].values.tolist()
    assert chosen == [["fsdp", "2", "2", "root", "1"], ["zero1", "1", "–", "auto", "–"]]
    assert "model" not in table.columns
    bench.view.value, bench.about.value = "one run: memory over a step", "2 fsdp"
    assert "Predicted at rest" in summary_of(bench.upper.content)
    bench.close()
    found = workbench(own, tmp_path).table.content
    assert found["accumulation"].tolist() == ["2", "1"], "earlier runs are found with their settings"
