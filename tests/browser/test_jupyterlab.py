"""What a person sees in JupyterLab: cells that ran, output of ranks, figures; and nothing left when it is closed."""

import ast

import nbformat
import pytest

from tests.browser.figures import drawn_figures
from tests.browser.notebook_page import write_notebook

FIRST = "00_ranks_in_a_cell.ipynb"
LEAVES_RANKS_WARM = """
from shardlab import RankPool
pool = RankPool(2, device="cpu")
pool.start()
print(list(pool.pids))
"""


@pytest.fixture(scope="module")
def first(open_notebook):
    notebook = open_notebook(FIRST)
    assert set(notebook.prompts()) == {"[ ]:"}, "nothing has run, so what is seen later is of this run"
    assert not drawn_figures(notebook.page)
    notebook.run_all()
    return notebook


def test_the_first_notebook_runs_from_top_to_bottom(first, lab):
    cells = nbformat.read(lab.root / FIRST, as_version=4).cells
    assert first.errors() == []
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert first.prompts() == [f"[{number}]:" for number in range(1, len(code) + 1)]


def test_what_a_rank_prints_is_seen_behind_its_rank(first):
    for rank in range(4):
        line = first.output_with(f"[rank {rank}] I am rank {rank}")
        line.scroll_into_view_if_needed()
        assert line.is_visible()


def test_a_figure_is_drawn_and_follows_the_window(first):
    (wide,) = drawn_figures(first.page)
    assert wide.height > 200
    assert wide.marks >= 4, "one bar for each rank"
    first.page.set_viewport_size({"width": 900, "height": 700})
    first.page.wait_for_function(f"() => document.querySelector('svg.main-svg').clientWidth < {wide.width} - 200")
    (narrow,) = drawn_figures(first.page)
    assert narrow.height > 200
    assert narrow.width <= narrow.room
    assert narrow.marks == wide.marks


def test_warm_ranks_end_with_the_server(open_notebook, lab):
    write_notebook(lab.root / "warm.ipynb", LEAVES_RANKS_WARM)
    notebook = open_notebook("warm.ipynb")
    notebook.run_all()
    assert notebook.errors() == []
    pids = ast.literal_eval(notebook.output_with("[").inner_text())
    assert len(pids) == 2
    assert set(pids) <= {process.pid for process in lab.processes()}
    assert lab.stop() == []
