"""What users of plain torch write by habit: right, or refused on every rank with the line to write instead."""

import contextlib
import copy
import gc
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.engines.grad_scaler import GradScaler
from shardlab.launch import current
from shardlab.tensor_parallel import Column, Row, parallelize_module
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from tests.dist import cases
from tests.dist.every_engine import told_of
from tests.dist.test_engines import one_step
from tests.dist.test_in_flight import SETUPS, SHARDED

WORLD_SIZES = (2, 3)
PIECES = ("zero1", "zero2", *SHARDED)
PEERS = ("torch_ddp", "torch_zero1", "torch_fsdp2")
OURS_AND_TORCH_S = SETUPS | {name: (name, {}) for name in PEERS}
STEPS = 3


def engine_of(setup, model, mesh, optimizer="sgd"):
    strategy, options = OURS_AND_TORCH_S[setup]
    return build_engine(strategy, model, cases.OPTIMIZERS[optimizer], mesh, **options)


@contextlib.contextmanager
def trained_by(setup, kind="MLP", optimizer="sgd"):
    with Mesh({"data": current().world_size}) as mesh, engine_of(setup, cases.build(kind), mesh, optimizer) as engine:
        yield engine


def own(kind, step, micro_batch, engine):
    return (
        cases.own_rows(part, engine.data_rank) for part in cases.rows(kind, step, micro_batch, engine.num_data_ranks)
    )


def backward(engine, step, micro_batch=0, kind="MLP"):
    x, y = own(kind, step, micro_batch, engine)
    engine.backward(cases.loss_of(engine(x), y))


# How to forget gradients.

ZEROING = {
    "engine": lambda engine: engine.zero_grad(),
    "model": lambda engine: engine.module.zero_grad(),
    "optimizer": lambda engine: engine.optimizer.zero_grad(),
}


def trained_with_zeroing(rank, setup, way):  # noqa: ARG001
    """Zeroed after every step, after a backward that is not to count, and after one that was not communicated."""
    zero = ZEROING[way]
    with trained_by(setup, "Uneven") as engine:
        for step in range(STEPS):
            backward(engine, step, 1, "Uneven")
            zero(engine)
            with engine.no_sync():
                backward(engine, step, 2, "Uneven")
            zero(engine)
            with engine.no_sync():
                backward(engine, step, 0, "Uneven")
            backward(engine, step, 0, "Uneven")
            engine.step()
            zero(engine)
            held = bytes_by_role(engine.live_tensors())[Role.GRADIENT]
            engine.step()  # of nothing
        return engine.full_state_dict(), held


def one_process(num_ranks, kind="Uneven", weight=2.0):
    model = cases.build(kind)
    optimizer = cases.OPTIMIZERS["sgd"](list(model.parameters()))
    for step in range(STEPS):
        x, y = cases.rows(kind, step, 0, num_ranks)
        (weight * cases.loss_of(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("way", ZEROING)
@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("setup", SETUPS)
def test_every_zero_grad_forgets_all_gradients(pools, setup, num_ranks, way):
    expected = one_process(num_ranks)
    for state, held in pools(num_ranks).run(trained_with_zeroing, setup, way):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)
        if setup not in ("bucketed", "zero1"):  # which keep their buckets
            assert held == 0


KEPT_AS_ZEROS = {
    "engine": lambda engine: engine.zero_grad(set_to_none=False),
    "model": lambda engine: engine.module.zero_grad(set_to_none=False),
    "optimizer": lambda engine: engine.optimizer.zero_grad(set_to_none=False),
}


def kept_as_zeros(rank, setup):  # noqa: ARG001
    states = []
    for zero in KEPT_AS_ZEROS.values():
        with trained_by(setup, "Uneven") as engine:
            for step in range(STEPS):
                backward(engine, step, 0, "Uneven")
                engine.step()
                zero(engine)
                engine.step()  # by momentum alone
                with engine.no_sync():
                    backward(engine, step, 1, "Uneven")
                zero(engine)
            states.append(engine.full_state_dict())
    return states


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("setup", SETUPS)
def test_every_zero_grad_can_keep_gradients_as_zeros(pools, setup, num_ranks):
    model = cases.build("Uneven")
    optimizer = cases.OPTIMIZERS["sgd"](list(model.parameters()))
    for step in range(STEPS):
        for micro_batch in (0, 1):
            x, y = cases.rows("Uneven", step, micro_batch, num_ranks)
            cases.loss_of(model(x), y).backward()
            if micro_batch == 0:
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if micro_batch == 0:
                optimizer.step()
    for states in pools(num_ranks).run(kept_as_zeros, setup):
        for way, state in zip(KEPT_AS_ZEROS, states, strict=True):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0, msg=f"{name} by {way}")


