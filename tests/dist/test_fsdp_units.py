"""FSDP with every kind of ``wrap`` equals one process, and gathers the units that ``show_units`` shows."""

import pytest
import torch
from torch.nn import functional

from shardlab import Mesh, build_engine, show_units
from shardlab.engines.peers.torch_fsdp2 import TorchFSDP2
from shardlab.units import wrapped_modules
from tests.comm.test_communicator import Log
from tests.dist.test_engines import adamw
from tests.dist.test_fsdp import assert_states
from tests.units.look_alikes import GPT2, Residual

WRAPS = {
    "auto": "auto",
    "root": "root",
    "a pattern": "transformer.h.*",
    "patterns": ("transformer.h.[02]", "transformer.h.*.up", "transformer.ln_f"),
    "a class": Residual,
    "classes": (Residual, torch.nn.Linear),
    "a number": 144,
    "a function": lambda name, _: name.endswith(("1", "down")),
}


def build():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2().double()


def loss_of(model, rows):
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def rows_of(step, num_rows=4):
    return torch.randint(11, (num_rows, 6), generator=torch.Generator().manual_seed(step))


def train(rank, wrap, make):
    log = Log()
    with Mesh({"data": 2}) as mesh, make(build(), adamw, mesh, wrap=wrap) as engine:
        for step in range(3):
            with mesh.observed_by(log):
                engine.backward(loss_of(engine, rows_of(step)[2 * rank : 2 * rank + 2]))
                engine.step()
            engine.zero_grad()
        return engine.full_state_dict(), {event.tag for event in log.events if event.op == "all_gather"}


def fsdp(*args, **options):
    return build_engine("fsdp", *args, **options)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_every_kind_of_units_equals_one_process(pools, wrap):
    model = build()
    optimizer = adamw(list(model.parameters()))
    for step in range(3):
        loss_of(model, rows_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = pools(2).run(train, wrap, fsdp)
    assert_states([state for state, _ in results], model.state_dict())
    table = show_units(model, wrap)
    units = table.loc[table["parameters"] > 0, "unit"]
    assert results[0][1] == {f"parameters of {unit}" for unit in units}


def test_torchs_own_takes_the_same_units(pools):
    for wrap in ("auto", Residual, "transformer.h.*.up"):
        for _, tags in pools(2).run(train, wrap, TorchFSDP2):
            assert len(tags) == 2 * (1 + len(wrapped_modules(build(), wrap)))  # for forward and for backward
