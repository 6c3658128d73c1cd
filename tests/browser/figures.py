"""What plotly has really put into a page: boxes and colours as the browser laid them out, not what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

DRAWN = """() => [...document.querySelectorAll(".js-plotly-plot")].map(plot => {
    const box = element => element ? element.getBoundingClientRect() : {width: 0, height: 0};
    const marks = [...plot.querySelectorAll(".mlayer path")];
    const svg = box(plot.querySelector("svg.main-svg"));
    return {
        width: svg.width, height: svg.height, room: box(plot.parentElement).width,
        marks: marks.filter(mark => box(mark).width + box(mark).height > 0).length,
    };
})"""


@dataclass(frozen=True)
class Drawn:
    """One figure.

    Attributes:
        width, height: of the drawing, in px.
        room: width of the element that holds the figure, in px.
        marks: lines, bars and points that take up space.
    """

    width: float
    height: float
    room: float
    marks: int


def drawn_figures(page: Page) -> list[Drawn]:
    """All figures of the page, from top to bottom."""
    return [Drawn(**figure) for figure in page.evaluate(DRAWN)]
