"""Samples of what is gathered: exact bytes of the units that are there, no trace of the hooks; and the picture."""

import pandas as pd
import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.course.gathered_units import gathered_by_unit, unit_bytes, watch_gathered
from shardlab.engines import Engine, build_engine
from shardlab.models import GPT, GPTConfig, next_token_loss
from tests.conftest import Pools

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
MOMENTS = [
    "root forward", *(f"{name} forward{end}" for name in BLOCKS for end in ("", " done")), "root forward done",
    "root backward", *(f"{name} backward{end}" for name in reversed(BLOCKS) for end in ("", " done")),
    "root backward done", "end",
]  # fmt: skip


def sgd(tensors):
    return torch.optim.SGD(tensors, lr=0.1)


def watched(rank: int, options: dict) -> tuple[pd.DataFrame, dict[str, int], dict[str, int], int]:
    tokens = torch.arange(9).view(1, 9) + rank
    with Mesh({"data": 2}) as mesh:
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=16, seq_len=8, num_layers=3, num_heads=1, hidden=6))
        engine = build_engine("fsdp", model, sgd, mesh, **options)
        num_hooks = hooks_of(engine)
        with watch_gathered(engine) as samples:
            engine.backward(next_token_loss(engine(tokens[:, :-1]), tokens[:, 1:]))
        with engine.full_params():
            all_there = gathered_by_unit(engine)
        # A row per moment and a column per unit.
        table = pd.DataFrame(samples).pivot_table(index=["sample", "moment"], columns="unit", values="bytes")
        return table.droplevel("sample"), unit_bytes(engine), all_there, hooks_of(engine) - num_hooks


def hooks_of(engine: Engine) -> int:
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.module.modules())
    return modules + sum(len(param._post_accumulate_grad_hooks or ()) for param in engine.params.values())


@pytest.mark.parametrize(("prefetch", "layout"), [(0, "flat"), (1, "flat"), (2, "flat"), (1, "dim0")])
def test_samples_are_in_order_and_hold_whole_units(pools: Pools, prefetch: int, layout: str) -> None:
    for samples, whole, all_there, more_hooks in pools(2).run(watched, {"prefetch": prefetch, "layout": layout}):
        assert list(samples.index) == MOMENTS
        assert more_hooks == 0
        assert not samples.iloc[-1].any()
        if layout == "flat":  # dim0 gathers with its padding and then drops it
            assert all_there == whole
            assert all(set(samples[unit]) <= {0, num_bytes} for unit, num_bytes in whole.items())
            at_most = whole["root"] + sum(sorted((whole[name] for name in BLOCKS), reverse=True)[: 1 + prefetch])
            assert samples.sum(axis=1).max() == at_most
        if (layout, prefetch) == ("flat", 1):
            for moment, gone in (("0 forward", "2"), ("0 forward done", "02"), ("1 backward", "2"),
                                 ("1 backward done", "12")):  # fmt: skip
                assert dict(samples.loc[f"blocks.{moment}"]) == whole | dict.fromkeys((f"blocks.{n}" for n in gone), 0)


def test_shard_grad_op_lets_go_of_nothing_in_forward_and_bytes_are_those_of_the_compute_dtype(pools: Pools) -> None:
    samples, full, *_ = pools(2).run(watched, {"sharding": "shard_grad_op"})[0]
    assert samples.sum(axis=1).max() == sum(full.values())
    samples, whole, *_ = pools(2).run(watched, {"precision": "bf16", "prefetch": 0})[0]
    assert {unit: 2 * held for unit, held in whole.items()} == full
    assert samples.sum(axis=1).max() == whole["root"] + whole["blocks.0"]
