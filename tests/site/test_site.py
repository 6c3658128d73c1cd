"""The site for teachers: its link checker finds what is broken, and every engine and notebook has its page."""

import sys
from pathlib import Path

import pytest

from shardlab.planner.setup import STRATEGIES

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / ".site"))

from engine_pages import FILES, NOTEBOOKS, engine_pages  # noqa: E402
from guide_pages import guide_pages  # noqa: E402
from links import broken_links  # noqa: E402
from notebook_pages import notebook_page  # noqa: E402
from pages import Page, Site  # noqa: E402
from prose import markdown  # noqa: E402
from slides import slides_of  # noqa: E402
from static_pages import PAGES, static_pages  # noqa: E402


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, ROOT, ROOT / ".site" / "page.html")


def write(folder: Path, **pages: str) -> None:
    for name, body in pages.items():
        (folder / f"{name}.html").write_text(f"<html><body>{body}</body></html>")


def test_links_that_lead_somewhere(tmp_path: Path) -> None:
    write(tmp_path, index='<a href="b.html#here">b</a><a href="https://example.org/x">out</a>', b='<p id="here"></p>')
    assert broken_links(tmp_path) == []


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    for body, said in (
        ('<a href="c.html">c</a>', "c.html does not exist"),
        ('<img src="c.png">', "c.png does not exist"),
        ('<a href="b.html#there">b</a>', "b.html#there has no such anchor"),
        ('<a href="#there">b</a>', "#there has no such anchor"),
        ('<a href="/b.html">b</a>', "'/b.html' is no address that works everywhere"),
        ('<a href="http://example.org">b</a>', "'http://example.org' is no address that works everywhere"),
        ('<a href="">b</a>', "'' is no address that works everywhere"),
    ):
        write(tmp_path, index=f'<a href="b.html">b</a>{body}', b="")
        (problem,) = broken_links(tmp_path)
        assert problem.startswith(f"index.html: {said}")
    write(tmp_path, index="", b="")
    assert broken_links(tmp_path) == ["b.html: no page leads to it"]


def test_formulas_are_mathml_and_code_keeps_its_dollars() -> None:
    shown = markdown("For $S_1$ and\n\n$$a = \\frac{b}{c}$$\n\n`$HOME` costs $5 and\n\n```sh\necho $A $B\n```\n")
    assert shown.count("<math") == 2
    assert "<code>$HOME</code> costs $5" in shown
    assert "$A" in shown.replace('<span class="nv">', "")


def test_every_engine_has_a_page_with_formula_idea_figure_and_file(site: Site) -> None:
    pages = engine_pages(site, NOTEBOOKS.values())
    assert [page.title for page in pages] == list(STRATEGIES) == list(FILES) == list(NOTEBOOKS)
    for page in pages:
        assert page.lead
        for part in ("<h2>Formula</h2>", "<h2>The idea</h2>", 'class="plot"', "<h2>The file</h2>"):
            assert part in page.body, (page.title, part)
    assert "<td>4P/N</td>" in pages[-1].body
    assert all((ROOT / "notebooks" / f"{name}.ipynb").is_file() for name in NOTEBOOKS.values())


def test_the_guide_leads_to_notebooks_sources_pictures_and_the_first_page(site: Site) -> None:
    body = "".join(page.body for page in guide_pages(site))
    for link in ("../../index.html#what-each-strategy-costs", "../../front_page/workbench.png", "../16_workbench.html",
                 "records.html", "loop.html#units-of-fsdp",
                 "../../source/shardlab/records/tables.py.html"):  # fmt: skip
        assert f'="{link}"' in body
    assert '<h2 id="units-of-fsdp">Units of FSDP</h2>' in body


def test_every_page_without_python_is_on_the_first_page(site: Site) -> None:
    pages = static_pages(site)
    assert {page.path.stem for page in pages} == {path.stem for path in PAGES.glob("*.html")}
    body = site.index(pages, [], [], [])
    for page in pages:
        assert f'href="{page.path}"' in body
        assert page.lead.endswith("?")
        assert (site.folder / page.path).is_file()


def test_a_notebook_keeps_its_figures_and_its_links(site: Site, tmp_path: Path) -> None:
    page = notebook_page(ROOT / "notebooks" / "07_zero_3.ipynb", site)
    assert page.body.count('class="plot"') == page.body.count("<noscript><img") >= 1
    assert 'href="08_fsdp_units.html"' in page.body
    assert 'href="../source/shardlab/engines/zero3.py.html"' in page.body
    assert page.lead.endswith("?")
    site.write(page)
    site.write(Page(Path("index.html"), "shardlab", '<a href="notebooks/07_zero_3.html">07</a>'))
    site.write_sources()
    for name in ("style.css", "plotly.min.js", "figures.js"):
        (tmp_path / name).touch()
    broken = broken_links(tmp_path)
    missing = ("guide/exercises", "08_fsdp_units")
    assert broken == [f"notebooks/07_zero_3.html: {page}.html does not exist" for page in missing], "no page was made"
    with pytest.raises(FileNotFoundError, match=r"a\.html: leads to none\.py"):
        site.source_link("none.py", Path("a.html"))


def test_slides_are_texts_and_pictures_without_code_exercises_or_a_network() -> None:
    path = ROOT / "notebooks" / "06_zero_1_and_2.ipynb"
    page, with_code = slides_of(path), slides_of(path, code=True)
    assert page.count("<section>") == with_code.count("<section>") >= 12
    assert "<svg" in page.split("</section>")[1], "the drawing has a slide of its own"
    assert page.count("data:image/png") >= 4
    assert "import torch" not in page
    assert "import torch" in with_code
    assert "your code" not in with_code, "exercises are for afterwards"
    inside = slides_of(path.with_name("07_zero_3.ipynb"))
    assert "Warm-up" not in inside, "of a cell in which they begin, what is before them has a slide"
    assert "engine.save" in inside
    assert "<strong>" in inside[inside.index("To carry home") :].partition("</section>")[0]
    assert "The file that implements it" not in inside
    assert 'src="http' not in page
    assert "<script src" not in page
