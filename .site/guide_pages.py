"""A page for each page of the guide: its Markdown, with links to the site's own pages."""

import re
from pathlib import Path

from pages import Page, Site
from prose import text_page

GUIDE = Path("notebooks") / "guide"
_ROW = re.compile(r"^\| \[(.+)\]\((\w+)\.md\) \| (.+) \|$", re.MULTILINE)


def guide_pages(site: Site) -> list[Page]:
    """The page that lists all others, and those, in its order.

    Args:
        site: which pages belong to.
    """
    first = (site.root / GUIDE / "README.md").read_text(encoding="utf-8")
    rows = [("The guide", "README", ""), *_ROW.findall(first)]
    return [_page(title, name, question, site) for title, name, question in rows]


def _page(title: str, name: str, question: str, site: Site) -> Page:
    source = GUIDE / f"{name}.md"
    place = source.with_suffix(".html")
    body = text_page((site.root / source).read_text(encoding="utf-8"))
    return Page(place, title, site.linked(body, source, place), question)
