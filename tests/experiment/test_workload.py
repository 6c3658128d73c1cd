"""A model, data and loss that the project has never seen, under every strategy, against one process."""

import random
import re
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from shardlab import CompareConfig, Workload, compare, plan
from shardlab.comm.autograd_collectives import all_gather
from shardlab.experiment.planned.known_workload import optimizer_of
from shardlab.experiment.told.answer import answer
from shardlab.experiment.told.differences import losses_compared
from shardlab.experiment.told.losses import alone_verdict, resumed_verdict, verdict
from shardlab.experiment.told.saved_runs import load_saved
from shardlab.experiment.told.verdicts import plan_verdict
from shardlab.experiment.trained.batches import batches_of, check_enough, divide, rows_of
from shardlab.experiment.trained.workload import InPlaceOf, seeded
from shardlab.launch import RankError, current
from shardlab.planner import Optimizer
from shardlab.records.store import load_run
from tests.dist.test_state_at_the_edges import Kept

OURS = ("single", "ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp")
PEERS = ("torch_ddp", "torch_zero1", "torch_fsdp2")


class Labelled(Dataset):
    """Samples as dicts, a number of them that no batch divides."""

    def __init__(self, num_samples=29, features=6, classes=3):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num_samples, features, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, classes, (num_samples,), generator=generator)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, place):
        return {"x": self.x[place], "y": self.y[place]}


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Residual(nn.Module):
    """Dict of blocks, keyword inputs, a dataclass as output, and a method that is not forward."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 10)
        self.blocks = nn.ModuleDict({str(place): nn.Linear(10, 10) for place in range(3)})
        self.leave = nn.Linear(10, 3)
        self.double()

    def forward(self, *, x, y=None):
        x = self.enter(x)
        for block in self.blocks.values():
            x = x + torch.tanh(block(x))
        logits = self.leave(x)
        return Output(logits, None if y is None else functional.cross_entropy(logits, y))


class OutOfOrder(nn.Module):
    """Blocks that are called in another order than they are registered, and some never or twice."""

    def __init__(self, order):
        super().__init__()
        self.order = order
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.leave = nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        for place in self.order:
            x = x + torch.tanh(self.blocks[place](x))
        return self.leave(x)


def keyword_loss(model, batch):
    return model(**batch).loss


def labelled_loss(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def workloads():
    return {
        "uneven batches": Workload(Residual, DataLoader(Labelled(), batch_size=10, shuffle=True), keyword_loss),
        "momentum": Workload(
            Residual, Labelled(), keyword_loss,
            optimizer=lambda tensors: torch.optim.SGD(tensors, lr=0.1, momentum=0.9),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        ),
    }  # fmt: skip


def test_what_is_no_optimizer_is_refused_before_ranks_start():
    def by_value(tensors):
        return torch.optim.SGD([one for one in tensors if one.sum().item() != 1], lr=0.1)  # only with values

    for optimizer, told in (
        (lambda _: "adam", "optimizer: it returned a str; return a torch.optim.Optimizer"),
        (torch.optim.LBFGS, r"optimizer: LBFGS.step\(\) needs a closure"),
    ):
        with pytest.raises(ValueError, match=told):
            CompareConfig(workload=Workload(Residual, Labelled(), keyword_loss, optimizer=optimizer))
    CompareConfig(workload=Workload(Residual, Labelled(), keyword_loss, optimizer=by_value))


@pytest.mark.parametrize(("name", "strategies"), [("momentum", OURS), ("uneven batches", ("single", "zero2", "fsdp"))])
def test_every_strategy_trains_it_as_one_process_does_and_as_planned(pools, tmp_path, name, strategies):
    found = compare(workloads()[name], tmp_path / "run", strategies=strategies, ranks=2, steps=3, pool=pools(2)).summary
    assert (found["max_loss_difference"].dropna() < 1e-10).all(), found
    assert found["loss_last"].nunique() > 0
    assert found["as_planned"].all(), found[["strategy", "as_planned"]]


@pytest.mark.parametrize("options", [{"accumulation": 2, "prefetch": 2, "clip": 1.0}, {"sharding": "shard_grad_op"}])
def test_units_are_planned_in_the_order_of_their_calls_and_without_those_never_called(pools, tmp_path, options):
    workload = Workload(partial(OutOfOrder, (2, 0, 1)), Labelled(), labelled_loss)
    strategies = ("single", "fsdp")
    found = compare(workload, tmp_path / "run", strategies=strategies, ranks=2, steps=2, pool=pools(2), **options)
    assert found.summary["as_planned"].all()


def test_a_unit_that_is_called_twice_is_planned(pools, tmp_path):
    workload = Workload(partial(OutOfOrder, (0, 1, 0)), Labelled(), labelled_loss)
    found = compare(workload, tmp_path / "run", strategies=("zero3", "fsdp"), ranks=2, steps=2, pool=pools(2))
    assert found.summary["as_planned"].all()


class Nested(nn.Module):
    """Blocks with layers that may be units too, the first with an output of its own, the last with the block's."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)) for _ in range(2))
        self.leave = nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def test_nested_units_are_planned(pools, tmp_path):
    workload = Workload(Nested, Labelled(), labelled_loss)
    for number, options in enumerate(({}, {"sharding": "shard_grad_op"}, {"prefetch": 2, "precision": "bf16"})):
        run = {"strategies": "fsdp", "ranks": 2, "steps": 2, "pool": pools(2)}
        found = compare(workload, tmp_path / str(number), wrap="blocks.*,blocks.*.0", **run, **options)
        assert found.summary["as_planned"].all(), options


