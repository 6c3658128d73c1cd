"""What ``record`` takes for a step, whatever the loop looks like: one process, no groups."""

import copy
import gc
import io
import json
import math
import os
import time
import warnings

import pandas as pd
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import shardlab
from shardlab.cli import app
from shardlab.comm import CollectiveEvent
from shardlab.recording.record import ALWAYS_WATCHED, Place, Recording, claim
from shardlab.recording.report import answer_of_record, load_recorded
from shardlab.records.store import load_run
from shardlab.trace.clock import HostClock
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Collective, Role


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
    gc.collect()  # tensors in cycles of earlier tests would be held in this record, and freed in the middle of it
    with shardlab.record(tmp_path / "run", **options):
        train()
    return load_run(tmp_path / "run")


@pytest.fixture(autouse=True)
def _never_off_the_cpu(monkeypatch):
    """These tests are of the order of spans, which a busy machine would cut."""
    monkeypatch.setattr(HostClock, "cpu_time", lambda clock: None)


def kinds(records, step):
    rows = records.spans[(records.spans["step"] == step) & (records.spans["unit"] == "model")]
    return rows.sort_values("start_us")["kind"].tolist()


def at_rest(records, step=1):
    rows = records.memory[(records.memory["where"] == "rest") & (records.memory["step"] == step)]
    return rows.set_index("role")["bytes"]


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


def test_a_diff_says_that_one_record_is_longer(tmp_path):
    for steps in (2, 3):
        (tmp_path / str(steps)).mkdir()
        model = Net()
        recorded(tmp_path / str(steps), lambda: train(model, sgd(model), steps))  # noqa: B023
    done = CliRunner().invoke(app, ["diff", *(str(tmp_path / str(steps) / "run") for steps in (2, 3))])
    assert "steps: 2 in the first, 3 in the second" in done.stdout
    assert "ranks:" not in done.stdout


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
    assert records.steps["loss"].tolist() == pytest.approx([sum(losses[:2]), sum(losses[2:4]), sum(losses[4:])])
    assert kinds(records, 1) == [*["forward", "forward", "backward"] * 2, "optimizer"]


def test_what_calling_operations_takes_at_least_grows_with_their_number(tmp_path):
    found = {}
    for layers in (1, 8):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with shardlab.record(tmp_path / str(layers)):
            train(model, optimizer, 4)
        found[layers] = load_run(tmp_path / str(layers)).steps.set_index("step")["dispatch_us"]
        assert found[layers].notna().tolist() == [True, False, True, False]
    assert found[8][2] > found[1][2] > 0


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, row):
        time.sleep(0.02)
        return torch.ones(8)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_loader_takes_is_of_the_step_that_trains_on_it(tmp_path, workers):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def epochs():
        for _ in range(3):
            loader = torch.utils.data.DataLoader(Slow(), num_workers=workers, prefetch_factor=1 if workers else None)
            for number, x in enumerate(loader):
                (model(x) - x).square().mean().backward()
                if number % 2:  # of two micro-batches
                    optimizer.step()
                    optimizer.zero_grad()

    records = recorded(tmp_path, epochs)
    spans = records.spans
    loaded = spans[spans["kind"] == "data"].groupby("step").agg({"start_us": "min", "end_us": "max", "unit": "size"})
    # After steps 0, 1 and the traced one memory is read, and the next begins at its forward: one batch is inside.
    # Step 4 has the end of an epoch and the beginning of another, too.
    assert loaded["unit"].to_dict() == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2 + 2, 5: 2}
    times = records.steps.set_index("step")
    assert (loaded["start_us"] >= times["start_us"]).all()
    assert (loaded["end_us"] <= times["start_us"] + times["step_us"]).all()


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
    rest = at_rest(records)
    assert rest["optimizer_state"] == 2 * 4 * (16 * 8 + 8)  # Adam's; read after both have stepped
    assert rest.index.is_unique


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: nn.Sequential(nn.Sequential(model))])
def test_an_evaluation_belongs_to_no_step(tmp_path, wrap):
    """Also where what trains is inside, as in DistributedDataParallel."""
    model = Net()
    trained = wrap(model)

    def evaluate():
        with torch.no_grad():
            loss_of(model)  # the inner one, as the Trainer of transformers does
            time.sleep(0.05)
            loss_of(model)
            time.sleep(0.05)  # metrics

    records = recorded(tmp_path, lambda: train(trained, sgd(model), 5, evaluate), trace_memory=None)
    spans = records.spans
    ends = spans[spans["kind"] == "optimizer"].set_index("step")["end_us"]
    for step in range(5):
        assert kinds(records, step) == ["forward", "forward", "backward", "optimizer"]
    for step in range(1, 5):  # what passes from one optimizer step to the next is the evaluation and the step
        assert records.steps.set_index("step").loc[step, "step_us"] <= ends[step] - ends[step - 1] - 100_000
    ups = spans[(spans["kind"] == "forward") & spans["unit"].str.endswith("up")]
    assert ups["step"].tolist() == [0, 1, 2, 3, 4]


