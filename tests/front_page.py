"""The pictures of the README, and what it says is printed; and the recorded run with which the workbench begins.

    python -m tests.front_page           # draws the pictures anew; needs Chromium
    python -m tests.front_page RUN       # keeps what is needed of a run of ``shardlab compare``, the one of ``COMMAND``

One picture is a drawing of the course, the other a moment of a page that needs no Python. Each carries a digest of what
it was drawn from, so a test can tell that it shows these and no others, without drawing it.
"""

import hashlib
import io
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from PIL import Image, PngImagePlugin

from shardlab.analysis.rows import timed_steps
from shardlab.course.drawings import who_keeps_what
from shardlab.experiment.told.saved_runs import load_comparison

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDER = Path(__file__).parents[1] / "data" / "front_page"
STRATEGIES = ("bucketed", "zero1", "zero2", "zero3", "fsdp")
RANKS = 2
COMMAND = f"shardlab compare --ranks {RANKS} --steps 6 --strategies {','.join(STRATEGIES)} --link 2Gbps,50us --out RUN"
SHOWN = "fsdp"
PAGE, MOMENT = FOLDER.parents[1] / "notebooks" / "pages" / "fsdp_step.html", "#prefetch=1&gather=4&at=4"
COLOURS = 128
ALONE = """body > :not(div:has(#figure), .legend, #say) { display: none } #say { min-height: 0 }
body { margin: 0; padding: 1rem }"""


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


def sources() -> dict[str, str]:
    """What each picture is drawn from, by its name."""
    return {"who_keeps_what": who_keeps_what().svg(), "fsdp_step": PAGE.read_text() + MOMENT}


def digest(source: str) -> str:
    """Of what a picture is drawn from."""
    return hashlib.sha256(source.encode()).hexdigest()


def digest_in(picture: Path) -> str:
    """The digest that a picture carries."""
    with Image.open(picture) as image:
        return str(image.info["source"])


def draw(folder: Path = FOLDER) -> None:
    """Write the pictures."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 800, "height": 900}, device_scale_factor=2)
        page.set_content(who_keeps_what().svg())
        drawn = {"who_keeps_what": page.locator("svg.drawing").screenshot()}
        page.goto(PAGE.as_uri() + MOMENT)
        page.add_style_tag(content=ALONE)
        drawn["fsdp_step"] = page.locator("body").screenshot()
        browser.close()
    for name, image in drawn.items():
        info = PngImagePlugin.PngInfo()
        info.add_text("source", digest(sources()[name]))
        few = Image.open(io.BytesIO(image)).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE)
        few.save(folder / f"{name}.png", pnginfo=info, optimize=True)


if __name__ == "__main__":
    keep(Path(sys.argv[1])) if sys.argv[1:] else draw()
