"""Who clips: the engine, or torch where that is right; else a refusal that says what to write instead."""

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from shardlab.engines.clip import clip_
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from tests.dist import cases
from tests.dist.every_engine import KINDS, PIECES, SHARDED, momentum
from tests.dist.telling import Stories

STORIES = Stories()
story = STORIES.story
WORDS = r"write engine\.clip_grad_norm_\(max_norm\)"


def clipped(user, tensors_of):
    norms = []
    for step in range(3):
        user.go_back(step)
        norms.append(clip_grad_norm_(tensors_of(), 0.05))
        user.step_and_clear()
    assert min(norms) > 0.05
    return {str(step): norm for step, norm in enumerate(norms)}


@story(on=("ddp", "bucketed", "torch_ddp", "torch_zero1"), optimizer=momentum)
def torch_clips_parameters_where_they_are_whole(user):
    return clipped(user, user.module.parameters)


@story(on=("ddp", "bucketed", "fsdp-no_shard"), optimizer=momentum)
def torch_clips_what_is_stepped_where_it_is_whole(user):
    return clipped(user, user.tensors)


def trained_after_a_clip(user):
    user.go_back(0)
    user.clip_grad_norm_(1e-3)
    user.step_and_clear()
    user.train(1)


LOOKS = (
    lambda model: clip_grad_norm_(model.parameters(), 1.0),
    lambda model: clip_grad_norm_(list(model.parameters()), 1.0, foreach=True),
    lambda model: clip_grad_norm_(model[0].parameters(), 1.0),
    lambda model: clip_grad_value_(model.parameters(), 1.0),
    lambda model: get_total_norm([p.grad for p in model.parameters() if p.grad is not None]),
    lambda model: [p.grad.norm() for p in model.parameters() if p.grad is not None],
    lambda model: [p.grad.div_(2) for p in model.parameters() if p.grad is not None],
    lambda model: [p.grad.data.mul_(2) for p in model.parameters() if p.grad is not None],
    lambda model: nn.Module.zero_grad(model, set_to_none=False),
)


@story(on=(*PIECES, "zero2"), refused=r"write engine\.clip_grad_norm_", instead=trained_after_a_clip)
def a_look_at_gradients_that_lie_in_pieces(user):
    user.go_back(0)
    held = bytes_by_role(user.live_tensors())[Role.GRADIENT]
    for look in LOOKS:
        with user.refused():
            look(user.module)
    tensors = user.step_tensors()
    groups = [group["params"] for group in user.optimizer.param_groups]
    for some in (tensors, tensors[:2], tensors.where(lambda name: name.endswith("bias")), *groups):
        with user.refused():
            clip_grad_norm_(some, 1.0)
    numel = sum(param.numel() for param in cases.build("MLP").parameters())
    assert held <= 8 * (numel // (1 if user.name == "zero1" else user.num_ranks) + 10 * user.num_ranks)
    trained_after_a_clip(user)


LOCAL_CLIPS = (
    lambda user: clip_grad_norm_(user.module.parameters(), 1e-3),
    lambda user: clip_grad_value_(user.module.parameters(), 1e-3),
    lambda user: clip_grad_norm_(user.step_tensors(), 1e-3),
    lambda user: clip_grad_norm_(user.optimizer.param_groups[0]["params"], 1e-3),
    lambda user: clip_grad_norm_(user.step_tensors().where(lambda name: "weight" in name), 1e-3),
)
THEN = (
    lambda user: user.step(),
    lambda user: user.clip_grad_norm_(1.0),
    lambda user: user.go_back(1),
    lambda user: (user.quietly(1), user.step()),  # nothing is sent by the first, so all are told by the second
    lambda user: user.loss(1).backward(),
    lambda user: user.full_gradients(),
)


@story(on=(*KINDS, "fsdp-no_shard"), refused=WORDS, instead=lambda user: user.train(0))
def torch_clips_what_no_sync_has_left(user):
    for number, clip in enumerate(LOCAL_CLIPS):
        for place, then in enumerate(THEN):
            if (number + place) % 2:  # beside means that are there already, by turns
                user.go_back(0)
            user.quietly(1)
            with user.refused():
                clip(user)
                then(user)
            user.zero_grad()
    user.train(0)


@story(on=("zero1", "zero2"), dtype=torch.float32, options={"precision": "bf16"}, refused=WORDS, instead=None)
def torch_clips_sums_that_add_up_in_more_bits(user):
    """In the bucket: torch's clipping would find none, and clip nothing."""
    x, y = user.rows(0)
    for _ in range(2):
        with user.no_sync():
            user.backward(cases.loss_of(user(x.float()), y))
        for clip in LOCAL_CLIPS:
            with user.refused():
                clip(user)
    quiet = float(user.clip_grad_norm_(1.0))
    user.zero_grad()
    user.backward(2 * cases.loss_of(user(x.float()), y))
    assert quiet == pytest.approx(float(user.clip_grad_norm_(1.0)), rel=1e-2)


@story(on=SHARDED, refused="engine.clip_grad_norm_", instead=lambda user: user.train(0, 1))
def torch_clips_behind_a_forward_without_backward(user):
    """Such as a discriminator's on what is to be improved next."""
    user.go_back(0)
    user.loss(1)
    with user.refused():
        clip_grad_norm_(user.module.parameters(), 0.01)
    user.step_and_clear()
    user.train(1)


@story(on=PIECES, refused="engine.clip_grad_norm_|it was set or cleared", instead=lambda user: user.train(0, 1))
def after_autograd_grad_torch_s_gradients_are_clipped_or_set(user):
    """It computes gradients and accumulates none."""
    for is_set in (True, False):
        user.go_back(0)
        with user.full_params() as model:
            params = list(model.parameters())
            gradients = torch.autograd.grad(user.loss(1), params)
            if is_set:
                for param, gradient in zip(params, gradients, strict=True):
                    param.grad = gradient
            else:
                with user.refused():
                    clip_grad_norm_(params, 0.01)
        with user.refused(here=is_set):
            user.step()
        user.zero_grad()
    user.train(1)


class KeepsAList(cases.MLP):
    """With its parameters in a list that nobody looks into, from before the engine."""

    def __init__(self):
        super().__init__()
        self.listed = (list(self.parameters()),)


@story(
    model=KeepsAList,
    on=PIECES,
    refused=rf"{WORDS}|it was set or cleared at the parameter",
    instead=lambda user: user.train(0, 1),
)
def a_list_of_parameters_from_before_the_engine_is_clipped_or_cleared(user):
    (params,) = user.module.listed
    for is_cleared in (True, False):
        user.go_back(0)
        if is_cleared:
            for param in params:
                param.grad = None
            with user.refused():
                user.step()
        else:
            with user.refused():
                clip_grad_norm_(params, 0.1)
            user.step()
        user.zero_grad()
        assert all(param.grad is None for param in params)
    user.train(1)
    user.close()
    assert all(param.grad is None for param in params)


test_stories = STORIES.told()


def test_a_frozen_weight_of_8_bits_has_no_part_in_the_norm():
    frozen, param = torch.ones(2).to(torch.float8_e4m3fn), torch.zeros(2, dtype=torch.float64)
    param.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    norm = clip_({(): [frozen, param]}, 1.0, 2.0, torch.device("cpu"))
    assert (norm.item(), norm.dtype) == (5.0, torch.float64)
