"""A traced step of an engine made by hand: its records are a run's, and activations show what checkpointing keeps."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from shardlab import Mesh, build_engine
from shardlab.analysis import memory_over_step, peak
from shardlab.lab.small_records import trace_step
from shardlab.models import GPT, GPTConfig, next_token
from shardlab.vocabulary import Role, SpanKind

ROWS, SEQ, HIDDEN = 4, 16, 32


def traced(rank, recompute):
    model = GPT(GPTConfig(seq_len=SEQ, num_layers=3, num_heads=4, hidden=HIDDEN))
    if recompute:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    tokens = torch.arange(ROWS * (SEQ + 1)).view(ROWS, SEQ + 1) % 256
    with (
        Mesh({"data": 2}) as mesh,
        build_engine("fsdp", model, lambda tensors: torch.optim.AdamW(tensors, lr=1e-3), mesh) as engine,
    ):
        return trace_step(rank, "hand made", engine, next_token, (tokens[:, :-1], tokens[:, 1:]))


def block_growth(records):
    forward = memory_over_step(records.memory).query("phase == 'forward'").groupby("unit")["activation"].last()
    return forward["blocks.1"] - forward["blocks.0"]


def test_the_tables_are_those_of_a_run(pools):
    for rank, records in enumerate(pools(2).run(traced, False)):
        assert set(records.steps["rank"]) == {rank}
        assert set(records.steps["run"]) == {"hand made"}
        assert records.steps["traced_memory"].tolist() == [False, True]
        assert records.steps["peak_bytes"].iloc[1] == peak(records.memory)["bytes"].sum()
        assert records.steps["loss"].iloc[1] < records.steps["loss"].iloc[0]
        assert {SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER} <= set(records.spans["kind"])
        counts = records.collectives.query("step == 1 and phase != 'metrics'").groupby("op").size()
        assert counts.to_dict() == {"all_gather": 8, "all_reduce": 2, "reduce_scatter": 4}
        assert Role.ACTIVATION in set(records.memory["role"])


def test_a_checkpointed_block_keeps_its_input_alone(pools):
    one = 4 * ROWS * SEQ * HIDDEN
    kept, recomputed = (pools(2).run(traced, recompute)[0] for recompute in (False, True))
    assert one <= block_growth(recomputed) < 1.1 * one
    assert 16 * one <= block_growth(kept) < 17 * one
    assert recomputed.steps["peak_bytes"].iloc[1] < kept.steps["peak_bytes"].iloc[1]