@pytest.mark.parametrize("options", [{"accumulation": 2, "clip": 0.1}, {"sharding": "shard_grad_op", "prefetch": 2}])
def test_options_hold_for_it_too(pools, tmp_path, options):
    workload = Workload(Residual, Labelled(), keyword_loss)
    strategies = ("single", "fsdp", *(("bucketed", *PEERS[1:]) if "clip" in options else ()))
    found = compare(workload, tmp_path / "run", strategies=strategies, ranks=3, steps=3, pool=pools(3), **options)
    assert (found.summary["max_loss_difference"] < 1e-10).all()
    assert found.summary["as_planned"].dropna().all()


def test_the_manifest_says_what_was_trained(pools, tmp_path):
    workload = Workload(Residual, Labelled(), keyword_loss)
    compare(workload, tmp_path / "run", strategies="bucketed", ranks=2, steps=2, seed=7, pool=pools(2))
    trained = load_run(tmp_path / "run" / "records" / "bucketed").manifests["bucketed"]["workload"]
    params = sum(param.numel() for param in Residual().parameters())
    own = {"name": "Residual", "data": "Labelled", "seed": 7, "dtypes": ["float64"], "differs_by_rank": []}
    assert trained.items() >= {**own, "parameters": params, "trainable": params}.items()
    for name, end in (("module", "test_workload.Residual"), ("loss", "keyword_loss"), ("optimizer", "adamw")):
        assert trained[name].endswith(end)


