"""Verdicts on times of a quiet, a slowed and a loaded machine: none contradicts the figures it was computed from."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from shardlab.analysis import overlap
from shardlab.course import notebook_verdicts as say
from shardlab.plots import overlap_bars, summary_of
from shardlab.records.store import Records
from shardlab.records.tables import STEPS
from tests.analysis.hand_made import random_step as one_step
from tests.analysis.hand_made import timed

SEEDS = range(12)
SIZES = (20_000, 100_000, 500_000, 2_000_000)


def slowed(table: pd.DataFrame) -> pd.DataFrame:
    """All of it seven times as slow."""
    times = [name for name in table.columns if name.endswith("_us")]
    return table.assign(**{name: 7 * table[name] for name in times})


def loaded(table: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Each time by itself up to four times as long: other programs had the cores."""
    draw = np.random.default_rng(seed)
    times = [name for name in table.columns if name.endswith("_us")]
    return table.assign(**{name: table[name] * draw.uniform(1, 4, len(table)) for name in times})


def words(said: str) -> str:
    """Without its numbers and their units."""
    return re.sub(r"[\d.]+( ?(µs|ms|s|%|kB|MB|GB/s))?\b", "#", said)


def sweep() -> pd.DataFrame:
    return pd.DataFrame({"bucket_bytes": SIZES * 3, "step_us": [300.0, 200, 150, 260] * 3, "exposed_comm_us": 1.0})


def test_buckets_the_best_is_the_shortest_and_lies_where_it_is_said_to() -> None:
    assert "It lies in between" in say.bucket_verdict(sweep())
    assert "It is the largest" in say.bucket_verdict(sweep().assign(step_us=[4.0, 3, 2, 1] * 3))
    assert words(say.bucket_verdict(slowed(sweep()))) == words(say.bucket_verdict(sweep()))
    for seed in SEEDS:
        table = loaded(sweep(), seed)
        said, steps = say.bucket_verdict(table), table.groupby("bucket_bytes")["step_us"].median()
        best, ends = steps.idxmin(), steps.iloc[[0, -1]]
        assert f"Buckets of {best // 1000} kB" in said or f"Buckets of {best // 1_000_000} MB" in said
        close = bool(ends.max() <= say.ALIKE * steps.min())
        for sentence, applies in (
            ("hardly matters", close),
            ("It lies in between", best not in ends.index and not close),
            ("larger ones start late", best not in ends.index and ends.min() > say.ALIKE * steps.min()),
            ("It is the largest", best == SIZES[-1] and not close),
            ("It is the smallest", best == SIZES[0] and not close),
        ):
            assert (sentence in said) == applies
        assert all(float(ratio) >= 1 for ratio in re.findall(r"([\d.]+) times as long", said))


def test_no_message_gains_more_than_it_lasts() -> None:
    for seed in range(4):
        gains = say.message_gains(*timed(*one_step(seed, slow=1.0 + 6 * (seed % 2))))
        assert (gains["gain (ms)"] <= gains["duration (ms)"] + 1e-9).all(), seed
        parts = gains["hidden (ms)"] + gains["exposed (ms)"]
        assert parts.tolist() == pytest.approx(gains["duration (ms)"].tolist())
        said, more = say.gain_verdict(gains), gains["gain (ms)"] > say.ALIKE * gains["exposed (ms)"]
        assert f"Without {gains['gain (ms)'].idxmax()} the step would gain most" in said
        assert ("no message gains more than it exposes" in said) == (not more.any())


def test_hidden_and_exposed_are_compared_as_they_are() -> None:
    for seed in SEEDS:
        table = pd.concat(overlap(*one_step(seed + 100 * place)).assign(run=name) for place, name in enumerate("abc"))
        said, exposed = say.hidden_verdict(table, ["a", "b", "c"]), table.groupby("run")["exposed_us"].median()
        first, *others = said.removesuffix(".").split("; ")
        assert first.startswith("a hides ")
        for before, name, sentence in zip("ab", "bc", others, strict=True):
            now, then = exposed[name], exposed[before]
            alike = max(now, then) <= say.ALIKE * min(now, then)
            kind = "about as much" if alike else "less" if now < then else "MORE"
            assert re.fullmatch(rf"{name} .*, {kind} exposed.* {before}", sentence)
        assert words(say.hidden_verdict(slowed(table), ["a", "b", "c"])) == words(said)


