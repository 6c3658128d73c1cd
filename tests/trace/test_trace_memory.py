"""Bytes against scans that know nothing of the ledger: the garbage collector's, and torch's profiler's."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from shardlab.analysis import memory_over_step, peak
from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.experiment import TrainStep
from shardlab.models import GPT, GPTConfig, next_token
from shardlab.records.store import load_run, write_manifest
from shardlab.trace.memory_by_role import MemoryLedger, bytes_by_role
from shardlab.vocabulary import Phase, Role
from tests.trace.training import Setting, adamw, train

ROLES = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE, Role.OTHER)


def storages(tensors):
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def scan(engine, train_step):
    """Bytes by role from the garbage collector alone: every tensor alive, sorted by who refers to it."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    known = set(storages([*train_step._losses]))
    params = storages(thing for thing in found if isinstance(thing, nn.Parameter))
    counters, state = {}, {}
    for held in engine.optimizer.state.values():
        for name, value in held.items():
            (counters if name == "step" else state).update(storages([value]))
    apart = known | {*params, *counters, *state}
    rest = {key: size for key, size in storages(found).items() if size and key not in apart}
    return {
        Role.PARAMETER: sum(params.values()),
        Role.OPTIMIZER_STATE: sum(state.values()),
        Role.OTHER: sum(counters.values()),
        "losses": sum(storages(train_step._losses).values()),
        "rest": sorted(rest.values()),
    }


@pytest.mark.parametrize(("strategy", "num_ranks"), [("ddp", 2), ("bucketed", 3), ("zero1", 3)])
def test_bytes_at_rest_equal_a_scan_by_the_garbage_collector(pools, tmp_path, strategy, num_ranks):
    write_manifest(tmp_path, {"run": strategy})
    setting = Setting(strategy, directory=tmp_path, steps=2, at_rest=scan)
    results = pools(num_ranks).run(train, setting)
    records = load_run(tmp_path)
    rows = records.memory[records.memory["where"] == "rest"]
    for rank, outcome in enumerate(results):
        for step, seen in enumerate(outcome.at_rest):
            recorded = rows[(rows["rank"] == rank) & (rows["step"] == step)].set_index("role")["bytes"].to_dict()
            for role in (Role.PARAMETER, Role.OPTIMIZER_STATE, Role.OTHER):
                assert recorded[role] == seen[role], (role, step)
            # Beside the gradients only the batch is alive, x [4, 6] and y [4, 5], and the norm before clipping.
            left = list(seen["rest"])
            nobodys = (4 * 4 * 6, 4 * 4 * 5, 4)
            for known in nobodys:
                left.remove(known)
            assert recorded[Role.GRADIENT] == sum(left), (left, step)
            assert recorded[Role.GRADIENT] >= sum(param.nbytes for param in outcome.params)
            assert recorded[Role.UNATTRIBUTED] == sum(nobodys) + seen["losses"], step
            assert all(recorded[role] == 0 for role in set(Role) - {*ROLES, Role.UNATTRIBUTED})


def test_the_peak_of_a_hand_made_sequence():
    param = torch.zeros(100)  # 400 B, there from the start
    ledger = MemoryLedger({Role.PARAMETER: [param]})
    with ledger:
        ledger.phase = Phase.FORWARD
        kept = torch.empty(1000)  # 4000 B of activation
        temporary = torch.empty(500)  # 2000 B: 6400 in all, the highest in forward
        del temporary
        view = kept[:10]  # a view holds nothing of its own
        ledger.phase = Phase.BACKWARD
        gradient = torch.empty(100)  # 400 B: survives, so a gradient from its first byte
        temporary = torch.empty(600)  # 2400 B, other: 7200 in all, the peak
        del kept, view, temporary
        ledger.phase = Phase.STEP
        state = torch.empty(1500)  # 6000 B: 400 + 400 + 6000 = 6800, below the peak
        ledger.classify({Role.PARAMETER: [param], Role.GRADIENT: [gradient], Role.OPTIMIZER_STATE: [state]})
    highest = ledger.peak()
    assert highest.num_bytes == 7200
    assert highest.phase is Phase.BACKWARD
    assert {role: size for role, size in highest.by_role.items() if size} == {
        Role.PARAMETER: 400,
        Role.ACTIVATION: 4000,
        Role.GRADIENT: 400,
        Role.OTHER: 2400,
    }


