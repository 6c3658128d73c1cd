"""The page that ``compare`` leaves, in a browser: every figure drawn, in light and in dark, and nothing fetched."""

import pytest
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.experiment import CompareConfig, compare, write_report
from tests.browser.figures import drawn_figures

# The page itself and its parts, but for those that scroll sideways by design, as a broad table on a phone does.
TOO_WIDE = """() => [document.documentElement, ...document.querySelectorAll("main, main *:not(svg, svg *)")]
    .filter(element => !["auto", "scroll", "hidden"].includes(getComputedStyle(element).overflowX)
            && element.clientWidth > 0 && element.scrollWidth > element.clientWidth)
    .map(element => `${element.tagName}.${element.className}: ${element.scrollWidth} in ${element.clientWidth} px`)"""


@pytest.fixture(scope="module")
def report(browser, pools, tmp_path_factory):
    config = CompareConfig(
        strategies=("single", "bucketed", "zero3"), ranks=2, steps=3, model="mlp", text=__file__, seq_len=16,
        device="cpu",
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("report") / "run"
    return write_report(compare(config, directory, pool=pools(2)), config)


@pytest.fixture(scope="module", params=["light", "dark"])
def opened(request, browser, report):
    """The page, and what the browser complained of or asked for."""
    page = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme=request.param)
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: requests.append(asked.url))
    page.goto(report.as_uri(), wait_until="load")
    page.locator("section:not([hidden] *) .plot svg.main-svg").last.wait_for(timeout=60_000)
    yield page, complaints, requests
    page.close()


def test_answer_and_two_figures_are_seen_without_scrolling(opened):
    page, _, _ = opened
    names = page.locator(".answer dt").all_inner_texts()
    assert names == ["LEAST MEMORY", "FASTEST", "COST", "WHY", "CAN I TRUST IT", "NEXT"]
    assert "zero3, " in page.locator(".answer dd").first.inner_text()
    seen = [*page.locator(".answer dd").all(), *page.locator(".pair .plot").all()]
    assert len(seen) == 6 + 2
    for box in (one.bounding_box() for one in seen):
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 1300
        assert 0 < box["y"] < box["y"] + box["height"] <= 900


def test_the_page_is_whole_and_fetches_nothing(opened, report):
    page, complaints, requests = opened
    choices = page.locator(".choices option").count()
    for number in (0, choices - 1):
        page.select_option(".choices select", index=number)
        page.locator(".choice:not([hidden]) svg.main-svg").first.wait_for(timeout=60_000)
        figures = drawn_figures(page)  # timelines that were not chosen have no size
        assert len([figure for figure in figures if figure.width]) == page.locator(".plot").count() - choices + 1 >= 8
    for figure in (figure for figure in figures if figure.width):
        assert figure.height > 100
        assert figure.width <= figure.room
        assert figure.marks > 0
    assert complaints == []
    assert report.stat().st_size < 1.5e6
    assert [url for url in requests if not url.startswith(("data:", "blob:"))] == [report.as_uri()]
    assert page.evaluate(TOO_WIDE) == []


@pytest.mark.parametrize("gpu", [["--gpu", "1MB,1GB/s,50us"], []])
def test_the_page_of_a_plan_has_its_lines_and_two_figures(browser, tmp_path, gpu):
    given = ["--workload", "data/train.py:workload", "--ranks", "4", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["plan", *given, *gpu])
    assert done.exit_code == 0, done.output
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.goto((tmp_path / "plan.html").as_uri(), wait_until="load")
    page.locator(".plot svg.main-svg").last.wait_for(timeout=60_000)
    figures = drawn_figures(page)
    assert [figure.marks > 0 and figure.width <= figure.room for figure in figures] == [True, True]
    names = page.locator(".answer dt").all_inner_texts()
    assert names == [*(["WHAT FITS"] if gpu else []), "LEAST MEMORY", "COST", "NEXT"]
    assert page.evaluate(TOO_WIDE) == []
    page.close()
