"""Show figures: in a notebook as plotly's JSON for live viewers, a PNG for GitHub, text for everyone else; in a report.

In a notebook a figure has no paper, and reads on a light page and on a dark one (``theme.on_any_page``).

The notebook holds no text/html, no plotly.js and no widget state. A PNG needs a browser, which takes about two seconds
to start, so it is made only if SHARDLAB_PNG=1, as in the command that builds the notebooks. A report is one HTML file:
lead, tables, figures. It contains plotly.js once, and never fetches anything: the basic bundle (4.1.1, under the MIT
licence, as its first lines say), which is a quarter of the whole, compressed.
"""

import base64
import gzip
import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.utils import PlotlyJSONEncoder

from shardlab.plots.text import column_text
from shardlab.plots.theme import HEIGHT, on_any_page, summary_of

DIGITS = 6
PLOTLY_MIME = "application/vnd.plotly.v1+json"
PNG_WIDTH = 900
PNG_SCALE = 1.0  # with a palette about 12 kB a figure, so a notebook stays far below 500 kB
PNG_COLOURS = 256  # a figure has a few hundred, nearly all from the edges of letters
# The browser refuses every request, so a report that is opened years later shows what it shows today.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)
# Kaleido takes the first load event for that of its page. On a busy machine it may be the empty tab's before, and the
# figure comes while scripts are still to come: until they are there this stands in for kaleido's own.
WAITING = """<script>const loaded = new Promise(done => addEventListener("load", done));
window.kaleido_scopes = {plotly: (...given) => loaded.then(() => window.kaleido_scopes.plotly(...given))}</script>"""
HEAD = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">"""
_CSS, _SCRIPT = (Path(__file__).with_name(name) for name in ("report.css", "report.js"))
_PLOTLY = Path(__file__).with_name("plotly-basic.min.js.gz")
BASIC = {"bar", "pie", "scatter"}  # the kinds of traces that it draws
TITLE_PX = 68


def plain_json(figure: go.Figure) -> dict[str, Any]:
    """``{"data": ..., "layout": ...}`` of Python's own types; NaN and infinity become None."""
    # Not figure.to_dict(): it turns arrays into base64.
    content = {"data": [trace.to_plotly_json() for trace in figure.data], "layout": figure.layout.to_plotly_json()}
    plain: dict[str, Any] = json.loads(json.dumps(content, cls=PlotlyJSONEncoder), parse_float=_rounded)
    return plain


