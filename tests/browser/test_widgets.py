"""Controls in JupyterLab: a slider changes a figure, the live view changes while ranks train, a click goes on."""

import pytest

from tests.browser.notebook_page import RUN_ALL, write_notebook

EXPLORER = """
from shardlab.widgets import MemoryPlan, memory_explorer
memory_explorer(MemoryPlan("gpt-1m", 4))
"""
ENDLESS = """
import tempfile
from pathlib import Path
from shardlab import CompareConfig, compare
from shardlab.widgets import live
directory = Path(tempfile.mkdtemp()) / "run"
# Over a slow link, so that the ranks leave the cores to the browser.
config = CompareConfig(
    strategies=("zero1",), ranks=2, steps=100_000, model="gpt-1m", text="grammar", device="cpu", link="1Gbps,5ms"
)
with live(directory):
    compare(config, directory)
"""
WORKBENCH = """
from shardlab import CompareConfig
from shardlab.widgets import workbench
config = CompareConfig(strategies=("zero1",), ranks=2, steps=4, model="gpt-1m", text="grammar", device="cpu")
workbench(config)
"""
# Text of figures that are seen: the place that waits for its turn is hidden.
SEEN = """() => [...document.querySelectorAll(".js-plotly-plot text")]
    .filter(text => getComputedStyle(text).visibility === "visible").map(text => text.textContent).join("|")"""
RUNNING = """[...document.querySelectorAll(".jp-InputPrompt")].some(prompt => prompt.innerText.includes("*"))"""
INTERRUPT = """() => window.jupyterapp.commands.execute("notebook:interrupt-kernel")"""
TIMEOUT_MS = 120_000


def wait_until_seen(page, text):
    page.wait_for_function(f"text => ({SEEN})().includes(text)", arg=text, timeout=TIMEOUT_MS)


def wait_until_gone(page, text):
    """The old figure stays until the new one is drawn, so for a moment both are there."""
    page.wait_for_function(f"text => !({SEEN})().includes(text)", arg=text, timeout=TIMEOUT_MS)


@pytest.fixture(scope="module")
def explorer(open_notebook, lab):
    write_notebook(lab.root / "explorer.ipynb", EXPLORER)
    notebook = open_notebook("explorer.ipynb")
    notebook.run_all()
    assert notebook.errors() == []
    return notebook.page


def test_a_slider_changes_figure_and_table(explorer):
    wait_until_seen(explorer, "Memory at rest of each of 4 ranks")
    before = explorer.locator(".jp-OutputArea-output table:visible").inner_text()
    handle = explorer.locator(".jupyter-widgets .noUi-handle").last  # the first is that of the number of parameters
    handle.focus()
    handle.press("ArrowRight")
    wait_until_seen(explorer, "Memory at rest of each of 6 ranks")
    wait_until_gone(explorer, "each of 4 ranks")
    table = explorer.locator(".jp-OutputArea-output table").filter(visible=True)
    table.filter(has_text="83.33").first.wait_for(timeout=TIMEOUT_MS)
    assert table.last.inner_text() != before


def test_the_live_view_changes_while_ranks_train(open_notebook, lab):
    write_notebook(lab.root / "live.ipynb", ENDLESS)
    page = open_notebook("live.ipynb").page
    page.evaluate(RUN_ALL)
    seen = []
    for _ in range(2):
        page.wait_for_function(
            f"""before => {{
                const text = ({SEEN})();
                const found = text.match(/zero1, step ([0-9]+): loss/);
                return {RUNNING} && found && text.includes("Timeline of step") && Number(found[1]) > before;
            }}""",
            arg=seen[-1] if seen else -1,
            timeout=TIMEOUT_MS,
        )
        seen.append(int(page.evaluate(f"() => ({SEEN})().match(/zero1, step ([0-9]+): loss/)[1]")))
    page.evaluate(INTERRUPT)
    page.wait_for_function(f"() => !{RUNNING}", timeout=TIMEOUT_MS)
    assert seen == sorted(set(seen)), "each time a later step, before the cell had ended"


def test_run_and_bad_input_in_the_workbench(open_notebook, lab):
    write_notebook(lab.root / "bench.ipynb", WORKBENCH)
    notebook = open_notebook("bench.ipynb")
    notebook.run_all()
    page = notebook.page
    run = page.locator("button.jupyter-button", has_text="Run")
    run.wait_for(timeout=TIMEOUT_MS)
    link = page.get_by_placeholder("real; or 10Gbps,50us")
    link.fill("very fast")
    link.press("Tab")
    run.click()
    alert = page.locator(".jupyter-widgets [role=alert]")
    alert.wait_for(timeout=TIMEOUT_MS)
    assert alert.inner_text().startswith("link: ")
    assert "write bandwidth,latency such as 10Gbps,50us" in alert.inner_text()
    link.fill("")
    link.press("Tab")
    run.click()
    page.locator(".jupyter-widgets [role=status]", has_text="Run 1 is over: zero1").wait_for(timeout=TIMEOUT_MS)
    wait_until_seen(page, "Loss by step")
    assert notebook.errors() == []
