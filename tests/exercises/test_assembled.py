"""The ladder's end: engines made of parts train as one process does, and a part that is missing or wrong is named."""

from collections.abc import Callable

import pandas as pd
import pytest

from shardlab.exercises.assembled import assemble, named_parts, row_of
from shardlab.exercises.assembled.train import ENGINES
from tests.conftest import Pools
from tests.exercises.right import RIGHT, right_forward, right_norm, right_owners
from tests.exercises.wrong import half_a_ring, local_norm, not_ahead


def as_parts(**functions: Callable[..., object]) -> list[Callable[..., object]]:
    """The functions under the names that are asked for."""
    for name, function in functions.items():
        function.__name__ = name
    return list(functions.values())


@pytest.fixture(scope="module")
def table(pools: Pools) -> pd.DataFrame:
    parts = {name.replace(".", "_"): copied(right) for name, (*_, right) in RIGHT.items()}
    return assemble(*as_parts(**parts), steps=2, pool=pools(2)).set_index(["strategy", "whose"])


def copied(function: Callable[..., object]) -> Callable[..., object]:
    return lambda *inputs: function(*inputs)


def test_the_references_train_as_one_process_ours_and_torchs_do(table: pd.DataFrame) -> None:
    assert table["as one process"].all(), table["why not"]
    assert (table["why not"] == "").all()
    mine = table.xs("yours", level="whose")
    assert list(mine.index) == list(ENGINES)
    whose = table.reset_index("whose").groupby("strategy")["whose"].agg(set)
    assert whose["fsdp"] == whose["zero1"] == whose["ddp"] == {"yours", "ours", "torch's"}


def test_the_learners_send_and_hold_what_ours_do(table: pd.DataFrame) -> None:
    yours, ours = (table.xs(whose, level="whose") for whose in ("yours", "ours"))
    columns = ["bytes sent", "bytes at rest"]
    assert yours[columns].to_dict() == ours.loc[yours.index, columns].to_dict()
    assert table["bytes at rest"].loc["fsdp", "yours"] == table["bytes at rest"].loc["single", ""] / 2


def rows(pools: Pools, wanted: list[float], **functions: Callable[..., object]) -> dict[str, tuple[object, ...]]:
    parts = named_parts(as_parts(**{name: copied(function) for name, function in functions.items()}))
    return {name: row_of(engine, parts, pools(2), wanted) for name, engine in ENGINES.items()}


def test_a_part_that_is_missing_wrong_or_raises_is_said_in_its_row(pools: Pools, table: pd.DataFrame) -> None:
    losses = table["last loss"].loc["single", ""]
    found = rows(
        pools, [5.0, losses], buckets_assign=RIGHT["buckets.assign"][0], collectives_ring_all_reduce=half_a_ring,
        zero1_owners=right_owners, clip_global_norm=local_norm, zero3_forward=not_ahead,
    )  # fmt: skip
    assert found["ddp"][2:] == (None,) * 5 + ("data_parallel_hooks missing",)
    assert found["fsdp"][-1] == "fsdp_units missing"
    assert "the loss of step" in str(found["bucketed"][-1])
    assert found["zero1"][3] is False, "each rank clips by its own norm"
    parts = {"zero1_owners": right_owners, "clip_global_norm": right_norm}
    found = rows(pools, [losses], **parts, zero3_forward=lambda units, x: right_forward(units[:-1], x))
    assert "raised" in str(found["zero3"][-1]), "a GPT without its head gives no logits"


def test_bad_input_is_refused_by_field(pools: Pools) -> None:
    with pytest.raises(ValueError, match="functions: right_norm is not the name of an exercise; there are collectives"):
        assemble(right_norm)
    with pytest.raises(ValueError, match="ranks: 3 was given; 4 rows divide among 1, 2 or 4"):
        assemble(ranks=3)
    with pytest.raises(ValueError, match="pool: 2 ranks, but ranks is 4; give the same number"):
        assemble(ranks=4, pool=pools(2))