def zeroed_copy(rank, setup):
    """A copy's gradients are its own, and so are the engine's."""
    with trained_by(setup) as engine:
        with engine.full_params() as model:
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        backward(engine, 0)
        for copied in copies:
            x, y = cases.rows("MLP", 0, 0, 2)
            cases.loss_of(copied(x), y).backward()
            assert all(param.grad is not None for param in copied.parameters())
            copied.zero_grad()
            assert all(param.grad is None for param in copied.parameters())
        return float(engine.clip_grad_norm_(1.0))


@pytest.mark.parametrize("setup", SETUPS)
def test_a_copy_of_a_wrapped_module_zeroes_its_own_gradients(pools, setup):
    assert min(pools(2).run(zeroed_copy, setup)) > 0.1


def zeroed_after_close(rank, setup):
    with trained_by(setup) as engine:
        one_step(engine, rank)
        model, optimizer = engine.module, engine.optimizer
        assert "zero_grad" in vars(model)
    assert "zero_grad" not in vars(model) | vars(optimizer)
    x, y = cases.rows("MLP", 0, 0, 1)
    cases.loss_of(model(x), y).backward()
    assert all(param.grad is not None for param in model.parameters())
    norm = clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    return float(norm)


@pytest.mark.parametrize("setup", SETUPS)
def test_after_close_gradients_are_the_module_s_own(pools, setup):
    assert min(pools(2).run(zeroed_after_close, setup)) > 0


def zeroed_in_part(rank, setup):  # noqa: ARG001
    """A submodule's own method, and the loop that some write instead."""

    def by_hand(engine):
        for param in engine.module[0].parameters():
            param.grad = None

    refusals = []
    for zero in (lambda engine: engine.module[0].zero_grad(), by_hand):
        for then in (lambda engine: engine.step(), lambda engine: backward(engine, 1)):
            with trained_by(setup) as engine:
                backward(engine, 0)
                with pytest.raises(
                    RuntimeError, match=r"gradient of '0\.\w+'.*write engine\.zero_grad|engine\.zero_gr"
                ):
                    zero(engine)
                    then(engine)
                engine.zero_grad()
                one_step(engine, engine.data_rank)
                refusals.append(engine.num_steps)
    return refusals


@pytest.mark.parametrize("setup", PIECES)
def test_gradients_forgotten_in_part_are_refused_where_they_lie_in_pieces(pools, setup):
    assert pools(2).run(zeroed_in_part, setup) == [[1] * 4] * 2


# Who steps.


def stepped_directly(rank, setup):
    with trained_by(setup) as engine:
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.ones(()))
        backward(engine, 0)
        for step in (engine.optimizer.step, lambda: scaler.step(engine.optimizer)):
            with pytest.raises(RuntimeError, match=r"engine\.optimizer\.step\(\): .*; write engine\.step\(\)"):
                step()
        engine.step()
        scheduler.step()
        engine.zero_grad()
        one_step(engine, rank, step=1)
        optimizer, state, rate = engine.optimizer, engine.full_state_dict(), engine.learning_rate
        others = []
        if setup not in PEERS:
            others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
            assert all(other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"] for other in others)
            assert len(optimizer.state_dict()["state"]) > 0
    for free in (*others, *(() if setup == "torch_zero1" else (optimizer,))):  # which sends, over a mesh that is closed
        free.zero_grad()
        free.step()
    return state, rate


@pytest.mark.parametrize("setup", OURS_AND_TORCH_S)
def test_only_the_engine_steps(pools, setup):
    model = cases.build("MLP")
    optimizer = cases.OPTIMIZERS["sgd"](list(model.parameters()))
    for step, rate in enumerate((1e-2, 5e-3)):
        optimizer.param_groups[0]["lr"] = rate
        x, y = cases.rows("MLP", step, 0, 2)
        optimizer.zero_grad()
        cases.loss_of(model(x), y).backward()
        optimizer.step()
    for state, rate in pools(2).run(stepped_directly, setup):
        assert rate == 5e-3
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


class Raises(torch.optim.SGD):
    """Fails once in a step."""

    shardlab_looks_at = "element"  # it would fail in the trial that finds this out, too
    failed = False

    def step(self, closure=None):
        if not self.failed:
            self.failed = True
            raise ArithmeticError("once")
        return super().step(closure)


def step_that_raises(rank, setup):
    strategy, options = SETUPS[setup]
    model = cases.build("MLP")
    with (
        Mesh({"data": 2}) as mesh,
        build_engine(strategy, model, lambda tensors: Raises(tensors, lr=0.1), mesh, **options) as engine,
    ):
        backward(engine, 0)
        with pytest.raises(ArithmeticError, match="once"):
            engine.step()
        with pytest.raises(RuntimeError, match=r"write engine\.step\(\)"):
            engine.optimizer.step()
        engine.step()
        return engine.num_steps


@pytest.mark.parametrize("setup", SETUPS)
def test_a_step_that_raised_opens_no_way_round_the_engine(pools, setup):
    assert pools(2).run(step_that_raises, setup) == [1, 1]


class Lookahead(torch.optim.Optimizer):
    """As such wrappers are often written: without ``Optimizer.__init__``, so without torch's hooks, and no copy can be tried."""

    shardlab_looks_at = "element"

    def __init__(self, inner):
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure=None):
        return self.inner.step(closure)


