"""What is saved in the notebooks: readable on GitHub, small, run in order, comparable, free of this machine."""

import ast
import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from PIL import Image

from shardlab.course import drawings
from tests.plots.test_plots_colours_and_text import contrast

FOLDER = Path(__file__).parents[2] / "notebooks"
PATHS = sorted(FOLDER.glob("[0-9]*.ipynb"))
PLOTLY = "application/vnd.plotly.v1+json"
NOT_COMPARED = {"nbval-ignore-output", "nbval-skip"}
MACHINE_PATH = re.compile(r"(?:/(?:home|Users|root|work|tmp|usr|opt|var|mnt|private)/|[A-Z]:\\)\w")


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def outputs(path: Path) -> list[NotebookNode]:
    return [output for cell in code_cells(path) for output in cell.outputs]


def tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def has_figure(cell: NotebookNode) -> bool:
    return any(PLOTLY in output.get("data", {}) for output in cell.outputs)


def check_it_is_small(path: Path) -> None:
    assert path.stat().st_size < 500_000


def check_metadata_is_the_kernel_and_tags(path: Path) -> None:
    notebook = read(path)
    assert dict(notebook.metadata) == {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags", "jupyter"}
        assert tags(cell) <= NOT_COMPARED | {"nbval-raises-exception"}
    assert not [data for data in (o.get("data", {}) for o in outputs(path)) if any("widget" in mime for mime in data)]


def check_cells_ran_in_order(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


def check_no_cell_failed_or_complained(path: Path) -> None:
    for output in outputs(path):
        assert output.output_type != "error", output.get("evalue")
        assert output.get("name") != "stderr", output.get("text")


def check_every_figure_is_readable_everywhere(path: Path) -> None:
    figures = [output.data for cell in code_cells(path) for output in cell.outputs if PLOTLY in output.get("data", {})]
    assert figures, "a notebook answers with a picture"
    for data in figures:
        assert set(data) == {PLOTLY, "image/png", "text/plain"}, "plotly for viewers, PNG for GitHub, text; no HTML"
        assert len(data["text/plain"].strip("'\" ")) > 20, "the summary says what is to be seen"


def colours_in(part: object, key: str = "") -> Iterator[str]:
    """Of marks, lines and words; not of what stands on a mark or has a ground of its own."""
    if isinstance(part, dict):
        for name, value in part.items():
            if name not in ("template", "insidetextfont", "textfont", "error_x", "shapes", "hoverlabel", "colorscale"):
                yield from colours_in(value, name)
    elif isinstance(part, list):
        for value in part:
            yield from colours_in(value, key)
    elif isinstance(part, str) and re.fullmatch("#[0-9a-f]{6}", part) and part not in ("#000000", "#ffffff"):
        yield part  # (black on white and white on black are crosses on marks)


def check_figures_read_on_light_and_dark_pages(path: Path) -> None:
    for data in (output.data for output in outputs(path) if PLOTLY in output.get("data", {})):
        figure = data[PLOTLY]
        assert figure["layout"]["paper_bgcolor"] == "rgba(0,0,0,0)", "a slab on a page of the other colour"
        for colour in {*colours_in([figure["data"], figure["layout"]])}:
            assert min(contrast(colour, ground) for ground in ("#ffffff", "#111111")) >= 3, colour
        picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGBA")
        assert picture.getpixel((2, picture.height // 2))[3] == 0, "the picture of it has a paper"


def check_no_html_but_tables(path: Path) -> None:
    for output in outputs(path):
        html = output.get("data", {}).get("text/html", "")
        assert "<script" not in html
        assert not html or 'class="dataframe"' in html


def check_a_dozen_imports_at_most(path: Path) -> None:
    parsed = [node for cell in code_cells(path)[1:] for node in ast.parse(cell.source).body]  # after the drawing
    assert sum(isinstance(node, ast.Import | ast.ImportFrom) for node in parsed) <= 12


def check_figures_are_not_compared_and_the_rest_is(path: Path) -> None:
    for cell in code_cells(path):
        if has_figure(cell):
            assert tags(cell) & NOT_COMPARED, "a figure has a PNG only in the build, so nbval cannot compare it"
    compared = [cell for cell in code_cells(path) if cell.outputs and not tags(cell) & NOT_COMPARED]
    assert len(compared) >= 3, "bytes, counts and verdicts must be compared"


def check_it_begins_with_a_title_and_a_question_and_ends_with_a_file(path: Path) -> None:
    cells = read(path).cells
    first, last = cells[0], cells[-1]
    assert first.cell_type == last.cell_type == "markdown"
    assert first.source.startswith("# ")
    assert "**Question.**" in first.source
    assert "**Prediction.**" in first.source
    assert "**The file that implements it:**" in last.source


def check_a_drawing_stands_before_the_first_code(path: Path) -> None:
    drawn = code_cells(path)[0]
    found = re.fullmatch(r"from shardlab\.course\.drawings import (\w+)\n\n\1\(\)", drawn.source)
    assert found
    assert tags(drawn) == {"nbval-ignore-output"}, "as a figure's"
    data = drawn.outputs[0].data
    assert set(data) == {"image/svg+xml", "image/png", "text/plain"}, "a PNG where a notebook is not trusted"
    assert data["image/svg+xml"] == getattr(drawings, found[1])().svg(), "python notebooks/build.py draws it anew"


def check_imports_stand_behind_the_drawing_and_are_folded(path: Path) -> None:
    folded = [cell for cell in code_cells(path) if "jupyter" in cell.metadata]
    assert folded == [code_cells(path)[1]]
    assert folded[0].metadata == {"jupyter": {"source_hidden": True}}
    assert all(isinstance(line, ast.Import | ast.ImportFrom) for line in ast.parse(folded[0].source).body)


def check_it_ends_with_a_line_to_carry_home_and_two_problems_on_paper(path: Path) -> None:
    told = read(path).cells[-2].source
    assert re.match(r"## To carry home\n\n\*\*[^*]+\*\*\n\n## On paper\n", told)
    problems, answers = told.split("<details><summary>Answers</summary>")
    for part in (problems, answers):
        assert re.findall(r"^(\d)\. ", part, re.MULTILINE) == ["1", "2"]


def check_it_has_something_to_break_and_an_exercise(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    assert "## Something to break" in text
    assert re.search("^## (Exercises|Try it yourself)$", text, re.MULTILINE)


def check_links_lead_somewhere(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target.startswith("https://") or (FOLDER / target).is_file(), target


def check_link_texts_name_the_file_that_they_open(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    for words, target in re.findall(r"\[`([^`]+)`\]\(([^)]+)\)", text):
        assert target.endswith(f"/{words}"), f"{words} opens {target}"


def check_no_path_of_a_machine(path: Path) -> None:
    for cell in code_cells(path):
        for output in cell.outputs:
            shown = output.get("text", "") + json.dumps(
                {mime: data for mime, data in output.get("data", {}).items() if mime != "image/png"}
            )
            found = MACHINE_PATH.search(shown)
            assert found is None, f"cell {cell.execution_count}: {shown[max(0, found.start() - 40) : found.end() + 40]}"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook(path: Path) -> None:
    checks = [value for name, value in globals().items() if name.startswith("check_")]
    assert len(checks) == 17
    for check in checks:
        check(path)


REST, PEAK = "Memory at rest after a step", "Memory at the peak of a step"
ROW = re.compile(r"^(\S.*?)((?:  +[\d.,-]+)+) *$", re.MULTILINE)


def figures(path: Path, title: str) -> list[NotebookNode]:
    drawn = [output.data[PLOTLY] for output in outputs(path) if PLOTLY in output.get("data", {})]
    return [one for one in drawn if f">{title}" in one["layout"]["title"]["text"]]


def bars(figure: NotebookNode) -> dict[str, dict[str, int]]:
    """Bytes of each role by run, as the hover says them."""
    found: dict[str, dict[str, int]] = {}
    for trace in figure["data"]:
        for label, words in zip(trace["y"], trace.get("customdata", []), strict=False):
            found.setdefault(str(label), {})[trace["name"]] = int(words[1].replace(",", ""))
    return found


def rows_of(path: Path, column: str) -> dict[str, list[set[int]]]:
    """The whole numbers in rows of printed tables that have this column, by the row's name."""
    found: dict[str, list[set[int]]] = {}
    for printed in (output.get("data", {}).get("text/plain", "") for output in outputs(path)):
        for name, numbers in ROW.findall(printed) if column in printed.partition("\n")[0].split() else ():
            found.setdefault(name, []).append({int(one) for one in numbers.split() if one.isdigit()})
    return found


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_figures_and_tables_say_the_same(path: Path) -> None:
    rows, counted = rows_of(path, "parameter"), rows_of(path, "messages")
    peaks = [bars(figure) for figure in figures(path, PEAK)]
    compared = 0
    for at_rest in map(bars, figures(path, REST)):
        for run, held in at_rest.items():
            assert "unattributed" not in held, "a lesson's bars are what the strategy holds"
            for row in rows.get(run, []):
                compared += 1
                drawn = {held[role] for role in ("parameter", "gradient", "optimizer state")}  # counters differ by rank
                assert drawn <= row, run
            for peak in peaks:
                assert sum(peak.get(run, held).values()) >= sum(held.values()), f"{run}: less at the peak than at rest"
    for figure in figures(path, "Training of"):
        assert all(trace["name"] != "unattributed" for trace in figure["data"]), "nor does a live view show others"
    assert compared >= 6 or not path.stem.startswith("02")
    told = "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs(path))
    assert "GiB" not in told, "one gigabyte of a card, which is 1e9 bytes"
    # Messages are counted in one way, flags among them.
    for said in (output.get("data", {}).get("text/plain", "") for output in outputs(path)):
        for run, number in re.findall(r"of run (.+?): .*?(\d+) collectives a rank", said):
            assert all(int(number) in row for row in counted.get(run, [])), f"{run}: {number} and {counted[run]}"
