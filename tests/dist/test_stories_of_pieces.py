"""What else steps, writes and assigns to the pieces that the engine steps: other optimizers, and users by hand."""

import pytest
import torch
from torch import nn

from tests.dist.every_engine import PIECES, SHARDED, sgd
from tests.dist.telling import Stories
from tests.dist.test_stories_of_clipping import KeepsAList
from tests.dist.test_stories_of_steps import ASSIGNED, NOT_STEPPED_IN_PIECES, UNGATHERED, clamp, old_values

INSIDE = r"written to inside full_params\(\)"
STORIES = Stories()
story = STORIES.story


def layer_2(name):
    return name.startswith("2.")


# Other optimizers.


def with_a_second(user, second, *, last=False):
    for step in range(3):
        user.go_back(step)
        for optimizer in (user, second) if last else (second, user):
            optimizer.step()
        user.zero_grad()


@story()
def a_second_optimizer_steps_first(user):
    """A step of nothing by the engine's own gathers what the second has stepped."""
    with_a_second(user, torch.optim.SGD(user.tensors(layer_2), lr=0.5))


@story()
def a_second_fused_optimizer_steps_in_a_hook(user):
    """Its kernels write without raising autograd's version counters."""
    second = torch.optim.AdamW(user.tensors(), lr=0.05, eps=0.1, fused=True)
    user.optimizer.register_step_post_hook(lambda *_: second.step())
    user.train(0, 1)


for fused in (False, True):

    @story(name=f"a_second_optimizer_steps_last_and_nobody_gathers_{fused}", on=("zero1",), refused=UNGATHERED)
    def a_second_optimizer_steps_last_and_nobody_gathers(user, fused=fused):
        second = torch.optim.Adam(user.tensors(layer_2), lr=0.1, fused=fused)
        user.go_back(0)
        user.step()
        second.step()
        if user.rank is not None:
            with user.refused():
                user.full_state_dict()
            with user.refused():
                user.go_back(1)
        user.zero_grad()
        user.step()  # gathers it
        user.loss(1)


@story(
    model=KeepsAList, on=PIECES, refused=r"it steps the module's .*write engine.step\(\)",
    instead=lambda user: user.train(0),
)  # fmt: skip
def an_optimizer_over_the_module_s_parameters_steps(user):
    early = sgd(user.module.listed[0])
    late = sgd(user.module.parameters())  # over placeholders, where parameters are sharded
    user.go_back(0)
    for other in (early, late):
        with user.refused():
            other.step()
    user.step_and_clear()
    user.close()
    early.step()  # the module is plain again


@story(refused=r"write engine.step\(\)", instead=None)
def a_step_inside_backward(user):
    optimizers = {}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    with user.full_params() as model:
        for param in model.parameters():
            optimizers[param] = sgd([param])
            param.register_post_accumulate_grad_hook(step)
    user.refuses(user.go_back, 0)


@story(refused=r"inside no_sync\(\); write engine\.step\(\), or call engine\.finish_gradients\(\) first", instead=None)
def another_optimizer_does_not_wait_for_means(user):
    second = sgd(user.tensors()[:1])
    user.quietly(0)
    with user.refused():
        second.step()
    user.finish_gradients()
    second.step()
    user.step()


for fused in (False, True):

    @story(name=f"another_optimizer_steps_between_forward_and_backward_{fused}", on=(*SHARDED, "fsdp-offload"),
           refused=f"modified by an inplace operation|{INSIDE}", instead=None)  # fmt: skip
    def another_optimizer_steps_between_forward_and_backward(user, fused=fused):
        second = torch.optim.Adam(user.tensors(layer_2), lr=0.5, fused=fused)
        user.train(0)
        user.go_back(1)
        loss = user.loss(2)
        second.step()
        user.refuses(user.backward, loss)
        loss = user.loss(3)
        with user.full_params(keep_changes=True) as model:
            model[2].weight.data = model[2].weight.data * 2
        user.refuses(user.backward, loss)
        user.go_back(1)
        with user.full_params():
            second.step()
        user.refuses(user.go_back, 1)


# By hand.


@torch.no_grad()
def shrink(user):
    for tensor in user.tensors():
        tensor.mul_(0.9)


@story(on=("zero1",), refused=UNGATHERED, instead=None)
def pieces_of_what_is_frozen(user):
    user.module[0].requires_grad_(False)
    state = user.full_state_dict()
    for change in (lambda one: one.mul_(0.9), lambda one: setattr(one, "grad", torch.ones_like(one))):
        user.go_back(0)
        for piece in user.tensors(lambda name: name.startswith("0.")):
            change(piece.detach()) if change.__code__.co_names[0] == "mul_" else change(piece)
        with user.refused():
            user.step()
            user.go_back(1)
        user.zero_grad()
        user.load_full_state_dict(state)
    user.train(0)


def clamped_after_the_step(user):
    for step in range(3):
        user.train(step)
        clamp(user.optimizer)
    user.step()


story(on=NOT_STEPPED_IN_PIECES)(clamped_after_the_step)


@story(on=("zero1",), refused=UNGATHERED, instead=clamped_after_the_step)
def pieces_are_clamped_last(user):
    for step in range(3):
        user.train(step)
        clamp(user.optimizer)
        for use in (lambda: user.go_back(0), user.full_state_dict, lambda: user.full_params().__enter__()):
            user.refuses(use)
        user.step()  # gathers


@story(on=("zero1",), refused=UNGATHERED, instead=None)
def pieces_are_clamped_before_an_evaluation(user):
    """Nothing tells the other ranks, and perhaps nothing follows."""
    user.train(0)
    clamp(user.optimizer)
    with pytest.warns(UserWarning, match=UNGATHERED), torch.no_grad():
        user.loss(0)
    with user.refused():
        user.close()


@story(on=("zero1", "zero3", "fsdp-offload"), refused=ASSIGNED, instead=None)
def pieces_are_assigned(user):
    user.train(0)
    loss = user.loss(0)
    for tensor in user.tensors():
        tensor.data = tensor.data * 3
    user.refuses(user.backward, loss)
    with user.refused():
        user.close()


@story()
def pieces_are_written_between_forwards(user):
    user.train(0)
    user.loss(0)
    shrink(user)
    if user.rank is not None and user.name == "zero1":
        user.step()  # gathers
    user.train(1)


@story(on=SHARDED, refused=INSIDE, instead=None)
def pieces_are_written_while_full_parameters_are_held(user):
    for keeps in (False, True):
        user.train(0)
        with user.full_params(keep_changes=keeps):
            shrink(user)
            with user.refused():
                user.full_state_dict()
        user.zero_grad()
        user.refuses(user.go_back, 1)


@story(on=SHARDED, refused="modified by an inplace operation", instead=None)
def a_backward_through_pieces_that_were_written(user):
    old_values(user, lambda: shrink(user))


@story(refused="steps 1 tensors that it was not given.*needs another engine", instead=lambda user: user.train(0))
def a_parameter_of_after_the_engine_is_added(user):
    user.go_back(0)
    user.module.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    user.optimizer.add_param_group({"params": [user.module.scale]})
    with user.refused():
        user.step()
    user.optimizer.param_groups.pop()
    user.zero_grad()
    del user.module.scale
    user.train(0)


test_stories = STORIES.told()
