"""The pictures of the README, drawn from a recorded run of ``data/front_page``, and what it says is printed.

    python -m tests.front_page RUN    # keeps what is needed of a run of ``shardlab compare``, and draws it anew

The run is the one of ``COMMAND``. A picture carries a digest of its figure, so a test can tell that it shows these
records and no others, without drawing it.
"""

import hashlib
import io
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from PIL import Image, PngImagePlugin

from shardlab.analysis.timed import timed_steps
from shardlab.experiment.told.saved_runs import load_comparison
from shardlab.plots import collective_timeline, memory_by_role
from shardlab.plots.show import plain_json, png

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDER = Path(__file__).parents[1] / "data" / "front_page"
STRATEGIES = ("bucketed", "zero1", "zero2", "zero3", "fsdp")
RANKS = 2
COMMAND = f"shardlab compare --ranks {RANKS} --steps 6 --strategies {','.join(STRATEGIES)} --link 2Gbps,50us --out RUN"
SHOWN = "fsdp"


def blocks(text: str, kind: str) -> list[str]:
    """The blocks of a page that are of one kind: 'python', 'sh', or 'text' for what is printed."""
    return [block for found, block in BLOCKS.findall(text) if found == kind]


def shortened(lines: Iterable[str], answer: Iterable[tuple[str, str]]) -> list[str]:
    """Which printed lines are not those of ``answer``, as far as they go; how far losses differ does not matter."""
    said = {title: re.sub(r"\d\.\de-\d\d", "", text) for title, text in answer}
    shown = [(line, re.sub(r"\d\.\de-\d\d", "", line[16:]).rstrip(" …")) for line in lines]
    return [line for line, text in shown if not said[line[:16].rstrip()].startswith(text)]


def keep(run: Path, folder: Path = FOLDER) -> None:
    """Keep the memory of all strategies, and one ordinary step of the one whose timeline is shown."""
    records = load_comparison(run).records
    steps = timed_steps(records.steps[records.steps["run"] == SHOWN])
    own = steps[steps["rank"] == 0].sort_values("step_us")["step"]
    middle = own.iloc[len(own) // 2]
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("collectives", "spans"):
        table = getattr(records, name)
        table[(table["run"] == SHOWN) & (table["step"] == middle)].to_parquet(folder / f"{name}.parquet", index=False)
    records.memory[records.memory["where"] == "rest"].to_parquet(folder / "memory.parquet", index=False)


def figures(folder: Path = FOLDER) -> dict[str, go.Figure]:
    """The two pictures by name."""
    memory, collectives, spans = (
        pd.read_parquet(folder / f"{name}.parquet") for name in ("memory", "collectives", "spans")
    )
    return {"memory": memory_by_role(memory), "timeline": collective_timeline(collectives, spans, run=SHOWN)}


def digest(figure: go.Figure) -> str:
    """Of what a figure shows."""
    return hashlib.sha256(json.dumps(plain_json(figure)["data"], sort_keys=True).encode()).hexdigest()


def digest_in(picture: Path) -> str:
    """The digest that a picture carries."""
    with Image.open(picture) as image:
        return str(image.info["figure"])


def draw(folder: Path = FOLDER) -> None:
    """Write the pictures; needs Chromium."""
    for name, figure in figures(folder).items():
        drawn = png(figure)
        assert drawn is not None, "no browser was found"
        info = PngImagePlugin.PngInfo()
        info.add_text("figure", digest(figure))
        Image.open(io.BytesIO(drawn)).save(folder / f"{name}.png", pnginfo=info, optimize=True)


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
    draw()
