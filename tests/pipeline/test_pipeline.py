"""Pipelines on real ranks against one process, in float64."""

import copy
import re

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import DDP, FSDP, Bucketed, ZeRO1, ZeRO2, ZeRO3, build_engine
from shardlab.launch import RankError
from shardlab.models import GPT, GPTConfig
from shardlab.pipeline import Pipeline, cut
from shardlab.schedules import Schedule, make_schedule

CONFIG = GPTConfig(vocab_size=11, seq_len=6, num_layers=3, num_heads=2, hidden=8, tied=False)


def gpt():
    torch.manual_seed(0)
    return GPT(CONFIG).double()


def loss_fn(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rows(num_data_ranks, num_micro_batches):
    tokens = torch.randint(11, (num_data_ranks, 2 * num_micro_batches, 7), generator=torch.Generator().manual_seed(1))
    return tokens[..., :-1], tokens[..., 1:]


def sgd(params):
    return torch.optim.SGD(params, 0.5, momentum=0.9)


def trained(rank, axes, plan, num_micro_batches, options, make):
    """The parameters of this rank's stages after two steps, by name; the losses; messages by tag."""
    schedule = make_schedule(plan, axes["pipe"], num_micro_batches, **options)
    tags, losses = [], []

    class Log:
        def issued(self, event):
            tags.append((event.axis, event.op, re.sub(r"[\d]+", "", event.tag)))

        def started(self, event):
            pass

        completed = waited = started

    with Mesh(axes) as mesh:
        pipeline = Pipeline(gpt(), schedule, mesh)
        inputs, targets = rows(axes.get("data", 1), num_micro_batches)
        data_rank = mesh["data"].rank if "data" in axes else 0
        with build_engine(make(), pipeline.module, sgd, mesh) as engine:
            for _ in range(2):
                tags.clear()
                with mesh.observed_by(Log()):
                    loss = pipeline.run(engine, loss_fn, inputs[data_rank], targets[data_rank])
                losses.append(None if loss is None else loss.item())
                engine.clip_grad_norm_(0.1)
                engine.step()
                engine.zero_grad()
            return engine.full_state_dict(), losses, [tag for tag in tags if tag[0] == "pipe"]


def one_process(num_data_ranks, num_micro_batches):
    model = gpt()
    optimizer = sgd(model.parameters())
    inputs, targets = (part.flatten(0, 1) for part in rows(num_data_ranks, num_micro_batches))
    losses = []
    for _ in range(2):
        loss = loss_fn(model(inputs), targets)
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), losses


@pytest.mark.parametrize(
    ("num_ranks", "axes", "plan", "m", "options", "make"),
    [
        (2, {"pipe": 2, "data": 1}, "gpipe", 3, {}, DDP),
        (2, {"pipe": 2, "data": 1}, "interleaved", 4, {"stages_per_rank": 2}, Bucketed),
        (3, {"pipe": 3, "data": 1}, "1f1b", 4, {}, DDP),
        (4, {"pipe": 2, "data": 2}, "1f1b", 4, {}, Bucketed),
        (4, {"pipe": 2, "data": 2}, "1f1b", 3, {}, ZeRO1),
        (4, {"pipe": 2, "data": 2}, "interleaved", 2, {"stages_per_rank": 2}, ZeRO2),
        (4, {"pipe": 2, "data": 2}, "1f1b", 3, {}, ZeRO3),
        (4, {"pipe": 2, "data": 2}, "interleaved", 2, {"stages_per_rank": 2}, FSDP),
        (4, {"pipe": 4, "data": 1}, "1f1b", 5, {}, ZeRO1),
    ],
)
def test_equal_to_one_process(pools, num_ranks, axes, plan, m, options, make):
    wanted, losses = one_process(axes["data"], m)
    answers = pools(num_ranks).run(trained, axes, plan, m, options, make)
    found = {}
    for state, _, _ in answers:
        found |= state
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-12, rtol=0, msg=name)
    told = [own for _, own, _ in answers if own[0] is not None]
    assert torch.tensor(told, dtype=torch.float64).mean(0).tolist() == pytest.approx(losses, abs=1e-12)
    # Each way (p v - 1) m messages, on each of the data ranks.
    boundaries = (axes["pipe"] * options.get("stages_per_rank", 1) - 1) * m * axes["data"]
    sent = [tag[2] for _, _, tags in answers for tag in tags if tag[1] == "send"]
    assert sent.count("activations of stage , micro-batch ") == boundaries
    assert sent.count("gradients of stage , micro-batch ") == boundaries
    assert len(sent) == 2 * boundaries


def test_stages_are_balanced_and_keep_the_models_names():
    model = gpt()
    assert cut(model, 2) == (("embed", "blocks.0"), ("blocks.1", "blocks.2", "logits"))
    assert cut(model, 2, ("blocks.2",)) == (("embed", "blocks.0", "blocks.1"), ("blocks.2", "logits"))
    assert cut(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), 3) == (("0",), ("1",), ("2",))


@pytest.mark.parametrize(
    ("make", "num_stages", "begins", "told"),
    [
        (gpt, 6, (), "stages: 6 of a model with 5 parts; give 1 to 5"),
        (gpt, 2, ("blocks.9",), "begins: blocks.9 cannot begin stages 1 to 1; give so many of blocks.0"),
        (gpt, 3, ("blocks.1", "blocks.0"), "begins: blocks.1, blocks.0 cannot begin stages 1 to 2"),
        (lambda: GPT(GPTConfig(num_layers=1)), 2, (), "'head.weight' of stage 1 is 'token_embedding.weight' of stage"),
        (lambda: nn.Linear(2, 2), 1, (), "model: Linear does not say where it may be cut"),
    ],
)
def test_what_cannot_be_cut_is_refused(make, num_stages, begins, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        cut(make(), num_stages, begins)


def refused(_, schedule):
    with Mesh({"pipe": 2, "data": 1}) as mesh:
        Pipeline(copy.deepcopy(gpt()), schedule, mesh)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (make_schedule("1f1b", 3, 3), "schedule: it is for 3 ranks, and axis 'pipe' has 2"),
        (make_schedule("zb-h1", 2, 3), "schedule: I and W, backward in two halves, are played and not run; use B"),
        (Schedule.from_csv("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n"), "rank 1 needs 0F1 first, and rank 0 sends 0F0"),
    ],
)
def test_a_schedule_that_ranks_cannot_do_is_refused(pools, schedule, told):
    with pytest.raises(RankError, match=re.escape(told)):
        pools(2).run(refused, schedule)