def stepped_by_a_wrapper(rank, setup):
    strategy, options = SETUPS[setup]
    with (
        Mesh({"data": 2}) as mesh,
        build_engine(
            strategy, cases.build("MLP"), lambda tensors: Lookahead(cases.OPTIMIZERS["sgd"](tensors)), mesh, **options
        ) as engine,
    ):
        one_step(engine, rank)
        return engine.full_state_dict()


@pytest.mark.parametrize("setup", ["bucketed", "zero1", "fsdp"])
def test_an_optimizer_without_hooks_trains(pools, setup):
    expected = cases.reference("MLP", "sgd", 2, steps=1)
    for state in pools(2).run(stepped_by_a_wrapper, setup):
        for name, value in expected.state.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


# Who clips.


def clipped_by_torch(rank, setup, way, num_steps=3):  # noqa: ARG001
    norms = []
    with trained_by(setup, "SmallGPT") as engine:
        for step in range(num_steps):
            backward(engine, step, kind="SmallGPT")
            tensors = engine.module.parameters() if way == "parameters" else engine.step_tensors()
            norms.append(float(clip_grad_norm_(tensors, 0.05)))
            engine.step()
            engine.zero_grad()
        return norms, engine.full_state_dict()


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize(
    ("setup", "way"),
    [
        *((setup, way) for setup in ("ddp", "bucketed") for way in ("parameters", "step_tensors")),
        ("fsdp-no_shard", "step_tensors"),
        ("torch_ddp", "parameters"),
        ("torch_zero1", "parameters"),
    ],
)
def test_torch_s_clipping_is_right_where_gradients_are_whole(pools, setup, way, num_ranks):
    expected = cases.reference("SmallGPT", "sgd", num_ranks, steps=3, clip=0.05)
    assert min(expected.norms) > 0.05
    for norms, state in pools(num_ranks).run(clipped_by_torch, setup, way):
        assert norms == pytest.approx(expected.norms, abs=1e-10)
        for name, value in expected.state.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


LOOKS = {
    "clip_grad_norm_": lambda model: clip_grad_norm_(model.parameters(), 1.0),
    "of a list": lambda model: clip_grad_norm_(list(model.parameters()), 1.0, foreach=True),
    "of a submodule": lambda model: clip_grad_norm_(model[0].parameters(), 1.0),
    "clip_grad_value_": lambda model: clip_grad_value_(model.parameters(), 1.0),
    "get_total_norm": lambda model: get_total_norm([p.grad for p in model.parameters() if p.grad is not None]),
    "by hand": lambda model: [p.grad.norm() for p in model.parameters() if p.grad is not None],
    "in place": lambda model: [p.grad.div_(2) for p in model.parameters() if p.grad is not None],
    "data": lambda model: [p.grad.data.mul_(2) for p in model.parameters() if p.grad is not None],
    "zeros": lambda model: nn.Module.zero_grad(model, set_to_none=False),
}