def _rounded(number: str) -> float | int:
    rounded = float(f"{float(number):.{DIGITS - 1}e}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


def is_in_a_cell() -> bool:
    """Whether this runs in IPython, which has been imported then; scripts and the command line do without it."""
    if sys.modules.get("IPython") is None:
        return False
    from IPython.core.getipython import get_ipython

    return get_ipython() is not None


def show(shown: go.Figure | pd.DataFrame) -> None:
    """Display a figure, or a table, in the current cell; outside a notebook, print its summary, or the table."""
    is_figure = isinstance(shown, go.Figure)
    if not is_in_a_cell():
        sys.stdout.write((summary_of(shown) if is_figure else shown.to_string(index=False)) + "\n")
        return
    from IPython.display import display

    display(mime_bundle(shown) if is_figure else shown, raw=is_figure)  # type: ignore[no-untyped-call]  # so IPython


def mime_bundle(figure: go.Figure, *, with_png: bool = True) -> dict[str, Any]:
    """The output of a cell: plotly JSON, a text summary, and a PNG if one is wanted and a browser is available."""
    content = on_any_page(plain_json(figure))
    # Not "responsive": JupyterLab fits the width itself, and with both a figure loses its height on a resize.
    config = {"displaylogo": False, "toImageButtonOptions": {"format": "svg"}}  # the camera saves one for slides
    bundle: dict[str, Any] = {PLOTLY_MIME: content | {"config": config}, "text/plain": summary_of(figure)}
    image = png(figure) if with_png and os.environ.get("SHARDLAB_PNG") == "1" else None
    return bundle if image is None else bundle | {"image/png": base64.b64encode(image).decode("ascii")}


def png(figure: go.Figure) -> bytes | None:
    """The figure as a PNG; None if kaleido, Pillow, or Chrome or Chromium is missing."""
    try:
        from kaleido import PageGenerator, calc_fig_sync
        from kaleido.errors import ChromeNotFoundError
        from PIL import Image
    except ImportError:
        return None
    options = {"format": "png", "width": PNG_WIDTH, "height": figure.layout.height or HEIGHT, "scale": PNG_SCALE}
    page = PageGenerator(mathjax=False)  # which would be fetched from the network
    page.header += WAITING
    # Now and then kaleido's pipe logs a harmless traceback, which a notebook must not show.
    logger = logging.getLogger("choreographer.channels.pipe")
    before, logger.disabled = logger.disabled, True
    try:
        image: bytes = calc_fig_sync(on_any_page(plain_json(figure)), opts=options, kopts={"page_generator": page})
    except ChromeNotFoundError:
        return None
    finally:
        logger.disabled = before
    # With a palette it has a quarter of the size, and looks the same.
    few = Image.open(io.BytesIO(image)).convert("RGBA").quantize(PNG_COLOURS, Image.Quantize.FASTOCTREE)
    few.save(smaller := io.BytesIO(), "PNG", optimize=True)
    return smaller.getvalue()


def report_page(
    title: str, lead: str, tables: Mapping[str, pd.DataFrame], figures: Mapping[str, go.Figure], answer:
    Iterable[tuple[str, str]], first: int, choices: Mapping[str, go.Figure] | None = None,
) -> str:  # fmt: skip
    """The whole page as text: the answer, the first figures side by side, one of the choices, all else; tables folded.

    Args:
        title: heading of the page.
        lead: one or two sentences of what was done.
        tables: caption -> table. Column names include their unit, for example 'step (ms)'; numbers are aligned right,
            missing values are a dash. The index is not shown.
        figures: caption -> figure. The figure's title becomes a heading, its summary the accessible name.
        answer: lines of title and text, which stand first.
        first: how many of the figures stand beside each other on the first screen.
        choices: figures of one kind by name, of which the reader chooses one.

    Returns:
        A complete HTML document of about 1 MB, half of it plotly.js.

    Raises:
        ValueError: a figure has a trace of another kind than ``BASIC``.
    """
    chosen, folded = dict(choices or {}), "".join(_table(caption, table) for caption, table in tables.items())
    drawn = [_figure(place, caption, figure) for place, (caption, figure) in enumerate(figures.items())]
    sections = [
        f'<div class="pair">{"".join(drawn[:first])}</div>', _choice(len(figures), chosen) if chosen else "",
        f"<details><summary>All tables</summary>{folded}</details>", *drawn[first:],
    ]  # fmt: skip
    every = [_drawn(figure) for figure in (*figures.values(), *chosen.values())]
    traces = [trace for figure in (*figures.values(), *chosen.values()) for trace in figure.data]
    if others := {trace.type for trace in traces} - BASIC:
        raise ValueError(f"figures: traces of {', '.join(sorted(others))}; a page draws {', '.join(sorted(BASIC))}")
    data = json.dumps(every, separators=(",", ":"), allow_nan=False)
    lines = [
        HEAD, f"<title>{escape(title)}</title>", f"<style>\n{_CSS.read_text()}</style></head>", "<body><main>",
        f"<header><h1>{escape(title)}</h1>",
        '<dl class="answer">', *(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in answer), "</dl>",
        "</header>", *sections, f'<section><p class="lead">{escape(lead)}</p></section>',
        "</main>", _packed("figures", gzip.compress(data.encode(), mtime=0)), _packed("plotly", _PLOTLY.read_bytes()),
        f"<script>\n{_SCRIPT.read_text()}</script>", "</body></html>",
    ]  # fmt: skip
    return "\n".join(lines)


def _packed(name: str, content: bytes) -> str:
    return f'<script type="application/gzip" id="{name}">{base64.b64encode(content).decode()}</script>'


def _drawn(figure: go.Figure) -> dict[str, object]:
    """The figure without its title, which becomes a heading of the page, and without the space of the title."""
    content = plain_json(figure)
    layout = content["layout"]
    layout.pop("title", None)
    margin = layout.get("margin", {})
    top = margin.get("t", 0) - TITLE_PX  # what a figure needs above the plot besides its title, for slanted names
    layout["margin"] = {**margin, "t": max(top, 48 if "annotations" in layout else 16)}
    layout["height"] = (layout.get("height") or HEIGHT) - 56
    return content


def _figure(place: int, caption: str, figure: go.Figure) -> str:
    summary = summary_of(figure)
    heading = figure.layout.title.text or caption
    note = figure.layout.title.subtitle.text
    height = (figure.layout.height or HEIGHT) - 56
    return (
        f"<section><h2>{escape(heading)}</h2>{f'<p class=note>{escape(note)}</p>' if note else ''}"
        f'<figure><div class="plot" id="figure-{place}" role="img" aria-label="{escape(summary)}" '
        f'style="height:{height}px"></div>'
        f"<noscript><p>The figure needs JavaScript.</p></noscript>"
        f"<figcaption>{escape(caption)} <span>{_unbroken(escape(summary))}</span></figcaption></figure></section>"
    )


def _choice(first: int, figures: Mapping[str, go.Figure]) -> str:
    """Figures of which one is seen, by a list of their names; ``first`` is the place of the first among all."""
    options = "".join(f'<option value="{first + at}">{escape(name)}</option>' for at, name in enumerate(figures))
    drawn = (_figure(first + at, name, figure) for at, (name, figure) in enumerate(figures.items()))
    parts = (f'<div class="choice"{" hidden" if at else ""}>{section}</div>' for at, section in enumerate(drawn))
    return f'<div class="choices"><label>Timeline of <select>{options}</select></label>{"".join(parts)}</div>'


def _table(caption: str, table: pd.DataFrame) -> str:
    numeric = {name: pd.api.types.is_numeric_dtype(table[name]) for name in table.columns}
    shown = pd.DataFrame({name: column_text(table[name]) for name in table.columns})
    head = "".join(f'<th scope="col"{_side(numeric[name])}>{_header(str(name))}</th>' for name in table.columns)
    rows = []
    for values in shown.itertuples(index=False, name=None):
        first, *rest = zip(table.columns, values, strict=True)
        cells = f'<th scope="row"{_side(numeric[first[0]])}>{escape(first[1])}</th>'
        cells += "".join(f"<td{_side(numeric[name])}>{escape(value)}</td>" for name, value in rest)
        rows.append(f"<tr>{cells}</tr>")
    return (
        f'<section class="wide"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></section>"
    )


def _header(name: str) -> str:
    """'step (ms)' with its unit lighter and on its own line."""
    text, bracket, unit = name.partition(" (")
    return f"{escape(text)}<br><small>{escape(unit.removesuffix(')'))}</small>" if bracket else escape(text)


def _side(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _unbroken(text: str) -> str:
    """The text with a non-breaking space between each number and its unit."""
    return re.sub(r"(?<=\d) (?=(?:%|[kMGT]?B\b|[mµ]?s\b))", "&nbsp;", text)
