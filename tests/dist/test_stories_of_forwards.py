"""Forwards between the planned moments of a step: evaluations, other depths, frozen parts, derivatives inside them."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.dist import cases
from tests.dist.every_engine import KINDS, SHARDED, WHOLE, momentum
from tests.dist.nasty import Block, Deep, EveryPartReentrant
from tests.dist.telling import Stories

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
]
STORIES = Stories()
story = STORIES.story
ON = (*KINDS, "fsdp-shard_grad_op")  # what stays gathered after forward


def of_depth(user, step, depth):
    x, y = user.rows(step)
    return cases.loss_of(user(x, depth=depth), y)


deep = functools.partial(story, model=Deep, optimizer=momentum)


@deep(on=ON)
def evaluate_before_the_step(user):
    """Evaluation, an early exit and a forward that no backward follows, between backward and step."""
    outputs = []
    for step in range(3):
        user.go_back(step)
        with torch.no_grad():
            outputs += [user(user.rows(10 + step)[0], depth=depth) for depth in (3, 1)]
        of_depth(user, 20 + step, 2)
        user.step_and_clear()
        with torch.inference_mode():
            outputs.append(user(user.rows(30 + step)[0]).clone())
    return outputs


@deep()
def other_depths(user):
    """Also before the backward of an earlier one."""
    for step, depth in enumerate([3, 1, 2, 0, 3]):
        loss = of_depth(user, step, depth)
        with torch.no_grad():
            of_depth(user, step, 3 - depth)
        user.backward(loss)
        user.step_and_clear()


@deep()
def thawed_between_steps(user):
    """Frozen, thawed and frozen again, in every moment of a step."""
    block = user.module.blocks[1]
    for step in range(4):
        block.requires_grad_(step % 2 == 1)
        user.go_back(step)
        if step == 1:
            block.requires_grad_(False)  # its gradient is there, and is stepped
        user.step_and_clear()
    block.requires_grad_(True)


@deep(on=ON)
def frozen_between_forward_and_backward(user):
    """Autograd calls the hooks of what was frozen meanwhile, and accumulates nothing."""
    for step, names in enumerate((["blocks.1"], ["leave", "enter"], [])):
        loss = user.loss(step)
        for name in names:
            user.module.get_submodule(name).requires_grad_(False)
        user.backward(loss)
        user.step_and_clear()
        user.module.requires_grad_(True)


@deep(on=ON)
def plain_backwards(user):
    """``loss.backward()`` of two forwards, of their sum, and one more before ``zero_grad()``."""
    first, second = user.loss(0), of_depth(user, 1, 2)
    first.backward()
    second.backward()
    user.step()
    (user.loss(2) + of_depth(user, 3, 1)).backward()
    user.step_and_clear()
    user.loss(4).backward()
    user.zero_grad()
    user.loss(5).backward()
    user.step()


@deep()
def the_gradient_of_the_input_is_penalised(user):
    """``torch.autograd.grad`` passes through the module and leaves no gradients in it."""
    x, y = user.rows(0)
    output = user(x.requires_grad_())
    torch.autograd.grad(output.square().sum(), x, retain_graph=True)
    with torch.no_grad():
        evaluated = user(user.rows(1)[0])
    user.backward(cases.loss_of(output, y))
    user.step()
    return [evaluated]


@deep()
def inference_between_forward_and_backward(user):
    for step, plain in enumerate((False, True, False)):
        loss = user.loss(step)
        with torch.inference_mode():
            user.loss(step + 1)
        loss.backward() if plain else user.backward(loss)
        with torch.inference_mode():
            user.loss(step)
        user.step_and_clear()


@story(on=ON, instead=None)
def a_parameter_says_whether_it_trains_wherever_that_was_changed(user):
    for at_rest, inside in ((False, True), (True, False), (True, False), (False, True)):
        user.module[4].weight.requires_grad_(at_rest)
        with user.full_params() as module:
            assert module[4].weight.requires_grad is at_rest
            module[4].weight.requires_grad_(inside)
        assert user.module[4].weight.requires_grad is inside


# Reentrant checkpointing.


class CheckpointedBlock(Block):
    """Reentrant checkpointing of a part of it, and of the same part once more."""

    def forward(self, x):
        for _ in range(2):
            x = x + checkpoint(self.inner, torch.tanh(x), use_reentrant=True)
        return x


class Reentrant(Deep):
    """Such blocks, one of them used twice in a forward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([CheckpointedBlock() for _ in range(3)])

    def forward(self, x, depth=None):
        x = self.enter(x)
        for block in [*list(self.blocks)[:depth], self.blocks[0]]:
            x = block(x)
        return self.leave(x)


class TiedReentrant(Deep):
    """A weight that belongs to the root, and that reentrant checkpointing inside one of the blocks uses too."""

    def __init__(self):
        super().__init__()
        self.enter.requires_grad_(False)
        self.blocks[-1] = CheckpointedBlock()
        for block in self.blocks:
            block.inner.weight = self.blocks[0].inner.weight


