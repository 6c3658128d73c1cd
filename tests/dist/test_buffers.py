"""Buffers and extra state that forward makes different on each rank: which of them state dicts and checkpoints have."""

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.launch import current
from shardlab.testing import check_agreement
from tests.comm.test_communicator import Log
from tests.dist import cases
from tests.dist.every_engine import PEERS, assert_states, engine_of, momentum, one_step

KEYS = ("bucketed", "zero3", "fsdp")
NO_CHECKPOINT = ("torch_zero1", "torch_fsdp2")


class Remembers(nn.Module):
    """Every kind of thing that forward can change and a state dict keep."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 5)
        self.seen = {"rows": 0, "means": torch.zeros(2)}
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("largest", torch.full((5,), -1e9))
        self.register_buffer("signs", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        out = self.last(torch.tanh(self.norm(self.first(x))))
        self.count += int(x[0, 1].abs() * 1000)
        self.largest = torch.maximum(self.largest, out.detach().amax(0))
        self.signs = out.detach()[0] > 0
        self.scratch = x.detach()[0, :3]
        self.seen = {"rows": self.seen["rows"] + int(x[0, 1].abs() * 1000), "means": x.detach().mean(0)[:2]}
        return out

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def build(seed=0):
    return cases.seeded(Remembers, seed).double()


def own_state(model):
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return buffers | {"rows": model.seen["rows"], "means": model.seen["means"].clone()}


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name
        elif isinstance(value, dict):
            same(value, other[name])
        else:
            assert value == other[name], name


def remembered(rank, setup, directory):
    num_ranks, model = current().world_size, build(seed=rank)
    with engine_of(setup, num_ranks, model, optimizer_fn=momentum) as engine:
        for step in range(3):
            one_step(engine, step=step)
            engine.zero_grad()
        before, state = own_state(model), engine.full_state_dict()
        same(own_state(model), before)
        buffers = dict(model.named_buffers())
        assert all(value.data_ptr() != buffers[name].data_ptr() for name, value in state.items()
                   if name in buffers and value.numel())  # fmt: skip
        again = engine.full_state_dict()
        if setup not in NO_CHECKPOINT:
            engine.save(directory)
    loaded = None
    if setup not in NO_CHECKPOINT:
        with engine_of(setup, num_ranks, build(seed=7), optimizer_fn=momentum) as engine:
            engine.load(directory)
            loaded = engine.full_state_dict()
            mine = own_state(engine.module)
            same({name: mine[name] for name in mine if name in loaded}, {n: loaded[n] for n in mine if n in loaded})
    return before, state, again, loaded


@pytest.mark.parametrize(("setup", "num_ranks"), [*((key, 3) for key in KEYS), *((key, 2) for key in PEERS)])
def test_a_full_state_dict_is_the_first_rank_s_everywhere_and_what_load_restores(pools, tmp_path, setup, num_ranks):
    results = pools(num_ranks).run(remembered, setup, tmp_path)
    of_first, expected, _, _ = results[0]
    for name in ("norm.running_mean", "count", "largest", "rows"):
        others = [before[name] for before, *_ in results[1:]]
        assert not any(torch.equal(torch.as_tensor(of_first[name]), torch.as_tensor(other)) for other in others), name
    assert set(expected) == set(build().state_dict())
    same({name: value for name, value in expected.items() if name in of_first},
         {name: value for name, value in of_first.items() if name in expected})  # fmt: skip
    same(expected["_extra_state"], {"rows": of_first["rows"], "means": of_first["means"]})
    for _, state, again, loaded in results:
        same(state, expected)
        same(again, expected)
        if setup not in NO_CHECKPOINT:
            same(loaded, expected)
    build().load_state_dict(expected, strict=True)


def sent_for_it(rank, setup, kind):
    log = Log()
    with engine_of(setup, 2, cases.build(kind), optimizer_fn=momentum) as engine, engine.mesh.observed_by(log):
        engine.full_state_dict()
    return [(str(event.op), event.num_bytes) for event in log.events if not event.tag.startswith("parameters")]


@pytest.mark.parametrize("setup", KEYS)
def test_only_buffers_are_sent(pools, setup):
    for events in pools(2).run(sent_for_it, setup, "MLP"):
        assert events == []
    for events in pools(2).run(sent_for_it, setup, "Frozen"):
        assert events == [("broadcast", 9 * 8)]


class Codebook(nn.Module):
    """A codebook that follows the rows which each rank has."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)
        self.register_buffer("book", torch.randn(8, 6))

    def forward(self, x):
        x = self.norm(self.enter(x))
        nearest = torch.cdist(x, self.book).argmin(1)
        if self.training:
            with torch.no_grad():
                self.book[nearest] = (self.book[nearest] + x) / 2
        return self.leave(x + (self.book[nearest] - x).detach())


