"""What torch's own engines send and hold is recorded as it is: against counts and bytes found another way."""

import gc
from collections import Counter
from math import isnan

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.engines.peers import Peer
from shardlab.experiment.run.shard_rows import shard_rows
from shardlab.partition.ring_cost import Link
from shardlab.trace.memory_by_role import bytes_by_role, known_tensors
from shardlab.trace.observed import wire_bytes
from shardlab.vocabulary import Role
from tests.comm.test_communicator import Log
from tests.dist import cases
from tests.dist.every_engine import adamw, axes_of

NUM_BLOCKS = 2  # of WideGPT
UNITS = NUM_BLOCKS + 1  # and the root
STRATEGIES = ("torch_ddp", "torch_zero1", "torch_fsdp2", "torch_tp")
PARAMS = dict(cases.build("WideGPT").named_parameters())
NUMEL = sum(param.numel() for param in PARAMS.values())
IN_A_STEP = {
    "torch_ddp": {"all_reduce": 1},
    "torch_zero1": {"all_reduce": 1, "broadcast": len(PARAMS)},
    "torch_fsdp2": {"all_gather": 2 * UNITS, "reduce_scatter": UNITS},
    "torch_tp": {"all_reduce": 6 * NUM_BLOCKS},
}


NAMES = {
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
}


