import itertools
import re
from pathlib import Path

import numpy as np

from shardlab.plots import theme
from shardlab.plots.show import plain_json
from shardlab.plots.theme import on_any_page
from shardlab.records.tables import ProcessPart
from shardlab.vocabulary import Collective, MeshAxis, Role, SpanKind

TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.95047, 1.0, 1.08883])
RUNS = [*theme.PALETTE, theme.STRATEGY_COLOURS["single"]]
FAMILIES = (
    theme.ROLE_COLOURS.values(), theme.PART_COLOURS.values(), theme.COLLECTIVE_COLOURS.values(),
    theme.SPAN_COLOURS.values(), theme.AXIS_COLOURS.values(), RUNS, theme.RANKS, theme.UNITS,
    (theme.ALL_RANKS, theme.EXPOSED, theme.WAITING, theme.QUEUED, theme.HIDDEN, theme.REST),
)  # fmt: skip
EVERY = [*itertools.chain(*FAMILIES)]


def linear(colour):
    values = np.array([int(colour[index : index + 2], 16) for index in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    ratio = TO_XYZ @ rgb / WHITE
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_any_two_colours_can_be_told_apart():
    """Also by who sees no red, no green or no blue, by the matrices of Machado, Oliveira and Fernandes 2009."""
    protan = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    deutan = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    tritan = [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    roles = [colour for role, colour in theme.ROLE_COLOURS.items() if role not in {"offloaded", *list(Role)[-2:]}]
    for matrix, colours in itertools.product(
        (np.eye(3), *map(np.array, (protan, deutan, tritan))),
        (RUNS, theme.RANKS, theme.UNITS, theme.SPAN_COLOURS.values(), roles, theme.AXIS_COLOURS.values()),
    ):
        for pair in itertools.combinations(colours, 2):
            seen = [lab(np.clip(matrix @ linear(colour), 0, 1)) for colour in pair]
            assert np.linalg.norm(seen[0] - seen[1]) >= 12, pair


def contrast(first, second):
    light, dark = sorted((linear(colour) @ TO_XYZ[1] + 0.05 for colour in (first, second)), reverse=True)
    return light / dark


def test_text_on_a_bar_is_black_or_white_whichever_reads_better():
    for colour in {*EVERY, "#c4e3f3", "#3a95c9"}:
        other = {"#000000": "#ffffff", "#ffffff": "#000000"}[theme.readable_on(colour)]
        assert contrast(theme.readable_on(colour), colour) >= max(4.5, contrast(other, colour)), colour


def test_text_reads_on_its_paper_and_everything_on_light_and_dark_pages():
    layout, pairs = theme.TEMPLATE.layout, []
    assert layout.title.font.color is layout.title.subtitle.font.color is None, "a title is not paler than text"
    for style in ("shardlab/plots/report.css", ".site/style.css"):
        css = (Path(__file__).parents[2] / style).read_text()
        pages = re.findall(r"--paper: (#\w+); --ink: (#\w+); --soft: (#\w+);", css)
        assert (len(pages), ".main-svg { background: transparent" in css, "plot .legendtext" in css) == (2, True, False)
        pairs += [(colour, paper) for paper, *texts in pages for colour in texts]
        for (paper, *_), colour in itertools.product(pages, (*EVERY, theme.INK)):
            assert contrast(colour, paper) >= 3, (colour, paper)
    hover = layout.hoverlabel
    for pair in (*pairs, (layout.font.color, layout.paper_bgcolor), (hover.font.color, hover.bgcolor)):
        assert contrast(*pair) >= 4.5, pair


def test_a_figure_in_a_notebook_has_no_paper_and_reads_on_light_and_dark_pages():
    figure = theme.new_figure("Title", "note").add_annotation(text="a note", x=0, y=0)
    figure.add_scatter(x=[1, 2], y=[1, 2], mode="text", text=["beside", ""])
    figure.add_bar(x=[1], y=[1], text=["within"], textposition="inside", insidetextfont={"color": "#ffffff"})
    figure.update_xaxes(title_text="time (ms)")
    before = plain_json(figure)
    content = on_any_page(before)
    layout, (beside, within) = content["layout"], content["data"]
    assert before == plain_json(figure)
    assert layout["paper_bgcolor"] == layout["template"]["layout"]["plot_bgcolor"] == "rgba(0,0,0,0)"
    for ground in ("#ffffff", "#111111"):  # of JupyterLab, whose own ink is in the variable
        assert contrast(layout["font"]["color"], ground) >= 4.3, "the most that one grey can have on both"
    title, note = layout["title"], layout["annotations"][0]
    words = [
        title["text"],
        title["subtitle"]["text"],
        layout["xaxis"]["title"]["text"],
        note["text"],
        beside["text"][0],
    ]
    for text, plain in zip(words, ("Title", "note", "time (ms)", "a note", "beside"), strict=True):
        assert re.fullmatch(
            rf'<span style="color:var\(--jp-content-font-color1,.*{theme.INK}\)\)">{re.escape(plain)}</span>', text
        )
    assert (beside["text"][1], within["text"]) == ("", ["within"]), "what stands on a bar has a colour of its own"


def test_every_word_has_one_colour_that_no_other_family_has_and_a_strategy_keeps_it_in_any_company():
    assert len(set(EVERY)) == len(EVERY)
    for words, colours in zip((Role, ProcessPart, Collective, SpanKind, MeshAxis), FAMILIES, strict=False):
        assert len(words) == len(colours)
    for names in (["zero1"], ["mine", "zero1"], ["zero1", "ddp", "mine", "yours"]):
        chosen = theme.run_colours(names)
        assert chosen["zero1"] == theme.STRATEGY_COLOURS["zero1"]
        assert len(set(chosen.values())) == len(names)
