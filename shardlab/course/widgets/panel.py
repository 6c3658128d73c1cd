"""Controls above pictures, with a fallback where controls cannot be shown.

Each picture is one output of the cell in several formats: a widget that can change, plotly's JSON or a table, a text
and, when notebooks are built, a PNG. JupyterLab shows the widget; a saved notebook, GitHub, a PDF or a screen reader
uses what it can. (plotly's own FigureWidget takes 5 MB, and is blank if server and kernel differ.)
"""

import threading
from collections.abc import Sequence
from html import escape
from typing import Any, TypeAlias

import pandas as pd
import plotly.graph_objects as go
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display
from ipywidgets import HTML, Layout, Output, VBox, Widget

from shardlab.plots.show import mime_bundle
from shardlab.plots.text import column_text
from shardlab.plots.theme import summary_of

Content: TypeAlias = go.Figure | pd.DataFrame
DRAWING_S = 0.15  # about the time in which a browser draws a figure
SHOWN: dict[str, str | None] = {"height": None, "visibility": "visible"}
# Not display: none, because plotly must know its width.
HIDDEN: dict[str, str | None] = {"height": "0px", "visibility": "hidden"}


class Picture:
    """A figure or a table in the output of a cell, which can be replaced without flicker.

    A displayed plotly figure does not draw new data, and a new figure leaves a gap until it is drawn. So there are two
    places: the next content is drawn in the hidden one, and then the two are swapped.
    """

    def __init__(self, content: Content) -> None:
        self.content = content
        self._places = [Output(layout=Layout(overflow="hidden", **state)) for state in (SHOWN, HIDDEN)]
        self._widget = VBox(self._places, layout=Layout(overflow="hidden"))
        self._handle: DisplayHandle | None = None
        self._lock = threading.Lock()
        self._turn: threading.Timer | None = None

    def show(self) -> None:
        """Show it in the current cell; from now on ``replace`` changes it there."""
        if get_ipython() is not None:
            self._put(self._places[0])
            self._handle = DisplayHandle()  # type: ignore[no-untyped-call]  # IPython leaves it untyped
            self._handle.display(self._bundle(), raw=True)  # type: ignore[no-untyped-call]

    def replace(self, content: Content, *, final: bool = False) -> None:
        """Show ``content`` instead, if this picture is shown.

        Args:
            content: the next figure or table.
            final: also replace what is saved with the notebook, because this content will stay.
        """
        self.content = content
        if self._handle is None or not hasattr(get_ipython(), "kernel"):
            return  # not shown, or in a terminal, which would print every replacement again
        with self._lock:  # the timer's thread swaps the places
            self._put(self._places[1])
            if self._turn is None:  # else a swap is due already, and will show the newer content
                self._turn = threading.Timer(DRAWING_S, self._change_roles)
                self._turn.daemon = True
                self._turn.start()
        if final:
            self._handle.update(self._bundle(), raw=True)  # type: ignore[no-untyped-call]

    def __str__(self) -> str:
        return text_of(self.content)

    def _bundle(self) -> dict[str, Any]:
        return {**self._widget._repr_mimebundle_(), **bundle_of(self.content, with_png=True)}

    def _put(self, place: Output) -> None:
        bundle = bundle_of(self.content, with_png=False)
        place.outputs = ({"output_type": "display_data", "data": bundle, "metadata": {}},)

    def _change_roles(self) -> None:
        with self._lock:
            self._turn = None
            self._places.reverse()
            for place, state in zip(self._places, (SHOWN, HIDDEN), strict=True):
                for name, value in state.items():
                    setattr(place.layout, name, value)


class Panel:
    """The result of a function such as ``memory_explorer``; shows itself as the last line of a cell.

    Args:
        controls: widgets above the pictures.
        pictures: from top to bottom.
        purpose: a few words on the controls, shown where widgets cannot be.
    """

    def __init__(self, controls: Widget, pictures: Sequence[Picture], purpose: str) -> None:
        self.controls, self.pictures, self.purpose = controls, tuple(pictures), purpose

    def _ipython_display_(self) -> None:
        if get_ipython() is None:  # a script cannot show it
            return
        words = f"[{self.purpose}; run this cell in JupyterLab to use the controls]"
        display({**self.controls._repr_mimebundle_(), "text/plain": words}, raw=True)  # type: ignore[no-untyped-call]
        for picture in self.pictures:
            picture.show()

    def __repr__(self) -> str:
        return "\n\n".join([f"[{self.purpose}]", *map(str, self.pictures)])


class Message:
    """A line of text among the controls; errors stand out, and screen readers announce them."""

    def __init__(self, text: str = "") -> None:
        self.widget = HTML()
        self.say(text)

    def say(self, text: str, done: float | None = None) -> None:
        """Show ``text``, and a bar where a part of something is ``done``; with 0 it moves by itself."""
        self._put(text, "status", "var(--jp-ui-font-color1, inherit)")
        if done is not None:
            self.widget.value += f"<progress{f' value={done:.3f}' if done else ''}></progress>"

    def fail(self, text: str) -> None:
        """Show ``text`` as an error."""
        self._put(text, "alert", "var(--jp-error-color1, #ac2a58)")

    def _put(self, text: str, role: str, colour: str) -> None:
        self.text = text
        self.widget.value = f'<div role="{role}" style="color:{colour};line-height:1.5">{escape(text, False)}</div>'


def bundle_of(content: Content, *, with_png: bool) -> dict[str, Any]:
    """A figure or a table as the output of a cell."""
    if isinstance(content, go.Figure):
        return mime_bundle(content, with_png=with_png)
    table = _as_text(content).to_html(index=False, border=0, justify="right")
    html = f'<div style="overflow-x: auto">{table}</div>'  # else a page that is too narrow hides the last columns
    return {"text/html": html, "text/plain": text_of(content)}


def text_of(content: Content) -> str:
    """A figure's summary, or a table in plain text."""
    return summary_of(content) if isinstance(content, go.Figure) else _as_text(content).to_string(index=False)


def _as_text(table: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({name: column_text(table[name]) for name in table.columns})
