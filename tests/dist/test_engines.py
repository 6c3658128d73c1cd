"""What every engine promises beside equal losses: bytes, collectives, ownership, freezing, groups, schedulers."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import ShardedOptimizer, build_engine
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from shardlab.trace.observed import wire_bytes
from tests.comm.test_communicator import Log
from tests.dist import cases

STRATEGIES = ("ddp", "bucketed", "zero1", "zero2", "zero3")


def adamw(tensors):
    return torch.optim.AdamW(tensors, lr=1e-2)


def one_step(engine, rank, kind="MLP", step=0):
    num_ranks = engine.comm.num_ranks
    x, y = (cases.own_rows(part, rank) for part in cases.rows(kind, step, 0, num_ranks))
    engine.backward(cases.loss_of(engine(x), y))
    engine.step()


def bytes_and_wire(rank, strategy, num_ranks, dtype):
    log = Log()
    with Mesh({"data": num_ranks}) as mesh:
        model = cases.build("MLP").to(dtype)
        with build_engine(strategy, model, adamw, mesh) as engine, mesh.observed_by(log):
            x, y = (cases.own_rows(part, rank).to(dtype) for part in cases.rows("MLP", 0, 0, num_ranks))
            engine.backward(cases.loss_of(engine(x), y))
            engine.step()
            held = bytes_by_role(engine.live_tensors())
            return held, engine.padding_bytes, [(e.op, wire_bytes(e), e.tag) for e in log.events]


def lines_of_collectives(rank):
    log, lines = Log(), {}
    for strategy in (*STRATEGIES, "fsdp"):
        with Mesh({"data": 2}) as mesh, mesh.observed_by(log):
            with build_engine(strategy, cases.build("MLP"), adamw, mesh) as engine:
                one_step(engine, rank)
            lines[strategy] = {event.source_line for event in log.events}
            log.events.clear()
    return lines


def test_every_collective_names_a_line_of_the_caller(pools):
    for strategy, lines in pools(2).run(lines_of_collectives)[0].items():
        assert all(line.startswith(f"{__file__}:") for line in lines), (strategy, lines)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_bytes_at_rest_and_on_the_wire_are_the_formulas(pools, num_ranks):
    numel = sum(param.numel() for param in cases.build("MLP").parameters())
    for strategy in ("ddp", "bucketed", "zero1", "zero2"):
        results = pools(num_ranks).run(bytes_and_wire, strategy, num_ranks, torch.float32)
        for held, padding, events in results:
            gradients = (4 * numel + padding) // (num_ranks if strategy == "zero2" else 1)
            assert held[Role.PARAMETER] == 4 * numel + padding
            assert held[Role.GRADIENT] == gradients
            assert padding == (-numel % num_ranks) * 4 * strategy.startswith("zero")
            wire = sum(wire for _, wire, _ in events)
            assert wire == pytest.approx(2 * (4 * numel + padding) * (num_ranks - 1) / num_ranks, abs=1e-9)
        states = [held[Role.OPTIMIZER_STATE] for held, _, _ in results]
        if strategy.startswith("zero"):
            assert sum(states) == 8 * numel
            assert max(states) == 8 * -(-numel // num_ranks)
        else:
            assert states == [8 * numel] * num_ranks


def test_collectives_in_order(pools):
    expected = {
        "ddp": [("all_reduce", f"gradient of {n}.{kind}") for n in (0, 2, 4) for kind in ("weight", "bias")],
        "bucketed": [("all_reduce", "gradients of bucket 0")],
        "zero1": [("reduce_scatter", "gradients of bucket 0"), ("all_gather", "parameters of bucket 0")],
        "zero2": [("reduce_scatter", "gradients of bucket 0"), ("all_gather", "parameters of bucket 0")],
    }
    for strategy, collectives in expected.items():
        for _, _, events in pools(2).run(bytes_and_wire, strategy, 2, torch.float32):
            assert [(op, tag) for op, _, tag in events] == collectives


def overlap_order(rank):
    """Issue order against the hooks: the first bucket must leave before the first layer's gradient is there."""
    log = Log()
    seen = []
    with Mesh({"data": 2}) as mesh:
        model = cases.build("MLP")
        model[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(log.events)))
        with build_engine("bucketed", model, adamw, mesh, bucket_bytes=256) as engine, mesh.observed_by(log):
            one_step(engine, rank)
            return seen[0], len(log.events), len(engine.buckets)


