"""A picture of an idea, made of boxes, arrows and words: one SVG for light and dark pages, with a layout for phones.

Inside a page of HTML that is narrower than 520 px the second layout is shown; its words, as those of the first, are
never smaller than 12 px. As an image, in JupyterLab, the first is shown whole, light or dark as JupyterLab's theme is
and not as the system's: an image takes the color-scheme of the page that it stands in.
"""

import base64
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from html import escape
from itertools import accumulate
from textwrap import wrap

import plotly.graph_objects as go

from shardlab.plots.show import PNG_WIDTH, png
from shardlab.plots.theme import COLLECTIVE_COLOURS, EXPOSED, INK, ROLE_COLOURS, SPAN_COLOURS
from shardlab.vocabulary import Collective, Role, SpanKind

WIDE, NARROW = 640, 360  # in px, of the text's size
LETTER = 8.8  # px of a letter, with some room
COLOURS = {
    "parameter": ROLE_COLOURS[Role.PARAMETER], "gathered": ROLE_COLOURS[Role.GATHERED_PARAMETER],
    "gradient": ROLE_COLOURS[Role.GRADIENT], "optimizer": ROLE_COLOURS[Role.OPTIMIZER_STATE],
    "all-reduce": COLLECTIVE_COLOURS[Collective.ALL_REDUCE], "all-gather": COLLECTIVE_COLOURS[Collective.ALL_GATHER],
    "reduce-scatter": COLLECTIVE_COLOURS[Collective.REDUCE_SCATTER], "compute": SPAN_COLOURS[SpanKind.BACKWARD],
    "wait": EXPOSED, "activation": ROLE_COLOURS[Role.ACTIVATION],
}  # fmt: skip
LIGHT = "--ink: #1d2127; --soft: #59616c; --line: #8d95a0; --paper: #ffffff;"
STYLE = f"""
.drawing {{ {LIGHT} background: var(--paper);
  {" ".join(f"--{name}: {colour};" for name, colour in COLOURS.items())} }}
@media (prefers-color-scheme: dark) {{
  .drawing {{ --ink: #e8eaed; --soft: #a3abb6; --line: #7d8590; --paper: #111315; --wait: #ff6b69; }}
}}
.drawing text {{ font-size: 15px; font-family: system-ui, sans-serif; }}
.drawing .narrow {{ display: none; }}
html .drawing {{ width: 100%; height: auto; max-width: 760px; aspect-ratio: var(--wide); }}
@media (max-width: 520px) {{
  html .drawing {{ aspect-ratio: var(--narrow); }}
  html .drawing .wide {{ display: none; }}
  html .drawing .narrow {{ display: inline; }}
}}"""


Span = tuple[float, float, str, str]  # from, to, a colour, words


def stacked(parts: Iterable[tuple[str, float]]) -> list[Span]:
    """Spans one after another, each as long as its part: a colour and a size, which is written on it; none of 0."""
    held = [(colour, size) for colour, size in parts if size]
    ends = [*accumulate((size for _, size in held), initial=0.0)]
    return [(end - size, end, colour, f"{size:g}") for (colour, size), end in zip(held, ends[1:], strict=True)]


