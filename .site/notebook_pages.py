"""A notebook as a page: its text, code and saved outputs; figures are drawn by plotly, or are the saved PNG."""

import json
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters import HTMLExporter
from nbformat import NotebookNode
from pages import Page, Site
from prose import markdown
from traitlets.config import Config

PLOTLY = "application/vnd.plotly.v1+json"


def notebook_page(path: Path, site: Site) -> Page:
    """The page of a saved notebook.

    Args:
        path: the notebook.
        site: which pages belong to.
    """
    notebook = nbformat.read(path, as_version=4)
    place = Path("notebooks") / f"{path.stem}.html"
    title = f"{path.stem[:2]} {notebook.cells[0].source.splitlines()[0].removeprefix('# ')}"
    for cell in notebook.cells:
        _make_ready(cell, site, path.relative_to(site.root), place)
    config = Config({"HTMLExporter": {"exclude_anchor_links": True}})
    body, _ = HTMLExporter(template_name="basic", config=config).from_notebook_node(notebook)
    site.copy(path, place.with_suffix(".ipynb"))
    note = f'<p class="note">As it was saved: <a href="{path.name}">{path.name}</a>.</p>'
    return Page(place, title, note + body, site.questions[path.stem])


def _make_ready(cell: NotebookNode, site: Site, source: Path, page: Path) -> None:
    """Give links the site's addresses, text its formulas, and figures a form that needs no Jupyter."""
    if cell.cell_type == "markdown":
        cell.source = site.linked(markdown(cell.source), source, page)
        return
    for output in cell.get("outputs", []):
        if PLOTLY in output.get("data", {}):
            output.data = NotebookNode({"text/html": figure(output.data)})


def figure(data: dict[str, Any]) -> str:
    """A figure: its JSON for plotly, its PNG for a browser without JavaScript, its summary for everybody.

    Args:
        data: by MIME type: plotly's JSON, ``text/plain``, and ``image/png`` where there is one.
    """
    drawn, summary = data[PLOTLY], data["text/plain"]
    height = drawn["layout"].get("height", 440)
    content = json.dumps({"data": drawn["data"], "layout": drawn["layout"]}, separators=(",", ":"))
    content = content.replace("</", "<\\/")  # else a name in a figure could end the element
    image = data.get("image/png")
    png = f'<noscript><img src="data:image/png;base64,{image}" alt=""></noscript>' if image else ""
    return (
        f'<figure><div class="plot" role="img" aria-label="{escape(summary)}" style="min-height:{height}px">'
        f'<script type="application/json">{content}</script></div>{png}'
        f"<figcaption>{escape(summary)}</figcaption></figure>"
    )
