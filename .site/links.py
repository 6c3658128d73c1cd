"""Check the links of a built site: every page, picture and anchor that a page leads to is there. Nothing is fetched."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_OUTSIDE = re.compile(r"(https://\S+|data:\S+|mailto:\S+)\Z")


class _Reader(HTMLParser):
    """What a page leads to, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src"):
                self.targets.append(value or "")
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")


def broken_links(folder: Path) -> list[str]:
    """One line for each link that leads nowhere, and for each page that no other leads to.

    Args:
        folder: of the site; its first page is ``index.html``.
    """
    pages = {path.resolve(): _read(path) for path in sorted(folder.rglob("*.html"))}
    problems, reached = [], {(folder / "index.html").resolve()}
    for page, found in pages.items():
        for target in found.targets:
            if _OUTSIDE.match(target):
                continue
            parts = urlsplit(target)
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            reached.add(file)
            where = page.relative_to(folder.resolve())
            if not target or parts.scheme or parts.path.startswith("/"):
                problems.append(
                    f"{where}: {target!r} is no address that works everywhere; use a relative one, or https"
                )
            elif not file.is_file():
                problems.append(f"{where}: {target} does not exist")
            elif parts.fragment and (file not in pages or unquote(parts.fragment) not in pages[file].anchors):
                problems.append(f"{where}: {target} has no such anchor")
    problems += [f"{page.relative_to(folder.resolve())}: no page leads to it" for page in pages if page not in reached]
    return problems


def _read(path: Path) -> _Reader:
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader
