"""Gradients that users clear, read, replace, scale and add up, between backward and step, as one process does."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn

from shardlab.engines import build_engine
from shardlab.engines.precision import Precision
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from tests.dist import cases
from tests.dist.every_engine import KINDS, PIECES, WHOLE, momentum, sgd
from tests.dist.telling import Stories

STORIES = Stories()
story = STORIES.story


def held(user):
    """Bytes of gradients."""
    return 0 if user.rank is None else bytes_by_role(user.live_tensors())[Role.GRADIENT]


# How to forget them.

ZEROING = (
    lambda user, **how: user.zero_grad(**how),
    lambda user, **how: user.module.zero_grad(**how),
    lambda user, **how: user.optimizer.zero_grad(**how),
)


@story(model="Uneven", optimizer=momentum, on=(*KINDS, "zero2", "fsdp-no_shard"))
def every_zero_grad_forgets_all(user):
    """After a step, after a backward that is not to count, and after one that was not communicated."""
    for step, zero in enumerate(ZEROING):
        user.go_back(step, 1)
        zero(user)
        user.quietly(step, 2)
        zero(user)
        user.quietly(step)
        user.go_back(step)
        user.step()
        zero(user)
        if user.rank is not None and user.name not in ("bucketed", "zero1"):  # which keep their buckets
            assert held(user) == 0
        user.step()  # of nothing


def cleared_by_hand(module):
    for param in module.parameters():
        param.grad = None


@story(
    on=PIECES,
    refused=r"gradient of '0\.\w+'.*write engine\.zero_grad|engine\.zero_gr",
    instead=lambda user: user.train(1, 2),
)
def some_of_them_are_forgotten(user):
    for zero in (nn.Module.zero_grad, cleared_by_hand):
        for then in (user.step, lambda: user.go_back(1)):
            user.go_back(0)
            with user.refused():
                zero(user.module[0])
                then()
            user.zero_grad()
    user.train(1, 2)


@story(on=(*PIECES, "zero2"), instead=lambda user: user.train(2, 3), refused=r"cleared or replaced.*engine\.zero_grad")
def sums_are_replaced_while_their_means_lie_elsewhere(user):
    for make in (lambda param: None, torch.ones_like):
        user.go_back(0)
        user.quietly(1)
        with user.full_params() as module:
            for param in module.parameters():
                param.grad = make(param)
        user.refuses(user.step)
    user.train(2, 3)


@story(
    name="the_same_in_more_bits", on=("zero2",), instead=lambda user: user.train(2, 3),
    refused=r"cleared or replaced.*engine\.zero_grad", options={"precision": Precision(reduce=torch.float64)},
)  # fmt: skip
def in_more_bits(user):
    sums_are_replaced_while_their_means_lie_elsewhere(user)


@story(on=("zero1", "zero2"), dtype=torch.float32, options={"precision": "bf16"}, instead=None,
       refused="cleared or replaced at the parameter, and it is elsewhere")  # fmt: skip
def a_submodule_s_sums_in_more_bits_are_cleared(user):
    with user.no_sync():
        user.backward(user(user.rows(0)[0].float()).sum())
    user.module[0].zero_grad()
    user.refuses(user.finish_gradients)


# Adding up.


BY_HAND = {"cleared": lambda grad: None, "replaced": lambda grad: grad * 0.5, "changed": lambda grad: grad.mul_(0.5)}


@story(optimizer=momentum, on=(*KINDS, "zero2", "fsdp-no_shard"))
def means_are_changed_by_hand_before_the_next_is_added(user):
    for change in BY_HAND.values():
        for name in ("0.weight", "2.bias"):
            user.go_back(0)
            for tensor in user.tensors(lambda known, name=name: known == name):
                if tensor.grad is not None:
                    tensor.grad = change(tensor.grad)
            user.train(1)


@story()
def a_backward_leaves_a_graph(user):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")  # torch tells it once
        for quiet in (True, False):
            with user.no_sync() if quiet else contextlib.nullcontext():
                user.loss(0, int(quiet)).backward(create_graph=True)
    user.step()


@story(on=WHOLE)
def sums_are_read_replaced_and_cleared(user):
    """The user's own doing, which travels as it is."""
    user.quietly(0)
    assert float(nn.utils.get_total_norm([param.grad for param in user.module.parameters()])) > 0
    for name, param in user.module.named_parameters():
        param.grad = param.grad * 2 if name.endswith("bias") else param.grad
        param.grad = None if name == "0.weight" else param.grad
    found = user.full_gradients()
    assert found["0.weight"] is None
    user.step()
    return {name: gradient for name, gradient in found.items() if gradient is not None}


# Left out by a rank.


def without_rank_1(user):
    for step in range(3):
        sum(user.loss_of_rank(rank, step) for rank in range(user.num_ranks) if step != 1 or rank != 1).backward()
        user.step_and_clear()


for has_forward in (True, False):

    @story(
        name=f"a_rank_leaves_a_backward_out_{has_forward}", model="SmallGPT", optimizer=momentum, num_ranks=3,
        on=("ddp", *WHOLE, "zero2-round_robin", "fsdp-no_shard", *["fsdp-shard_grad_op"] * has_forward),
        instead=without_rank_1,
    )  # fmt: skip
    def a_rank_leaves_a_backward_out(user, has_forward=has_forward):
        """It sends zeros; where forward or backward gathers parameters, all ranks have to call that."""
        for step in range(3):
            is_left_out = step == 1 and user.rank == 1
            loss = user.loss(step) if has_forward or not is_left_out else None
            if not is_left_out:
                user.backward(loss)
            user.step_and_clear()


# Hooks of the user's.


def halved(param):
    param.grad.mul_(0.5)


@story()
def hooks_change_gradients(user):
    """Registered after the engine's own, which take gradients away."""
    with user.full_params() as model:
        hooks = [param.register_post_accumulate_grad_hook(halved) for param in model.parameters()]
    user.train(0, 1)
    hooks[0].remove()
    user.train(2)


@story()
def what_is_cleared_is_refused_no_more(user):
    for zero in (lambda user: cleared_by_hand(user.module), *ZEROING):
        user.quietly(0)
        nn.utils.clip_grad_norm_(user.module.parameters(), 0.01)
        user.quietly(1)
        zero(user)
        user.train(2)


test_stories = STORIES.told()


@pytest.mark.parametrize("after_means", [False, True])
@pytest.mark.parametrize("strategy", ["single", "zero1", "zero2"])
def test_one_process_may_clip_what_no_sync_has_left_unless_means_lie_elsewhere(strategy, after_means):
    model = cases.build("MLP")
    x, y = cases.rows("MLP", 0, 0, 1)
    plain = copy.deepcopy(model)
    with build_engine(strategy, model, sgd) as engine:
        for backward in [engine.backward] * after_means + [engine.no_sync()(engine.backward)]:
            backward(cases.loss_of(engine(x), y))
            cases.loss_of(plain(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
        if after_means and strategy != "single":
            with pytest.raises(RuntimeError, match=r"write engine\.clip_grad_norm_\(max_norm\)"):
                engine.step()
        else:
            engine.step()
            for param, alone in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(param, alone - 0.1 * alone.grad, rtol=0, atol=1e-12)
