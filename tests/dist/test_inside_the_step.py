"""Who writes while the optimizer steps, and what was written where it is seen late: right, or refused on all ranks."""

import contextlib
from functools import partial

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import ShardedOptimizer
from shardlab.launch import current
from tests.dist import cases
from tests.dist.every_engine import ENGINES, assert_states, engine_of
from tests.dist.test_users_code import STEPPED_IN_PIECES, OnRanks, in_one_process, loss_of, on_ranks, sgd, train

PLACES = [(key, 4 if "hybrid" in key else 2) for key in ENGINES]
GATHERED = [place for place in PLACES if place[0].startswith(("zero3", "fsdp"))]
MOVED = [place for place in GATHERED if "no_shard" not in place[0]]  # full parameters are other memory than the pieces
CHANGED = "modified by an inplace operation"
STALE = "pieces were written to.*engine.full_params"


def stepped_twice(engine):
    train(engine, 0)
    train(engine, 1)


def held(engine, *, keeps=True):
    return engine.full_params(keep_changes=keeps)


def second_optimizer_in_a_hook(engine):
    """Its kernels write without raising autograd's version counters."""
    second = torch.optim.AdamW(engine.tensors_of(lambda _: True), lr=0.05, eps=0.1, fused=True)
    engine.optimizer.register_step_post_hook(lambda *_: second.step())
    stepped_twice(engine)


def written_before_the_update(engine, *, assigns):
    with held(engine) as model:

        @torch.no_grad()
        def shrink(*_):
            for param in model.parameters():
                if assigns:
                    param.data = param.data * 0.9
                else:
                    param.mul_(0.9)

        engine.optimizer.register_step_pre_hook(shrink)
        stepped_twice(engine)


def pieces_written_before_the_update(engine):
    @torch.no_grad()
    def shrink(optimizer, *_):
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.mul_(0.9)

    engine.optimizer.register_step_pre_hook(shrink)
    stepped_twice(engine)


@torch.no_grad()
def shrink_pieces(engine):
    for tensor in engine.tensors_of(lambda _: True):
        tensor.mul_(0.9)


def pieces_written_between_forwards(engine):
    train(engine, 0)
    loss_of(engine, 0)
    shrink_pieces(engine)
    if hasattr(engine, "engine") and engine.name in ("zero1", "zero2"):
        engine.step()  # gathers
    train(engine, 1)


STORIES = {
    "second optimizer": second_optimizer_in_a_hook,
    "parameters written": partial(written_before_the_update, assigns=False),
    "parameters assigned": partial(written_before_the_update, assigns=True),
    "pieces written": pieces_written_before_the_update,
    "between forwards": pieces_written_between_forwards,
}


@pytest.mark.parametrize("name", STORIES)
@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_what_is_written_around_an_update_counts(pools, key, num_ranks, name):
    expected = in_one_process(STORIES[name], num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(on_ranks, key, STORIES[name]), expected)


@torch.no_grad()
def write_into_copies(engine):
    for param in engine.module.parameters():
        param.mul_(0.5)


def rounded_written_before_the_update(rank, key):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=sgd, precision="bf16") as engine:
        hook = engine.optimizer.register_step_pre_hook(lambda *_: write_into_copies(engine))
        engine.backward(loss_of(OnRanks(engine), 0))
        with pytest.raises(RuntimeError, match="it is a rounded copy"):
            engine.step()
        hook.remove()
        with pytest.raises(RuntimeError, match="Missing key"):
            engine.load_full_state_dict({})
        with pytest.raises(RuntimeError, match="it is a rounded copy"):
            engine.step()
        engine.load_full_state_dict(cases.build("MLP").state_dict())
        stepped_twice(OnRanks(engine))
    return True


@pytest.mark.parametrize("key", STEPPED_IN_PIECES)
def test_what_a_hook_writes_into_rounded_copies_is_refused_until_it_is_replaced(pools, key):
    assert pools(2).run(rounded_written_before_the_update, key) == [True, True]


def assigned_and_not_loaded(engine, refused=lambda: None):
    train(engine, 0)
    for param in engine.module.parameters():
        param.data = param.data * 0.9
    refused()
    train(engine, 1)