def looked_at(rank, setup):
    with trained_by(setup) as engine:
        backward(engine, 0)
        held = bytes_by_role(engine.live_tensors())[Role.GRADIENT]
        for look in LOOKS.values():
            with pytest.raises(RuntimeError, match=r"gradient of .*write engine\.clip_grad_norm_\(max_norm\)"):
                look(engine.module)
        tensors = engine.step_tensors()
        groups = [group["params"] for group in engine.optimizer.param_groups]
        for some in (tensors, tensors[:2], tensors.where(lambda name: name.endswith("bias")), *groups):
            with pytest.raises(RuntimeError, match=r"engine\.step_tensors\(\): .*; write engine\.clip_grad_norm_"):
                clip_grad_norm_(some, 1.0)
        norm = float(engine.clip_grad_norm_(1e-3))
        engine.step()
        engine.zero_grad()
        one_step(engine, rank, step=1)
        return norm, held, engine.full_state_dict()


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("setup", PIECES)
def test_a_look_at_gradients_that_lie_in_pieces_is_refused(pools, setup, num_ranks):
    model = cases.build("MLP")
    numel = sum(param.numel() for param in model.parameters())
    optimizer = cases.OPTIMIZERS["sgd"](list(model.parameters()))
    for step in range(2):
        x, y = cases.rows("MLP", step, 0, num_ranks)
        optimizer.zero_grad()
        cases.loss_of(model(x), y).backward()
        if step == 0:
            expected = float(clip_grad_norm_(model.parameters(), 1e-3))
        optimizer.step()
    for norm, held, state in pools(num_ranks).run(looked_at, setup):
        assert norm == pytest.approx(expected, abs=1e-10)
        share = 1 if setup == "zero1" else num_ranks
        assert held <= 8 * (numel // share + 10 * num_ranks)  # what stands at the parameters has no bytes
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


# Who clips what no_sync() has left.

WHOLE = tuple(setup for setup in SETUPS if setup not in PIECES)
ROUNDED = {"zero1-bf16": ("zero1", {"precision": "bf16"}), "zero2-bf16": ("zero2", {"precision": "bf16"})}
LOCAL_CLIPS = {
    "clip_grad_norm_": lambda engine: clip_grad_norm_(engine.module.parameters(), 1e-3),
    "clip_grad_value_": lambda engine: clip_grad_value_(engine.module.parameters(), 1e-3),
    "of step_tensors": lambda engine: clip_grad_norm_(engine.step_tensors(), 1e-3),
    "of groups": lambda engine: clip_grad_norm_(engine.optimizer.param_groups[0]["params"], 1e-3),
    "of a choice": lambda engine: clip_grad_norm_(engine.step_tensors().where(lambda name: "weight" in name), 1e-3),
}
THEN = {
    "step": lambda engine: engine.step(),
    "clip": lambda engine: engine.clip_grad_norm_(1.0),
    "backward": lambda engine: backward(engine, 1),
    "quiet backward": lambda engine: quietly_backward(engine, 1),
    "plain backward": lambda engine: plain_backward(engine, 1),
    "full_gradients": lambda engine: engine.full_gradients(),
}


def quietly_backward(engine, step):
    with engine.no_sync():
        backward(engine, step)


def plain_backward(engine, step):
    x, y = own("MLP", step, 0, engine)
    cases.loss_of(engine(x), y).backward()


def clipped_too_early(rank, setup, then):  # noqa: ARG001
    with trained_by(setup) as engine:
        for clip in LOCAL_CLIPS.values():
            for after_means in (False, True):
                if after_means:
                    backward(engine, 0)
                quietly_backward(engine, 1)
                with pytest.raises(RuntimeError, match=r"write engine\.clip_grad_norm_\(max_norm\)"):
                    clip(engine)
                    THEN[then](engine)
                engine.zero_grad()
        assert not engine.step_tensors().are_behind
        one_step(engine, engine.data_rank)
        return engine.full_state_dict()


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("setup", SETUPS)
def test_torch_s_clipping_of_what_no_sync_has_left_is_refused(pools, setup, num_ranks, then):
    expected = cases.reference("MLP", "sgd", num_ranks, steps=1)
    for state in pools(num_ranks).run(clipped_too_early, setup, then):
        for name, value in expected.state.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_clipping_local_sums_alone_is_refused_in_one_process_too_where_means_lie_elsewhere(strategy):
    model = cases.build("MLP")
    with build_engine(strategy, model, cases.OPTIMIZERS["sgd"]) as engine:
        backward(engine, 0)
        quietly_backward(engine, 1)
        with pytest.raises(RuntimeError, match=r"write engine\.clip_grad_norm_\(max_norm\)"):
            clip_grad_norm_(model.parameters(), 1e-3)
            engine.step()
        engine.zero_grad()
        quietly_backward(engine, 0)
        engine.step()
    alone = cases.build("MLP")
    optimizer = cases.OPTIMIZERS["sgd"](alone.parameters())
    x, y = cases.rows("MLP", 0, 0, 1)
    cases.loss_of(alone(x), y).backward()
    optimizer.step()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, atol=1e-10, rtol=0)


def clipped_where_there_is_something(rank, setup):
    """One rank alone has gradients, so it alone refuses."""
    with trained_by(setup) as engine:
        if rank == 1:
            quietly_backward(engine, 0)
            clip_grad_norm_(engine.module.parameters(), 1.0)
            with pytest.raises(RuntimeError, match="changed in place"):
                engine.finish_gradients()
        else:
            clip_grad_norm_(engine.module.parameters(), 1.0)
            with pytest.raises(RuntimeError, match=told_of(1)):
                engine.finish_gradients()
        engine.zero_grad()
        one_step(engine, engine.data_rank)
        return engine.full_state_dict()


