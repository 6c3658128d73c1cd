"""The pages that need no Python: what each computes equals Python, and what each shows fits, also on a phone."""

import re
import sys
from pathlib import Path

import pytest

from shardlab.course.drawings import DRAWINGS
from shardlab.course.exercises.ladder import hidden_time
from shardlab.forecast.replay import Schedule, Unit, replay
from shardlab.planner.formulas import model_states
from shardlab.planner.rows import ROWS
from tests.browser.test_report_page import TOO_WIDE

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / ".site"))

from static_pages import PAGES, with_parts  # noqa: E402

NAMES = sorted(path.stem for path in PAGES.glob("*.html"))
# Texts that are out of their picture, smaller than 12 px, or on another one.
SPOILT = """() => [...document.querySelectorAll("#figure, .drawing")].flatMap(svg => {
    const picture = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(one => [one, one.getBoundingClientRect()])
        .filter(([, box]) => box.width > 0);
    const out = texts.filter(([one, box]) => parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a < 12
        || box.left < picture.left - 1 || box.right > picture.right + 1 || box.bottom > picture.bottom + 1);
    const over = texts.filter(([, a], place) => texts.slice(place + 1).some(([, b]) =>
        a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 5 && b.top < a.bottom - 5));
    return [...out, ...over].map(([one]) => one.textContent);
})"""


@pytest.fixture
def open_page(browser):
    """``open_page(name, address, **view)``: a page, which has complained of nothing when the test ends."""
    pages, complaints = [], []

    def opened(name, address="", **view):
        page = browser.new_page(**view)
        pages.append(page)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: complaints.append(asked.url) if not asked.url.startswith("file:") else None)
        page.goto((PAGES / f"{name}.html").as_uri() + address)
        return page

    yield opened
    for page in pages:
        page.close()
    assert complaints == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_one_small_file_with_all_parts_as_they_are(name):
    text = (PAGES / f"{name}.html").read_text()
    assert with_parts(text) == text, "run python .site/static_pages.py"
    assert 3_000 < len(text.encode()) < 15_000
    assert not re.search(r'(src|href)="(?!https://|\w+\.html)', text)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_whole_at_every_position_and_width_and_goes_by_keys(open_page, name):
    page = open_page(name, viewport={"width": 900, "height": 900})
    page.clock.install()  # the address follows a little later, on a loaded machine too
    last = int(page.locator("[name=position]").get_attribute("max"))
    assert last >= 5
    for width in (900, 400):
        page.set_viewport_size({"width": width, "height": 900})
        said = set()
        for place in range(last + 1):
            page.locator("[name=position]").fill(str(place))
            assert page.evaluate(SPOILT) == [], (width, place)
            said.add(page.locator("#say").inner_text())
        assert len(said) == last + 1
        assert page.evaluate(TOO_WIDE) == []
    page.keyboard.press("ArrowLeft")
    assert page.locator("[name=position]").input_value() == str(last - 1)
    there = page.locator("#say").inner_text()
    page.clock.run_for(250)
    again = open_page(name, "#" + page.url.split("#")[1])
    assert again.locator("#say").inner_text() == there, "the address leads there"
    assert not page.locator("#answer").is_visible()
    page.locator("summary").click()
    assert len(page.locator("#answer").inner_text()) > 50


UNITS = [Unit(f"block {number}", 5e-3, 10e-3, 200e3, 200e3) for number in range(4)]
FSDP = Unit("the root", 1e-3, 2e-3, 82e3, 82e3)
STEP = """([prefetch, gather, keeps]) => {
    const {events, held, end, waits} = fsdpStep(prefetch, gather, keeps);
    const row = name => events.filter(one => one.row == name).map(one => [one.unit?.name ?? "", one.start, one.end]);
    return [row("compute"), row("link"), end, waits, mostGathered(held)];
}"""


@pytest.mark.parametrize("strategy", ["fsdp", "shard_grad_op"])
def test_a_step_of_fsdp_is_the_replayed_one(open_page, strategy):
    page = open_page("fsdp_step")
    for prefetch in (0, 1, 2):
        for gather_ms in (1, 4, 6, 10):
            schedule = Schedule(ROWS[strategy], prefetch=prefetch, optimizer_seconds=3e-3, contention=0)
            found = replay(UNITS, schedule, lambda _op, _axis, num_bytes, ms=gather_ms: ms * num_bytes / 2e8, FSDP)
            sent = sorted(found.host.transfers.values(), key=lambda one: one.started_us)
            compute, link, end, waits, most = page.evaluate(STEP, [prefetch, gather_ms, strategy == "shard_grad_op"])
            assert [times for _, *times in compute] == [
                pytest.approx([1e3 * start, 1e3 * end]) for _, start, end in found.computed
            ]
            assert link == [
                [one.of.tag, *map(pytest.approx, (one.started_us / 1e3, one.ended_us / 1e3))] for one in sent
            ]
            assert [end, waits] == pytest.approx([1e3 * found.seconds, 1e3 * found.exposed_seconds])
            assert most == (882 if strategy == "shard_grad_op" else 82 + 200 * (1 + prefetch))


