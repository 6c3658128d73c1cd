"""What else steps, writes and assigns to the pieces that the engine steps: other optimizers, and users by hand."""

import pytest
import torch
from torch import nn

from shardlab.engines.precision import Precision
from tests.dist import cases
from tests.dist.every_engine import KINDS, PIECES, SHARDED, assert_states, engine_of, sgd
from tests.dist.own_optimizers import Assigns
from tests.dist.telling import OnRanks, PlainTorch, Stories
from tests.dist.test_stories_of_clipping import KeepsAList
from tests.dist.test_stories_of_steps import NOT_STEPPED_IN_PIECES, STALE, UNGATHERED, clamp, old_values

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


@story(on=(*KINDS, "fsdp-offload"))
def a_second_optimizer_assigns_first(user):
    with_a_second(user, Assigns(user.tensors(layer_2), lr=0.5))


@story(on=(*NOT_STEPPED_IN_PIECES, "fsdp-offload"))
def a_second_optimizer_assigns_last(user):
    with_a_second(user, Assigns(user.tensors(layer_2), lr=0.5), last=True)


@story()
def a_second_fused_optimizer_steps_in_a_hook(user):
    """Its kernels write without raising autograd's version counters."""
    second = torch.optim.AdamW(user.tensors(), lr=0.05, eps=0.1, fused=True)
    user.optimizer.register_step_post_hook(lambda *_: second.step())
    user.train(0, 1)


@story(on=("zero1",), refused=r"SGD.step\(\).*call it before engine.step\(\)")
def a_second_optimizer_steps_last_and_nobody_gathers(user):
    second = torch.optim.SGD(user.tensors(layer_2), lr=0.5)
    user.go_back(0)
    user.step()
    second.step()
    if user.rank is not None:
        for use in (lambda: user.loss(1), user.full_state_dict):
            with user.refused():
                use()
    user.zero_grad()
    user.step()  # gathers it
    user.loss(1)


@story()
def closed_after_a_second_optimizer(user):
    second = torch.optim.SGD(user.tensors(layer_2), lr=0.5)
    user.go_back(0)
    user.step()
    second.step()
    user.close()


@story(instead=None)
def loaded_over_what_a_second_optimizer_has_stepped(user):
    second = torch.optim.SGD(user.tensors(), lr=0.5)
    user.save(user.directory)
    saved = user.full_state_dict()
    user.train(0)
    user.go_back(1)
    second.step()
    with pytest.raises(ValueError, match="nothing"):
        user.load(user.directory / "nothing")
    user.load(user.directory)
    assert_states([user.full_state_dict()], saved)


def stepped_and_assigned(user):
    second = Assigns(user.tensors(), lr=0.5)
    user.train(0)
    user.go_back(1)
    second.step()


@story(on=PIECES, instead=stepped_and_assigned)
def what_a_second_optimizer_has_assigned_is_there_at_the_end(user):
    stepped_and_assigned(user)
    with pytest.raises(RuntimeError, match="Missing key"):
        user.load_full_state_dict({})
    user.zero_grad()
    user.close()


for bits, options in (("64", {}), ("16", {"precision": Precision(torch.bfloat16)})):

    @story(name=f"loaded_over_what_was_assigned_in_{bits}_bits", on=PIECES, instead=None, options=options)
    def loaded_over_what_was_assigned(user):
        user.save(user.directory)
        saved = user.full_state_dict()
        for load in (lambda: user.load(user.directory), lambda: user.load_full_state_dict(saved)):
            stepped_and_assigned(user)
            load()
            user.zero_grad()
            user.step()  # of nothing
            assert_states([user.full_state_dict()], saved)


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
    user.step()
    user.zero_grad()
    user.close()
    early.step()  # the module is plain again


@story(refused=r"write engine.step\(\)|step with engine.step\(\)", instead=None)
def a_step_inside_backward(user):
    optimizers = {}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    with user.full_params() as model:
        for param in model.parameters():
            optimizers[param] = sgd([param])
            param.register_post_accumulate_grad_hook(step)
    with user.refused():
        user.go_back(0)
    user.zero_grad()


@story(refused=r"inside no_sync\(\); call engine\.finish_gradients\(\) first", instead=None)
def another_optimizer_does_not_wait_for_means(user):
    second = sgd(user.tensors()[:1])
    user.quietly(0)
    with user.refused():
        second.step()
    user.finish_gradients()
    second.step()
    user.step()


@story(on=SHARDED, refused=r"modified by an inplace operation|^SGD.step\(\): .* would be stale", instead=None)
def another_optimizer_steps_between_forward_and_backward(user):
    second = torch.optim.SGD(user.tensors(layer_2), lr=0.5)
    user.train(0)
    user.go_back(1)
    loss = user.loss(2)
    second.step()
    with user.refused():
        user.backward(loss)
    user.zero_grad()
    loss = user.loss(3)
    with user.full_params(keep_changes=True) as model:
        model[2].weight.data = model[2].weight.data * 2
    with user.refused():
        user.backward(loss)
    user.zero_grad()
    with user.full_params(), user.refused():
        second.step()


# By hand.


@torch.no_grad()
def shrink(user):
    for tensor in user.tensors():
        tensor.mul_(0.9)