@pytest.mark.parametrize("setup", ["ddp", "bucketed", "zero1", "zero2"])
def test_a_refusal_of_local_clipping_on_one_rank_leaves_no_other_waiting(pools, setup):
    expected = cases.reference("MLP", "sgd", 2, steps=1)
    for state in pools(2).run(clipped_where_there_is_something, setup):
        for name, value in expected.state.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def refused_twice(rank, setup):  # noqa: ARG001
    with trained_by(setup) as engine:
        with engine.no_sync():
            backward(engine, 0)
            clip_grad_norm_(engine.module.parameters(), 1e-3)
            with pytest.raises(RuntimeError, match=r"write engine\.clip_grad_norm_\(max_norm\)"):
                plain_backward(engine, 1)
        with pytest.raises(RuntimeError, match=r"write engine\.clip_grad_norm_\(max_norm\)|call engine\.zero_grad\(\)"):
            engine.step()
        engine.zero_grad()
        one_step(engine, engine.data_rank)
        return engine.full_state_dict()


@pytest.mark.parametrize("setup", ["ddp", "bucketed", "zero1", "zero2"])
def test_a_plain_backward_that_was_refused_does_not_accept_what_it_refused(pools, setup):
    expected = cases.reference("MLP", "sgd", 2, steps=1)
    for state in pools(2).run(refused_twice, setup):
        for name, value in expected.state.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def clipped_inside_no_sync(rank, setup):
    """One rank alone changes its sum, and all communicate before they leave no_sync()."""
    with trained_by(setup) as engine:
        with engine.no_sync():
            backward(engine, 0)
            if rank == 0:
                clip_grad_norm_(engine.module.parameters(), 1e-3)
            with pytest.raises(RuntimeError, match="changed in place" if rank == 0 else told_of(0)):
                engine.finish_gradients()
        engine.zero_grad()
        one_step(engine, engine.data_rank)
        return engine.full_state_dict()


@pytest.mark.parametrize("setup", ["ddp", "bucketed", "zero1", "zero2"])
def test_a_refusal_inside_no_sync_leaves_no_other_waiting(pools, setup):
    expected = cases.reference("MLP", "sgd", 2, steps=1)
    for state in pools(2).run(clipped_inside_no_sync, setup):
        for name, value in expected.state.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def rounded_and_clipped_too_early(rank, setup):
    strategy, options = ROUNDED[setup]
    model = cases.build("MLP").float()
    with (
        Mesh({"data": 2}) as mesh,
        build_engine(strategy, model, cases.OPTIMIZERS["sgd"], mesh, **options) as engine,
    ):
        x, y = own("MLP", 0, 0, engine)
        norms = []
        for _ in range(2):
            with engine.no_sync():
                engine.backward(cases.loss_of(engine(x.float()), y))
            for clip in LOCAL_CLIPS.values():
                with contextlib.suppress(RuntimeError):
                    clip(engine)
                    norms.append("was not refused")
        norms.append(float(engine.clip_grad_norm_(1.0)))
        engine.zero_grad()
        engine.backward(2 * cases.loss_of(engine(x.float()), y))
        return [*norms, float(engine.clip_grad_norm_(1.0))]


@pytest.mark.parametrize("setup", ROUNDED)
def test_torch_s_clipping_is_refused_where_local_gradients_add_up_in_more_bits(pools, setup):
    """They add up in the bucket: torch's clipping would find none, and clip nothing."""
    for quiet, at_once in pools(2).run(rounded_and_clipped_too_early, setup):
        assert quiet == pytest.approx(at_once, rel=1e-2)


def local_gradients(rank, setup):  # noqa: ARG001
    """Read, replaced and cleared: the user's own doing, which travels as it is."""
    with trained_by(setup) as engine:
        quietly_backward(engine, 0)
        norm = float(get_total_norm([param.grad for param in engine.module.parameters()]))
        for name, param in engine.module.named_parameters():
            param.grad = param.grad * 2 if name.endswith("bias") else param.grad
            param.grad = None if name == "0.weight" else param.grad
        gradients = engine.full_gradients()
        return norm, gradients


@pytest.mark.parametrize("setup", [*WHOLE[:2], "zero1", "zero2"])
def test_what_no_sync_has_left_may_be_read_replaced_and_cleared(pools, setup):
    norms = []
    for rank, (norm, gradients) in enumerate(pools(2).run(local_gradients, setup)):
        model = cases.build("MLP")
        for share in range(2):
            x, y = (cases.own_rows(part, share) for part in cases.rows("MLP", 0, 0, 2))
            cases.loss_of(model(x), y).backward()
            if share == 0 and rank == 0:
                norms.append((norm, float(get_total_norm([param.grad for param in model.parameters()]))))
        for name, param in model.named_parameters():
            expected = None if name == "0.weight" else param.grad / (1 if name.endswith("bias") else 2)
            if expected is None:
                assert gradients[name] is None
            else:
                torch.testing.assert_close(gradients[name], expected, atol=1e-10, rtol=0)
    assert norms[0][0] == pytest.approx(norms[0][1], abs=1e-10)