class Centred(nn.Module):
    """Rows minus a running mean of this rank's own, from the third call on."""

    def __init__(self):
        super().__init__()
        self.leave = nn.Sequential(nn.Linear(6, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.leave.register_buffer("mean", torch.zeros(6))
        self.double()

    def forward(self, x):
        self.calls += 1
        if self.calls > 2:
            self.leave.mean += 0.5 * (x.detach().mean(0) - self.leave.mean)
        return self.leave(x - self.leave.mean)


def test_a_buffer_of_a_ranks_own_rows_is_named_with_its_step_and_not_called_a_difference(pools, tmp_path):
    trained = Workload(Centred, Labelled(), labelled_loss)
    strategies = ("single", "ddp", "zero2", "fsdp", "torch_ddp")
    found = compare(trained, tmp_path / "run", ranks=3, steps=4, pool=pools(3), strategies=strategies)
    said = "buffer leave.mean differs between ranks after step 2"
    assert f"which rightly differs: {said}" in alone_verdict(found)
    assert "not compared with the single process, see below" in dict(answer(found))["CAN I TRUST IT"]
    by_strategy = found.summary.set_index("strategy")
    assert by_strategy["losses_equal"].tolist() == [None, True, True, True, False]
    assert by_strategy.loc["single", "loss_last"] != by_strategy.loc["ddp", "loss_last"]
    assert f"What differs first: {said}" in verdict(found)
    assert "torch_ddp goes on from those of rank 0" in verdict(found)


def test_buffers_that_are_broadcast_are_planned_and_those_of_torchs_ddp(pools, tmp_path):
    trained = Workload(Centred, Labelled(), labelled_loss)
    ours = ("single", "ddp", "zero2", "fsdp")
    strategies, options = (*ours, "torch_ddp"), {"broadcast_buffers": True}
    found = compare(trained, tmp_path / "run", ranks=2, steps=4, pool=pools(2), strategies=strategies, **options)
    by_strategy = found.summary.set_index("strategy")
    assert by_strategy["losses_equal"].tolist() == [None, *[True] * len(ours)]
    assert by_strategy["as_planned"].dropna().tolist() == [True] * len(ours)
    assert by_strategy.loc["single", "loss_last"] != by_strategy.loc["ddp", "loss_last"]
    said = r"rightly differs: all ranks have the first one's buffers calls, leave.mean \(broadcast_buffers\)"
    assert re.search(said, alone_verdict(found))
    tags = {run: set(rows["tag"]) for run, rows in found.records.collectives.query("step >= 0").groupby("run")}
    sent = {name for name, told in tags.items() if any("buffers" in tag for tag in told)}
    assert sent == {*strategies} - {"single"}
    with pytest.raises(ValueError, match="broadcast_buffers: torch's own engines do as they do; leave it out"):
        CompareConfig(workload=trained, strategies="torch_ddp", ranks=2, **options)


def dropping_loss(model, batch):
    return functional.cross_entropy(functional.dropout(model(batch["x"]), 0.2), batch["y"])


def test_a_loss_that_draws_random_numbers_is_said_and_not_called_a_difference(pools, tmp_path):
    workload = Workload(lambda: nn.Linear(6, 3, dtype=torch.float64), Labelled(), dropping_loss)
    strategies = ("single", "zero1", "fsdp")
    found = compare(workload, tmp_path / "run", strategies=strategies, ranks=2, steps=3, pool=pools(2))
    assert found.losses_equal
    assert set(found.summary["loss_reference"].dropna()) == {"zero1"}
    assert "rightly differs: the loss draws random numbers, as dropout does" in alone_verdict(found)


def made_on_meta():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(6, 8, dtype=torch.float64), nn.Tanh(), nn.Linear(8, 3, dtype=torch.float64))


def test_a_model_on_the_meta_device_is_the_same_under_every_strategy(pools, tmp_path):
    workload = Workload(made_on_meta, Labelled(), labelled_loss)
    strategies = ("single", "zero1", "zero3", "fsdp")
    found = compare(workload, tmp_path / "run", strategies=strategies, ranks=2, steps=3, pool=pools(2)).summary
    assert (found["max_loss_difference"] < 1e-10).all()
    assert found["as_planned"].all()


def test_five_lines_are_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = compare(Residual, Labelled(), keyword_loss, ranks=2, steps=2, strategies="zero1")
    assert found.directory.parent.name == "runs"
    assert list(found.summary["strategy"]) == ["zero1"]


# Going on.


def test_a_run_goes_on_from_its_checkpoints_with_the_losses_of_one_long_run(pools, tmp_path):
    trained, options = workloads()["momentum"], {"strategies": ("single", "fsdp"), "accumulation": 2}
    long = compare(trained, tmp_path / "long", ranks=2, steps=6, pool=pools(2), **options)
    compare(trained, tmp_path / "first", ranks=2, steps=3, save_every=2, pool=pools(2), **options)
    second = {"steps": 6, "resume": str(tmp_path / "first"), "pool": pools(2), **options}
    rest = compare(trained, tmp_path / "second", ranks=2, **second)
    columns = ["run", "step", "rank", "loss", "learning_rate"]
    expected = long.records.steps[long.records.steps["step"] >= 3][columns].reset_index(drop=True)
    assert rest.records.steps["step"].min() == 3
    pd.testing.assert_frame_equal(rest.records.steps[columns].reset_index(drop=True), expected, rtol=0, atol=1e-12)
    assert rest.losses_equal
    assert rest.summary["as_planned"].all()
    for changes, said in (
        ({"steps": 3}, "steps: 3, but single in .* has taken 3 already"),
        ({"seed": 1}, "seed: 1, but single in .* was trained with 0; set seed to that"),
        ({"batch": 8}, "batch: 8, but single in .* was trained with 16"),
        ({"strategies": ("zero2",)}, "has no checkpoint of zero2; it has those of fsdp, single"),
        ({"strategies": ("torch_zero1",)}, "resume: strategy 'torch_zero1' .*leave it out"),
    ):
        with pytest.raises(ValueError, match=said):
            compare(trained, tmp_path / "third", ranks=2, **{**second, **changes})


def test_batches_of_a_loader_are_the_same_when_more_ranks_go_on(pools, tmp_path):
    class OfACell(Labelled):
        """Which no other interpreter can import: the workers are forks of the ranks."""

    batches = DataLoader(OfACell(), batch_size=7, drop_last=True, num_workers=1)
    trained, options = Workload(Residual, batches, keyword_loss), {"strategies": ("single", "fsdp")}
    long = compare(trained, tmp_path / "long", ranks=2, steps=5, pool=pools(2), **options)
    compare(trained, tmp_path / "first", ranks=2, steps=2, save_every=2, pool=pools(2), **options)
    second = {"steps": 5, "resume": str(tmp_path / "first"), "pool": pools(3), **options}
    rest = compare(trained, tmp_path / "rest", ranks=3, **second)
    losses = [found.records.steps.query("rank == 0 and step >= 2")["loss"].tolist() for found in (long, rest)]
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=1e-10)


