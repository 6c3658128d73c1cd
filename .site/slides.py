"""Slides of a lesson: ``python .site/slides.py 06 [--code] [--out FOLDER]``, by default into ``build/slides``.

One file, which a browser opens from a folder, without a network: a slide for each text of the notebook, and for each of
its saved figures and drawings; what a cell has printed stands under the text before it, one table on a slide. Code is
left out, unless ``--code`` is given, and so is what follows "Exercise", but for what to carry home. What is higher than
the window is made smaller. Arrow keys, Page Up and Page Down, or a click turn the slides; the address names one.
"""

import argparse
import sys
from html import escape
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from notebook_pages import PLOTLY
from prose import markdown

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
STYLE = """
section { display: none; min-height: 100vh; padding: 4vh 6vw; box-sizing: border-box; flex-direction: column;
  justify-content: center; max-width: 1280px; margin: auto; font-size: clamp(17px, 1.7vw, 26px); overflow-x: auto; }
section.on { display: flex; }
section img, section > svg { width: 100%; max-height: 82vh; max-width: 1100px; margin: auto; object-fit: contain; }
section pre { white-space: pre-wrap; }
section figcaption { max-width: 1100px; margin: .6rem auto; }
#place { position: fixed; right: 1rem; bottom: .6rem; color: var(--soft); font-size: 14px; }
@media print { section { display: flex; break-after: page; } #place { display: none; } }
"""
SCRIPT = """
const slides = [...document.querySelectorAll("section")];
let at = -1;
const show = to => {
  at = Math.max(0, Math.min(slides.length - 1, to));
  slides.forEach((slide, place) => slide.classList.toggle("on", place == at));
  document.getElementById("place").textContent = `${at + 1} / ${slides.length}`;
  history.replaceState(null, "", `#${at + 1}`);
  scrollTo(0, 0);
  slides[at].style.zoom = 1;
  for (let zoom = 0.95; slides[at].getBoundingClientRect().height > innerHeight + 1 && zoom > 0.45; zoom -= 0.05)
    slides[at].style.zoom = zoom;
};
const asked = () => show((parseInt(location.hash.slice(1)) || 1) - 1);
addEventListener("hashchange", asked);
addEventListener("resize", asked);
addEventListener("keydown", event => {
  const turn = {ArrowRight: 1, PageDown: 1, " ": 1, ArrowLeft: -1, PageUp: -1}[event.key];
  if (turn) { event.preventDefault(); show(at + turn); }
});
addEventListener("click", event => {
  if (event.target.closest("a, summary") || String(getSelection())) return;
  show(at + (event.clientX < innerWidth / 3 ? -1 : 1));
});
asked();
"""


def main() -> int:
    """Write the slides of the notebooks that are named; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="beginnings of file names, such as 06")
    parser.add_argument("--code", action="store_true", help="show the cells too")
    parser.add_argument("--out", type=Path, default=NOTEBOOKS.parent / "build" / "slides")
    given = parser.parse_args()
    paths = [path for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")) if path.name.startswith(tuple(given.names))]
    if not paths:
        parser.error(f"no notebook begins with {' or '.join(given.names)}")
    given.out.mkdir(parents=True, exist_ok=True)
    for path in paths:
        place = given.out / f"{path.stem}.html"
        place.write_text(slides_of(path, code=given.code), encoding="utf-8")
        sys.stdout.write(f"{place}\n")
    return 0


def slides_of(path: Path, *, code: bool = False) -> str:
    """The page of a saved notebook's slides.

    Args:
        path: the notebook.
        code: whether cells of code are shown.
    """
    notebook = nbformat.read(path, as_version=4)
    slides: list[str] = []
    exercises = ""
    for cell in notebook.cells:
        if exercises and not cell.source.startswith("## To carry home"):
            continue
        if cell.cell_type == "markdown":
            text, begins, _ = f"\n{cell.source}".partition("\n## Exercise")  # it may stand inside a cell
            exercises = exercises or begins
            slides.append(markdown(text.strip()))
            continue
        if code:
            slides[-1] += f"<pre>{escape(cell.source)}</pre>"
        for is_picture, body in map(_output, cell.outputs):
            if is_picture or not slides or ("<table" in body and "<table" in slides[-1]):
                slides.append(body)
            else:
                slides[-1] += body
    style = (Path(__file__).parent / "style.css").read_text("utf-8") + STYLE
    title = escape(notebook.cells[0].source.splitlines()[0].removeprefix("# "))
    return "\n".join([
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{style}</style></head><body>",
        *(f"<section>{slide}</section>" for slide in slides if slide.strip()),
        f'<div id="place"></div><script>{SCRIPT}</script></body></html>',
    ])  # fmt: skip


def _output(output: NotebookNode) -> tuple[bool, str]:
    """Whether an output is a picture, and its HTML."""
    data = output.get("data", {})
    if svg := data.get("image/svg+xml"):
        return True, svg
    if image := data.get("image/png"):
        summary = escape(data["text/plain"].strip("'")) if PLOTLY in data else ""
        caption = f"<figcaption>{summary}</figcaption>"
        return True, f'<img alt="{summary}" src="data:image/png;base64,{image.strip()}">{caption}'
    if table := data.get("text/html"):
        return False, table
    return False, f"<pre>{escape(output.get('text') or data.get('text/plain', ''))}</pre>"


if __name__ == "__main__":
    sys.exit(main())