def two_forwards_one_backward(user):
    for step in range(2):
        user.backward(user.loss(2 * step) + user.loss(2 * step + 1))
        user.step_and_clear()


# Gradients that come in parts are right where nothing has been sent by then; else they are refused, on all ranks.
IN_PARTS = (
    *((two_forwards_one_backward, kind, WHOLE) for kind in (Reentrant, TiedReentrant)),
    (plain_backwards, Reentrant, (*WHOLE, "fsdp", "fsdp-shard_grad_op")),
)


for go, kind, refusing in IN_PARTS:
    right = [key for key in ON if key not in refusing]
    # In one bucket all parts are there before it is sent: what only the root uses comes last.
    right += ["bucketed-one", "zero1-one"] if (go, kind) == (two_forwards_one_backward, Reentrant) else []
    STORIES.story(name=f"{kind.__name__}_{go.__name__}", model=kind, on=tuple(right))(go)
    STORIES.story(
        name=f"{kind.__name__}_{go.__name__}_is_refused", model=kind, on=refusing, instead=None,
        refused="use_reentrant=False",
    )(lambda user, go=go: user.refuses(go, user))  # fmt: skip


class NormedBlock(Block):
    """A norm and a layer inside reentrant checkpointing."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return x + checkpoint(lambda x: torch.tanh(self.inner(self.norm(x))), x, use_reentrant=True)


class NormTwice(Deep):
    def __init__(self):
        super().__init__(num_blocks=1)
        self.blocks[0] = NormedBlock()

    def forward(self, x, depth=None):
        return self.leave(self.blocks[0](self.blocks[0](self.enter(x))))


@story(model=NormTwice, on=("fsdp", "fsdp-dim0", "fsdp-shard_grad_op", "zero3"), options={"wrap": ["blocks.*"]})
def a_unit_is_needed_until_its_first_call_has_brought_its_gradients(user):
    user.quietly(0)
    user.train(1)


@story(model=Deep, dtype=torch.float32, instead=None)
def two_forwards_in_one_block_of_autocast(user):
    """Torch keeps there what the first one has cast, which would bring gradients of units that have been sent."""

    def cast(micro_batch):
        with torch.autocast("cpu", torch.bfloat16):
            x, y = (part.float() for part in user.rows(0, micro_batch))
            user.backward(cases.loss_of(user(x), y))

    gradients = []
    for block in (torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext()):
        with block:
            with user.no_sync():
                cast(0)
            cast(1)
        gradients.append(user.full_gradients())
        user.zero_grad()
    torch.testing.assert_close(*gradients, atol=0, rtol=0)


class InsideAndOutside(Deep):
    """A weight inside reentrant checkpointing and, later in forward, outside of it."""

    def __init__(self):
        super().__init__(num_blocks=1)

    def forward(self, x, depth=None):
        x = self.enter(x)
        inner = self.blocks[0].inner
        return self.leave(inner(checkpoint(inner, torch.tanh(x), use_reentrant=True)))


@story(model=InsideAndOutside, on=(*WHOLE, "fsdp", "fsdp-no_shard"), options={"wrap": nn.Linear},
       refused=r"gradient of .*: it comes in parts.*use_reentrant=False", instead=None)  # fmt: skip
def a_part_of_a_gradient_comes_after_the_rest_was_sent(user):
    loss = user.loss(0)
    user.refuses(user.backward, loss)
    user.backward(user.call(user.module.enter, user.rows(0)[0]).sum())
    user.step()


@story(model=Reentrant, on=WHOLE, refused=r"use_reentrant=False|^rank 0 ", instead=None)
def it_comes_in_parts_in_a_plain_backward_of_one_rank(user):
    losses = [user.loss(step) for step in range(2 if user.rank == 0 else 1)]
    with user.refused():
        sum(losses).backward()
    user.engine.data_comms[0].barrier().wait()  # before any verb, which would send what is left of the backward
    user.zero_grad()


class KeepsItsOutput(EveryPartReentrant):
    def forward(self, x):
        self.kept = super().forward(x)
        return x


@story(model=KeepsItsOutput, on=SHARDED, refused=r"engine\.backward\(loss\) instead of loss\.backward\(\)")
def a_plain_backward_comes_through_no_output_to_what_is_computed_again(user):
    user(user.rows(0)[0])
    if user.rank is not None:
        user.refuses(user.module.kept.square().mean().backward)
    user(user.rows(1)[0])
    user.backward(user.module.kept.square().mean())
    user.step()


@story(model=functools.partial(Deep, num_blocks=1), on=("fsdp",), options={"offload": "all"})
def gradients_are_cleared_between_two_forwards_of_one_backward(user):
    first = of_depth(user, 0, 1)
    user.zero_grad()
    user.backward((first + of_depth(user, 1, 1)) / 2)
    user.step()


# What forward returns, and who else computes in it.


class ReturnsItsScale(Deep):
    """Forward returns a parameter itself, as contrastive models do with their temperature."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, depth=None):
        return {"y": super().forward(x, depth), "scale": self.scale, "bias": [self.leave.bias]}


