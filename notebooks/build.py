"""Execute the notebooks and save them with their outputs: ``python notebooks/build.py [NAME ...]``.

Figures get a PNG beside plotly's JSON, because GitHub draws no plotly. What differs from run to run and tells nobody
anything (times of execution, widget state, the exact Python) is taken out. A notebook with an error, with anything on
stderr, or of more than 500 kB is not saved, and the exit code is 1.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from rich.console import Console
from rich.progress import Progress

FOLDER = Path(__file__).resolve().parent
MAX_BYTES = 500_000
KERNELSPEC = {"name": "python3", "display_name": "Python 3", "language": "python"}
CELL_TIMEOUT_S = 300
KEPT = ("tags", "jupyter")


def main() -> int:
    """Build the notebooks named on the command line, or all; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of file names, such as 03; none for all notebooks")
    names = tuple(parser.parse_args().names) or ("",)
    paths = [path for path in sorted(FOLDER.glob("[0-9]*.ipynb")) if path.name.startswith(names)]
    if not paths:
        parser.error(f"no notebook in {FOLDER} begins with {' or '.join(names)}")
    os.environ["SHARDLAB_PNG"] = "1"
    # A user's own IPython profile or startup files leave no trace in what is saved.
    with tempfile.TemporaryDirectory() as profile:
        os.environ["IPYTHONDIR"] = profile
        problems = [problem for path in paths if (problem := build(path)) is not None]
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


def build(path: Path) -> str | None:
    """Execute and save one notebook; what is wrong with it, or None."""
    notebook = nbformat.read(path, as_version=4)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(path.name, total=len(notebook.cells))
        client = NotebookClient(
            notebook, timeout=CELL_TIMEOUT_S, kernel_name=KERNELSPEC["name"], record_timing=False,
            resources={"metadata": {"path": str(path.parent)}}, on_cell_complete=lambda **_: progress.advance(task),
        )  # fmt: skip
        try:
            client.execute()
        except CellExecutionError as error:
            return f"{path.name}: a cell failed, nothing saved\n{error}"
    clean(notebook)
    if complaint := complaint_of(notebook):
        return f"{path.name}: a cell wrote to stderr, nothing saved\n{complaint}"
    text = nbformat.writes(notebook) + "\n"
    if len(text.encode()) > MAX_BYTES:
        return f"{path.name}: {len(text.encode())} bytes are more than {MAX_BYTES}, nothing saved"
    path.write_text(text)
    return None


def complaint_of(notebook: NotebookNode) -> str:
    """What the cells wrote to stderr."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.get("name") == "stderr")


def clean(notebook: NotebookNode) -> None:
    """Keep of the metadata the kernel's name, the cells' tags, and which cell's source is folded: that with imports."""
    notebook.metadata = NotebookNode(kernelspec=KERNELSPEC, language_info={"name": "python"})
    for cell in notebook.cells:
        cell.metadata = NotebookNode({key: value for key, value in cell.metadata.items() if key in KEPT})
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = NotebookNode()
            # Controls live in a kernel: what stays of them is the line of text beside.
            for mime in [mime for mime in output.get("data", {}) if "widget" in mime]:
                del output.data[mime]
    nbformat.validate(notebook)


if __name__ == "__main__":
    sys.exit(main())
