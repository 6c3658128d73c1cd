"""The workbench takes what ``compare`` takes, a workload of one's own; the others say what they take."""

import pytest

from shardlab import Workload
from shardlab.course import live, memory_explorer, step_through, workbench
from shardlab.plots import summary_of
from tests.course.widgets.test_choices import loss, make_model, samples


@pytest.fixture(scope="module")
def own():
    return Workload(make_model, samples(), loss, name="own")


@pytest.mark.parametrize(("widget", "wanted"), [
    (live, "live: .* give the directory in which compare"), (step_through, "step_through: .* give records"),
    (memory_explorer, "memory_explorer: .* give a plan"),
])  # fmt: skip
def test_what_runs_nothing_says_what_it_takes(own, widget, wanted):
    with pytest.raises(TypeError, match=wanted):
        widget(own)


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
