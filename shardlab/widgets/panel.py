"""Controls above pictures, and what stands there where no controls can be shown.

Controls are ipywidgets. Pictures are not: each is an ordinary output of the cell, plotly's JSON beside a text (and, in
the saved notebook, a PNG), that is replaced in place by its display id. So a picture never depends on a widget's state:
a saved notebook, a PDF and a reader without widgets show the last one, and nothing is saved of the controls but a line.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import pandas as pd
import plotly.graph_objects as go
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display
from ipywidgets import HTML, Widget

from shardlab.plots.show import mime_bundle
from shardlab.plots.tables import column_text
from shardlab.plots.theme import summary_of

Content: TypeAlias = go.Figure | pd.DataFrame


class Picture:
    """A figure or a table in a cell's output, which can be replaced while somebody looks at it."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self._handle: DisplayHandle | None = None

    def show(self) -> None:
        """Put it into the current cell; from now on ``replace`` changes it there."""
        if get_ipython() is not None:
            self._handle = DisplayHandle()  # type: ignore[no-untyped-call]  # IPython leaves it untyped
            self._handle.display(bundle_of(self.content, with_png=True), raw=True)  # type: ignore[no-untyped-call]

    def replace(self, content: Content, *, final: bool = False) -> None:
        """Show ``content`` instead, where this picture is shown.

        Args:
            content: the next figure or table.
            final: it will stay for a while: worth a PNG where notebooks are built.
        """
        self.content = content
        if self._handle is not None and _updates_in_place():
            self._handle.update(bundle_of(content, with_png=final), raw=True)  # type: ignore[no-untyped-call]

    def __str__(self) -> str:
        return text_of(self.content)


class Panel:
    """What a function such as ``memory_explorer`` gives back: shows itself as the last line of a cell.

    Args:
        controls: widgets above the pictures.
        pictures: from top to bottom.
        purpose: what the controls are for, in a few words: all that is left of them where widgets cannot show.
    """

    def __init__(self, controls: Widget, pictures: Sequence[Picture], purpose: str) -> None:
        self.controls, self.pictures, self.purpose = controls, tuple(pictures), purpose

    def _ipython_display_(self) -> None:
        if get_ipython() is None:  # a script: nowhere to show it
            return
        display(self._controls_bundle(), raw=True)  # type: ignore[no-untyped-call]
        for picture in self.pictures:
            picture.show()

    def __repr__(self) -> str:
        return "\n\n".join([f"[{self.purpose}]", *map(str, self.pictures)])

    def _controls_bundle(self) -> dict[str, Any]:
        bundle: dict[str, Any] = self.controls._repr_mimebundle_()
        return bundle | {"text/plain": f"[{self.purpose}; run this cell in JupyterLab to use the controls]"}


class Message:
    """A line of text among the controls; an error stands out and is read out by a screen reader."""

    def __init__(self, text: str = "") -> None:
        self.widget = HTML()
        self.text = ""
        self.say(text)

    def say(self, text: str) -> None:
        """Show ``text``."""
        self._put(text, "status", "var(--jp-ui-font-color1, inherit)")

    def fail(self, text: str) -> None:
        """Show ``text`` as what is wrong."""
        self._put(text, "alert", "var(--jp-error-color1, #ac2a58)")

    def _put(self, text: str, role: str, colour: str) -> None:
        self.text = text
        safe = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        self.widget.value = f'<div role="{role}" style="color:{colour};line-height:1.5">{safe}</div>'


def bundle_of(content: Content, *, with_png: bool) -> dict[str, Any]:
    """A figure or a table as the output of a cell."""
    if isinstance(content, go.Figure):
        return mime_bundle(content, with_png=with_png)
    shown = pd.DataFrame({name: column_text(content[name]) for name in content.columns})
    html = shown.to_html(index=False, border=0, classes="dataframe", justify="right")
    return {"text/html": html, "text/plain": text_of(content)}


def text_of(content: Content) -> str:
    """A figure's summary, or a table in plain text."""
    if isinstance(content, go.Figure):
        return summary_of(content)
    return pd.DataFrame({name: column_text(content[name]) for name in content.columns}).to_string(index=False)


def _updates_in_place() -> bool:
    """Whether there is a notebook: a terminal would print every replacement below the last one."""
    return hasattr(get_ipython(), "kernel")
