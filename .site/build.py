"""Build the site for teachers and check its links: ``python .site/build.py [FOLDER]``, by default ``build/site``.

A page for each page of the guide, each notebook and each engine, the pages that need no Python, the source files they
lead to, and an index. Nothing is fetched, here or by a reader's browser: plotly.js is copied from the installed
package, and formulas are MathML.

Notebooks are converted as they are saved, not run again. The tests that ``.ci/run`` has passed before this ran every
one of them and compared its outputs with the saved ones, so a second run would take minutes and find nothing; and the
pictures of a saved notebook are of a quiet machine.

nbconvert comes with JupyterLab. Sphinx or MkDocs would have to be taught the form of these docstrings, and plotly, by a
plugin each, which is more than what stands here.
"""

import argparse
import shutil
import sys
from pathlib import Path

from engine_pages import engine_pages
from guide_pages import guide_pages
from links import broken_links
from notebook_pages import notebook_page
from pages import Page, Site
from plotly.offline import get_plotlyjs
from static_pages import static_pages

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent


def main() -> int:
    """Build, check, and say how much there is; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "site")
    folder = parser.parse_args().folder.resolve()
    if folder.exists():
        shutil.rmtree(folder)
    build(folder)
    problems = broken_links(folder)
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    pages = sum(1 for _ in folder.rglob("*.html"))
    sys.stdout.write(f"{folder / 'index.html'}: {pages} pages, {len(problems)} broken links\n")
    return 1 if problems else 0


def build(folder: Path, names: str = "[0-9]*.ipynb") -> None:
    """Write all pages.

    Args:
        folder: where; it must not exist.
        names: pattern of the notebooks' file names.
    """
    folder.mkdir(parents=True)
    (folder / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    shutil.copy(HERE / "style.css", folder)
    shutil.copy(HERE / "figures.js", folder)
    shutil.copytree(ROOT / "data" / "front_page", folder / "front_page", ignore=shutil.ignore_patterns("*.parquet"))
    site = Site(folder, ROOT, HERE / "page.html")
    notebooks = [notebook_page(path, site) for path in sorted((ROOT / "notebooks").glob(names))]
    engines = engine_pages(site, {page.path.stem for page in notebooks})
    overview, *guide = guide_pages(site)
    site.write(overview)
    for chapter in (guide, notebooks, engines):
        for place, page in enumerate(chapter):
            before = chapter[place - 1] if place else None
            after = chapter[place + 1] if place + 1 < len(chapter) else None
            site.write(page, before=before, after=after)
    site.write(Page(Path("index.html"), "shardlab", site.index(static_pages(site), guide, notebooks, engines)))
    site.write_sources()


if __name__ == "__main__":
    sys.exit(main())