def refused_load(rank, key, path):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=sgd) as engine:

        def load():
            with pytest.raises(ValueError, match="checkpoint"):
                engine.load(path)

        assigned_and_not_loaded(OnRanks(engine), load)
        return engine.full_state_dict()


@pytest.mark.parametrize("key", STEPPED_IN_PIECES)
def test_a_refused_load_leaves_what_was_assigned(pools, tmp_path, key):
    expected = in_one_process(assigned_and_not_loaded, 2, cases.build("MLP"))
    assert_states(pools(2).run(refused_load, key, str(tmp_path)), expected)


def written_while_held(rank, key, keeps):
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        user = OnRanks(engine)
        train(user, 0)
        leaves = pytest.raises(RuntimeError, match=STALE) if keeps else contextlib.nullcontext()
        with leaves, held(engine, keeps=keeps):
            shrink_pieces(user)
            for refused in (lambda: loss_of(user, 0), engine.full_state_dict):
                with pytest.raises(RuntimeError, match=STALE):
                    refused()
        train(user, 1)
        return engine.full_state_dict()


def written_in_between(engine):
    train(engine, 0)
    shrink_pieces(engine)
    train(engine, 1)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("key", "num_ranks"), MOVED)
def test_pieces_written_while_full_parameters_are_held_are_refused_there_and_stay(pools, key, num_ranks, keeps):
    expected = in_one_process(written_in_between, num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(written_while_held, key, keeps), expected)


class Clears(torch.optim.SGD):
    """Clears its gradients itself."""

    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


