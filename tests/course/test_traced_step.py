"""A traced step of an engine made by hand: its records are those of a run."""

import torch

from shardlab import Mesh, build_engine
from shardlab.analysis import peak
from shardlab.course.recorded_steps import trace_step
from shardlab.models import GPT, GPTConfig, next_token
from shardlab.vocabulary import Role, SpanKind

ROWS, SEQ, HIDDEN = 4, 16, 32


def traced(rank):
    model = GPT(GPTConfig(seq_len=SEQ, num_layers=3, num_heads=4, hidden=HIDDEN))
    tokens = torch.arange(ROWS * (SEQ + 1)).view(ROWS, SEQ + 1) % 256
    with (
        Mesh({"data": 2}) as mesh,
        build_engine("fsdp", model, lambda tensors: torch.optim.AdamW(tensors, lr=1e-3), mesh) as engine,
    ):
        return trace_step(rank, "hand made", engine, next_token, (tokens[:, :-1], tokens[:, 1:]))


def test_the_tables_are_those_of_a_run(pools):
    for rank, records in enumerate(pools(2).run(traced)):
        assert set(records.steps["rank"]) == {rank}
        assert set(records.steps["run"]) == {"hand made"}
        assert records.steps["traced_memory"].tolist() == [False, True]
        assert records.steps["peak_bytes"].iloc[1] == peak(records.memory)["bytes"].sum()
        assert records.steps["loss"].iloc[1] < records.steps["loss"].iloc[0]
        assert {SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER} <= set(records.spans["kind"])
        counts = records.collectives.query("step == 1 and phase != 'metrics'").groupby("op").size()
        assert counts.to_dict() == {"all_gather": 8, "all_reduce": 2, "reduce_scatter": 4}
        assert Role.ACTIVATION in set(records.memory["role"])