class Wide(nn.Module):
    def forward(self, x):
        return torch.tanh(x.repeat(1, 2500)).exp().unflatten(1, (2500, 4)).mean(1)


class Hungry(nn.Module):
    """All its units are small but one, which makes activations of 160 kB."""

    def __init__(self) -> None:
        super().__init__()
        self.thin, self.wide, self.out = nn.Linear(6, 4), Wide(), nn.Linear(4, 5)

    def forward(self, x):
        return self.out(self.wide(self.thin(x)))


def test_the_peak_names_its_unit_and_the_step_its_course(pools, tmp_path):
    write_manifest(tmp_path, {"run": "ddp"})
    pools(2).run(train, Setting("ddp", directory=tmp_path, traced=1, model=Hungry))
    records = load_run(tmp_path)
    highest = peak(records.memory)
    assert set(highest["unit"]) == {"wide"}
    assert highest["bytes"].sum() > 160_000
    course = memory_over_step(records.memory)
    assert set(course["unit"]) == {"thin", "wide", "out", "model"}
    assert course["time_us"].is_monotonic_increasing
    top = course.loc[course["bytes"].idxmax()]
    assert top["bytes"] == highest["bytes"].sum() == records.steps["peak_bytes"].max()
    assert top["unit"] == highest["unit"].iloc[0]
    for rank in (0, 1):
        own = memory_over_step(records.memory, step=1, rank=rank)
        assert own["bytes"].max() == records.steps.set_index(["rank", "step"]).at[(rank, 1), "peak_bytes"]
    with pytest.raises(ValueError, match="step: 0 was not traced; there are 1"):
        memory_over_step(records.memory, step=0)
    with pytest.raises(ValueError, match="no step was traced"):
        memory_over_step(records.memory[records.memory["where"] == "rest"])


def test_memory_used_again_at_the_same_address_counts_again():
    ledger = MemoryLedger({})
    with ledger:
        ledger.phase = Phase.FORWARD
        for _ in range(20):  # freed before the next is made, most likely at the same place
            block = torch.empty(1000)
            del block
        first = torch.empty(1000)
        second = torch.empty(1000)
    del first, second
    assert ledger.peak().num_bytes == 8000


def test_a_ledger_leaves_nothing_on_tensors_that_outlive_it():
    weight = torch.ones(3)
    with MemoryLedger({Role.PARAMETER: [weight]}) as ledger:
        product = weight * 2
    del ledger
    assert [weakref.getweakrefcount(tensor.untyped_storage()) for tensor in (weight, product)] == [0, 0]


class Recording:
    """Stands in for a recorder that traces memory: phases to the ledger, roles at rest."""

    def __init__(self, engine):
        self.engine, self.ledger = engine, MemoryLedger(engine.live_tensors())

    @contextmanager
    def phase(self, phase, kind=None, unit=""):
        before, self.ledger.phase = self.ledger.phase, phase
        yield
        self.ledger.phase = before

    def at_rest(self):
        self.ledger.classify(self.engine.live_tensors())


def profiled_peak(profile):
    """Highest sum of the profiler's own allocations and frees on the CPU, in bytes above the beginning."""
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    height = highest = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        height += change.nbytes()
        highest = max(highest, height)
    return highest


def test_the_peak_of_a_step_is_within_one_percent_of_the_profilers():
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, seq_len=32, num_layers=3, num_heads=4, hidden=64)
    with build_engine("bucketed", GPT(config), adamw, Mesh.alone()) as engine:
        x = torch.randint(0, 64, (4, 33))
        inputs, targets = x[:, :-1].contiguous(), x[:, 1:].contiguous()
        plain = TrainStep(engine, next_token)
        plain((inputs, targets))  # the optimizer's state is there from now on
        at_start = sum(bytes_by_role(engine.live_tensors()).values())
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profile:
            plain((inputs, targets))
        recording = Recording(engine)
        with recording.ledger:
            TrainStep(engine, next_token, recorder=recording)((inputs, targets))
    expected = at_start + profiled_peak(profile)
    assert recording.ledger.peak().num_bytes == pytest.approx(expected, rel=0.01)
    assert expected > 1.5 * at_start  # there is a peak to find
    assert recording.ledger.peak().phase in (Phase.FORWARD, Phase.BACKWARD)