class Raises(torch.optim.SGD):
    """Raises after the update, and before hooks that follow it."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise KeyError("after the update")


class FusedAndRaises(torch.optim.AdamW):
    """The same, and its kernels write unseen."""

    fails = False

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, fused=True)

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise KeyError("after the update")


def backward_through_old_values(rank, key, how):
    optimizer = {"clears": Clears, "raises": Raises, "fused": FusedAndRaises}.get(how, torch.optim.SGD)
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=partial(optimizer, lr=0.1)) as engine:
        user = OnRanks(engine)
        train(user, 0)
        engine.backward(loss_of(user, 0))
        old = loss_of(user, 1)
        if how == "written":
            shrink_pieces(user)
        elif how == "clears":
            engine.step()
        else:
            engine.optimizer.fails = True
            with pytest.raises(KeyError):
                engine.step()
        with pytest.raises(RuntimeError, match=CHANGED):
            engine.backward(old)
        engine.zero_grad()
        engine.optimizer.fails = False
        engine.step()
        stepped_twice(user)
    return True


@pytest.mark.parametrize("how", ["written", "clears", "raises", "fused"])
@pytest.mark.parametrize(("key", "num_ranks"), GATHERED)
def test_a_backward_through_values_that_are_gone_is_refused(pools, key, num_ranks, how):
    assert pools(num_ranks).run(backward_through_old_values, key, how) == [True] * num_ranks


def step_and_raise(user):
    user.backward(loss_of(user, 1))
    user.optimizer.fails = True
    with pytest.raises(KeyError):
        user.step()
    with pytest.raises(RuntimeError, match=STALE):
        loss_of(user, 2)


def raises_while_held(rank, key, optimizer):
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=partial(optimizer, lr=0.1)) as engine:
        user = OnRanks(engine)
        train(user, 0)
        with pytest.raises(RuntimeError, match=STALE), held(engine):
            step_and_raise(user)
        return engine.full_state_dict()


@pytest.mark.parametrize("optimizer", [Raises, FusedAndRaises])
@pytest.mark.parametrize(("key", "num_ranks"), MOVED)
def test_a_step_that_raises_while_changes_are_kept_is_not_undone(pools, key, num_ranks, optimizer):
    expected = in_one_process(stepped_twice, num_ranks, cases.build("MLP"), partial(optimizer, lr=0.1))
    assert_states(pools(num_ranks).run(raises_while_held, key, optimizer), expected)


class Looks(torch.optim.SGD):
    """Looks at the model in the middle of its step."""

    look = None

    def step(self, closure=None):
        super().step(closure)
        if self.look is not None:
            self.look()


def used_in_the_middle(rank, key):
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=partial(Looks, lr=0.1)) as engine:
        user = OnRanks(engine)
        engine.optimizer.look = lambda: loss_of(user, 0)
        train(user, 0)
        with engine.full_params():
            engine.backward(loss_of(user, 1))
            with pytest.raises(RuntimeError, match=STALE):
                engine.step()
        engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize(("key", "num_ranks"), MOVED)
def test_inside_a_step_what_is_held_is_refused_and_what_is_gathered_is_new(pools, key, num_ranks):
    expected = in_one_process(stepped_twice, num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(used_in_the_middle, key), expected)


def with_a_sharded_optimizer(rank, story):
    with Mesh({"data": 2}) as mesh:
        return stepped_by_a_sharded_optimizer(rank, story, mesh.data)


def stepped_by_a_sharded_optimizer(rank, story, comm):
    model = cases.build("MLP")
    make = FusedAndRaises if story == "fused" else Raises
    optimizer = ShardedOptimizer(model.parameters(), make, comm=comm, lr=0.1, bucket_bytes=256)
    x, y = cases.rows("MLP", 0, 0, 4)
    torch.nn.functional.mse_loss(model(x), y).backward()
    pieces = optimizer.param_groups[0]["params"]
    if story in ("raises", "fused"):
        optimizer.inner.fails = rank == 0
        with pytest.raises(KeyError) if rank == 0 else contextlib.nullcontext():
            optimizer.step()
    elif story == "written":
        with torch.no_grad():
            for piece in pieces:
                piece.mul_(0.9)
        with pytest.raises(RuntimeError, match="pieces were written to"):
            optimizer.step()
        return None
    else:
        for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
            with pytest.raises(RuntimeError, match="clip the gradients of the parameters"):
                clip(pieces, 0.01)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("story", ["raises", "fused", "clipped"])
def test_a_sharded_optimizer_leaves_all_ranks_with_one_model(pools, story):
    model = cases.build("MLP")
    optimizer = (FusedAndRaises if story == "fused" else Raises)(model.parameters(), lr=0.1)
    x, y = cases.rows("MLP", 0, 0, 4)
    torch.nn.functional.mse_loss(model(x), y).backward()
    if story == "clipped":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    assert_states(pools(2).run(with_a_sharded_optimizer, story), model.state_dict())


def test_a_sharded_optimizer_refuses_pieces_that_were_written_to(pools):
    pools(2).run(with_a_sharded_optimizer, "written")


def clipped_by_torch_after_a_forward(rank, key):  # noqa: ARG001
    """No backward follows the forward, such as a discriminator's on what is to be improved next."""
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        user = OnRanks(engine)
        engine.backward(loss_of(user, 0))
        loss_of(user, 1)
        with pytest.raises(RuntimeError, match="engine.clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.01)
        engine.step()
        engine.zero_grad()
        train(user, 1)
        return engine.full_state_dict()


@pytest.mark.parametrize(("key", "num_ranks"), GATHERED)
def test_torchs_clipping_is_refused_behind_a_forward_without_backward(pools, key, num_ranks):
    expected = in_one_process(stepped_twice, num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(clipped_by_torch_after_a_forward, key), expected)


def changed_after_autograd_grad(rank, key, how):  # noqa: ARG001
    """It computes gradients and accumulates none."""
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        user = OnRanks(engine)
        with engine.full_params() as model:
            engine.backward(loss_of(user, 0))
            params = list(model.parameters())
            gradients = torch.autograd.grad(loss_of(user, 1), params)
            if how == "clipped":
                with pytest.raises(RuntimeError, match="engine.clip_grad_norm_"):
                    torch.nn.utils.clip_grad_norm_(params, 0.01)
                engine.step()
            else:
                for param, gradient in zip(params, gradients, strict=True):
                    param.grad = gradient
                with pytest.raises(RuntimeError, match="it was set or cleared at the parameter"):
                    engine.step()
        engine.zero_grad()
        train(user, 1)
        return engine.full_state_dict()


@pytest.mark.parametrize("how", ["clipped", "set"])
@pytest.mark.parametrize(("key", "num_ranks"), [place for place in PLACES if place[0] not in ("ddp", "bucketed")])
def test_after_autograd_grad_torchs_gradients_are_refused_as_before(pools, key, num_ranks, how):
    story = stepped_twice if how == "clipped" else partial(train, step=1)
    expected = in_one_process(story, num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(changed_after_autograd_grad, key, how), expected)
