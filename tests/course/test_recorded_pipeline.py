"""A recorded step of a pipeline: a span for each action, and the bubble beside the one that is foretold."""

import time

import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.course.recorded_steps import bubbles, played_of, record_pipeline
from shardlab.engines import build_engine
from shardlab.pipeline import Pipeline
from shardlab.plots import collective_timeline
from shardlab.schedules import make_schedule


class Slow(torch.autograd.Function):
    """Equal work on every machine: it sleeps."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.04)
        return gradient


class Stage(nn.Linear):
    def forward(self, x):
        return Slow.apply(super().forward(x))


def on_rank(rank, schedule):
    with Mesh({"pipe": 2, "data": 1}) as mesh:
        pipeline = Pipeline(nn.Sequential(Stage(4, 4), Stage(4, 4)), schedule, mesh)
        with build_engine("ddp", pipeline.module, torch.optim.AdamW, mesh) as engine:
            rows = torch.ones(4, 4)
            return record_pipeline(rank, "gpipe", pipeline, engine, nn.functional.mse_loss, rows, rows)


def test_a_recorded_step_has_its_actions_and_its_bubble(pools):
    schedule = make_schedule("gpipe", 2, 4)
    records = pools(2).run(on_rank, schedule)
    for rank, one in enumerate(records):
        assert {*one.spans["unit"]} - {"model"} == {str(action) for action in schedule.ranks[rank]}
        figure = collective_timeline(one.collectives, one.spans)
        assert any(f"{rank}F3" in text for trace in figure.data for text in trace.hovertext or ())
    done = played_of(records)
    assert done.schedule == schedule
    for action in schedule.ranks[1][:4]:
        assert done.begins[action] >= done.begins[action._replace(stage=0)]
    assert set(bubbles({"gpipe": records}).columns) >= {"bubble", "bubble foretold"}