def with_a_codebook(rank, key, num_ranks, more):
    """After steps of two micro-batches: what is said of agreement, what each rank evaluates, and the state."""
    said = ""
    x, y = (part[rank * 6 : rank * 6 + 6] for part in rows_of_codebook(num_ranks))
    with engine_of(key, num_ranks, cases.seeded(Codebook).double(), optimizer_fn=momentum, **more) as engine:
        for step in range(3):
            with engine.no_sync():
                engine.backward(cases.loss_of(engine(x + step), y))
            engine.backward(cases.loss_of(engine(x * step), y))
            engine.step()
            engine.zero_grad()
        try:
            check_agreement(engine)
        except RuntimeError as error:
            said = str(error)
        engine.module.eval()
        with torch.no_grad():
            return said, engine(rows_of_codebook(num_ranks)[0]), engine.full_state_dict()


def rows_of_codebook(num_ranks):
    seed = torch.Generator().manual_seed(1)
    return tuple(torch.randn(6 * num_ranks, size, generator=seed, dtype=torch.float64) for size in (7, 5))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_buffers_that_drift_are_named_and_broadcast_as_under_torchs_ddp(pools, num_ranks):
    of_torch = pools(num_ranks).run(with_a_codebook, "torch_ddp", num_ranks, {})
    assert {said for said, *_ in of_torch} == {""}
    for key in ("ddp", *KEYS, "zero2") if num_ranks == 2 else ("zero1", "fsdp"):
        drifted = pools(num_ranks).run(with_a_codebook, key, num_ranks, {})
        for said, output, _ in drifted:
            assert said.startswith("agreement: ranks differ in buffers book, norm.running_mean, norm.running_var (")
            assert "build the engine with broadcast_buffers=True" in said
            assert output is drifted[0][1] or not torch.equal(output, drifted[0][1])
        broadcast = pools(num_ranks).run(with_a_codebook, key, num_ranks, {"broadcast_buffers": True})
        for (said, output, state), (_, wanted, expected) in zip(broadcast, of_torch, strict=True):
            assert said == ""
            torch.testing.assert_close(output, wanted, atol=1e-10, rtol=0)
            assert_states([state], expected)


def test_torchs_engines_broadcast_as_they_do():
    for name, words in (("torch_ddp", "before forwards anyway"), ("torch_fsdp2", "cannot")):
        with pytest.raises(ValueError, match=f"^broadcast_buffers: '{name}' .*{words}"):
            build_engine(name, nn.Linear(2, 2), momentum, broadcast_buffers=True)


class Unpicklable(nn.Linear):
    def get_extra_state(self):
        return lambda: None


def unpicklable(rank):
    with (
        Mesh({"data": 2}) as mesh,
        build_engine("bucketed", Unpicklable(3, 3), cases.OPTIMIZERS["sgd"], mesh) as engine,
    ):
        with pytest.raises(RuntimeError, match=r"pickle.*on rank 0|on rank 0.*pickle") as caught:
            engine.full_state_dict()
        return str(caught.value)


def test_extra_state_that_cannot_be_sent_is_refused_on_every_rank(pools):
    first, second = pools(2).run(unpicklable)
    assert first == second
