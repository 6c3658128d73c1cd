"""What a workload or an option says is a unit, is one in FSDP, in the spans, in memory and in the plan."""

import pytest
import torch
from torch.nn import functional

from shardlab import CompareConfig, Workload, compare
from shardlab.units import wrap_text
from tests.units.look_alikes import GPT2, Residual

STRATEGIES = ("zero3", "fsdp", "torch_fsdp2")
BLOCKS = ["transformer.h.0", "transformer.h.1", "transformer.h.2"]


def tokens(rank, ranks, seed):
    generator = torch.Generator().manual_seed(seed + rank)
    while True:
        yield torch.randint(11, (2, 6), generator=generator)


def next_token(model, rows):
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@pytest.mark.parametrize(("wrap", "units"), [(Residual, BLOCKS), ("transformer.h.*.up", None)])
def test_of_a_model_of_dicts_the_blocks_are_gathered_timed_measured_and_planned(pools, tmp_path, wrap, units):
    units = units or [f"{block}.up" for block in BLOCKS]
    workload = Workload(GPT2, tokens, next_token, wrap=wrap)
    found = compare(workload, tmp_path / "out", strategies=STRATEGIES, ranks=2, steps=3, device="cpu", pool=pools(2))
    assert found.summary["as_planned"].tolist() == [True, True, None]
    assert found.losses_equal
    records = found.records
    assert {manifest["config"]["wrap"] for manifest in records.manifests.values()} == {wrap_text(wrap)}
    gathered = records.collectives[(records.collectives["run"] == "fsdp") & (records.collectives["op"] == "all_gather")]
    last = gathered[gathered["step"] == 2]
    assert set(last["tag"]) == {f"parameters of {unit}" for unit in (*units, "root")}
    for run in STRATEGIES:
        for table, column in ((records.spans, "unit"), (records.memory, "where")):
            seen = set(table.loc[table["run"] == run, column])
            assert set(units) <= seen
            assert "transformer" not in seen


def test_units_that_match_nothing_are_refused_before_ranks_start(tmp_path):
    said = r"^wrap: 'layers\.\*' matches no module; the module has .*'transformer\.h\.\*'"
    for options in ({"wrap": "layers.*"}, {"workload": Workload(GPT2, tokens, next_token, wrap="layers.*")}):
        with pytest.raises(ValueError, match=said):
            CompareConfig(**{"workload": Workload(GPT2, tokens, next_token), "strategies": ("fsdp",), **options})
