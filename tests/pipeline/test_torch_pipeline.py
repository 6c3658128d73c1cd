"""Torch's own runtime with the same table of actions: equal gradients, on the same ranks."""

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.engines.peers.torch_pipeline import TorchPipeline
from shardlab.pipeline import Pipeline
from shardlab.pipeline.stages import module_of
from shardlab.schedules import make_schedule


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))).double()


def gradients(rank, schedule):
    """Of both, by name; and the losses."""
    x = torch.sin(torch.arange(8 * 6, dtype=torch.float64)).view(8, 6)
    found = []
    with Mesh({"pipe": 2, "data": 1}) as mesh:
        pipeline = Pipeline(layers(), schedule, mesh)
        with build_engine("ddp", pipeline.module, torch.optim.AdamW, mesh) as engine:
            loss = pipeline.run(engine, nn.functional.mse_loss, x, x.flip(0))
            found.append(({name: param.grad for name, param in engine.params.items()}, loss))
        model = layers()
        own = [(stage, parts) for stage, parts in enumerate(pipeline.cut) if schedule.rank_of[stage] == rank]
        stages = {stage: module_of(model, {stage: parts}) for stage, parts in own}
        number, actions = schedule.num_micro_batches, schedule.to_csv()
        theirs = TorchPipeline(stages, schedule.num_stages, actions, number, nn.functional.mse_loss, mesh)
        losses = [one.item() for one in theirs.run(x, x.flip(0))]
        named = [pair for module in stages.values() for pair in module.named_parameters()]
        found.append(({name: param.grad for name, param in named}, losses and sum(losses) / number))
    return found


@pytest.mark.parametrize("plan", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_gradients_are_those_of_torch_with_the_same_table(pools, plan):
    for (ours, loss), (theirs, torchs) in pools(2).run(gradients, make_schedule(plan, 2, 4)):
        assert set(ours) == set(theirs)
        for name, gradient in ours.items():
            torch.testing.assert_close(gradient, theirs[name], atol=1e-14, rtol=0)
        assert (loss is None) == (not torchs)
        assert loss is None or loss.item() == pytest.approx(torchs)
