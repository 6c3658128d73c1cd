"""What a person sees in JupyterLab: cells that ran, output of ranks, figures, controls; and nothing left at the end.

A slider changes a figure, the live view changes while ranks train, a click goes on.
"""

import ast

import pytest

from tests.browser.figures import drawn_figures
from tests.browser.notebook_page import write_notebook

RANKS = """
from shardlab import Mesh, RankPool, show
from shardlab.course import SPANS, collectives_table, log_collectives
from shardlab.plots import collective_timeline

pool = RankPool(2, device="cpu")  # nobody closes it

def meet(rank):
    print(f"I am rank {rank}")
    with Mesh({"data": 2}) as mesh, log_collectives(mesh, rank) as log:
        mesh.data.barrier().wait()
    return log.rows()

show(collective_timeline(collectives_table(pool.run(meet)), SPANS.frame([])))
print("ranks:", list(pool.pids))
"""
EXPLORER = """
from shardlab.course import MemoryPlan, live, memory_explorer, workbench
memory_explorer(MemoryPlan("gpt-1m", 4))
"""
WORKBENCH = """
from shardlab import CompareConfig, compare
config = CompareConfig(strategies=("zero1",), ranks=2, steps=3, model="mlp", text="grammar", device="cpu")
workbench(config)
"""
ENDLESS = """
import tempfile
from dataclasses import replace
from pathlib import Path
directory = Path(tempfile.mkdtemp()) / "run"
# Over a slow link, so that the ranks leave the cores to the browser.
with live(directory):
    compare(replace(config, steps=100_000, link="1Gbps,20ms"), directory)
"""
RUN_FROM_THE_LAST = """command => {
    window.jupyterapp.shell.currentWidget.content.activeCellIndex = 3;
    return command === "notebook:run-all-above" ? window.jupyterapp.commands.execute(command)
        : void window.jupyterapp.commands.execute(command);
}"""
# Text of figures that are seen: the place that waits for its turn is hidden.
SEEN = """() => [...document.querySelectorAll(".js-plotly-plot text")]
    .filter(text => getComputedStyle(text).visibility === "visible").map(text => text.textContent).join("|")"""
SEEN_LAST = SEEN.replace("document.", "document.querySelectorAll('.jp-CodeCell')[3].", 1)
RUNNING = """[...document.querySelectorAll(".jp-InputPrompt")].some(prompt => prompt.innerText.includes("*"))"""
INTERRUPT = """() => window.jupyterapp.commands.execute("notebook:interrupt-kernel")"""
TIMEOUT_MS = 120_000


@pytest.fixture(scope="module")
def notebook(open_notebook, lab):
    """One kernel for four cells, of which the last has not run: it would keep the kernel."""
    write_notebook(lab.root / "controls.ipynb", RANKS, EXPLORER, WORKBENCH, ENDLESS)
    notebook = open_notebook("controls.ipynb")
    notebook.page.evaluate(RUN_FROM_THE_LAST, "notebook:run-all-above")
    return notebook


def test_cells_run_and_what_a_rank_prints_is_seen_behind_its_rank(notebook):
    assert notebook.errors() == []
    assert notebook.prompts() == ["[1]:", "[2]:", "[3]:", "[ ]:"]
    for rank in range(2):
        line = notebook.output_with(f"[rank {rank}] I am rank {rank}")
        line.scroll_into_view_if_needed()
        assert line.is_visible()


def test_a_figure_is_drawn_and_follows_the_window(notebook):
    wide, *_ = drawn_figures(notebook.page)
    assert wide.height > 200
    assert wide.marks >= 2, "one bar for each rank"
    size = notebook.page.viewport_size
    notebook.page.set_viewport_size({"width": 900, "height": 700})
    notebook.page.wait_for_function(f"() => document.querySelector('svg.main-svg').clientWidth < {wide.width} - 200")
    narrow, *_ = drawn_figures(notebook.page)
    assert narrow.height > 200
    assert narrow.width <= narrow.room
    assert narrow.marks == wide.marks
    notebook.page.set_viewport_size(size)


def wait_until_seen(page, text):
    page.wait_for_function(f"text => ({SEEN})().includes(text)", arg=text, timeout=TIMEOUT_MS)


def wait_until_gone(page, text):
    """The old figure stays until the new one is drawn, so for a moment both are there."""
    page.wait_for_function(f"text => !({SEEN})().includes(text)", arg=text, timeout=TIMEOUT_MS)


def test_a_slider_changes_figure_and_table(notebook):
    page, cell = notebook.page, notebook.page.locator(".jp-CodeCell").nth(1)
    wait_until_seen(page, "Memory at rest of each of 4 ranks")
    before = cell.locator("table:visible").inner_text()
    handle = cell.locator(".noUi-handle").last  # the first is that of the number of parameters
    handle.focus()
    handle.press("ArrowRight")
    wait_until_seen(page, "Memory at rest of each of 6 ranks")
    wait_until_gone(page, "each of 4 ranks")
    table = cell.locator("table").filter(visible=True)
    table.filter(has_text="83.33").first.wait_for(timeout=TIMEOUT_MS)
    assert table.last.inner_text() != before


def test_run_and_bad_input_in_the_workbench(notebook):
    page, cell = notebook.page, notebook.page.locator(".jp-CodeCell").nth(2)
    run = cell.locator("button.jupyter-button", has_text="Run")
    run.wait_for(timeout=TIMEOUT_MS)
    link = page.get_by_placeholder("real; or 10Gbps,50us")
    link.fill("very fast")
    link.press("Tab")
    run.click()
    alert = cell.locator("[role=alert]")
    alert.wait_for(timeout=TIMEOUT_MS)
    assert alert.inner_text().startswith("link: ")
    assert "write bandwidth,latency such as 10Gbps,50us" in alert.inner_text()
    link.fill("")
    link.press("Tab")
    run.click()
    cell.locator("[role=status]", has_text="Run 1 is over: zero1").wait_for(timeout=TIMEOUT_MS)
    wait_until_seen(page, "Loss by step")
    assert notebook.errors() == []


def test_the_live_view_changes_while_ranks_train(notebook):
    page, seen = notebook.page, []
    page.evaluate(RUN_FROM_THE_LAST, "notebook:run-all-below")
    for _ in range(2):
        page.wait_for_function(
            f"""before => {{
                const text = ({SEEN_LAST})();
                const found = text.match(/zero1, step ([0-9]+): loss/);
                return {RUNNING} && found && text.includes("Timeline of step") && Number(found[1]) > before;
            }}""",
            arg=seen[-1] if seen else -1,
            timeout=TIMEOUT_MS,
        )
        seen.append(int(page.evaluate(f"() => ({SEEN_LAST})().match(/zero1, step ([0-9]+): loss/)[1]")))
    page.evaluate(INTERRUPT)
    page.wait_for_function(f"() => !{RUNNING}", timeout=TIMEOUT_MS)
    assert seen == sorted(set(seen)), "each time a later step, before the cell had ended"


def test_warm_ranks_end_with_the_server(notebook, lab):
    pids = ast.literal_eval(notebook.output_with("ranks:").inner_text().partition(": ")[2])
    assert len(pids) == 2
    assert set(pids) <= {process.pid for process in lab.processes()}
    assert lab.stop() == []
