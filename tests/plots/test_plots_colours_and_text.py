import itertools

import numpy as np

from shardlab.plots.theme import (  # isort: skip
    COLLECTIVE_COLOURS, INK, PALETTE, PART_COLOURS, ROLE_COLOURS, SPAN_COLOURS, STRATEGY_COLOURS, readable_on,
    run_colours,
)  # fmt: skip
from shardlab.vocabulary import Collective, ProcessPart, Role, SpanKind

TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WORDS = [*ROLE_COLOURS.values(), *PART_COLOURS.values(), *COLLECTIVE_COLOURS.values(), *SPAN_COLOURS.values()]
WHITE = np.array([0.95047, 1.0, 1.08883])


def linear(colour):
    values = np.array([int(colour[index : index + 2], 16) for index in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    ratio = TO_XYZ @ rgb / WHITE
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_any_two_colours_can_be_told_apart():
    """Also by who sees no red or no green: protanopia and deuteranopia, of Machado, Oliveira and Fernandes 2009."""
    protan = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    deutan = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    for matrix in (np.eye(3), np.array(protan), np.array(deutan)):
        for colours in (PALETTE, SPAN_COLOURS.values()):
            for pair in itertools.combinations(colours, 2):
                seen = [lab(np.clip(matrix @ linear(colour), 0, 1)) for colour in pair]
                assert np.linalg.norm(seen[0] - seen[1]) >= 12, pair


def contrast(first, second):
    light, dark = sorted((linear(colour) @ TO_XYZ[1] + 0.05 for colour in (first, second)), reverse=True)
    return light / dark


def test_text_on_a_bar_is_black_or_white_whichever_reads_better():
    for colour in {*PALETTE, *WORDS, "#c4e3f3", "#3a95c9"}:
        other = {"#000000": "#ffffff", "#ffffff": "#000000"}[readable_on(colour)]
        assert contrast(readable_on(colour), colour) >= max(4.5, contrast(other, colour)), colour


def test_contrast_on_light_and_dark():
    for ground in ("#ffffff", "#111111"):
        for colour in {*PALETTE, *WORDS, *STRATEGY_COLOURS.values()}:
            assert contrast(colour, ground) >= 2.9, colour
        assert contrast(INK, ground) >= 4.3


def test_every_word_has_one_colour_of_its_own_and_a_strategy_keeps_it_in_any_company():
    for words, colours in (
        (Role, ROLE_COLOURS), (Collective, COLLECTIVE_COLOURS), (SpanKind, SPAN_COLOURS), (ProcessPart, PART_COLOURS),
    ):  # fmt: skip
        assert set(words) == set(colours)
    for colours in (ROLE_COLOURS | PART_COLOURS, COLLECTIVE_COLOURS, SPAN_COLOURS):
        assert len(set(colours.values())) == len(colours)
    for names in (["zero1"], ["mine", "zero1"], ["zero1", "ddp", "mine", "yours"]):
        chosen = run_colours(names)
        assert chosen["zero1"] == STRATEGY_COLOURS["zero1"]
        assert len(set(chosen.values())) == len(names)