def test_a_step_that_is_not_watched_has_its_loss_and_time_and_leaves_the_modules_alone(tmp_path):
    model = Net()
    optimizer, losses, hooked, plain = sgd(model), [], [], torch.distributed.Work.wait

    def loop():
        for step in range(ALWAYS_WATCHED + 5):
            losses.extend(train(model, optimizer, 1))
            hooked.append(bool(model.up._forward_hooks))
            assert hooked[-1] == (torch.distributed.Work.wait is not plain), step

    records = recorded(tmp_path, loop, watch_every=3)
    # They come when the step before a watched one has ended, and go when the step after it begins.
    assert hooked == [*[True] * ALWAYS_WATCHED, False, True, True, False, True]
    assert records.steps["loss"].tolist() == pytest.approx(losses)
    assert (records.steps["step_us"] > 0).all()
    known = records.steps.set_index("step")["wire_bytes"].dropna()
    assert set(known.index) == set(records.spans["step"]) == {*range(ALWAYS_WATCHED), 18}
    assert load_recorded(tmp_path / "run").summary["wire_bytes_per_step"].tolist() == [0.0]


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
    (state,) = optimizer.state.values()
    kept = [value for entry in state.values() for value in (entry if isinstance(entry, list) else [entry])]
    assert state["old_dirs"]  # a list, as the matrices of Shampoo are
    held = {value.untyped_storage()._cdata: value.nbytes for value in kept if isinstance(value, torch.Tensor)}
    assert at_rest(records, step=2)["optimizer_state"] == sum(held.values())


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_backward_computes_again_is_recomputation(tmp_path, reentrant):
    """And no forward of a model of its own, which the parts look like: nothing outer is being called."""

    class Checkpointed(Net):
        def forward(self, x):
            for part in (self.up, self.down):
                x = checkpoint(part, x, use_reentrant=reentrant)
            return x

    model = Checkpointed()
    inputs = torch.ones(4, 8, requires_grad=True)

    def loop():
        optimizer = sgd(model)
        for _ in range(3):
            model(inputs).square().mean().backward()
            optimizer.step()

    spans = recorded(tmp_path, loop).spans
    counted = spans[spans["step"] == 1].groupby(["unit", "kind"]).size().to_dict()
    assert counted["up", "recompute"] == counted["down", "recompute"] == 1
    assert {unit for unit, kind in counted if kind == "forward"} == {"model", "up", "down"}
    assert {number for (unit, kind), number in counted.items() if kind == "forward" and unit != "model"} == {1}


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


def test_copies_and_files_of_a_model_have_no_hooks_and_afterwards_nothing_has(tmp_path):
    model = Net()
    hooks = (torch.nn.modules.module._global_forward_pre_hooks, _global_optimizer_pre_hooks)

    def patched():
        return [torch.autograd.backward, torch.amp.GradScaler.scale, torch.distributed.Work.wait, *map(len, hooks)]

    before = patched()
    with shardlab.record(tmp_path / "run"):
        train(model, sgd(model), 2)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        twin = copy.deepcopy(model)
        loss_of(twin).backward()
    assert patched() == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
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
            try:  # without a backward, which torch may refuse in a fork
                loss_of(model)
                sgd(model).step()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        train(model, sgd(model), 1)
    assert load_run(tmp_path / "run").steps["step"].tolist() == [0, 1, 2]


