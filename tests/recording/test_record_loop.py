"""What ``record`` takes for a step, whatever the loop looks like: one process, no groups."""

import copy
import gc
import io
import math
import os
import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import shardlab
from shardlab.recording.holdings import Holdings
from shardlab.trace.store import load_run


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def loss_of(model, seed=0):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    return (model(x) - x).square().mean()


def train(model, optimizer, steps, between=lambda: None):
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        between()
    return losses


def recorded(tmp_path, train, **options):
    with shardlab.record(tmp_path / "run", **options):
        train()
    return load_run(tmp_path / "run")


def kinds(records, step):
    rows = records.spans[(records.spans["step"] == step) & (records.spans["unit"] == "model")]
    return rows.sort_values("start_us")["kind"].tolist()


def sgd(*models):
    return torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)


def test_a_plain_loop(tmp_path):
    model = Net()
    losses = []
    records = recorded(tmp_path, lambda: losses.extend(train(model, sgd(model), 5)))
    assert records.steps["loss"].tolist() == pytest.approx(losses)
    assert records.steps["learning_rate"].tolist() == [0.1] * 5
    assert kinds(records, 3) == ["forward", "forward", "backward", "optimizer"]  # the model, then the loss
    assert set(records.spans["unit"]) == {"up", "down", "model"}
    assert records.collectives.empty


def test_each_step_begins_where_the_last_has_ended(tmp_path):
    model = Net()
    records = recorded(tmp_path, lambda: train(model, sgd(model), 6), trace_memory=None)
    optimizer = records.spans[records.spans["kind"] == "optimizer"].set_index("step")
    for step in (4, 5):  # 0 and 1 are followed by a reading of all memory
        length = optimizer.loc[step, "end_us"] - optimizer.loc[step - 1, "end_us"]
        assert records.steps.set_index("step").loc[step, "step_us"] == pytest.approx(length, abs=200)


def test_gradient_accumulation_is_one_step_with_the_sum_of_its_losses(tmp_path):
    model = Net()
    optimizer, losses = sgd(model), []

    def loop():
        for step in range(3):
            for part in range(2):
                loss = loss_of(model, 10 * step + part) / 2
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    records = recorded(tmp_path, loop)
    assert records.steps["loss"].tolist() == pytest.approx(
        [losses[0] + losses[1], losses[2] + losses[3], sum(losses[4:])]
    )
    assert kinds(records, 1) == [*["forward", "forward", "backward"] * 2, "optimizer"]


