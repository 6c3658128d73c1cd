"""The pages that need no Python: write what they share into each: ``python .site/static_pages.py``.

Each page of ``notebooks/pages`` is one file, which a browser opens from a folder. What several of them need stands
once, in ``notebooks/pages/parts``, and, without comments, between the lines "begin NAME" and "end NAME" of every page
that uses it.
"""

import re
from html import unescape
from pathlib import Path

from pages import Page, Site

PAGES = Path(__file__).resolve().parents[1] / "notebooks" / "pages"
_HEAD = re.compile(r'<title>(.+)</title>\n<meta name="description" content="(.+)">')
_PART = re.compile(r"(/\* begin (\S+) \*/\n).*?(/\* end \2 \*/)", re.DOTALL)


_NOT_NEEDED = re.compile(r"^ +|^//.*\n|  // .*|^\n", re.MULTILINE)


def with_parts(page: str) -> str:
    """A page with all parts as they are now."""
    return _PART.sub(lambda found: f"{found[1]}{_part(found[2])}{found[3]}", page)


def static_pages(site: Site) -> list[Page]:
    """Copy all into the site; title and question of each, for the index, in the order of the guide's links to them."""
    found = []
    for name in re.findall(r"\(\.\./pages/(\w+)\.html\)", (site.root / "notebooks/guide/README.md").read_text("utf-8")):
        place = Path("notebooks") / "pages" / f"{name}.html"
        site.copy(site.root / place, place)
        head = _HEAD.search((site.root / place).read_text("utf-8"))
        assert head is not None, f"{place}: no title and description"
        found.append(Page(place, *map(unescape, (head[1], "", head[2]))))
    return found


def _part(name: str) -> str:
    return _NOT_NEEDED.sub("", (PAGES / "parts" / name).read_text("utf-8"))


if __name__ == "__main__":
    for path in PAGES.glob("*.html"):
        path.write_text(with_parts(path.read_text("utf-8")), "utf-8")
