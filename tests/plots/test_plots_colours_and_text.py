import itertools
import math

import numpy as np
import pandas as pd

from shardlab.plots.text import column_text, format_bytes, format_count, format_percent, format_us, significant, tick
from shardlab.plots.theme import (
    COLLECTIVE_COLOURS,
    INK,
    PALETTE,
    PART_COLOURS,
    ROLE_COLOURS,
    SPAN_COLOURS,
    STRATEGY_COLOURS,
    readable_on,
    run_colours,
)
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


READ = {
    format_bytes: {0: "0 B", 999: "999 B", 999_960: "1.00 MB", 12_345_678: "12.3 MB", 4.8e9: "4.80 GB"},
    format_us: {0.25: "0.250 µs", 12_345: "12.3 ms", 2.5e6: "2.50 s", math.nan: "–"},
    format_count: {1_234_567: "1.23 M"},
    format_percent: {0.6875: "69 %", 0.0321: "3.2 %", math.nan: "–"},
    significant: {9.999: "10.0", 3e-8: "3.00e-08"},
    tick: {"1.00 kB": "1 kB", "100 µs": "100 µs"},
}


def test_numbers_read_well():
    for format_, texts in READ.items():
        assert {value: format_(value) for value in texts} == texts
    assert column_text(pd.Series([10.0, 7.5, np.nan, 0.0])) == ["10.00", "7.50", "–", "0.00"]
    assert column_text(pd.Series([1.0, 3e-8, 0.0])) == ["1.00", "3.00e-08", "0"]
    assert column_text(pd.Series([4_800_000, pd.NA], dtype="Int64")) == ["4,800,000", "–"]
    assert column_text(pd.Series(["a", None])) == ["a", "–"]