def test_the_second_block_ahead_buys_nothing_at_4_ms_a_gather_and_does_at_6(open_page):
    page = open_page("fsdp_step")
    wanted = {4: [119, 81, 81], 6: [145, 96, 92], 10: [198, 141, 141]}
    ends = "gather => [0, 1, 2].map(prefetch => Math.round(fsdpStep(prefetch, gather).end))"
    assert {gather: page.evaluate(ends, gather) for gather in wanted} == wanted


def test_what_a_rank_keeps_is_what_plan_says(open_page):
    page = open_page("which_strategy")
    held = "given => Object.keys(STRATEGIES).map(name => sum(heldBytes(name, ...given)))"
    for number in range(50):
        params, ranks = round(1e8 * 1.165**number), (1, 2, 3, 7, 8, 64, 96, 1000, 1024)[number % 9]
        precision = ("mixed", "fp32")[number % 2]
        wanted = [states.total_bytes for states in model_states(params, ranks, precision)]
        assert page.evaluate(held, [params, ranks, precision]) == pytest.approx(wanted, abs=4)


def test_buckets_travel_by_the_clock_of_the_exercise(open_page):
    page = open_page("why_buckets")
    of_page = ([(625, 62_500)] * 64, 2000, 125)
    for layers, latency_us, bytes_per_us in (*hidden_time.LINKS.values(), of_page):
        for size in range(1, len(layers) + 1):
            found = page.evaluate("given => linkClock(...given)", [size, layers, latency_us, bytes_per_us])
            queued = [one["start"] - one["ready"] for one in found["messages"]]
            assert queued == pytest.approx(hidden_time._played(size, layers, latency_us, bytes_per_us)[0])
            *_, last = found["messages"]
            assert found["end"] == pytest.approx(last["start"] + latency_us + last["bytes"] / bytes_per_us)
    steps = page.evaluate("SIZES.map(k => stepMs(k, {latency: 2, gbps: 1}))")
    assert steps == [160.625, 97.25, 66.5, 53, 50, 58, 74]


def test_a_click_on_the_axis_is_a_guess(open_page):
    page = open_page("why_buckets")
    assert page.locator("#figure circle").count() == 0
    picture = page.locator("#figure").bounding_box()
    page.mouse.click(picture["x"] + picture["width"] - 30, picture["y"] + 290)
    assert page.locator("[name=guess]").input_value() == "64"
    assert "You expected 64 layers: 24.0 ms longer than with 16 layers." in page.locator("#say").inner_text()


def test_six_ways_of_fsdp_cost_what_they_say(open_page):
    page = open_page("memory_or_time", "#gather=4&choice=4")
    assert "77 ms, of which 11 ms wait; at most 882 kB" in page.locator("#say").inner_text()
    page.locator("summary").click()
    assert "keeping saves 4 ms of 81" in page.locator("#answer").inner_text()


def test_ranks_break_even_by_the_clock_of_the_exercise(open_page):
    page = open_page("two_slower_than_one")
    for step in hidden_time.STEPS.values():
        rows = [1, 2, 5, 40]
        found = page.evaluate("([rows, step]) => rows.map(one => stepOf(one, step).us)", [rows, step])
        assert found == pytest.approx([hidden_time._step_us(one, step) for one in rows])
        assert page.evaluate("step => breakEven(2, step)", step) == hidden_time._fewest(step)
    wanted = {
        "sent=buckets": "From 3 rows a rank on;",
        "sent=after": "From 22 rows a rank on;",
    }  # as notebook 05 predicts
    for address, begin in wanted.items():
        page = open_page("two_slower_than_one", f"#{address}")
        page.locator("summary").click()
        assert page.locator("#answer").inner_text().startswith(begin)


def test_drawings_fit_in_both_layouts(browser):
    page = browser.new_page()
    page.set_content("".join(draw().svg() for draw in DRAWINGS))
    for width, shown in ((900, ".wide"), (540, ".wide"), (400, ".narrow"), (340, ".narrow")):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.locator(f".drawing {shown}:visible").count() == len(DRAWINGS)
        assert page.evaluate(SPOILT) == [], width
    page.close()
