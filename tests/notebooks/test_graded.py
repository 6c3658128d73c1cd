"""Notebooks 03 to 12 ask for a number before a run, and end in graded steps whose solution nobody has read before."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from shardlab.course import LADDER, find

FOLDER = Path(__file__).parents[2] / "notebooks"
PATHS = [path for path in sorted(FOLDER.glob("[0-9]*.ipynb")) if "03" <= path.name[:2] <= "12"]
CHECK = re.compile(r'^check\("([\w.]+)", (\w+)\)$', re.MULTILINE)

of_each = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def cells_of(path: Path) -> list[NotebookNode]:
    return nbformat.read(path, as_version=4).cells


def checks_in(path: Path) -> dict[str, int]:
    """The place of the cell that checks an exercise, by its name."""
    return {found[1]: at for at, cell in enumerate(cells_of(path)) if (found := CHECK.search(cell.source)) is not None}


@pytest.mark.parametrize("path", [FOLDER / "01_collectives_by_hand.ipynb", *PATHS], ids=lambda path: path.stem)
def test_it_holds_its_exercises_with_their_tasks_and_untouched_starters(path: Path) -> None:
    cells, checks = cells_of(path), checks_in(path)
    assert set(checks) == {exercise.name for exercise in LADDER if exercise.notebook == path.stem}
    for name, place in checks.items():
        exercise = find(name)
        source = cells[place].source.replace("  # noqa: ARG001", "")
        starter = exercise.starter[exercise.starter.index("def ") :].rstrip()
        assert source == f'{starter}\n\n\ncheck("{name}", {exercise.function_name})'
        assert " ".join(exercise.task.split()) in " ".join(cells[place - 1].source.split())
        said = "".join(output.get("text", "") for output in cells[place].outputs)
        assert said.startswith(f"{name}: failed. "), "an untouched notebook shows what a failure looks like"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[0-9]*.ipynb")), ids=lambda path: path.stem)
def test_what_is_called_an_exercise_can_be_marked(path: Path) -> None:
    text = "\n".join(cell.source for cell in cells_of(path) if cell.cell_type == "markdown")
    assert ("## Exercises" in text) == bool(checks_in(path)), "what cannot is something to try, or a warm-up"
    numbered = re.findall(r"^\*\*\d\.(?: `([\w.]+)`)?", text[text.find("## Exercises") :], re.MULTILINE)
    assert set(numbered) <= set(checks_in(path))


@of_each
def test_it_ends_in_two_to_four_graded_steps_without_a_solution_above_them(path: Path) -> None:
    cells = cells_of(path)
    begin = next(place for place, cell in enumerate(cells) if "## Exercises" in cell.source)
    own = [cell for cell in cells[begin:] if any("not yet" in one.get("text", "") for one in cell.get("outputs", []))]
    assert 2 <= len(own) + len(checks_in(path)) <= 4
    for place, cell in enumerate(cells):
        is_tried = "not yet" in str(cells[place - 1].get("outputs"))
        assert "A solution</summary>" not in cell.source or is_tried, "read it, then try?"


@of_each
def test_it_asks_for_a_prediction_before_the_run_that_answers_it(path: Path) -> None:
    sources = [cell.source for cell in cells_of(path) if cell.cell_type == "code"]
    asked = next(place for place, source in enumerate(sources) if source.startswith("guess = predict("))
    answered = next(place for place, source in enumerate(sources) if source.startswith("guess.against("))
    assert 0 < asked < answered
    assert ", None" in sources[asked], "the prediction is the reader's"


def test_half_of_the_predictions_are_directions_and_no_saved_file_has_an_answer() -> None:
    cells = {path: cells_of(path) for path in sorted(FOLDER.glob("[0-9]*.ipynb"))}
    asking = {path: [cell.source for cell in of_one if "predict(" in cell.source] for path, of_one in cells.items()}
    directions = {path for path, sources in asking.items() if "among=" in str(sources)}
    assert len(directions) >= len([path for path, sources in asking.items() if sources]) / 2
    for cell in (cell for of_one in cells.values() for cell in of_one if ".against(" in cell.source):
        assert "shown once you have predicted it" in "".join(output.get("text", "") for output in cell.outputs)
