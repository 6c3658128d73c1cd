"""Model states from a number of parameters, the paper's numbers, and the command that prints them."""

import json
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest
import typer
from typer.testing import CliRunner

from shardlab.cli.plan import plan
from shardlab.installed import data_path
from shardlab.planner import Precision, model_states

app = typer.Typer()
app.command()(plan)


def planned(params, ranks=4, precision="mixed"):
    words = ["--params", str(params), "--ranks", str(ranks), "--precision", precision]
    return CliRunner().invoke(app, words, catch_exceptions=False)


def test_the_formulas_with_k_of_12():
    num_params, num_ranks = 6_000, 5
    rows = {row.strategy: row for row in model_states(num_params, num_ranks, "mixed")}
    assert list(rows) == ["ddp", "zero1", "zero2", "zero3"]
    assert rows["ddp"].total_bytes == 16 * num_params
    assert rows["zero1"].total_bytes == 4 * num_params + 12 * num_params // num_ranks
    assert rows["zero2"].total_bytes == 2 * num_params + 14 * num_params // num_ranks
    assert rows["zero3"].total_bytes == 16 * num_params // num_ranks
    for row in rows.values():
        assert row.total_bytes == row.parameter_bytes + row.gradient_bytes + row.optimizer_bytes
    sent = [row.wire_elements for row in rows.values()]
    assert sent == [volumes * num_params * (num_ranks - 1) // num_ranks for volumes in (2, 2, 2, 3)]


def test_fp32_fractions_and_precisions_of_one_s_own():
    zero2 = model_states(1_000, 4, "fp32")[2]
    assert (zero2.parameter_bytes, zero2.gradient_bytes, zero2.optimizer_bytes) == (4_000, 1_000, 2_000)
    assert model_states(10, 1, Precision(1, 2, 0, 1, 1))[0].total_bytes == 50
    assert model_states(10, 3, "fp32")[3].parameter_bytes == 40 / 3
    with pytest.raises(ValueError, match="precision: gradient: 0 is too small; it must be at least 1"):
        Precision(2, 0, 4, 4, 4)


PAPER = json.loads(data_path("zero_paper.json").read_text(encoding="utf-8"))
# The paper rounds the 7.5B column and the figure, and truncates the columns of 128B and 1T.
ROUNDING = {"half_up": ROUND_HALF_UP, "truncated": ROUND_DOWN}


def printed_and_computed() -> dict[tuple[str, int, int, str], tuple[str, str]]:
    """GB (10^9 bytes) per rank as the ZeRO paper prints them in its table 1 and figure 1, and the formula's."""
    rows = [
        ("table 1", column, int(ranks), dict(zip(PAPER["setting"]["strategies"], numbers, strict=True)))
        for column in PAPER["table_1"]["columns"].values()
        for ranks, numbers in column["by_ranks"].items()
    ]
    figure = PAPER["figure_1"]
    found = {}
    for where, column, ranks, by_strategy in [*rows, ("figure 1", figure, figure["ranks"], figure["by_strategy"])]:
        states = {row.strategy: Decimal(row.total_bytes) / 10**9 for row in model_states(column["num_params"], ranks)}
        for strategy, printed in by_strategy.items():
            computed = states[strategy].quantize(Decimal(printed), rounding=ROUNDING[column["rounding"]])
            found[where, column["num_params"], ranks, strategy] = (printed, str(computed))
    return found


def test_all_numbers_of_the_paper():
    numbers = printed_and_computed()
    wheres = [where for where, *_ in numbers]
    assert (wheres.count("table 1"), wheres.count("figure 1")) == (54, 4)
    assert not {key for key, (printed, computed) in numbers.items() if printed != computed}
    assert numbers["table 1", 10**12, 1024, "zero3"][0] == "15.6"  # 15.625, truncated
    assert numbers["figure 1", 7_500_000_000, 64, "zero3"][0] == "1.9"


def test_bad_input_names_the_field():
    for arguments, message in (
        *(((params, 4, "mixed"), "params: .* must be") for params in (0, -5e9, float("nan"), float("inf"), 1.5)),
        ((7.5e9, 0, "mixed"), "ranks: (0 is too small; it must be at least 1|0 was given; give 1 to)"),
        ((7.5e9, 4, "half"), "precision: 'half' is not one of mixed, fp32"),
    ):
        with pytest.raises(ValueError, match=message):
            model_states(*arguments)
        with pytest.raises(ValueError, match=message):
            planned(*arguments)


def test_more_ranks_than_a_table_holds_are_refused():
    result = CliRunner().invoke(app, ["--params", "7B", "--ranks", "99999999999999999999"])
    assert "ranks: 99999999999999999999 was given; give 1 to 1,000,000,000" in str(result.exception)


def test_plan_prints_json():
    for text in ("7.5B", "7500M", "7500000k", "0.0075T", "7.5e9"):
        result = CliRunner().invoke(app, ["--params", text, "--ranks", "64", "--precision", "mixed", "--json"])
        assert result.exit_code == 0
        rows = json.loads(result.stdout)["strategies"]
        assert rows[3] == {
            "strategy": "zero3", "parameter_bytes": 234_375_000, "gradient_bytes": 234_375_000,
            "optimizer_bytes": 1_406_250_000, "total_bytes": 1_875_000_000, "wire_elements": 22_148_437_500,
            "rest_bytes": 1_875_000_000, "wire_bytes_per_step": 44_296_875_000,
        }  # fmt: skip
        assert [row["strategy"] for row in rows] == ["ddp", "zero1", "zero2", "zero3"]


def test_plan_prints_a_table_that_fits_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for params, ranks in (("7.5e9", "64"), ("1e12", "1024"), ("29500001", "7"), ("1", "1")):
        result = CliRunner().invoke(app, ["--params", params, "--ranks", ranks])
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        assert max(len(line) for line in lines) <= 80
        assert "…" not in result.stdout
        [zero3] = [line for line in lines if line.strip().startswith("zero3")]
        if params == "7.5e9":
            assert zero3.split() == ["zero3", "0.23", "0.23", "1.41", "1.9", "44.30"]


def test_plan_reads_counts_as_papers_write_them_and_shows_a_unit_that_fits():
    shown = CliRunner().invoke(app, ["--params", "1.1M", "--ranks", "4"]).stdout
    assert "\n1,100,000 parameters" in shown
    assert "MB MB/step" in " ".join(shown.split())
    for text in ("7.5Q", "B", "many"):
        with pytest.raises(ValueError, match=f"params: '{text}' is given; it must be a number above 0, or one with K"):
            planned(text)
