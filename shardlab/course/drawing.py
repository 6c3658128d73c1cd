"""A picture of an idea, made of boxes, arrows and words: one SVG for light and dark pages, with a layout for phones.

Inside a page of HTML that is narrower than 520 px the second layout is shown; its words, as those of the first, are
never smaller than 12 px. As an image, in JupyterLab, the first is shown whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from textwrap import wrap

from shardlab.plots.theme import COLLECTIVE_COLOURS, EXPOSED, ROLE_COLOURS, SPAN_COLOURS
from shardlab.vocabulary import Collective, Role, SpanKind

WIDE, NARROW = 640, 360  # in px, of the text's size
LETTER = 8.8  # px of a letter, with some room
COLOURS = {
    "parameter": ROLE_COLOURS[Role.PARAMETER], "gathered": ROLE_COLOURS[Role.GATHERED_PARAMETER],
    "gradient": ROLE_COLOURS[Role.GRADIENT], "optimizer": ROLE_COLOURS[Role.OPTIMIZER_STATE],
    "all-reduce": COLLECTIVE_COLOURS[Collective.ALL_REDUCE], "all-gather": COLLECTIVE_COLOURS[Collective.ALL_GATHER],
    "reduce-scatter": COLLECTIVE_COLOURS[Collective.REDUCE_SCATTER], "compute": SPAN_COLOURS[SpanKind.BACKWARD],
    "wait": EXPOSED,
}  # fmt: skip
STYLE = f"""
.drawing {{ --ink: #1d2127; --soft: #59616c; --line: #8d95a0; --paper: #ffffff; background: var(--paper);
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

    def below(self, words: str, *, bold: bool = False, colour: str = "ink") -> None:
        """Lines of words under all that has been drawn, as many as they need."""
        self.height += 6
        for line in wrap(words, int(self.width / LETTER) - 1):
            self.text(0, self.height + 15, line, bold=bold, colour=colour)


@dataclass(frozen=True)
class Drawing:
    """A drawing with the line to carry home; a notebook shows it at the end of a cell.

    Attributes:
        draw: puts it on the pen, in the layout of the pen's width.
        takeaway: the bold line at its end.
    """

    draw: Callable[[Pen], None]
    takeaway: str

    def svg(self) -> str:
        """Both layouts in one SVG."""
        wide, narrow = (self._layout(width) for width in (WIDE, NARROW))
        ratios = "; ".join(
            f"--{name}: {pen.width} / {pen.height:g}" for name, pen in (("wide", wide), ("narrow", narrow))
        )
        inner = "".join(
            f'<svg class="{name}" viewBox="-4 -2 {pen.width + 8} {pen.height + 4:g}" width="100%" height="100%">'
            f"{''.join(pen.marks)}</svg>"
            for name, pen in (("wide", wide), ("narrow", narrow))
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" aria-label="{escape(self.takeaway)}" '
            f'width="{WIDE}" height="{wide.height:g}" style="{ratios}"><style>{STYLE}</style>{inner}</svg>'
        )

    def _layout(self, width: int) -> Pen:
        pen = Pen(width)
        self.draw(pen)
        pen.below(self.takeaway, bold=True)
        return pen

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"image/svg+xml": self.svg(), "text/plain": self.takeaway}