def two_losses(rank, setup):
    """Backwards that add to means: by engine.backward, in no_sync, and plain, from a forward before the first."""
    with trained_by(setup, "Unused") as engine:
        x, y = own("Unused", 1, 0, engine)
        first, second = (cases.loss_of(engine(x), y) for _ in range(2))
        engine.backward(first)
        second.backward()
        engine.finish_gradients()
        with engine.no_sync():
            backward(engine, 1, 0, "Unused")
        backward(engine, 1, 0, "Unused")
        penalty = torch.autograd.grad(cases.loss_of(engine(x), y), list(engine.module.first.parameters()))
        engine.step()
        assert all(part.shape == param.shape for part, param in zip(penalty, engine.module.first.parameters()))
        return engine.full_state_dict()


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("setup", ["ddp", "bucketed", "zero1", "zero2"])
def test_a_backward_that_adds_to_means_does_not_meet_what_stands_there(pools, setup, num_ranks):
    model = cases.build("Unused")
    x, y = cases.rows("Unused", 1, 0, num_ranks)
    (4 * cases.loss_of(model(x), y)).backward()
    cases.OPTIMIZERS["sgd"](list(model.parameters())).step()
    for state in pools(num_ranks).run(two_losses, setup):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


BY_HAND = {
    "cleared": lambda grad: None,
    "replaced": lambda grad: grad * 0.5,
    "changed": lambda grad: grad.mul_(0.5),
}


def changed_between_backwards(rank, setup, way, name):  # noqa: ARG001
    with trained_by(setup) as engine:
        backward(engine, 0)
        tensor = engine.step_tensors().by_name(name)
        if tensor.grad is not None:
            tensor.grad = BY_HAND[way](tensor.grad)
        backward(engine, 1)
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("way", BY_HAND)
@pytest.mark.parametrize("setup", SETUPS)
def test_a_mean_that_is_changed_by_hand_stays_changed_when_the_next_is_added(pools, setup, way, num_ranks):
    for name in ("0.weight", "2.bias"):
        model = cases.build("MLP")
        for step in range(2):
            x, y = cases.rows("MLP", step, 0, num_ranks)
            cases.loss_of(model(x), y).backward()
            if step == 0:
                param = model.get_parameter(name)
                param.grad = BY_HAND[way](param.grad)
        cases.OPTIMIZERS["sgd"](list(model.parameters())).step()
        for state in pools(num_ranks).run(changed_between_backwards, setup, way, name):
            for key, value in model.state_dict().items():
                torch.testing.assert_close(state[key], value, atol=1e-10, rtol=0)


# Whose module it is.


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = cases.build("MLP")
        self.head = nn.Linear(5, 5).double()

    def forward(self, x):
        return self.head(self.body(x))


def shares_a_parameter(model):
    other = nn.Linear(7, 16).double()
    other.weight = model.body[0].weight
    return other


def wrapped_round_about(rank, setup):
    said = []
    torch.manual_seed(0)  # engines make parameters equal to those of rank 0, which no rank must see as a change
    with Mesh({"data": 2}) as mesh:
        outer = Outer()
        sharing = shares_a_parameter(outer)
        before = {name: value.clone() for name, value in sharing.state_dict().items()}
        for first, second in ((outer, outer.body), (outer.body, outer), (outer, outer.body[2]), (outer, sharing)):
            with engine_of(setup, first, mesh) as engine:
                kinds = [type(param) for param in second.parameters()]
                for other in ("zero1", "fsdp"):
                    with pytest.raises(ValueError, match=r"^model: .*close\(\) that engine first") as caught:
                        engine_of(other, second, mesh)
                assert [type(param) for param in second.parameters()] == kinds
                said.append(str(caught.value))
                x = torch.ones(2, 7, dtype=torch.float64) * (rank + 1)
                engine.backward(engine(x).square().sum())
                engine.zero_grad()
            with engine_of(setup, second, mesh) as engine:  # free again
                pass
        assert all(torch.equal(value, before[name]) for name, value in sharing.state_dict().items())
    return said


@pytest.mark.parametrize("setup", SETUPS)
def test_a_module_belongs_to_one_engine(pools, setup):
    first, second = pools(2).run(wrapped_round_about, setup)
    assert first == second
    inside, round_about, deep, sharing = first
    assert "it is inside a module that an engine wraps" in inside
    assert "its module 'body' is wrapped by an engine" in round_about
    assert "it is inside a module" in deep
    assert "its parameter 'weight' is also in a module that an engine wraps" in sharing


def peers_round_about(rank, setup):  # noqa: ARG001
    with Mesh({"data": 2}) as mesh:
        outer = Outer()
        with engine_of(setup, outer, mesh):
            for other in ("bucketed", *PEERS):
                with pytest.raises(ValueError, match=r"model: it is inside a module that an engine wraps"):
                    engine_of(other, outer.body, mesh)
        outer = Outer()
        with engine_of("bucketed", outer.body, mesh), pytest.raises(ValueError, match=r"its module 'body' is wrapped"):
            engine_of(setup, outer, mesh)
    return True


