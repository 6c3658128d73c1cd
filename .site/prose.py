"""Text to HTML: Markdown with formulas as MathML, and docstrings, which are plain text with tables."""

import re
from html import escape

from latex2mathml.converter import convert
from nbconvert.filters import markdown2html

# Code keeps its dollar signs: it is matched first, and left as it is.
_PIECES = re.compile(r"(```.*?```|`[^`\n]+`)|\$\$(.+?)\$\$|\$([^$\s](?:[^$\n]*[^$\s])?)\$", re.DOTALL)
_TABLE = re.compile(r"^(=+ +)+=+$", re.MULTILINE)
_HEADING = re.compile(r'<h([1-6]) id="([^"]*)">(.*?)<a class="anchor-link".*?</a></h\1>')
_ITEM = re.compile(r"\A(?:\d+\.|[-*]) ")


def markdown(text: str) -> str:
    """Markdown, in which formulas stand between dollar signs."""
    return str(markdown2html(_PIECES.sub(_piece, text)))


def _piece(found: re.Match[str]) -> str:
    code, block, line = found.groups()
    if code is not None:
        return code
    if block is not None:
        return f'<div class="formula">{convert(block.strip(), display="block")}</div>'
    return convert(line)


def text_page(text: str) -> str:
    """A page of Markdown, whose headings have the anchors that GitHub gives them."""
    return _HEADING.sub(lambda found: f'<h{found[1]} id="{found[2].lower()}">{found[3]}</h{found[1]}>', markdown(text))


def inline(text: str) -> str:
    """One line of Markdown, without its paragraph."""
    return markdown(text).strip().removeprefix("<p>").removesuffix("</p>")


def docstring(text: str) -> str:
    """A docstring: paragraphs, with tables and what is indented as they stand."""
    return "\n".join(_paragraph(part) for part in re.split(r"\n\n(?! )", text.strip()))


def _paragraph(text: str) -> str:
    if _TABLE.search(text) or re.search(r"^ {4}", text, re.MULTILINE):
        return f"<pre>{escape(text)}</pre>"
    words = re.sub(r"``(.+?)``", r"<code>\1</code>", escape(text, quote=False), flags=re.DOTALL)
    return f"<p>{words}</p>"