def test_what_belongs_to_nothing_that_trains_is_unattributed(tmp_path):
    model, other = Net(), torch.zeros(1000, 1000)
    records = recorded(tmp_path, lambda: train(model, sgd(model), 2))
    rest = at_rest(records)
    assert rest["parameter"] == 4 * sum(param.numel() for param in model.parameters())
    assert rest["unattributed"] >= other.nbytes


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_and_nested_tensors_lie_where_their_parts_do(tmp_path):
    """Rows of an embedding, of which two are looked up twice, and a graph, held in both ways."""
    embedding, layer = nn.Embedding(100, 8, sparse=True), nn.Linear(8, 8)
    graph = torch.eye(5).to_sparse()
    graphs = [graph, graph.to_sparse_csr(), graph.to_sparse_csc()]
    optimizer = sgd(embedding, layer)

    def loop():
        for _ in range(3):
            optimizer.zero_grad()
            rows = embedding(torch.tensor([1, 2, 3, 1, 2]))
            made = layer(torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged))
            loss = sum((one @ layer(rows)).sum() for one in graphs) + made.values().sum()
            loss.backward()
            optimizer.step()

    held = at_rest(recorded(tmp_path, loop))
    indices, values = 5 * 8, 5 * 8 * 4  # not coalesced
    assert held["gradient"] == indices + values + layer.weight.nbytes + layer.bias.nbytes
    # Rows and columns; begins and columns, with the same values; begins and rows, with values of its own.
    of_graphs = 2 * 5 * 8 + 5 * 4, 6 * 8 + 5 * 8, 6 * 8 + 5 * 8 + 5 * 4
    assert bytes_by_role({Role.OTHER: graphs})[Role.OTHER] == sum(of_graphs)


def test_what_does_not_fit_is_refused(tmp_path):
    for number, (spoil, message) in enumerate((
        (lambda path: (path / "notes.txt").write_text(""), "out: .* holds another run"),
        (lambda path: (path / "rank0.journal").write_text(""), "out: .* holds another run"),
        (lambda path: (path.rmdir(), path.write_text("")), "out: .* is a file"),
    )):  # fmt: skip
        (directory := tmp_path / str(number)).mkdir()
        spoil(directory)
        with pytest.raises(ValueError, match=message), shardlab.record(directory):
            pass
    with pytest.raises(ValueError, match=r"trace_memory: 1\.5 is given"), shardlab.record(tmp_path, trace_memory=1.5):
        pass
    with pytest.raises(ValueError, match="trace_memory: -1 is given"), shardlab.record(tmp_path, trace_memory=-1):
        pass
    with pytest.raises(ValueError, match="watch_every: 0 is given"), shardlab.record(tmp_path, watch_every=0):
        pass
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank1.journal").write_bytes(b"")  # another rank has begun to write: no other run
    with shardlab.record(tmp_path / "run"):
        with pytest.raises(ValueError, match=r"record: this process records into .*run already"):
            shardlab.record(tmp_path / "other").__enter__()
        train(model := Net(), sgd(model), 1)


def test_overwrite_removes_a_record_and_what_ranks_that_are_no_more_left_of_it(tmp_path):
    model = Net()
    for steps in (2, 1):
        (tmp_path / "steps.rank3.parquet").write_bytes(b"")
        (tmp_path / "report.html").write_text("")
        with shardlab.record(tmp_path, overwrite=True):
            train(model, sgd(model), steps)
        assert len(load_run(tmp_path).steps) == steps
        assert not [path.name for path in tmp_path.iterdir() if "rank3" in path.name or path.name == "report.html"]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"overwrite: .* also holds notes\.txt, which no record has"):
        shardlab.record(tmp_path, overwrite=True).__enter__()
    assert len(load_run(tmp_path).steps) == 1
    for name in ("rank0.journal", "rank1.journal", "steps.rank1.parquet", "manifest.json"):
        (tmp_path / "ranks" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "ranks" / name).write_text("{}")
    claim(tmp_path / "ranks", Place(1, 2), overwrite=True)  # a rank leaves what is of the others
    assert {path.name for path in (tmp_path / "ranks").iterdir()} == {"rank0.journal", "manifest.json"}


