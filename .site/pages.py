"""Pages and what they share: the template, the index, and the source files that pages lead to."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from os.path import normpath, relpath
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, select_autoescape
from prose import inline, markdown, text_page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename

_LINK = re.compile(r'(href|src)="([^"#:]+)(#[^"]*)?"')


@dataclass(frozen=True)
class Page:
    """``path`` is relative to the site; ``lead`` is what the index says of it."""

    path: Path
    title: str
    body: str
    lead: str = ""


class Site:
    """The folder that pages are written to, and the source files that they have asked for.

    ``questions`` are those of the notebooks, by name, as the README has them.
    """

    def __init__(self, folder: Path, root: Path, template: Path) -> None:
        self.folder, self.root = folder, root
        self._sources: set[Path] = set()
        self._readme = (root / "README.md").read_text(encoding="utf-8")
        self.questions = dict(re.findall(r"^\| `(\d\d_\w+)` \| (.*) \|$", self._readme, re.MULTILINE))
        environment = Environment(loader=FileSystemLoader(template.parent), autoescape=select_autoescape())
        self._template = environment.get_template(template.name)

    def source_link(self, path: str, page: Path) -> str:
        """A link from ``page`` to the page of a file of the repository, which will be written.

        Raises:
            FileNotFoundError: there is no such file.
        """
        file = Path(path)
        if not (self.root / file).is_file():
            raise FileNotFoundError(f"{page}: leads to {path}, which does not exist")
        self._sources.add(file)
        return relpath(_page_of(file), page.parent)

    def linked(self, body: str, source: Path, page: Path) -> str:
        """``body``, made of the file ``source``, with the site's addresses in place of the repository's.

        Raises:
            FileNotFoundError: a link leads to no file of the repository.
        """

        def address(found: re.Match[str]) -> str:
            file = Path(normpath(source.parent / found[2]))
            if file == Path("README.md"):
                to = "index.html"
            elif file.suffix in (".md", ".ipynb"):
                to = str(file.with_suffix(".html"))
            elif file.suffix == ".html":
                to = str(file)
            elif file.parent == Path("data/front_page"):
                to = f"front_page/{file.name}"
            else:
                return f'{found[1]}="{self.source_link(str(file), page)}{found[3] or ""}"'
            return f'{found[1]}="{relpath(to, page.parent)}{found[3] or ""}"'

        return _LINK.sub(address, body)

    def copy(self, file: Path, to: Path) -> None:
        """Copy a file to a place in the site."""
        (self.folder / to).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, self.folder / to)

    def write(self, page: Page, before: Page | None = None, after: Page | None = None) -> None:
        """Write a page, with links to the ones before and after it."""
        up = relpath(".", page.path.parent)
        links = {
            name: (relpath(other.path, page.path.parent), other.title)
            for name, other in (("before", before), ("after", after)) if other is not None
        }  # fmt: skip
        has_figure = 'class="plot"' in page.body
        text = self._template.render(page=page, up=up, links=links, has_figure=has_figure)
        target = self.folder / page.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def write_sources(self) -> None:
        """Write a page for each source file that was asked for."""
        for file in sorted(self._sources):
            text = (self.root / file).read_text(encoding="utf-8")
            form = HtmlFormatter(linenos="inline", lineanchors="line")
            code = highlight(text, get_lexer_for_filename(file.name), form)
            self.write(Page(_page_of(file), str(file), f"<h1><code>{escape(str(file))}</code></h1>{code}"))

    def index(
        self, static: Sequence[Page], guide: Sequence[Page], notebooks: Sequence[Page], engines: Sequence[Page]
    ) -> str:
        """The body of the first page: the README's beginning and its formulas, and a table of each chapter."""
        opening, *sections = re.split(r"^## ", self._readme, flags=re.MULTILINE)
        (costs,) = (f"## {section}" for section in sections if "| strategy |" in section)
        first, formulas = (
            self.linked(text_page(text), Path("README.md"), Path("index.html")) for text in (opening, costs)
        )
        commands = re.search(r"^```sh\n.*?^```$", self._readme, re.MULTILINE | re.DOTALL)
        return "\n".join([
            first, "<h2>Try it here</h2><p>Each page answers with a picture; nothing is installed.</p>", _table(static),
            "<h2>Begin</h2>", markdown(commands[0] if commands else ""), "<h2>Guide</h2>", _table(guide),
            formulas,
            "<h2>Notebooks</h2><p>Saved with their outputs; in JupyterLab each runs on the ranks of your machine.</p>",
            _table(notebooks), "<h2>Engines</h2><p>Each is one idea more than the one before it.</p>", _table(engines),
        ])  # fmt: skip


def _table(pages: Sequence[Page]) -> str:
    rows = "".join(
        f'<tr><th scope="row"><a href="{page.path}">{escape(page.title)}</a></th><td>{inline(page.lead)}</td></tr>'
        for page in pages
    )
    return f'<table class="chapter"><tbody>{rows}</tbody></table>'


def _page_of(file: Path) -> Path:
    return Path("source") / f"{file}.html"