@dataclass
class Pen:
    """Draws one layout: x and y in px from the left and the top, colours by name: of ``COLOURS``, ink, soft or line."""

    width: int
    height: float = 0
    marks: list[str] = field(default_factory=list)

    @property
    def is_narrow(self) -> bool:
        """Whether this is the layout for a phone."""
        return self.width == NARROW

    def box(
        self, x: float, y: float, width: float, height: float, colour: str = "", words: str = "", *, edge: str = "line"
    ) -> None:
        """A box; empty without a colour, and dashed: not held. ``edge``: ink for what computes now, soft for a rank."""
        fill = f"var(--{colour})" if colour else "none"
        dashes = "" if colour or edge != "line" else ' stroke-dasharray="3 3"'
        thick = 3 if edge == "ink" else 1
        self.marks.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
            f'stroke="var(--{edge})" stroke-width="{thick}"{dashes}/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words, "middle", colour="#fff" if colour else "ink")
        self.height = max(self.height, y + height + 2)

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", *, bold: bool = False, colour: str = "ink"
    ) -> None:
        """One line of words, whose foot is at ``y``."""
        weight = ' font-weight="700"' if bold else ""
        fill = colour if colour.startswith("#") else f"var(--{colour})"
        self.marks.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}"{weight}>{escape(words)}</text>'
        )
        self.height = max(self.height, y + 6)

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str = "ink", width: float = 2) -> None:
        """A line."""
        self.marks.append(
            f'<path d="M{x:g},{y:g} L{to_x:g},{to_y:g}" stroke="var(--{colour})" stroke-width="{width:g}" fill="none"/>'
        )
        self.height = max(self.height, y, to_y)

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = "ink") -> None:
        """A line with a head at its end."""
        long = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
        along, across = (to_x - x) / long, (to_y - y) / long
        foot_x, foot_y = to_x - 9 * along, to_y - 9 * across
        self.line(x, y, foot_x, foot_y, colour, 3)
        left, right = ((foot_x - side * across, foot_y + side * along) for side in (6, -6))
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in ((to_x, to_y), left, right))
        self.marks.append(f'<polygon points="{points}" fill="var(--{colour})"/>')

    def panels(
        self, names: Iterable[str], height: float, *, wide: int, narrow: int
    ) -> Iterator[tuple[str, float, float]]:
        """A name, whose words are written in bold, and the left and the top of its panel; so many beside each other."""
        across, top = narrow if self.is_narrow else wide, self.height
        for place, name in enumerate(names):
            left, y = place % across * self.width / across, top + place // across * height
            for line, words in enumerate(wrap(name, int(self.width / across / LETTER))):
                self.text(left, y + 14 + 17 * line, words, bold=True)
            yield name, left, y

    def rows(
        self, rows: Mapping[str, Sequence[Span]], notes: Mapping[str, str] | None = None, *, names: int = 70,
        room: int = 0, end: float = 0,
    ) -> Callable[[float], float]:  # fmt: skip
        """Named rows of boxes on one scale, under all that has been drawn; what says where a number lies, in px.

        In the layout for a phone a row's name and its note stand above it. A wait is a thin line.

        Args:
            rows: the spans of each row, by its name.
            notes: what is said of a row, at the right, by its name.
            names, room: px for names and for notes, in the wide layout.
            end: of the scale; 0 for the last span's.
        """
        left, y = 0 if self.is_narrow else names, self.height + 8
        end = end or max(span[1] for spans in rows.values() for span in spans)
        scale = (self.width - left - (0 if self.is_narrow else room)) / end
        for name, spans in rows.items():
            y += 22 if self.is_narrow else 0
            words_y = y - 6 if self.is_narrow else y + 18
            self.text(0, words_y, name, bold=True)
            self.text(self.width, words_y, (notes or {}).get(name, ""), "end", colour="soft")
            for begin, stop, colour, words in spans:
                x, width = left + begin * scale, (stop - begin) * scale
                if colour == "wait":
                    self.line(x, y + 20, x + width, y + 20, colour, 5)
                    self.text(x + width / 2, y + 14, words, "middle", colour=colour)
                else:
                    self.box(x, y, width, 26, colour, words)
            y += 34
        return lambda number: left + number * scale

    def below(self, words: str, *, bold: bool = False, colour: str = "soft") -> None:
        """Lines of words under all that has been drawn, as many as they need."""
        self.height += 6
        for line in wrap(words, int(self.width / LETTER) - 1):
            self.text(0, self.height + 15, line, bold=bold, colour=colour)


@dataclass(frozen=True)
class Drawing:
    """A drawing with the line to carry home; a notebook shows it at the end of a cell.

    Attributes:
        draw: puts it on the pen, in the layout of the pen's width, and returns the bold line at its end.
    """

    draw: Callable[[Pen], str]

    @property
    def takeaway(self) -> str:
        """The bold line at its end."""
        return self.draw(Pen(WIDE))

    def svg(self) -> str:
        """Both layouts in one SVG."""
        wide, narrow = (self._layout(width) for width in (WIDE, NARROW))
        pens = {"wide": wide, "narrow": narrow}
        ratios = "; ".join(f"--{name}: {pen.width} / {pen.height:g}" for name, pen in pens.items())
        inner = "".join(
            f'<svg class="{name}" viewBox="-4 -2 {pen.width + 8} {pen.height + 4:g}" width="100%" height="100%">'
            f"{''.join(pen.marks)}</svg>"
            for name, pen in pens.items()
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" aria-label="{escape(self.takeaway)}" '
            f'width="{WIDE}" height="{wide.height:g}" style="{ratios}"><style>{STYLE}</style>{inner}</svg>'
        )

    def _layout(self, width: int) -> Pen:
        pen = Pen(width)
        pen.below(self.draw(pen), bold=True, colour="ink")
        return pen

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        bundle = {"image/svg+xml": self.svg(), "text/plain": self.takeaway}
        image = self._png() if os.environ.get("SHARDLAB_PNG") == "1" else None
        return bundle if image is None else bundle | {"image/png": base64.b64encode(image).decode("ascii")}

    def _png(self) -> bytes | None:
        """For JupyterLab, which shows no SVG of a notebook that it does not trust; on a page of any colour."""
        text = self.svg().replace(LIGHT, f"--ink: {INK}; --soft: {INK}; --line: {INK}; --paper: none;")
        source = f"data:image/svg+xml;base64,{base64.b64encode(text.encode()).decode('ascii')}"
        whole = {"xref": "paper", "yref": "paper", "x": 0, "y": 1, "sizex": 1, "sizey": 1, "source": source}
        hidden = {"visible": False}
        height = PNG_WIDTH * self._layout(WIDE).height / WIDE
        return png(go.Figure(layout={
            "images": [whole], "xaxis": hidden, "yaxis": hidden, "height": height, "margin": dict.fromkeys("lrtb", 0),
            "plot_bgcolor": "rgba(0,0,0,0)",
        }))  # fmt: skip


def drawing(draw: Callable[[Pen], str]) -> Callable[[], Drawing]:
    """What a notebook calls: the drawing, under the name of the function that draws it."""
    return wraps(draw)(partial(Drawing, draw))