@story(model=ReturnsItsScale, on=ON)
def a_parameter_that_forward_returns_is_used_in_the_loss(user):
    for step in range(3):
        returned = user(user.rows(step)[0])
        loss = (returned["y"] * returned["scale"].exp() + returned["bias"][0]).square().mean()
        loss.backward() if step == 1 else user.backward(loss)
        user.step_and_clear()


def pruned():
    model = cases.build("MLP")
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", amount=0.4)
    return model


def normed():
    model = cases.build("MLP")
    for layer in (model[0], model[2]):
        nn.utils.weight_norm(layer)
    return model


for kind in (pruned, normed):

    @story(name=f"hooks_of_layers_that_are_{kind.__name__}", model=kind, options={"wrap": nn.Linear})
    def hooks_of_layers_compute_weights(user):
        user.train(0, 1, 2)


@story()
def a_gradient_at_the_output_is_no_backward(user):
    """Rank 0 alone asks for it."""
    for step in range(2):
        x, y = user.rows(step)
        output = user(x)
        loss = cases.loss_of(output, y)
        if user.rank == 0:
            torch.autograd.grad(loss, output, retain_graph=True)
        user.backward(loss)
        user.step_and_clear()
    assert user.rank is None or user.num_backwards == 2


# A backward, and torch.func, inside forward.


class Adversarial(nn.Module):
    """Moves its input along the gradient of a loss of its own, whose backward gives parameters gradients too."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)), nn.Linear(7, 5)
        self.scale = 1  # the number of ranks that one process plays, whose means these are
        self.go_back = torch.Tensor.backward

    def forward(self, x):
        x = x.detach().clone().requires_grad_()
        self.go_back(self.body(x).square().sum() / self.scale)
        return self.head(x + self.scale * x.grad)


class Nested(nn.Module):
    """Its forward runs its own forward on other rows, once without a graph and once with."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 7)), nn.Linear(7, 5)
        vars(self)["again"] = self  # and not as a module of its own

    def forward(self, x, is_inner=False):
        if is_inner:
            return self.head(x)
        with torch.no_grad():
            target = self.again(x + 1, True)
        return self.again(x + self.body(x), True) * (1 + target)


class Tangent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7)), nn.Linear(7, 5)

    def forward(self, x):
        return self.head(torch.func.jvp(self.body, (x,), (torch.ones_like(x),))[1])


def rank_by_rank(user):
    user.module.scale = user.num_ranks
    for step in range(2):
        for rank in range(user.num_ranks):
            user.loss_of_rank(rank, step).backward()
        user.step_and_clear()


def by_the_engine(user):
    user.module.go_back = user.backward


def nested_engine(user):
    vars(user.module)["again"] = user.engine


def nested_call(user):
    vars(user.module)["again"] = functools.partial(user.call, user.module.forward)


INSIDE = {
    "a_backward": (Adversarial, lambda user: None),
    "a_backward_of_the_engine": (Adversarial, by_the_engine),
    "the_engine": (Nested, nested_engine),
    "a_call": (Nested, nested_call),
    "a_tangent": (Tangent, lambda user: None),
}
for name, (kind, prepare) in INSIDE.items():
    refusing = ("fsdp",) if kind is Adversarial else ()

    @story(name=f"inside_forward_{name}", model=kind, on=[key for key in KINDS if key not in refusing],
           instead=rank_by_rank)  # fmt: skip
    def inside_forward(user, prepare=prepare):
        prepare(user)
        user.train(0, 1)

    if refusing:

        @story(name=f"inside_forward_{name}_is_refused", model=kind, on=refusing, instead=None,
               refused="backward: it was called inside a forward")  # fmt: skip
        def refused_inside(user, prepare=prepare):
            prepare(user)
            user.refuses(user.go_back, 0)


class Transforms(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 6), nn.Linear(6, 5)
        self.between = torch.tanh

    def forward(self, x):
        return self.last(self.between(self.first(x)))


@story(model=Transforms, on=(*SHARDED, "fsdp-no_shard"), instead=lambda user: user.train(0),
       refused=r"^torch.func: .*write torch.autograd.grad\(.*create_graph=True\)")  # fmt: skip
def a_transform_whose_saved_tensors_nobody_may_replace(user):
    user.module.between = torch.func.grad(lambda hidden: hidden.square().sum())
    with user.refused():
        user.loss(0)
    user.module.between = torch.tanh
    user.train(0)


class CallsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(7, 7), nn.Linear(7, 5)

    def forward(self, x, depth=2):
        if depth:
            return self(x + torch.tanh(self.inner(x)), depth - 1)
        return self.last(x)


@story(model=CallsItself, options={"wrap": "root"})
def a_module_calls_itself(user):
    user.train(0, 1)


test_stories = STORIES.told()
