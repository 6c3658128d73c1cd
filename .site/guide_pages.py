"""A page for each page of the guide: its Markdown, with links to the site's own pages."""

import re
from pathlib import Path

from pages import Page, Site
from prose import markdown

GUIDE = Path("notebooks") / "guide"
_ROW = re.compile(r"^\| \[(.+)\]\((\w+)\.md\) \| (.+) \|$", re.MULTILINE)
_HEADING = re.compile(r'<h([1-6]) id="([^"]*)">(.*?)<a class="anchor-link".*?</a></h\1>')


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
    body = _HEADING.sub(_heading, markdown((site.root / source).read_text(encoding="utf-8")))
    return Page(place, title, site.linked(body, source, place), question)


def _heading(found: re.Match[str]) -> str:
    """With the anchor that GitHub gives it."""
    return f'<h{found[1]} id="{found[2].lower()}">{found[3]}</h{found[1]}>'