class Noisy(Labelled):
    """Samples with noise from ``draw``."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def __getitem__(self, place):
        return {"x": self.x[place] + self.draw(), "y": self.y[place]}


def drawn_by_numpy():
    model = Residual()
    for param in model.parameters():
        param.data = torch.from_numpy(np.random.randn(*param.shape) * 0.3)
    return model


def noisy_rows(draw, rank, ranks, seed):
    while True:
        x = Labelled().x[:8] + torch.tensor([draw() for _ in range(8)], dtype=torch.float64)[:, None]
        # The mask has no rows, and its size is that of no batch.
        yield {"x": x[rank::ranks], "y": Labelled().y[:8][rank::ranks], "mask": torch.ones(3, 2)}


def noisy(kind, draw):
    if kind == "function":
        return partial(noisy_rows, draw)
    return DataLoader(Noisy(draw), batch_size=8, shuffle=True)


def masked_loss(model, batch):
    return model(x=batch["x"], y=batch["y"]).loss


@pytest.mark.parametrize("kind", ["loader", "function"])
def test_numpys_generator_is_seeded_for_the_model_and_the_data_and_when_a_run_goes_on(pools, tmp_path, kind):
    trained = Workload(drawn_by_numpy, noisy(kind, lambda: np.random.rand()), masked_loss)
    options = {"strategies": ("single", "fsdp" if kind == "loader" else "ddp"), "ranks": 2, "pool": pools(2)}
    before = np.random.get_state()[1].tolist()
    long = compare(trained, tmp_path / "long", steps=4, **options)
    compare(trained, tmp_path / "first", steps=2, save_every=2, **options)
    rest = compare(trained, tmp_path / "rest", steps=4, resume=str(tmp_path / "first"), **options)
    assert (long.losses_equal, rest.losses_equal, resumed_verdict(rest)) == (True, True, "")
    losses = [found.records.steps.set_index(["run", "rank", "step"])["loss"] for found in (rest, long)]
    pd.testing.assert_series_equal(losses[0], losses[1].loc[losses[0].index], rtol=0, atol=1e-12)
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize("kind", ["loader", "function"])
def test_data_that_differ_are_said_and_not_the_losses_alone(pools, tmp_path, kind):
    trained = Workload(Residual, noisy(kind, lambda: np.random.default_rng().random()), masked_loss)
    options = {"strategies": ("single", "zero1"), "ranks": 2, "pool": pools(2), "accumulation": 2}
    found = compare(trained, tmp_path / "first", steps=2, save_every=2, **options)
    assert not found.losses_equal
    assert verdict(found).startswith(
        "The DATA differ, so losses are not compared: from step 0 on zero1 trained on other rows than single; compare "
        "seeds Python's, NumPy's and torch's generators; seed any other"
    )
    assert "losses NOT compared: the data differ, see below" in dict(answer(found))["CAN I TRUST IT"]
    if kind == "function":
        return
    rest = compare(trained, tmp_path / "rest", steps=4, resume=str(tmp_path / "first"), **options)
    assert "The DATA differ from those that were trained on before the checkpoint, from step 0" in resumed_verdict(rest)
    compare(trained, tmp_path / "again", steps=1, **options)
    saved = load_saved(tmp_path / "first"), load_saved(tmp_path / "again")
    assert verdict(saved[0][0]) == verdict(found)
    assert all(words.endswith("Their data differ from step 0 on.") for _, words in losses_compared(*saved))


# Rows.


def test_rows_of_all_ranks_are_the_batch_and_weights_make_the_mean():
    batch = {"x": torch.arange(14.0).view(7, 2), "names": list("abcdefg"), "scale": torch.tensor(2.0), "n": 3}
    for ranks in (1, 2, 3, 4):
        shares = [divide(batch, rank, ranks) for rank in range(ranks)]
        torch.testing.assert_close(torch.cat([share.batch["x"] for share in shares]), batch["x"])
        assert [name for share in shares for name in share.batch["names"]] == batch["names"]
        assert all(share.batch["n"] == 3 and share.batch["scale"] == 2 for share in shares)
        means = [share.weight * share.batch["x"].mean(0) for share in shares]
        torch.testing.assert_close(torch.stack(means).mean(0), batch["x"].mean(0))
    # What a loader makes of samples that are tuples.
    rows = {"rows": Output(torch.arange(7.0), list("abcdefg"))}
    loaded = [torch.arange(7.0), tuple("abcdefg"), np.arange(7.0), ["a", "b"], rows]
    shares = [divide(loaded, rank, 2).batch for rank in range(2)]
    assert [len(entry) for entry in shares[0]] == [4, 4, 4, 2, 1]
    assert (*shares[0][1], *shares[1][1]) == loaded[1]
    assert [*shares[0][2], *shares[1][2]] == [*loaded[2]]
    assert shares[1][4]["rows"].loss == list("efg")
    for call, words in (
        (lambda: rows_of((torch.zeros(3, 2), torch.zeros(4))), "data: a batch has tensors of 3 and of 4 rows"),
        (lambda: rows_of({"scale": torch.tensor(1.0)}), "data: a batch has no tensor with rows"),
        (lambda: divide(torch.zeros(2, 1), 0, 3), "data: a batch has 2 rows, too few for 3 data ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_losses_under_the_readers_own_autocast_are_judged_as_rounded(pools, tmp_path):
    def wide():
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    def rounded(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return (model(batch).float() - batch[:, :4]).square().mean()

    torch.manual_seed(0)
    found = compare(Workload(wide, list(torch.randn(4, 16, 64)), rounded), tmp_path / "run", pool=pools(2), ranks=2,
                    strategies=("single", "zero1"), steps=4, device="cpu")  # fmt: skip
    assert found.summary["judged_loss_difference"].max() > 1e-5, "one row fewer is rounded otherwise"
    assert ", within the rounding of bfloat16 autocast · " in dict(answer(found))["CAN I TRUST IT"]
    assert "master weights" not in dict(answer(found))["LEAST MEMORY"]


class Drawn:
    def __init__(self):
        self.generator, self.tokens = torch.Generator().manual_seed(3), torch.arange(99)

    def __iter__(self):
        yield from (self.tokens[torch.randint(0, 99, (4, 2), generator=self.generator)] for _ in range(5))


class DrawnSamples(Drawn, IterableDataset):
    pass


class Augmented(Drawn, Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, place):
        return self.tokens[place] + torch.rand(2, generator=self.generator)


@pytest.mark.parametrize("data", [Drawn(), DrawnSamples(), Augmented(), DataLoader(Augmented(), batch_size=4)])
def test_rows_drawn_by_a_generator_of_the_data_are_the_same_wherever_they_are_read(data):
    reads = [next(batches_of(workload(data=data), 0, 1, 0, 4)).batch for _ in range(2)]
    assert torch.equal(*reads), "a plan has read the first, and a run trains on it"


def test_a_loader_with_a_generator_yields_the_same_wherever_it_is_read():
    loader = DataLoader(Labelled(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))
    firsts = [next(batches_of(workload(data=loader), 0, 1, 0, 8)).checksum for _ in range(2)]
    assert firsts[0] == firsts[1]
    epoch = [share.checksum for share in islice(batches_of(workload(data=loader), 0, 1, 0, 8), 8)]
    assert epoch[0] != epoch[4]  # the second time in one run it is shuffled anew


class Stream(IterableDataset):
    """Without a length."""

    def __iter__(self):
        return iter(torch.arange(10.0).view(10, 1))


def test_all_ranks_see_one_order_whatever_they_draw_themselves():
    def first(data, noise):
        torch.manual_seed(noise)
        stream = batches_of(Workload(Residual, data, keyword_loss), 0, 1, seed=3, rows=4)
        seen = []
        for _ in range(12):  # more than one epoch
            torch.rand(noise)  # as dropout draws
            np.random.rand(noise)
            seen.append(next(stream).batch)
        return seen

    for data in (Noisy(np.random.rand), Stream(), [torch.zeros(4, 1)], DataLoader(Labelled(), 8, shuffle=True)):
        for one, other in zip(first(data, 1), first(data, 2), strict=True):
            torch.testing.assert_close(one, other)


def test_reading_data_leaves_the_random_numbers_of_training_alone():
    def draw():
        return torch.rand(()).item() + np.random.rand() + random.random()

    with seeded(0):
        expected = [draw() for _ in range(3)]
    stream = batches_of(Workload(Residual, DataLoader(Noisy(draw), 4, shuffle=True), keyword_loss), 0, 1, 0, 4)
    drawn = []
    with seeded(0):
        for _ in range(3):
            next(stream)
            drawn.append(draw())
    assert drawn == expected


def test_data_that_ends_says_after_how_many_batches():
    def three(rank, ranks, seed):
        return iter([torch.zeros(2, 1)] * 3)

    for data, rows, number, words in (
        (three, 2, 3, "data: it ended after 3 batches"),
        (Labelled(), 30, 0, "data: it has 29 samples, too few for a batch of 30"),
        ([], 2, 0, "data: it yields no batch"),
    ):
        stream = batches_of(Workload(Residual, data, keyword_loss), 0, 1, 0, rows)
        assert len([next(stream) for _ in range(number)]) == number
        with pytest.raises(ValueError, match=words):
            next(stream)


def test_data_that_are_too_few_are_refused_before_ranks_start(tmp_path):
    twelve = TensorDataset(torch.zeros(12, 6))
    for data, num_batches, said in (
        (Labelled(4), 1, "data: it has 4 samples, too few for a batch of 8; set batch"),
        ([torch.zeros(4, 2), torch.zeros(1, 2)], 2, "data: a batch has 1 rows, too few for 2 data ranks"),
        (DataLoader(twelve, batch_size=11), 2, "data: a batch has 1 rows, too few for 2 data ranks"),
        (DataLoader(twelve, batch_size=11, drop_last=True), 2, ""),
        ([torch.zeros(4, 2), torch.zeros(1, 2)], 1, ""),
        (Stream(), 9, ""),
    ):
        trained = Workload(Residual, data, keyword_loss)
        with pytest.raises(ValueError, match=said) if said else nullcontext():
            check_enough(trained, ranks=2, rows=8, num_batches=num_batches)
    with pytest.raises(ValueError, match="data: it has 4 samples, too few for a batch of 8"):
        compare(Workload(Residual, Labelled(4), keyword_loss), tmp_path / "run", ranks=2)
    assert not (tmp_path / "run").exists()


# The plan.


def test_the_plan_asks_the_optimizer_what_it_keeps():
    names = [name for name, _ in Residual().named_parameters()]
    for optimizer, kept in (
        (torch.optim.SGD, Optimizer(0, 0)),
        (lambda tensors: torch.optim.SGD(tensors, lr=1, momentum=0.9), Optimizer(1, 0)),
        (torch.optim.AdamW, Optimizer(2, 4)),
        (lambda tensors: torch.optim.Adam(tensors, amsgrad=True), Optimizer(3, 4)),
        (torch.optim.NAdam, Optimizer(2, 4, scalar_bytes=4)),
        (torch.optim.Adagrad, Optimizer(1, 4, from_start=Optimizer(1, 4))),
        (lambda tensors: Kept(tensors, "tensors"), Optimizer(2, 0)),  # one of them in a container
    ):
        found = optimizer_of(Workload(Residual, Labelled(), keyword_loss, optimizer), Residual())
        assert found == dict.fromkeys(names, kept)
    # Of which the state is no copy of the parameter.
    assert optimizer_of(Workload(Residual, Labelled(), keyword_loss, torch.optim.Adafactor), Residual()) is None


def of_biases(tensors):
    biases = tensors.where(lambda name: name.endswith("bias"))
    others = tensors.where(lambda name: not name.endswith("bias"))
    return torch.optim.SGD([{"params": biases, "momentum": 0.0}, {"params": others, "momentum": 0.9}], lr=0.1)


@pytest.mark.parametrize(
    "optimizer",
    [of_biases, lambda tensors: torch.optim.AdamW(list(tensors)[2:]), torch.optim.ASGD, torch.optim.Adagrad],
    ids=["groups by name", "a list", "ASGD", "Adagrad"],
)
def test_any_optimizer_is_planned_by_parameter(pools, tmp_path, optimizer):
    trained, strategies = Workload(Residual, Labelled(), keyword_loss, optimizer), ("zero1", "fsdp")
    found = compare(trained, tmp_path / "run", strategies=strategies, ranks=2, steps=2, pool=pools(2))
    assert found.summary["as_planned"].all(), found.summary[["planned_rest_bytes", "rest_bytes"]]


def test_an_optimizer_that_cannot_be_planned_says_why_and_loses_no_run(pools, tmp_path):
    def of_one_size(tensors):
        (weight,) = (tensor for tensor in tensors if tensor.numel() == 18)
        return torch.optim.SGD([weight], lr=0.1)

    trained = Workload(lambda: nn.Linear(6, 3, dtype=torch.float64), Labelled(), labelled_loss, of_one_size)
    found = compare(trained, tmp_path / "run", strategies="single", ranks=1, steps=2, pool=pools(1))
    assert (tmp_path / "run" / "summary.json").is_file()
    why = "optimizer: it raised ValueError .* cannot be planned; choose parameters by name"
    assert found.summary["not_planned"].str.contains(why).all()
    assert re.search(f"There is no plan to compare bytes and messages with: {why}", plan_verdict(found))
    with pytest.raises(ValueError, match=why):
        plan(trained, ranks=1, strategies="single")


@pytest.mark.parametrize("wrong", [None, torch.optim.SGD], ids=str)
def test_an_optimizer_that_is_none_is_named_as_the_reader_wrote_it(pools, tmp_path, wrong):
    trained = Workload(lambda: nn.Linear(6, 3, dtype=torch.float64), Labelled(), labelled_loss, lambda tensors: wrong)
    for call in (
        lambda: plan(trained, ranks=1, strategies="single"),
        lambda: compare(trained, tmp_path / "run", strategies="single", ranks=1, steps=2, pool=pools(1)),
    ):
        with pytest.raises((ValueError, RankError), match=r"optimizer: it returned .*; return a torch"):
            call()


# Losses that are no mean over rows.


class Padded(Dataset):
    """Rows of different lengths, every third of which is empty."""

    def __len__(self):
        return 48

    def __getitem__(self, place):
        generator, length = torch.Generator().manual_seed(place), (0, 3, 8)[place % 3]
        y = torch.randint(0, 3, (8,), generator=generator).masked_fill(torch.arange(8) >= length, -100)
        return {"x": torch.randn(8, 6, generator=generator, dtype=torch.float64), "y": y}


def token_loss(model, batch):
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def num_tokens(batch):
    return (batch["y"] != -100).sum()


def of_tokens(**fields):
    return Workload(partial(OutOfOrder, (0, 1, 2, 3)), Padded(), token_loss, **fields)


@pytest.mark.parametrize(
    ("ranks", "accumulation", "batch", "strategies"),
    [
        (2, 1, 2, ("single", "zero1", "zero3", "torch_ddp")),
        (2, 2, 8, ("single", "bucketed", "fsdp")),
        (3, 2, 12, ("single", "ddp", "zero2")),
    ],
)
def test_a_mean_over_tokens_that_is_weighed_is_that_of_one_process(
    pools, tmp_path, ranks, accumulation, batch, strategies
):
    options = {
        "ranks": ranks,
        "accumulation": accumulation,
        "batch": batch,
        "pool": pools(ranks),
        "steps": 3,
        "clip": 1.0,
    }
    trained = of_tokens(weight=num_tokens)
    found = compare(trained, tmp_path / "run", strategies=strategies, **options)
    assert (found.summary["max_loss_difference"] < 1e-10).all(), found.summary
    assert ((found.summary["norm_ratio"] - 1).abs() < 1e-10).all()
    assert found.summary["as_planned"].dropna().all()
    whole = compare(trained, tmp_path / "whole", strategies="single", **{**options, "accumulation": 1})
    steps = [one.records.steps.query("run == 'single'")["loss"].tolist() for one in (found, whole)]
    assert steps[0] == pytest.approx(steps[1], abs=1e-10), "micro-batches are weighed too"


def test_a_mean_over_tokens_that_is_not_weighed_is_told_with_the_weight_to_give(pools, tmp_path):
    options = {"strategies": ("single", "zero1"), "ranks": 2, "steps": 2, "batch": 12, "pool": pools(2)}
    found = compare(of_tokens(), tmp_path / "run", **options)
    assert not found.losses_equal
    assert "It is a mean of means: ranks' batches have different numbers of counted entries" in verdict(found)
    assert "weight=lambda batch: (batch['y'] != -100).sum())" in verdict(found)
    nothing = of_tokens(weight=lambda batch: 0)
    with pytest.raises(RankError, match="weight: it is 0 for every batch of a step"):
        compare(nothing, tmp_path / "nothing", **options)
    with pytest.raises(RankError, match="weight: it returned 'many'; it must return one number"):
        compare(of_tokens(weight=lambda batch: "many"), tmp_path / "wrong", **options)


def against_all(model, batch, mesh):
    """Each row against those of all ranks."""
    features, targets = (all_gather(each, mesh.data, 0) for each in (model(batch["x"]), batch["x"][:, :3]))
    return functional.cross_entropy(features @ targets.T, torch.arange(len(features)))


def by_torch(model, batch):
    features = model(batch["x"])
    if dist.get_world_size() > 1:
        dist.all_reduce(features.detach().clone())
    return features.square().mean()


def test_a_loss_that_compares_the_rows_of_all_ranks_takes_the_mesh(pools, tmp_path):
    trained = Workload(lambda: nn.Linear(6, 3, dtype=torch.float64), Labelled(), against_all)
    strategies = ("single", "ddp", "zero2", "fsdp")
    found = compare(trained, tmp_path / "run", strategies=strategies, ranks=2, steps=3, pool=pools(2))
    assert (found.summary["max_loss_difference"] < 1e-10).all()
    assert ((found.summary["norm_ratio"] - 1).abs() < 1e-10).all()
    assert found.summary["as_planned"].all(), "what the loss sends is in the plan"
    with pytest.raises(ValueError, match="strategies: 'fsdp' has two data axes, and the loss sends over one"):
        CompareConfig(workload=trained, strategies=("fsdp",), ranks=4, sharding="hybrid_shard")


def test_a_loss_that_calls_torch_distributed_by_itself_is_refused_and_does_not_hang(pools, tmp_path):
    trained = Workload(lambda: nn.Linear(6, 3, dtype=torch.float64), Labelled(), by_torch)
    options = {"ranks": 2, "steps": 2, "pool": pools(2)}
    found = compare(trained, tmp_path / "run", strategies=("single", "fsdp", "torch_ddp"), **options)
    assert list(found.summary["strategy"]) == ["torch_ddp"]
    assert list(found.failed) == ["single", "fsdp"]
    for why in found.failed.values():
        assert "ValueError: loss: it calls torch.distributed by itself" in why
        assert "loss(model, batch, mesh)" in why


# Bad input, refused before ranks start.


def workload(**changes):
    return Workload(**{"model": Residual, "data": Labelled(), "loss": keyword_loss, **changes})


WRONG_FIELDS = (
    ({"model": nn.Linear(2, 2)}, TypeError, "model: a Linear was given; give a function"),
    ({"model": lambda size: nn.Linear(size, 2)}, TypeError, r"model: it takes \(size\)"),
    ({"loss": lambda batch: batch}, TypeError, r"loss: it takes \(batch\)"),
    ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, TypeError, "optimizer: SGD"),
    ({"scheduler": 3}, TypeError, "scheduler: 3 was given"),
    ({"tp_plan": "blocks"}, TypeError, "tp_plan: 'blocks' was given; give 'auto', a mapping"),
    ({"tp_loss": lambda model, batch, axis: 0}, ValueError, "tp_loss: it is for a tp_plan of your own"),
    ({"data": "train.txt"}, TypeError, "data: 'train.txt' is neither"),
    ({"data": (x for x in ())}, ValueError, "data: an iterator can be read only once"),
    ({"data": Dataset()}, TypeError, "data: a Dataset has no __len__"),
    ({"data": lambda rank: []}, TypeError, r"data: it takes \(rank\)"),
)
SINGLE = "dtype: 'float64', but the parameters of .* are float32; make the model double in the workload"
WRONG_OPTIONS = (
    ({"model": lambda: 3}, {}, TypeError, "model: returned int"),
    ({"model": lambda: nn.LazyLinear(3)}, {}, ValueError, "model: 'weight' has no shape yet; call the module once"),
    ({"model": lambda: nn.Embedding(5, 3, sparse=True)}, {}, ValueError, "model: '' has sparse gradients"),
    ({"model": lambda: nn.Linear(6, 3, dtype=torch.cfloat)}, {}, ValueError, "model: parameters .* are complex"),
    ({"model": nn.Tanh}, {}, ValueError, "model: Tanh has no parameters"),
    ({}, {"model": "mlp"}, ValueError, "model: only for the built-in models; Residual says it itself"),
    ({}, {"learning_rate": 1.0}, ValueError, "learning_rate: only for the built-in models"),
    ({}, {"dtype": "float64", "tp": 2}, ValueError, "tp: nothing of Residual can be divided over 2 ranks"),
    ({"tp_plan": None}, {"tp": 2}, ValueError, "tp: Residual has tp_plan=None, which says"),
    ({"model": lambda: Residual().float()}, {"dtype": "float64"}, ValueError, SINGLE),
    ({"data": [1]}, {"batch": 4}, ValueError, "batch: the data of Residual comes in batches already"),
    ({}, {"batch": 3}, ValueError, "batch: 3 sequences do not divide"),
    ({}, {"strategies": ("torch_tp",)}, ValueError, "strategies: 'torch_tp' cuts a built-in GPT"),
    ({}, {"stepz": 4}, TypeError, "compare: stepz is not an option"),
)


def test_a_wrong_field_or_option_is_named(tmp_path):
    for changes, kind, said in WRONG_FIELDS:
        with pytest.raises(kind, match=said):
            workload(**changes)
    for changes, options, kind, said in WRONG_OPTIONS:
        with pytest.raises(kind, match=said):
            compare(workload(**changes), tmp_path / "run", **{"ranks": 2, **options})
    for wrong in (None, "gpt-1m", Residual):
        with pytest.raises(TypeError, match="give a Workload, a CompareConfig, or model, data and loss"):
            compare(wrong, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="workload: 3 is no Workload"):
        CompareConfig(workload=3)


def by_rank():
    try:
        return nn.Linear(6, 3 + current().rank)
    except RuntimeError:  # where the configuration is checked, outside of ranks
        return nn.Linear(6, 3)


def test_what_differs_between_ranks_or_does_not_reach_them_is_refused_before_they_train(pools, tmp_path):
    options = {"strategies": "ddp", "ranks": 2, "steps": 2, "pool": pools(2)}
    said = r"model: where rank 0 has weight \[3, 6\] float32, rank 1 has weight \[4, 6"
    with pytest.raises(RankError, match=said):
        compare(workload(model=by_rank), tmp_path / "run", **options)
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"loss: it cannot be pickled, .*lock"):
        compare(workload(loss=lambda model, batch: lock), tmp_path / "other", **options)


def test_a_loss_that_is_a_sum_is_told(pools, tmp_path):
    trained = workload(loss=lambda model, batch: model(**batch).loss * len(batch["y"]))
    found = compare(trained, tmp_path / "run", strategies=("single", "ddp"), ranks=2, steps=2, pool=pools(2))
    assert "that of ddp is 1/2 of the single process's, so the loss is a sum over rows" in verdict(found)


def test_a_loss_that_is_none_is_refused_in_the_first_step_as_are_other_fields(pools, tmp_path):
    by_metric = torch.optim.lr_scheduler.ReduceLROnPlateau
    for number, (changes, said) in enumerate((
        ({"loss": lambda model, batch: 3.0}, "loss: returned float"),
        ({"loss": lambda model, batch: model(**batch).logits}, r"loss: returned a tensor of shape \[4, 3\]"),
        ({"loss": lambda model, batch: model(**batch).loss.detach()}, "loss: it does not depend on any parameter"),
        ({"scheduler": by_metric}, "scheduler: ReduceLROnPlateau asks for a metric"),
        ({"data": lambda rank, ranks, seed: None}, "data: the function returned None"),
    )):  # fmt: skip
        with pytest.raises(RuntimeError, match=said):
            compare(workload(**changes), tmp_path / str(number), strategies="ddp", ranks=2, steps=2, pool=pools(2))


class CarriesState:
    """What it computed of the batch before is added to the output, as of a recurrent model."""

    state = None

    def __call__(self, model, batch):
        output = model(batch["x"])
        before, self.state = self.state, output.detach()
        return functional.cross_entropy(output if before is None else output + before, batch["y"])


def test_a_plan_leaves_what_a_loss_keeps_between_batches_alone():
    """It tries the loss with other numbers of rows, without values: the runs that follow would go on from these."""
    trained = Workload(lambda: OutOfOrder(range(4)), Labelled(), CarriesState())
    table = plan(trained, ranks=2, batch=8)
    assert trained.loss.state is None
    assert table["messages_per_step"].notna().all()


def test_a_plan_leaves_a_model_alone_that_the_reader_has_already():
    module = nn.Linear(6, 3, dtype=torch.float64)
    before = module.weight.detach().clone()
    for loss in (labelled_loss, lambda model, batch: labelled_loss(model, batch) * (batch["y"].max().item() + 1)):
        plan(Workload(lambda: module, Labelled(), loss), ranks=2, batch=8)
        assert torch.equal(module.weight, before)
        module.weight.grad = torch.ones_like(before)
    assert module.weight.grad is not None


def test_a_loss_sets_attributes_of_the_module_itself_and_takes_its_entries():
    module = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    model = InPlaceOf(module, module)
    model.scale = 0.5
    assert module.scale == model.scale == 0.5
    assert model[0] is module[0]