@pytest.mark.parametrize("setup", PEERS)
def test_a_module_of_torch_s_engine_belongs_to_it(pools, setup):
    assert pools(2).run(peers_round_about, setup) == [True, True]


def left_behind(rank):  # noqa: ARG001
    """An engine that was never closed and is gone; and copies of what an engine has."""
    with Mesh({"data": 2}) as mesh:
        outer = Outer()
        engine = engine_of("bucketed", outer, mesh)
        body, weight = outer.body, outer.head.weight
        copied = copy.deepcopy(outer.body)
        file = io.BytesIO()
        torch.save({"weight": weight}, file)
        file.seek(0)
        loaded = torch.load(file)["weight"]
        assert torch.equal(loaded, weight)
        with engine_of("zero1", copied, mesh):
            pass
        part = nn.Linear(5, 5).double()
        part.weight = loaded
        with engine_of("zero1", part, mesh):
            pass
        del engine, outer
        gc.collect()
        with engine_of("zero2", body, mesh) as engine:
            return engine.num_steps


def test_neither_a_copy_nor_what_a_lost_engine_leaves_belongs_to_one(pools):
    assert pools(2).run(left_behind) == [0, 0]


# A backward that leaves a graph at the gradients.


def backwards_with_graphs(rank, setup):  # noqa: ARG001
    with trained_by(setup) as engine, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")  # torch tells it once
        for quiet in (True, False):
            x, y = own("MLP", 0, int(quiet), engine)
            with engine.no_sync() if quiet else contextlib.nullcontext():
                cases.loss_of(engine(x), y).backward(create_graph=True)
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("setup", SETUPS)
def test_a_backward_may_leave_a_graph(pools, setup):
    model = cases.build("MLP")
    optimizer = cases.OPTIMIZERS["sgd"](model.parameters())
    for micro_batch in (1, 0):
        x, y = cases.rows("MLP", 0, micro_batch, 2)
        cases.loss_of(model(x), y).backward()
    optimizer.step()
    for state in pools(2).run(backwards_with_graphs, setup):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


# Who clips slices.


@contextlib.contextmanager
def slices_trained_by(strategy, num_data_ranks=1):
    """The two tensor ranks have slices: a norm of slices is not the model's."""
    with Mesh({"data": num_data_ranks, "tensor": 2}) as mesh:
        model = sliceable()
        parallelize_module(model, {"0": Column(), "2": Row()}, mesh["tensor"])
        with build_engine(strategy, model, changes_gradients, mesh) as engine:
            yield engine


def changes_gradients(tensors):
    return torch.optim.SGD(tensors, lr=0.01, momentum=0.9, nesterov=True, foreach=True)


def sliceable():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()


def loss_of_step(model, step):
    return model(torch.full((2, 4), step + 1.0).double()).square().sum()


def slices_clipped_too_early(rank, strategy):  # noqa: ARG001
    with slices_trained_by(strategy) as engine:
        with engine.no_sync():
            engine.backward(loss_of_step(engine, 0))
        with pytest.raises(RuntimeError, match=r"write engine\.clip_grad_norm_"):
            clip_grad_norm_(engine.module.parameters(), 1e-3)
            engine.step()
    return True


@pytest.mark.parametrize("strategy", ["ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp"])
def test_clipping_of_slices_that_no_sync_has_left_is_refused(pools, strategy):
    assert all(pools(2).run(slices_clipped_too_early, strategy))


AFTER_MEANS = {
    "step": lambda engine: engine.step(),
    "backward": lambda engine: engine.backward(loss_of_step(engine, 1)),
    "plain backward": lambda engine: loss_of_step(engine, 1).backward(),
    "scaled step": lambda engine: GradScaler(init_scale=1.0).step(engine),
    "clip": lambda engine: engine.clip_grad_norm_(1.0),
}


def slices_clipped(rank, strategy):  # noqa: ARG001
    with slices_trained_by(strategy) as engine:
        for then in AFTER_MEANS.values():
            for clip in ("clip_grad_norm_", "of a choice"):
                engine.backward(loss_of_step(engine, 0))
                with pytest.raises(RuntimeError, match=r"write engine\.clip_grad_norm_\(max_norm\)"):
                    LOCAL_CLIPS[clip](engine)
                    then(engine)
                engine.zero_grad()
        engine.backward(loss_of_step(engine, 0))
        engine.step()
        return engine.full_state_dict()


WITH_SLICES = ("single", "ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp")


@pytest.mark.parametrize("strategy", WITH_SLICES)
def test_torch_s_clipping_of_slices_is_refused(pools, strategy):
    model = sliceable()
    optimizer = changes_gradients(model.parameters())
    loss_of_step(model, 0).backward()
    optimizer.step()
    for state in pools(2).run(slices_clipped, strategy):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def halved(engine):
    for tensor in engine.step_tensors():
        tensor.grad = tensor.grad * 0.5


