"""A figure for pages of both grounds: it has no paper of its own, and its words have the ink of the page.

A figure in a notebook does not know whether the page around it is light or dark. JupyterLab and VS Code keep their ink
in a variable, which plotly puts into words that are its markup; elsewhere they have the one grey that reads on both.
Numbers on axes and the names of a legend are no markup, and have that grey everywhere. (The hover label has a ground of
its own.)
"""

from typing import Any

from shardlab.plots.theme import INK

INK_OF_PAGE = f"var(--jp-content-font-color1,var(--vscode-editor-foreground,{INK}))"
CLEAR = "rgba(0,0,0,0)"
Json = dict[str, Any]
_BEGIN, _END = f'<span style="color:{INK_OF_PAGE}">', "</span>"


def on_any_page(content: Json) -> Json:
    """The figure without paper, in the ink of the page.

    Args:
        content: ``{"data": ..., "layout": ...}`` of Python's own types, which is left as it is.
    """
    layout: Json = {name: _inked_title(name, part) for name, part in content["layout"].items()}
    ground = {"paper_bgcolor": CLEAR, "font": {**layout.get("font", {}), "color": INK}}
    return {"data": [_inked_words(trace) for trace in content["data"]], "layout": layout | ground}


def plain_words(text: str) -> str:
    """The text as it was before."""
    return text.removeprefix(_BEGIN).removesuffix(_END) if text.startswith(_BEGIN) else text


def _inked(text: str) -> str:
    return f"{_BEGIN}{text}{_END}"


def _inked_title(name: str, part: Any) -> Any:
    """A part of the layout: the title and its subtitle, the title of an axis, or notes."""
    if name == "annotations":
        return [note | _text(note) if "color" not in note.get("font", {}) else note for note in part]
    if name == "title":
        below = part.get("subtitle", {})
        return part | _text(part) | {"subtitle": below | _text(below)}
    if name.startswith(("xaxis", "yaxis")) and "title" in part:
        return part | {"title": part["title"] | _text(part["title"])}
    return part


def _text(part: Json) -> Json:
    return {"text": _inked(part["text"])} if part.get("text") else {}


def _inked_words(trace: Json) -> Json:
    """A trace; its words beside marks and behind bars get the ink of the page, those inside of bars have their own."""
    is_beside = "text" in trace.get("mode", "") or trace.get("textposition") == "outside"
    if not is_beside or "color" in trace.get("textfont", {}):
        return trace
    text = trace.get("text", [])
    return trace | {"text": _inked(text) if isinstance(text, str) else [_inked(one) if one else one for one in text]}