class CallsOfTorch(TorchDispatchMode):
    """Counts torch's own collective operations where they enter c10d, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: the plain tensors inside come again
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.counts[NAMES.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


def one_step(engine, step, rank):
    x, y = cases.rows("WideGPT", step, 0, torch.distributed.get_world_size())
    if engine.num_data_ranks > 1:
        x, y = cases.own_rows(x, rank), cases.own_rows(y, rank)
    engine.backward(cases.loss_of(engine(x), y))
    engine.step()


def steps_observed(rank, strategy, observed):
    """Events, and c10d calls counted apart, of step 2: in the first two DDP arranges itself."""
    observer = Log(flags=True)
    with (
        Mesh(axes_of(strategy, torch.distributed.get_world_size())) as mesh,
        mesh.observed_by(observer),
        build_engine(strategy, cases.build("WideGPT", rank), adamw, mesh, observed=observed) as engine,
    ):
        for step in range(2):
            one_step(engine, step, rank)
            engine.zero_grad()
        observer.events.clear()
        observer.calls.clear()
        with CallsOfTorch() as calls:
            one_step(engine, 2, rank)
    for event in observer.events:
        event.device_times = None
    return observer.events, Counter(what for what, _ in observer.calls), calls.counts


def sent_in_a_step(strategy, num_ranks):
    """Bytes by the formulas."""
    whole, share = 8 * NUMEL, (num_ranks - 1) / num_ranks
    padded = 8 * sum(padded_numel(param, num_ranks) for param in PARAMS.values())
    activations = 8 * 2 * num_ranks * 6 * 24  # 2 rows a rank, 6 positions, 24 features
    return {
        "torch_ddp": {"all_reduce": 2 * whole * share},
        "torch_zero1": {"all_reduce": 2 * whole * share, "broadcast": whole * share},
        "torch_fsdp2": {"all_gather": 2 * padded * share, "reduce_scatter": padded * share},
        "torch_tp": {"all_reduce": 6 * NUM_BLOCKS * 2 * activations * share},
    }[strategy]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recorded_collectives_are_those_torch_makes(pools, strategy):
    num_ranks = 3
    recorded = pools(num_ranks).run(steps_observed, strategy, True)
    plain = pools(num_ranks).run(steps_observed, strategy, False)
    events = recorded[-1][0]
    sent = {op: sum(wire_bytes(event) for event in events if event.op == op) for op in {event.op for event in events}}
    assert sent == pytest.approx(sent_in_a_step(strategy, num_ranks))
    for (events, told, calls), (unheard, _, plain_calls) in zip(recorded, plain, strict=True):
        assert Counter(event.op for event in events) == IN_A_STEP[strategy]
        assert calls == plain_calls == IN_A_STEP[strategy]  # listening adds nothing and leaves nothing out
        assert not unheard
        assert set(told.values()) == {len(events)}  # each is issued, started, completed and waited for, once
        for event in events:
            assert event.issue_ns <= event.start_ns <= event.end_ns
            assert event.dtype == "float64"
            assert event.group_size == num_ranks
            copied = event.op in ("all_gather", "reduce_scatter")
            assert event.scratch_bytes == (event.num_bytes if copied else 0)
            assert isnan(event.wait_start_ns) or event.issue_ns <= event.wait_start_ns <= event.wait_end_ns
        assert [event.seq for event in events] == sorted({event.seq for event in events})


def padded_numel(param, num_ranks):
    return -(-param.shape[0] // num_ranks) * num_ranks * (param.numel() // param.shape[0])


def live_bytes():
    """Of every storage of floating-point numbers (not of the ranks' numbers that torch's own mesh has in a tensor)."""
    gc.collect()
    numbers = [tensor for tensor in known_tensors() if tensor.is_floating_point()]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in numbers}
    return sum(storage.nbytes() for storage in storages.values())


def allocated_by(rank, strategy):
    with Mesh(axes_of(strategy, torch.distributed.get_world_size())) as mesh:
        before = live_bytes()
        with build_engine(strategy, cases.build("WideGPT", rank), adamw, mesh) as engine:
            return live_bytes() - before, bytes_by_role(engine.live_tensors())[Role.PARAMETER]


@pytest.mark.parametrize("strategy", ["torch_fsdp2", "torch_tp"])
def test_nothing_keeps_the_plain_parameters_that_torch_has_replaced(pools, strategy):
    for allocated, held in pools(2).run(allocated_by, strategy):
        assert allocated == held


def held_after_a_step(rank, strategy):
    with (
        Mesh(axes_of(strategy, torch.distributed.get_world_size())) as mesh,
        build_engine(strategy, cases.build("WideGPT", rank), adamw, mesh) as engine,
    ):
        for step in range(2):
            one_step(engine, step, rank)
            if step == 0:
                engine.zero_grad()
        held = bytes_by_role(engine.live_tensors())
        shards = shard_rows(engine)
        engine.zero_grad()
        return held, shards, bytes_by_role(engine.live_tensors())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_by_role_and_pieces_follow_the_formulas(pools, strategy):
    num_ranks = 3
    held = pools(num_ranks).run(held_after_a_step, strategy)
    whole = 8 * NUMEL
    for roles, shards, after in held:
        by_role = {role: sum(row["bytes"] for row in shards if row["role"] is role) for role in Role}
        if strategy == "torch_fsdp2":  # the pieces' storages are padded, and so are those the gradients arrive in
            padded = 8 * sum(padded_numel(param, num_ranks) for param in PARAMS.values()) // num_ranks
            assert roles[Role.PARAMETER] == roles[Role.GRADIENT] == padded
            assert by_role[Role.PARAMETER] == by_role[Role.GRADIENT] <= padded
        else:
            assert by_role[Role.PARAMETER] == roles[Role.PARAMETER]
            assert by_role[Role.GRADIENT] == roles[Role.GRADIENT]
        assert by_role[Role.OPTIMIZER_STATE] == roles[Role.OPTIMIZER_STATE]
        assert after[Role.GRADIENT] == 0
        assert after[Role.COMMUNICATION_BUFFER] == (whole if strategy in ("torch_ddp", "torch_zero1") else 0)
        assert roles[Role.GATHERED_PARAMETER] == roles[Role.COMMUNICATION_BUFFER] == 0
    if strategy in ("torch_ddp", "torch_zero1"):
        assert all(roles[Role.PARAMETER] == roles[Role.GRADIENT] == whole for roles, _, _ in held)
    states = [roles[Role.OPTIMIZER_STATE] for roles, _, _ in held]
    if strategy == "torch_ddp":
        assert states == [2 * whole] * num_ranks
    if strategy in ("torch_zero1", "torch_fsdp2"):
        assert sum(states) == 2 * whole
    for name, param in PARAMS.items():  # the pieces cover it once
        spread = sorted({
            (row["start"], row["stop"])
            for _, shards, _ in held for row in shards
            if row["parameter"] == name and row["role"] is Role.OPTIMIZER_STATE
        })  # fmt: skip
        assert spread[0][0] == 0
        assert spread[-1][1] == param.numel()
        assert [start for start, _ in spread[1:]] == [stop for _, stop in spread[:-1]], name


def refusals(rank):
    """Messages of what a peer cannot do."""
    found = []

    def refused(kind, call):
        with pytest.raises(kind) as error:
            call()
        found.append(str(error.value))

    with Mesh({"data": 2}, link=Link.parse("1Gbps,10us")) as mesh:
        refused(ValueError, lambda: build_engine("torch_ddp", cases.build("MLP"), adamw, mesh))
    refused(ValueError, lambda: build_engine("torch_ddp", cases.build("MLP"), adamw))
    with Mesh({"data": 1}, ranks=[rank]) as mesh:
        refused(ValueError, lambda: build_engine("torch_fsdp2", cases.build("MLP"), adamw, mesh))
    with Mesh({"data": 2}) as mesh:
        refused(ValueError, lambda: build_engine("torch_tp", cases.build("WideGPT"), adamw, mesh))
        with build_engine("torch_fsdp2", cases.build("MLP"), adamw, mesh) as engine:
            assert isinstance(engine, Peer)
            for call in (
                lambda: engine.save("nowhere"),
                lambda: engine.load("nowhere"),
                engine.full_optimizer_state_dict,
                lambda: engine.load_full_optimizer_state_dict({}),
                engine.owned,
                engine.resident_params,
            ):
                refused(NotImplementedError, call)
            refused(ValueError, lambda: engine.full_params(keep_changes=True).__enter__())
        with build_engine("torch_zero1", cases.build("MLP"), adamw, mesh) as engine:
            loss = engine(torch.ones(1, 7).double()).sum()
            refused(ValueError, lambda: engine.backward(loss, retain_graph=True))
    with Mesh({"data": 1, "tensor": 2}) as mesh:
        with build_engine("torch_tp", cases.build("SmallGPT"), adamw, mesh) as engine:
            refused(NotImplementedError, engine.full_params)
        for plan in ({"nothing": "row"}, {"0": "diagonal"}, {"1": "column"}, {"4": "column"}):
            refused(ValueError, lambda plan=plan: build_engine("torch_tp", cases.build("MLP"), adamw, mesh, plan=plan))
    return found


def test_what_a_peer_cannot_do_is_an_error_that_names_it(pools):
    starts = (
        "link: ", "mesh: 'torch_ddp' needs one", "mesh: torch's own engines need a mesh over all ranks",
        "mesh: it has {'data': 2}; 'torch_tp' needs an axis 'tensor'", "save: strategy 'torch_fsdp2'",
        "load: strategy", "full_optimizer_state_dict: ", "load_full_optimizer_state_dict: ", "owned: ",
        "resident_params: ", "keep_changes: ", "retain_graph: ", "full_params: ",
        "plan: 'nothing' matches no module", "plan: 'diagonal' of '0' is not one of column, row",
        "plan: '1' is a Tanh", "plan: 5 features of '4' do not divide among 2 ranks",
    )  # fmt: skip
    for messages in pools(2).run(refusals):
        for message, start in zip(messages, starts, strict=True):
            assert message.startswith(start), message
