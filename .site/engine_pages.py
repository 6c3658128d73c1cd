"""A page for each engine: its idea in its own words, the formula, figures from the planner, and the file."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
from notebook_pages import PLOTLY, figure
from pages import Page, Site
from plotly.graph_objects import Figure
from prose import docstring, inline

from shardlab.course import MemoryPlan
from shardlab.models import build_model
from shardlab.planner import Setup, described, predicted_collectives
from shardlab.planner.setup import STRATEGIES
from shardlab.plots import memory_by_role, wire_volume
from shardlab.plots.show import mime_bundle
from shardlab.units import units_of

MODEL, RANKS = "gpt-1m", 4
FILES = {name: f"shardlab/engines/{name}.py" for name in STRATEGIES}
NOTEBOOKS = {
    "single": "02_where_the_bytes_go", "ddp": "03_data_parallel", "bucketed": "03_data_parallel",
    "zero1": "06_zero_1_and_2", "zero2": "06_zero_1_and_2", "zero3": "07_zero_3", "fsdp": "08_fsdp_units",
}  # fmt: skip


def engine_pages(site: Site, notebooks: Iterable[str]) -> list[Page]:
    """The pages, in the order in which one idea follows another.

    Args:
        site: which pages belong to.
        notebooks: names of those that have a page.
    """
    formulas = _formulas((site.root / "README.md").read_text(encoding="utf-8"))
    return [_page(name, formulas, site, set(notebooks)) for name in STRATEGIES]


def _page(name: str, formulas: dict[str, list[str]], site: Site, notebooks: set[str]) -> Page:
    place, source = Path("engines") / f"{name}.html", (site.root / FILES[name]).read_text(encoding="utf-8")
    head, _, text = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
    parts = [
        f"<h1><code>{name}</code></h1>",
        f'<p class="lead">{inline(head)}</p>',
        "<h2>Formula</h2><p>Per rank, for P parameters in float32, Adam and N ranks.</p>",
        _formula_table(formulas["strategy"], formulas[name]),
        "<h2>The idea</h2>",
        docstring(text),
        *_figures(name),
        f'<h2>The file</h2><p><a href="{site.source_link(FILES[name], place)}"><code>{FILES[name]}</code></a>, '
        f"{source.count(chr(10))} lines.</p>",
    ]
    if NOTEBOOKS[name] in notebooks:
        parts.append(
            f'<p>Taught in <a href="../notebooks/{NOTEBOOKS[name]}.html">notebook {NOTEBOOKS[name][:2]}</a>.</p>'
        )
    return Page(place, name, "\n".join(parts), head)


def _formulas(readme: str) -> dict[str, list[str]]:
    """The rows of the README's table, by strategy; 'strategy' is its head."""
    table = re.search(r"^\| strategy \|.*?(?=\n\n)", readme, re.MULTILINE | re.DOTALL)
    if table is None:
        raise ValueError("README.md: no table of formulas, whose first row begins with '| strategy |'")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()]
    return {row[0].strip("`"): row[1:] for row in rows if not set(row[0]) <= {"-"}}


def _formula_table(head: list[str], row: list[str]) -> str:
    heads, cells = (
        "".join(f"<{tag}>{inline(text)}</{tag}>" for text in texts) for tag, texts in (("th", head), ("td", row))
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{cells}</tr></tbody></table>"


def _figures(name: str) -> Iterator[str]:
    if name == "single":
        held = MemoryPlan(MODEL, 1).by_ranks(name)
        yield "<h2>What it holds</h2>" + _drawn(memory_by_role(held))
        return
    yield f"<h2>What it holds</h2><p>A model of 30 million parameters on more and more ranks.</p>{_held(name)}"
    sent = _sent(name)
    yield f"<h2>What it sends</h2><p>One step of <code>{MODEL}</code> on {RANKS} ranks, beside <code>ddp</code>.</p>"
    yield _drawn(wire_volume(pd.concat([_sent("ddp").assign(run="ddp"), sent]) if name != "ddp" else sent))
    counts = sent.groupby(["phase", "op"], sort=False).agg(messages=("seq", "size"), bytes_sent=("wire_bytes", "sum"))
    yield counts.astype("int64").reset_index().to_html(index=False, border=0)


def _held(name: str) -> str:
    return _drawn(memory_by_role(MemoryPlan("gpt-30m", 64).by_ranks(name)))


def _sent(name: str) -> pd.DataFrame:
    module = build_model(MODEL, seq_len=64)
    setup = Setup(name, RANKS, bucket_bytes=2**20, units=units_of(module) if name == "fsdp" else {})
    return predicted_collectives(described(module), setup, ranks=[0])


def _drawn(drawn: Figure) -> str:
    bundle = mime_bundle(drawn, with_png=False)
    assert PLOTLY in bundle
    return figure(bundle)
