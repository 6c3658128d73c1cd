import base64
import gzip
import importlib
import json
import re
import struct
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from shardlab import plots
from shardlab.plots.show import plain_json

show_module = importlib.import_module("shardlab.plots.show")  # the package's `show` is the function in it
PLOTLY = "application/vnd.plotly.v1+json"


@pytest.fixture
def figure(records):
    return plots.memory_by_role(records.memory)


def test_plain_json_is_lists_rounded_and_without_nan():
    values = np.array([1.23456789, np.nan, 1e9 + 1, np.inf])
    content = plain_json(go.Figure(go.Scatter(x=np.arange(4), y=values)))
    assert content["data"][0]["x"] == [0, 1, 2, 3]
    assert content["data"][0]["y"] == [1.23457, None, 1_000_000_000, None]
    json.dumps(content, allow_nan=False)


def test_the_bundle_is_plotly_json_and_text_only(figure, monkeypatch):
    monkeypatch.delenv("SHARDLAB_PNG", raising=False)
    bundle = show_module.mime_bundle(figure)
    assert set(bundle) == {PLOTLY, "text/plain"}
    assert bundle["text/plain"] == plots.summary_of(figure)
    assert len(json.dumps(bundle)) < 20_000
    assert "bdata" not in json.dumps(bundle)
    assert bundle[PLOTLY]["config"]["toImageButtonOptions"] == {"format": "svg"}, "one click for a slide"


def test_a_png_joins_where_one_is_asked_for(figure, monkeypatch):
    monkeypatch.setenv("SHARDLAB_PNG", "1")
    monkeypatch.setattr(show_module, "png", lambda figure: b"\x89PNG")
    assert show_module.mime_bundle(figure)["image/png"] == "iVBORw=="
    monkeypatch.setattr(show_module, "png", lambda figure: None)
    assert set(show_module.mime_bundle(figure)) == {PLOTLY, "text/plain"}


def test_a_real_browser_makes_a_png_of_the_size_asked_for(figure):
    """Skips where kaleido finds no Chrome or Chromium; a warning on the way is an error."""
    image = show_module.png(figure)
    if image is None:
        pytest.skip("no Chrome or Chromium at hand")
    width, height = struct.unpack(">II", image[16:24])
    assert image[:4] == b"\x89PNG"
    assert (width, height) == (show_module.PNG_WIDTH, figure.layout.height)
    assert len(image) < 40_000


def test_a_page_whose_scripts_are_not_there_yet_is_waited_for(figure, monkeypatch):
    """Kaleido takes the first load event for its page's; on a busy machine it may be that of the empty tab before."""
    tab = pytest.importorskip("kaleido._kaleido_tab._tab")
    subscribed = tab._subscribe_new

    def at_once(one, event):
        future = subscribed(one, event)
        if event == "Page.loadEventFired":
            future.set_result({})
        return future

    monkeypatch.setattr(tab, "_subscribe_new", at_once)
    image = show_module.png(figure)
    assert image is None or image[:4] == b"\x89PNG"


def test_a_script_gets_the_summary_and_a_cell_one_bundle(figure, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append((bundle, raw)))
    for is_in_a_cell in (False, True):
        monkeypatch.setattr(show_module, "is_in_a_cell", lambda is_in_a_cell=is_in_a_cell: is_in_a_cell)
        plots.show(figure)
    assert capsys.readouterr().out == plots.summary_of(figure) + "\n"
    assert [raw for _, raw in shown] == [True]


class Page(HTMLParser):
    """Every tag with its attributes, in order, and the text of the cells."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data):
        if self.cells and self.lasttag in ("td", "th", "br", "small"):
            self.cells[-1] += data


@pytest.fixture
def page(figure):
    table = pd.DataFrame({"strategy": ["a<b>", "zero1"], "step (ms)": [90.5, 7.25], "peak (bytes)": [10_000, 5]})
    hostile = go.Figure(figure)
    hostile.data[0].name = "</script><script>alert(1)</script>"
    figures = {"First.": figure, "Second.": hostile}
    return plots.report_page("Runs & costs", "A lead.", {"Costs.": table}, figures, [("WHY", "because")], first=1)


def test_the_page_is_one_file_that_fetches_nothing_and_is_readable_without_eyes(page, figure):
    tags = Page(page).tags
    assert not [attrs for _, attrs in tags if "src" in attrs or "href" in attrs]
    assert "default-src 'none'" in page
    assert page.count('id="plotly"') == 1
    assert page.count("alert(1)</script>") == 0
    assert [tag for tag, _ in tags if tag in ("h1", "h2")] == ["h1", "h2", "h2"]
    labels = [attrs["aria-label"] for _, attrs in tags if attrs.get("role") == "img"]
    assert labels == [plots.summary_of(figure)] * 2
    names = [tag for tag, _ in tags]
    in_order = [name for name in names if name in ("dd", "figure", "table")]
    assert in_order == ["dd", "figure", "table", "figure"], "the answer, the first figure, folded tables, other figures"


def test_table_cells_align_and_escape(page):
    parsed = Page(page)
    cells = [cell.strip() for cell in parsed.cells]
    assert cells == ["strategy", "stepms", "peakbytes", "a<b>", "90.50", "10,000", "zero1", "7.25", "5"]
    assert [attrs.get("class") for tag, attrs in parsed.tags if tag == "td"] == ["number"] * 4
    assert "Runs &amp; costs" in page


def test_figures_on_the_page_are_those_given(page, figure):
    packed = re.search(r'id="figures">(.*?)</script>', page, re.S).group(1)
    content = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert content[0]["data"] == plain_json(figure)["data"]
    assert content[1]["data"][0]["name"] == "</script><script>alert(1)</script>"