def test_buckets_leave_during_backward(pools):
    for before_last_gradient, total, num_buckets in pools(2).run(overlap_order):
        assert total == num_buckets
        assert 0 < before_last_gradient < total


def accumulate(rank, strategy):
    log = Log()
    with Mesh({"data": 2}) as mesh, build_engine(strategy, cases.build("MLP"), adamw, mesh) as engine:
        x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", 0, 0, 2))
        with mesh.observed_by(log):
            with engine.no_sync():
                for _ in range(3):
                    engine.backward(cases.loss_of(engine(x), y))
            inside = [event.op for event in log.events]
            engine.backward(cases.loss_of(engine(x), y))
        return inside, [event.op for event in log.events[len(inside) :]]


def test_no_sync_sends_no_gradient(pools):
    for strategy in STRATEGIES:
        for inside, after in pools(2).run(accumulate, strategy):
            assert inside == ["all_gather"] * (6 if strategy == "zero3" else 0), "ZeRO-3 gathers for each pass"
            assert "reduce_scatter" in after or "all_reduce" in after


def views(rank):
    with Mesh({"data": 2}) as mesh, build_engine("bucketed", cases.build("MLP"), adamw, mesh) as engine:
        addresses = []
        for step in range(3):
            one_step(engine, rank, step=step)
            buffer = engine.buckets[0].buffer
            assert all(
                param.grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
                for param in engine.params.values()
            )
            addresses.append(buffer.data_ptr())
            engine.zero_grad()
        return len(set(addresses))


def test_gradients_are_views_of_one_lasting_bucket(pools):
    assert pools(2).run(views) == [1, 1]


def freeze_and_thaw(rank, strategy, num_ranks):
    with Mesh({"data": num_ranks}) as mesh:
        model = cases.build("Frozen", seed=rank)
        with build_engine(strategy, model, adamw, mesh) as engine:
            for step in range(6):
                toggle(model, step)
                one_step(engine, rank, "Frozen", step)
                engine.zero_grad()
            return engine.full_state_dict()


