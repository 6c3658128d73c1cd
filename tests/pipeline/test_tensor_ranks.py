"""Stages whose layers tensor ranks divide: `pipe` and `tensor`, and `data`, on one mesh, against one process."""

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.pipeline import Like, Pipeline, messages_of
from shardlab.schedules import make_schedule
from shardlab.tensor_parallel import Column, Row, parallelize_module
from tests.pipeline.test_pipeline import CONFIG, Log, gpt, loss_fn, one_process, rows, sgd

COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "fc1"), ("out_proj", "fc2")


def plan_of(model):
    names = [name for name, _ in model.named_modules()]
    return {name: Column() for name in names if name.endswith(COLUMNS)} | {
        name: Row() for name in names if name.endswith(ROWS)
    }


def trained(_, axes, plan, strategy, tied):
    schedule = make_schedule(plan, 2, 4, **({"stages_per_rank": 2} if plan == "interleaved" else {}))
    with Mesh(axes) as mesh:
        model = gpt(tied)
        parallelize_module(model, plan_of(model), mesh["tensor"])
        pipeline = Pipeline(model, schedule, mesh)
        inputs, targets = rows(1, 4)
        norms, losses = [], []
        with build_engine(strategy, pipeline.module, sgd, mesh) as engine:
            for _ in range(2):
                log = Log()
                with mesh.observed_by(log):
                    loss = pipeline.run(engine, loss_fn, inputs[0], targets[0])
                losses.append(None if loss is None else loss.item())
                norms.append(engine.clip_grad_norm_(0.1).item())
                engine.step()
                engine.zero_grad()
            border = Like((2, CONFIG.seq_len, CONFIG.hidden), torch.float64)
            sent = messages_of(schedule, [border] * (schedule.num_stages - 1), pipeline.loans)
            wanted = [(one.tag, one.num_bytes) for one in sent if one.rank == mesh["pipe"].rank]
            assert [event[2:] for event in log.events if event[:2] == ("pipe", "send")] == wanted
            return engine.full_state_dict(), losses, norms


@pytest.mark.parametrize(
    ("axes", "plan", "strategy", "tied"),
    [
        ({"pipe": 2, "tensor": 2}, "zb-h1", "ddp", True),
        ({"pipe": 2, "data": 1, "tensor": 2}, "interleaved", "fsdp", False),
        ({"tensor": 2, "pipe": 2, "data": 1}, "1f1b", "zero1", True),
    ],
)
def test_equal_to_one_process_with_the_messages_of_the_plan(pools, axes, plan, strategy, tied):
    wanted, losses = one_process(1, 4, tied)
    found, answers = {}, pools(4).run(trained, {"data": 1} | axes, plan, strategy, tied)
    for state, *_ in answers:
        found |= state
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-12, rtol=0, msg=name)
    for _, own, _ in answers:
        assert own[0] is None or own == pytest.approx(losses, abs=1e-12)
    assert all(norms == pytest.approx(answers[0][2], abs=0) for *_, norms in answers), (
        "of the whole model, on all ranks"
    )