def test_an_engine_of_ours_is_refused_in_its_first_forward(tmp_path):
    said = pytest.raises(ValueError, match="record: shardlab's engine 'single' trains the module")
    with shardlab.build_engine("single", Net(), torch.optim.SGD) as engine, said, shardlab.record(tmp_path):
        engine(torch.ones(8))


@pytest.mark.filterwarnings("ignore:record:UserWarning")
def test_the_mesh_is_known_of_a_run_that_is_killed(tmp_path):
    place = Place(0, 2)
    claim(tmp_path / "run", place)
    with Recording(tmp_path / "run", place, None, 16) as recording:
        recording.issued(CollectiveEvent(0, Collective.ALL_REDUCE, "data", "", "float32", 4, 16, 2, "gloo", False))
        manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["mesh"], manifest["backend"]) == ({"data": 2}, "gloo")


def test_nothing_that_trains_is_said(tmp_path):
    """Also where a script trains by hand: only an optimizer tells where a step ends."""
    with pytest.warns(UserWarning, match="no optimizer has taken a step in this process"), shardlab.record(tmp_path):
        Net()(torch.ones(8)).sum().backward()


def gan(begins_with_inputs, steps):
    """Half of its steps train D on 2 rows, the others G on 256; without ``begins_with_inputs`` all begin alike."""
    torch.manual_seed(0)
    generator, judge = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)), nn.Linear(8, 1)
    optimizers = {half: torch.optim.SGD(half.parameters(), lr=0.1) for half in (judge, generator)}
    for step in range(steps):
        half = (judge, generator)[step % 2]
        optimizers[half].zero_grad()
        if begins_with_inputs:
            rows = torch.randn(2, 8) if half is judge else generator(torch.randn(256, 8))
            loss = judge(rows).square().mean()
        else:
            loss = judge(torch.randn(2, 8)).square().mean()
            loss = loss if half is judge else loss + judge(generator(torch.randn(256, 8))).square().mean()
        loss.backward()
        optimizers[half].step()


@pytest.mark.parametrize("begins_with_inputs", [True, False])
def test_the_peak_is_that_of_the_half_of_a_gan_that_needs_more(tmp_path, begins_with_inputs):
    records = recorded(tmp_path, lambda: gan(begins_with_inputs, 8))
    steps = records.steps
    assert steps.loc[steps["traced_memory"], "step"].tolist() == ([0, 1, 2, 3] if begins_with_inputs else [0, 2, 5])
    peaks = steps.set_index("step")["peak_bytes"]
    assert peaks.max() == peaks[3 if begins_with_inputs else 5] > 256 * 64 * 4 + peaks[2]
    # Of the second half alone that begins as the first does, nothing is known until it has come again.
    unknown = [None] * 8 if begins_with_inputs else [None, 1, 1, 3, 3, None, None, None]
    assert [None if pd.isna(step) else step for step in steps["unlike_step"]] == unknown
    found = load_recorded(tmp_path / "run")
    assert f"in step {peaks.idxmax() if not begins_with_inputs else 3}, and" in answer_of_record(found)[0].text


def test_a_half_that_came_once_is_said_to_be_unknown(tmp_path):
    recorded(tmp_path, lambda: gan(False, 4))
    said = dict(answer_of_record(load_recorded(tmp_path / "run")))
    assert "that of step 3, which is unlike all traced ones, is not known" in said["MEMORY"]
    assert said["LATE"] == "no rank: there is one alone"


def test_what_torch_compile_is_asked_for_is_compiled_although_no_step_was_traced_yet(tmp_path):
    torch._dynamo.reset()
    compiled = []
    model = Net()
    model.compile(backend=lambda graph, _: compiled.append(graph) or graph.forward)
    try:
        steps = recorded(tmp_path, lambda: train(model, sgd(model), 4)).steps
    finally:
        torch._dynamo.reset()
    assert compiled
    assert not steps["traced_memory"].any()
    assert "no peak was traced" in answer_of_record(load_recorded(tmp_path / "run"))[0].text