def toggle(model, step):
    """A frozen weight is thawed, another frozen, and back, in both ways in which people write it."""
    model.first.weight.requires_grad = step in (2, 3)
    model.last.requires_grad_(step != 3)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_and_thawed_mid_run(pools, strategy, num_ranks):
    model = cases.build("Frozen")
    optimizer = adamw(list(model.parameters()))
    for step in range(6):
        toggle(model, step)
        x, y = cases.rows("Frozen", step, 0, num_ranks)
        cases.loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in pools(num_ranks).run(freeze_and_thaw, strategy, num_ranks):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def groups_and_scheduler(rank, strategy, num_ranks):
    def optimizer_fn(tensors):
        is_bias = lambda name: name.endswith("bias")  # noqa: E731
        return torch.optim.AdamW(
            [
                {"params": tensors.where(is_bias), "weight_decay": 0.0},
                {"params": tensors.where(lambda name: not is_bias(name)), "weight_decay": 0.5, "lr": 3e-2},
            ],
            lr=1e-2,
        )

    with Mesh({"data": num_ranks}) as mesh, build_engine(strategy, cases.build("Uneven"), optimizer_fn, mesh) as engine:
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=2, gamma=0.5)
        for step in range(5):
            one_step(engine, rank, "Uneven", step)
            engine.zero_grad()
            scheduler.step()
        engine.learning_rate = 0.25
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        return engine.full_state_dict(), rates


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameter_groups_by_name_and_schedulers(pools, strategy):
    model = cases.build("Uneven")
    biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
    others = [param for name, param in model.named_parameters() if not name.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": biases, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.5, "lr": 3e-2}], lr=1e-2
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(5):
        x, y = cases.rows("Uneven", step, 0, 3)
        cases.loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    for state, rates in pools(3).run(groups_and_scheduler, strategy, 3):
        assert rates == [0.25, 0.25]
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def alone(rank, partition, num_ranks):
    """ShardedOptimizer under gradients averaged by hand."""
    with Mesh({"data": num_ranks}) as mesh:
        model = cases.build("Uneven")
        optimizer = ShardedOptimizer(
            model.named_parameters(), torch.optim.AdamW, comm=mesh.data, partition=partition, lr=1e-2, weight_decay=0.1
        )
        for step in range(5):
            x, y = (cases.own_rows(part, rank) for part in cases.rows("Uneven", step, 0, num_ranks))
            cases.loss_of(model(x), y).backward()
            for param in model.parameters():
                mesh.data.all_reduce(param.grad).wait()
                param.grad.div_(num_ranks)
            optimizer.step()
            optimizer.zero_grad()
        state_bytes = sum(
            value.nbytes for state in optimizer.state.values() for key, value in state.items() if key != "step"
        )
        return model.state_dict(), optimizer.owners(), optimizer.owned(), optimizer.num_steps, state_bytes


def add_group_later(rank):
    with Mesh({"data": 2}) as mesh:
        optimizer = ShardedOptimizer(torch.nn.Linear(3, 3).parameters(), torch.optim.SGD, comm=mesh.data, lr=0.1)
        with pytest.raises(RuntimeError, match="param_group: the layout over ranks is fixed"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


def test_a_sharded_optimizer_takes_no_group_later(pools):
    pools(2).run(add_group_later)


@pytest.mark.parametrize("partition", ["elements", "round_robin", "contiguous", "balanced"])
def test_sharded_optimizer_alone(pools, partition):
    expected = cases.reference("Uneven", "adamw", 3).state
    results = pools(3).run(alone, partition, 3)
    numel = sum(value.numel() for value in expected.values())
    assert sum(result[4] for result in results) == 2 * 8 * numel
    owners = results[0][1]
    assert list(owners) == [name for name, _ in cases.build("Uneven").named_parameters()]
    for rank, (state, same_owners, owned, num_steps, _) in enumerate(results):
        assert same_owners == owners
        assert set(owned) == {name for name, ranks in owners.items() if rank in ranks}
        assert num_steps == 5
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)
    if partition != "elements":
        assert all(len(ranks) == 1 for ranks in owners.values())


def muon_of_weights(tensors):
    weights = tensors.where(lambda name: name.endswith("weight")) if hasattr(tensors, "where") else tensors
    return torch.optim.Muon(weights, lr=1e-2)


WHOLE_TENSOR = {"Adafactor": lambda tensors: torch.optim.Adafactor(tensors, lr=1e-2), "Muon": muon_of_weights}


def whole_tensor_optimizer(rank, strategy, kind, partition):
    model = cases.build("MLP")
    with Mesh({"data": 2}) as mesh:
        try:
            engine = build_engine(strategy, model, WHOLE_TENSOR[kind], mesh, partition=partition)
        except ValueError as error:
            return str(error)
        for step in range(3):
            one_step(engine, rank, step=step)
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("kind", WHOLE_TENSOR)
def test_whole_tensor_optimizers_are_exact_with_whole_parameters(pools, strategy, kind):
    model = cases.build("MLP")
    weights = [param for name, param in model.named_parameters() if kind == "Adafactor" or name.endswith("weight")]
    optimizer = WHOLE_TENSOR[kind](weights)
    for step in range(3):
        x, y = cases.rows("MLP", step, 0, 2)
        cases.loss_of(model(x), y).backward()
        optimizer.step()
        model.zero_grad()
    for state in pools(2).run(whole_tensor_optimizer, strategy, kind, "balanced"):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-8 if kind == "Muon" else 1e-10, rtol=0)


def test_whole_tensor_optimizers_are_refused_on_slices(pools):
    for strategy in ("zero1", "zero2", "zero3"):
        (message, _) = pools(2).run(whole_tensor_optimizer, strategy, "Adafactor", "elements")
        assert message.startswith("partition: Adafactor")
        assert "balanced" in message


def refused_then_taken(rank):
    model = cases.build("MLP")
    with Mesh({"data": 2}) as mesh:
        with pytest.raises(ValueError, match="partition: Adafactor"):
            build_engine("zero1", model, WHOLE_TENSOR["Adafactor"], mesh)
        with build_engine("bucketed", model, adamw, mesh) as other:
            one_step(other, rank)
    return True


def test_a_refused_module_can_be_taken_by_another_engine(pools):
    assert pools(2).run(refused_then_taken) == [True, True]


