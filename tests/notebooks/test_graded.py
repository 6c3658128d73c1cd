"""Notebooks 03 to 12 ask for a number before a run, and end in graded steps whose solution nobody has read before."""

import re
from functools import partial
from pathlib import Path

import nbformat
import pytest
import torch
from nbformat import NotebookNode
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.course import LADDER, find
from shardlab.course.exercises.exercise import code_in
from shardlab.course.small_records import log_collectives
from shardlab.engines import build_engine
from shardlab.launch import current
from shardlab.models import MLP

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


LAST_ALONE = "def accumulate(engine, given):\n    x, y = given[-1]\n    engine.backward(mse(engine(x), y))"


def test_a_step_that_sends_once_is_right_where_its_gradients_are(pools, capsys) -> None:
    cells = cells_of(FOLDER / "03_data_parallel.ipynb")
    place = next(place for place, cell in enumerate(cells) if cell.source.startswith("def accumulate(engine"))
    graded = cells[place].source.partition("\n\n\n")[2]
    x, y = torch.linspace(-1, 1, 64 * 9, dtype=torch.float64).sin().view(64, 9).split([8, 1], 1)
    given = {
        "N": 2, "X": x, "Y": y, "mse": nn.functional.mse_loss, "sgd": partial(torch.optim.SGD, lr=0.1), "MLP": MLP,
        "Mesh": Mesh, "build_engine": build_engine, "log_collectives": log_collectives, "current": current,
        "pool": pools(2),
    }  # fmt: skip
    for answer, words in (
        (code_in(cells[place + 1].source.replace("\n</details>", "").rstrip()).partition("```")[0], "\nright\n"),
        (LAST_ALONE, "\nnot yet: these are not the mean over all rows\n"),
    ):
        exec(compile(f"{answer}\n\n\n{graded}", "warm-up", "exec"), {"__name__": "__main__", **given})
        assert capsys.readouterr().out.endswith(words)


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