def zeroed_first(engine):
    engine.zero_grad(set_to_none=False)
    engine.backward(loss_of_step(engine, 1))


def zeroed_while_local(engine):
    engine.zero_grad()
    with engine.no_sync():
        engine.backward(loss_of_step(engine, 0))
    engine.zero_grad(set_to_none=False)


def zeroed_by_hand(engine):
    engine.step()
    for tensor in engine.step_tensors():
        tensor.grad.zero_()
    engine.backward(loss_of_step(engine, 1))


def zeroed_by_hand_alone(model, optimizer):
    optimizer.step()
    model.zero_grad()
    loss_of_step(model, 1).backward()


def stepped_first(engine):
    engine.step()
    engine.backward(loss_of_step(engine, 1))


def stepped_first_alone(model, optimizer):
    optimizer.step()
    loss_of_step(model, 1).backward()


# What each does to slices, and what it does to the model's gradients in one process.
ALLOWED = {
    "the engine's clipping": (
        lambda engine: engine.clip_grad_norm_(1e-3),
        lambda model, _: clip_grad_norm_(model.parameters(), 1e-3),
    ),
    "out of place": (halved, lambda model, _: [p.grad.mul_(0.5) for p in model.parameters()]),
    "zeros": (zeroed_first, lambda model, _: (model.zero_grad(), loss_of_step(model, 1).backward())),
    "zeros of local sums": (zeroed_while_local, lambda model, _: model.zero_grad(set_to_none=False)),
    "zeros by hand after a step": (zeroed_by_hand, zeroed_by_hand_alone),
    "a step that changes them": (stepped_first, stepped_first_alone),
    "unscaled": (
        lambda engine: GradScaler(init_scale=2.0).unscale_(engine),
        lambda model, _: [p.grad.div_(2) for p in model.parameters()],
    ),
}


def slices_changed(rank, strategy, way):  # noqa: ARG001
    with slices_trained_by(strategy) as engine:
        for _ in range(2):
            engine.backward(loss_of_step(engine, 0))
            ALLOWED[way][0](engine)
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize("way", ALLOWED)
@pytest.mark.parametrize("strategy", WITH_SLICES)
def test_what_may_be_done_to_gradients_of_slices(pools, strategy, way):
    model = sliceable()
    optimizer = changes_gradients(model.parameters())
    for _ in range(2):
        loss_of_step(model, 0).backward()
        ALLOWED[way][1](model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    for state in pools(2).run(slices_changed, strategy, way):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def whole_ones_clipped(rank, strategy):  # noqa: ARG001
    with slices_trained_by(strategy) as engine:
        engine.backward(loss_of_step(engine, 0))
        norm = clip_grad_norm_([param for name, param in engine.params.items() if name not in engine.slices], 1e-3)
        engine.step()
        return norm


@pytest.mark.parametrize("strategy", ["single", "ddp", "bucketed"])
def test_torch_clips_what_every_tensor_rank_has_whole(pools, strategy):
    model = sliceable()
    loss_of_step(model, 0).backward()
    expected = float(model[2].bias.grad.norm())
    for norm in pools(2).run(whole_ones_clipped, strategy):
        assert float(norm) == pytest.approx(expected, abs=1e-10)


def quiet_plain_backward(engine):
    with engine.no_sync():
        loss_of_step(engine, 1).backward()


ON_ONE_DATA_RANK = {
    "backward": AFTER_MEANS["backward"],
    "plain backward": AFTER_MEANS["plain backward"],
    "quiet plain backward": quiet_plain_backward,
}


def changed_on_one_data_rank(rank, strategy, then):  # noqa: ARG001
    with slices_trained_by(strategy, num_data_ranks=2) as engine:
        engine.backward(loss_of_step(engine, 0))
        if engine.data_rank == 0:
            for param in engine.module.parameters():
                param.grad.mul_(0.5)
        is_told = engine.data_rank == 0 or not then.startswith("quiet")
        text = "it is a slice" if engine.data_rank == 0 else told_of(0)
        with pytest.raises(RuntimeError, match=text) if is_told else contextlib.nullcontext():
            ON_ONE_DATA_RANK[then](engine)
        engine.zero_grad()
        for _ in range(2):
            engine.backward(loss_of_step(engine, 0))
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize("then", ON_ONE_DATA_RANK)
@pytest.mark.parametrize("strategy", ["ddp", "bucketed"])
def test_a_refusal_of_clipped_slices_on_one_data_rank_leaves_no_other_waiting(pools, strategy, then):
    model = sliceable()
    optimizer = changes_gradients(model.parameters())
    for _ in range(2):
        loss_of_step(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in pools(4).run(changed_on_one_data_rank, strategy, then):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)