@story()
def pieces_are_clamped_before_the_step(user):
    user.module[0].requires_grad_(False)
    for step in range(3):
        user.go_back(step)
        clamp(user.optimizer)
        user.step()
        user.zero_grad()


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
        for use in (lambda: user.loss(0), user.full_state_dict, lambda: user.full_params().__enter__()):
            with user.refused():
                use()
        user.step()  # gathers


@story(on=("zero1",), options={"precision": "bf16"}, refused="pieces were written to", instead=None)
def rounded_pieces_are_clamped_last(user):
    user.train(0)
    for use in (user.full_state_dict, user.engine.close):
        clamp(user.optimizer)
        with user.refused():
            use()
        user.step()
    assert max(value.abs().max().item() for value in user.full_state_dict().values()) == pytest.approx(0.1, abs=1e-3)


@torch.no_grad()
def clamp_first_bias(user):
    """It is in the piece of one rank: nothing else tells the other ranks that it was written."""
    return sum(tensor.clamp_(-0.1, 0.1).numel() for tensor in user.tensors(lambda name: name == "0.bias"))


def first_bias_clamped(user):
    user.train(0)
    clamp_first_bias(user)
    user.train(1)


@story(on=("zero1",), refused="pieces were written to", instead=first_bias_clamped)
def one_rank_writes_last(user):
    user.train(0)
    wrote = clamp_first_bias(user)
    with user.refused(here=bool(wrote)):
        user.full_state_dict()
    user.step()
    user.train(1)


@story(on=("zero1",))
def one_rank_writes_beside_what_is_frozen(user):
    user.train(0)
    user.module[2].requires_grad_(False)
    user.go_back(1)
    clamp_first_bias(user)
    user.step()


@story(on=("zero1",), instead=lambda user: user.train(0, 1))
def what_one_rank_has_written_is_loaded_over(user):
    user.train(0)
    state = user.full_state_dict()
    clamp_first_bias(user)
    user.load_full_state_dict(state)
    user.train(1)


def assigned_after_the_step(user):
    user.train(0)
    for tensor in user.tensors():
        tensor.data = tensor.data.clamp(-0.1, 0.1)


@story(on=NOT_STEPPED_IN_PIECES)
def pieces_are_assigned_after_the_step(user):
    assigned_after_the_step(user)
    user.close()


@story(on=("zero1",), refused="pieces were written to", instead=assigned_after_the_step)
def pieces_are_assigned_after_the_step_that_gathers(user):
    assigned_after_the_step(user)
    with user.refused():
        user.engine.close()
    user.step()


@story(on=("zero1", "zero3", "fsdp-offload"), instead=None,
       refused="between forward and backward|pieces were written to")  # fmt: skip
def pieces_are_assigned_between_forward_and_backward(user):
    """A backward through the old values would be right, and one through the new is not."""
    loss = user.loss(0)
    for tensor in user.step_tensors():
        tensor.data = tensor.data * 3
    with user.refused():
        user.backward(loss)
    user.zero_grad()
    user.step()


@story()
def pieces_are_written_between_forwards(user):
    user.train(0)
    user.loss(0)
    shrink(user)
    if user.rank is not None and user.name == "zero1":
        user.step()  # gathers
    user.train(1)


def shrunk_in_between_twice(user):
    for _ in range(2):
        user.train(0)
        shrink(user)
        user.train(1)


@story(on=SHARDED, refused=STALE, instead=shrunk_in_between_twice)
def pieces_are_written_while_full_parameters_are_held(user):
    for keeps in (False, True):
        user.train(0)
        with user.refused(here=keeps), user.full_params(keep_changes=keeps):
            shrink(user)
            for use in (lambda: user.loss(0), user.full_state_dict):
                with user.refused():
                    use()
        user.train(1)


@story(on=SHARDED, refused="modified by an inplace operation", instead=None)
def a_backward_through_pieces_that_were_written(user):
    old_values(user, lambda: shrink(user))


@story(on=PIECES, instead=None,
       refused=r"write model\.get_parameter\('.*'\)\.requires_grad_\(False\)"
       r"|optimizer\.state\[engine\.step_tensors\(\)")  # fmt: skip
def pieces_are_treated_as_parameters(user):
    user.go_back(0)
    piece = user.optimizer.param_groups[0]["params"][0]
    piece.requires_grad_(False)
    with user.refused():
        user.step()
    piece.requires_grad_(True)
    param = next(iter(user.params.values()))
    user.optimizer.state[param] = {}
    with user.refused():
        user.step()
    del user.optimizer.state[param]
    user.step()


@story(refused="steps 1 tensors that it was not given.*needs another engine", instead=lambda user: user.train(0))
def a_parameter_of_after_the_engine_is_added(user):
    user.go_back(0)
    user.module.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    user.optimizer.add_param_group({"params": [user.module.scale]})
    with user.refused():
        user.step()
    user.optimizer.param_groups.pop()
    user.step()
    user.zero_grad()
    del user.module.scale


test_stories = STORIES.told()


def test_one_process_writes_into_the_parameters_themselves(tmp_path):
    alone = PlainTorch(cases.build("MLP"), sgd, 1)
    clamped_after_the_step(alone)
    with engine_of("zero1", 1, cases.build("MLP"), optimizer_fn=sgd) as engine:
        clamped_after_the_step(OnRanks(engine, "", tmp_path))
        assert_states([engine.full_state_dict()], alone.full_state_dict())