def test_optimizers_that_step_together_end_one_step(tmp_path):
    model = Net()
    optimizers = [sgd(model.up), torch.optim.Adam(model.down.parameters())]

    def loop():
        for step in range(3):
            loss_of(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()

    records = recorded(tmp_path, loop)
    assert records.steps["step"].tolist() == [0, 1, 2]
    assert kinds(records, 1)[-2:] == ["optimizer", "optimizer"]
    rest = records.memory[(records.memory["where"] == "rest") & (records.memory["step"] == 1)].set_index("role")[
        "bytes"
    ]
    assert rest["optimizer_state"] == 2 * 4 * (16 * 8 + 8)  # Adam's; read after both have stepped
    assert rest.index.is_unique


def test_two_models_in_turn_are_steps_of_their_own(tmp_path):
    one, other = Net(), Net()
    first, second = sgd(one), sgd(other)

    def loop():
        for step in range(3):
            for model, optimizer in ((one, first), (other, second)):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()

    records = recorded(tmp_path, loop)
    assert len(records.steps) == 6
    assert {"forward", "backward", "optimizer"} <= set(kinds(records, 4))


def test_an_evaluation_belongs_to_no_step(tmp_path):
    model, pauses = Net(), []

    def evaluate():
        model.eval()
        with torch.no_grad():
            for seed in range(200):
                loss_of(model, seed)
        model.train()
        pauses.append(len(pauses))

    records = recorded(tmp_path, lambda: train(model, sgd(model), 5, evaluate), trace_memory=None)
    assert len(pauses) == 5
    spans = records.spans
    for step in range(5):
        own = spans[spans["step"] == step]
        assert kinds(records, step) == ["forward", "forward", "backward", "optimizer"]
        length = own["end_us"].max() - own["start_us"].min()
        assert records.steps.set_index("step").loc[step, "step_us"] < length + 2000  # 200 forwards take much longer
    assert (spans[spans["kind"] == "forward"].groupby("step")["unit"].value_counts().unstack()["up"] == 1).all()


def test_a_step_that_the_scaler_skips_is_a_step_without_optimizer(tmp_path):
    model = Net()
    optimizer, scaler, losses = sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0), []

    def loop():
        for step in range(4):
            loss = loss_of(model, step)
            scaler.scale(loss * math.inf if step == 1 else loss).backward()
            losses.append(loss.item() if step != 1 else math.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    records = recorded(tmp_path, loop)
    assert records.steps["loss"].tolist() == pytest.approx(losses)  # not 8 times as much
    assert [("optimizer" in kinds(records, step)) for step in range(4)] == [True, False, True, True]


def test_a_closure_is_trained_inside_the_optimizer(tmp_path):
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def loop():
        for step in range(3):

            def closure():
                optimizer.zero_grad()
                loss = loss_of(model, step)  # noqa: B023
                loss.backward()
                return loss

            optimizer.step(closure)

    records = recorded(tmp_path, loop)
    assert len(records.steps) == 3
    assert kinds(records, 1).count("backward") >= 2


def test_a_module_called_by_its_parts_and_a_loss_without_a_module(tmp_path):
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def loop():
        for _ in range(3):
            weight.square().sum().backward()
            optimizer.step()

    records = recorded(tmp_path, loop)
    assert len(records.steps) == 3
    assert kinds(records, 2) == ["backward", "optimizer"]


def test_a_second_model_that_begins_to_train_later_is_seen(tmp_path):
    one, late = Net(), nn.Sequential(nn.Linear(8, 8))

    def loop():
        train(one, sgd(one), 4)
        train(late, sgd(late), 4)

    records = recorded(tmp_path, loop)
    assert len(records.steps) == 8
    # Its first step shows the optimizer; from the next one on its module is known.
    assert ("backward" in kinds(records, 4), "forward" in kinds(records, 5)) == (True, True)
    assert "0" in set(records.spans.loc[records.spans["step"] == 6, "unit"])


def test_everything_is_as_before_afterwards(tmp_path):
    model = Net()
    optimizer = sgd(model)
    hooks = (torch.nn.modules.module._global_forward_pre_hooks, _global_optimizer_pre_hooks)
    before = [torch.autograd.backward, torch.amp.GradScaler.scale, torch.distributed.Work.wait, *map(len, hooks)]
    recorded(tmp_path, lambda: train(model, optimizer, 2))
    assert [
        torch.autograd.backward,
        torch.amp.GradScaler.scale,
        torch.distributed.Work.wait,
        *map(len, hooks),
    ] == before
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


def test_the_numbers_are_the_same_with_and_without(tmp_path):
    losses = []
    for directory in (None, tmp_path / "run"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        if directory is None:
            losses.append(train(model, optimizer, 5))
        else:
            with shardlab.record(directory):
                losses.append(train(model, optimizer, 5))
    assert losses[0] == losses[1]


def test_copies_and_files_of_a_model_have_no_hooks(tmp_path):
    model = Net()
    with shardlab.record(tmp_path / "run"):
        train(model, sgd(model), 2)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        twin = copy.deepcopy(model)
        loss_of(twin).backward()
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(torch.ones(8)), twin(torch.ones(8)))


def test_an_error_leaves_the_steps_before_it_and_no_hook(tmp_path):
    model = Net()
    optimizer = sgd(model)

    def broken():
        train(model, optimizer, 3)
        loss_of(model).backward()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        recorded(tmp_path, broken)
    assert len(load_run(tmp_path / "run").steps) == 3
    assert not model._forward_pre_hooks
    train(model, optimizer, 1)


def test_a_forked_child_records_nothing(tmp_path):
    model = Net()
    with shardlab.record(tmp_path / "run"):
        train(model, sgd(model), 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has threads
            child = os.fork()
        if child == 0:
            train(model, sgd(model), 2)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        train(model, sgd(model), 1)
    assert load_run(tmp_path / "run").steps["step"].tolist() == [0, 1, 2]


def test_holdings_do_not_keep_a_model_alive():
    holdings, model = Holdings(), Net()
    holdings.roots.add(model)
    del model
    gc.collect()
    assert not list(holdings.roots)


def test_what_belongs_to_nothing_that_trains_is_unattributed(tmp_path):
    model, other = Net(), torch.zeros(1000, 1000)
    records = recorded(tmp_path, lambda: train(model, sgd(model), 2))
    rest = records.memory[(records.memory["where"] == "rest") & (records.memory["step"] == 1)].set_index("role")[
        "bytes"
    ]
    assert rest["parameter"] == 4 * sum(param.numel() for param in model.parameters())
    assert rest["unattributed"] >= other.nbytes


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "notes.txt").write_text(""), "out: .* holds another run"),
        (lambda path: (path / "rank0.journal").write_text(""), "out: .* holds another run"),
        (lambda path: (path.rmdir(), path.write_text("")), "out: .* cannot be made"),
    ],
)
def test_a_directory_that_is_not_empty_is_refused(tmp_path, spoil, message):
    directory = tmp_path / "run"
    directory.mkdir()
    spoil(directory)
    with pytest.raises(ValueError, match=message), shardlab.record(directory):
        pass


def test_what_other_ranks_have_begun_to_write_is_no_other_run(tmp_path):
    (tmp_path / "rank1.journal").write_bytes(b"")
    model = Net()
    with shardlab.record(tmp_path):
        train(model, sgd(model), 1)


def test_record_inside_record_is_refused(tmp_path):
    model = Net()
    with shardlab.record(tmp_path / "run"):
        with pytest.raises(ValueError, match=r"record: this process records into .*run already"):
            shardlab.record(tmp_path / "other").__enter__()
        train(model, sgd(model), 1)


def test_a_step_to_trace_is_a_number(tmp_path):
    with pytest.raises(ValueError, match="trace_memory: -1 is given"), shardlab.record(tmp_path, trace_memory=-1):
        pass


def test_an_engine_of_ours_is_refused_in_its_first_forward(tmp_path):
    engine = shardlab.build_engine("single", Net(), lambda tensors: torch.optim.SGD(tensors, lr=0.1))
    with (
        engine,
        pytest.raises(ValueError, match="record: shardlab's engine 'single' trains the module"),
        shardlab.record(tmp_path),
    ):
        engine(torch.ones(8))


def test_nothing_that_trains_is_said(tmp_path):
    with pytest.warns(UserWarning, match="no training step was seen"), shardlab.record(tmp_path):
        Net()(torch.ones(8))