def left_open(rank, strategy):
    mesh = Mesh({"data": 2})
    model = cases.build("MLP")
    engine = build_engine(strategy, model, adamw, mesh)
    one_step(engine, rank)
    gone = [weakref.ref(it) for it in (engine, model, mesh)]
    del engine
    gc.collect()
    kept = gone[0]() is not None  # by the module, which would train without it
    del mesh, model
    gc.collect()
    return kept, [reference() is None for reference in gone]


@pytest.mark.parametrize("strategy", [*STRATEGIES, "fsdp"])
def test_an_engine_that_is_never_closed_goes_with_its_module(pools, strategy):
    assert pools(2).run(left_open, strategy) == [(True, [True, True, True])] * 2


def forward_alone(rank, strategy):
    model = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    saved = []
    model[1].register_forward_hook(lambda *args: saved.append(weakref.ref(args[-1])))
    with Mesh({"data": 2}) as mesh, build_engine(strategy, model, adamw, mesh) as engine:
        engine(torch.ones(2, 7, dtype=torch.float64))
        gc.collect()
        return saved[0]() is None


@pytest.mark.parametrize("strategy", [*STRATEGIES, "fsdp"])
def test_activations_go_with_an_output_that_is_dropped(pools, strategy):
    assert pools(2).run(forward_alone, strategy) == [True, True]


class Batched(nn.Module):
    """Statistics in buffers, of an integer dtype too."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 5)

    def forward(self, x):
        return self.last(self.norm(x))


def starts_equal(rank, strategy):
    torch.manual_seed(rank)
    model = Batched().double()
    model.norm.running_mean.fill_(rank)
    model.norm.num_batches_tracked.fill_(rank)
    with Mesh({"data": 2}) as mesh, build_engine(strategy, model, adamw, mesh) as engine:
        state = engine.full_state_dict()
        plain = Batched().double()
        plain.load_state_dict(state, strict=True)
        return state


def test_parameters_and_buffers_start_as_rank_0_has_them(pools):
    for strategy in STRATEGIES:
        first, second = pools(2).run(starts_equal, strategy)
        assert first["norm.num_batches_tracked"] == 0
        assert all(torch.equal(first[name], second[name]) for name in first)


def misuse(rank):
    messages = []
    with Mesh({"data": 2}) as mesh:
        model = cases.build("MLP")
        engine = build_engine("bucketed", model, adamw, mesh)
        for call in (
            lambda: build_engine("zero1", model, adamw, mesh),
            lambda: build_engine("zero7", cases.build("MLP"), adamw, mesh),
            lambda: build_engine("ddp", cases.build("MLP"), adamw, mesh, bucket_bytes=1),
            lambda: build_engine("bucketed", cases.build("MLP"), adamw, mesh, bucket_bytes=0),
            lambda: build_engine("zero1", cases.build("MLP"), adamw, mesh, partition="thirds"),
            lambda: build_engine("single", cases.build("MLP"), adamw, mesh),
            lambda: build_engine("ddp", nn.Tanh(), adamw, mesh),
            lambda: engine.clip_grad_norm_(1.0, norm_type=3.0),
            lambda: engine.clip_grad_norm_(0.0),
        ):
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                call()
            messages.append(str(caught.value).partition(":")[0])
        engine.close()
        engine.close()
        x, y = cases.rows("MLP", 0, 0, 2)
        cases.loss_of(model(x), y).backward()
        assert model[0].weight.grad is not None, "after close() the module trains alone"
    return messages


def test_misuse_names_the_field(pools):
    expected = ["model", "strategy", "options", "bucket_bytes", "partition", "mesh", "model", "norm_type", "max_norm"]
    assert pools(2).run(misuse) == [expected] * 2


MAP = (
    "from tests.dist import cases\nfrom shardlab.engines.buckets import build_buckets\n"
    "print([b.names for b in build_buckets(dict(cases.build('SmallGPT').named_parameters()), 3, 2000)])"
)


def test_the_bucket_map_does_not_depend_on_the_hash_seed():
    maps = {
        subprocess.run(
            [sys.executable, "-c", MAP],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(maps) == 1
    assert "blocks.0.attention.q_proj.weight" in maps.pop()