def test_a_figure_and_a_sentence_say_the_same_share() -> None:
    for seed in SEEDS[:4]:
        steps = [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
        measures = [overlap(*one_step(seed + 10 * step, slow=1 + step)) for _, step in steps]
        table = pd.concat(one.assign(run=run, step=step) for one, (run, step) in zip(measures, steps, strict=True))
        drawn = re.findall(r"([ab]) ([\d.]+ %) hidden with ([\d.]+ .?s) exposed", summary_of(overlap_bars(table)))
        said = re.findall(r"\b([ab])(?: hides)? ([\d.]+ %) \(([\d.]+ .?s) exposed\)", say.hidden_verdict(table, "ab"))
        assert drawn == said
        assert len(said) == 2


def speeds(seed: int | None) -> pd.DataFrame:
    rows = [(name, rows, 64 * rows * ranks / (10 + 5 * rows + late))
            for name, ranks, late in (("1 rank", 1, 0), ("2 ranks, ddp", 2, 117), ("2 ranks, bucketed", 2, 30))
            for rows in (2, 4, 8, 16, 32)]  # fmt: skip
    table = pd.DataFrame(rows, columns=["name", "rows", "tokens_per_s"])
    draw = np.random.default_rng(seed)
    return table if seed is None else table.assign(tokens_per_s=table["tokens_per_s"] / draw.uniform(1, 4, len(table)))


def test_two_ranks_pay_off_where_they_did() -> None:
    assert say.pay_off_verdict(speeds(None), "1 rank") == (
        "2 ranks, bucketed: faster than one from 8 rows on; with 32 rows they do 1.70 times as much. "
        "2 ranks, ddp: faster than one from 32 rows on; with 32 rows they do 1.18 times as much."
    )
    for seed in SEEDS:
        table = speeds(seed).pivot(index="rows", columns="name", values="tokens_per_s")
        for sentence in say.pay_off_verdict(speeds(seed), "1 rank").split(". 2 ranks"):
            name = "2 ranks, ddp" if "ddp" in sentence else "2 ranks, bucketed"
            ratios = table[name] / table["1 rank"]
            wins = list(ratios.index[ratios > 1])
            assert ("slower than one at every" in sentence) == (not wins)
            assert ("already with 2 rows" in sentence) == (len(wins) == 5)
            if found := re.search(r"from (\d+) rows on", sentence):
                assert wins == [rows for rows in ratios.index if rows >= int(found[1])]
            if found := re.search(r"with ([\d, and]+) rows only", sentence):
                assert [int(number) for number in re.findall(r"\d+", found[1])] == wins
            assert ("more than 2 ranks can" in sentence) == (ratios.max() > 2 * say.ALIKE)


def test_a_busy_machine_is_said_to_be_busy() -> None:
    steps = pd.DataFrame({"run": "a", "rank": 0, "step": range(6), "step_us": [900.0, 100, 101, 102, 103, 104]})
    assert "about equal time: the median is 1.02" in say.busy_in_steps(steps)
    assert say.busy_in_steps(slowed(steps)) == say.busy_in_steps(steps)
    for times, said in (
        ([1.0, 100, 101, 120, 130, 140], "did not take equal time"),
        ([900.0, 100, 150, 151, 160, 170], "This machine was busy: half of the steps took at least 1.5 times"),
    ):
        assert said in say.busy_in_steps(steps.assign(step_us=times))
    messages = pd.DataFrame({"time_us": [1.0, 2.0], "median_us": [4.0, 8.0]})
    assert "half of the messages took at least 4.0 times" in say.busy_in_messages(messages)
    assert say.others_verdict(0.03, 2) == "This machine is quiet: other programs use 3.0 % of its 2 cores."
    assert "is busy: other programs use 97 % of its 2 cores" in say.others_verdict(0.97, 2)
    assert re.match(r"This machine is (quiet|busy)", say.busy_now(0.01))


CLOCK = pd.Series({"naive": 86e3, "flat": 34e3, "bucketed": 9e3, "small": 9.5e3})


def test_measured_times_are_said_to_be_in_the_order_of_the_clock_only_if_they_are() -> None:
    assert say.clock_verdict(CLOCK, 7 * CLOCK) == (
        "Measured: bucketed 63.0 ms, small 66.5 ms, flat 238 ms and naive 602 ms. This is the order of the clock."
    )
    turned = CLOCK.rename({"naive": "flat", "flat": "naive"})  # as a busy machine has measured
    assert say.clock_verdict(CLOCK, turned).endswith("This is NOT the order of the clock: naive took less than flat.")
    alike = CLOCK.replace(34e3, 86e3)
    assert "the clock, but flat and naive took about as long here." in say.clock_verdict(CLOCK, alike)
    for seed in SEEDS:
        measured = CLOCK * np.random.default_rng(seed).uniform(1, 12, len(CLOCK))
        said = say.clock_verdict(CLOCK, measured)
        for less, more in (("bucketed", "flat"), ("small", "flat"), ("flat", "naive"), ("bucketed", "naive")):
            is_turned = measured[less] > say.ALIKE * measured[more]
            assert (f"{more} took less than {less}" in said) == is_turned
            assert not (is_turned and "This is the order" in said)


def test_ranks_without_their_cores_are_said_to_be() -> None:
    sent, spans = one_step(3)
    own = {"run": "a", "source": "measured", "rank": 0, "step": 1}
    blank, nothing = dict.fromkeys(STEPS.column_names), pd.DataFrame()
    steps = STEPS.frame([blank | own | {"step": place, "step_us": 100.0, "traced_memory": False} for place in (0, 1)])
    quiet = Records(collectives=sent[:0], spans=spans[:0], memory=nothing, shards=nothing, steps=steps, manifests={})
    assert say.cores_verdict(quiet) == "Ranks had their cores while they trained."
    away = pd.DataFrame([own | {"unit": "", "kind": "off_cpu", "start_us": 0.0, "end_us": 60.0}])
    busy = say.cores_verdict(replace(quiet, spans=away))
    assert busy.startswith("Times are UNCERTAIN: in a ranks were off the CPU for 60 % of their steps")


def test_ranks_that_take_turns_on_a_core_compute_longer():
    split = pd.DataFrame({
        "run": ["1 rank", "2 ranks", "4 ranks"], "compute_us": [60.0, 62.0, 65.0], "off_cpu_us": [0.0, 1.0, 37.0],
    })  # fmt: skip
    said = "Compute, with the time off the CPU in it, takes 1.05 times as long with 2 ranks"
    shared = "those ranks share cores or memory, and no faster link brings that back."
    assert say.floor_verdict(split, "1 rank") == f"{said} and 1.70 times as long with 4 ranks: {shared}"
    assert say.floor_verdict(split[:2], "1 rank") == f"{said}: more ranks did not slow it here."
