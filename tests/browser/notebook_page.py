"""One notebook in one page of the browser: open it, and read what a person would see."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import nbformat

if TYPE_CHECKING:  # the package may be missing; then the tests skip
    from playwright.sync_api import Locator, Page

OPEN_TIMEOUT_S = 120

# Earlier than this the command to run all cells is not there yet, or runs the few cells that are.
READY = """() => {
    const panel = window.jupyterapp?.shell.currentWidget;
    return panel?.context?.isReady && panel.content.widgets.length === panel.context.model.cells.length
        && panel.sessionContext.session?.kernel?.status === "idle"
        && window.jupyterapp.commands.isEnabled("notebook:run-all-cells");
}"""


class NotebookPage:
    """The notebook at ``url``, open and with its kernel ready."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        page.goto(url, timeout=1e3 * OPEN_TIMEOUT_S)
        page.wait_for_function(READY, timeout=1e3 * OPEN_TIMEOUT_S)

    def prompts(self) -> list[str]:
        """What stands before each code cell, such as '[3]:'."""
        return [text.strip() for text in self.page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()]

    def errors(self) -> list[str]:
        """Tracebacks, and what cells wrote to stderr."""
        mimes = ("application/vnd.jupyter.error", "application/vnd.jupyter.stderr")
        return self.page.locator(", ".join(f'[data-mime-type="{mime}"]' for mime in mimes)).all_inner_texts()

    def output_with(self, text: str) -> Locator:
        """The first output of a cell in which ``text`` stands."""
        return self.page.locator(".jp-OutputArea-output", has_text=text).first


def write_notebook(path: Path, *cells: str) -> None:
    """A notebook of code cells that has never run."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)
