"""What is overwritten between forward and backward: refused where plain torch refuses, right where it is right."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.dist import cases
from tests.dist.every_engine import KINDS, assert_states, engine_of, momentum, own_batch
from tests.dist.nasty import Deep
from tests.dist.telling import Stories
from tests.dist.test_fsdp import build

REFUSAL = "modified by an inplace operation"
# Where parameters are gathered, their saved values are references.
BY_REFERENCE = ("zero3", "fsdp", "fsdp-dim0", "fsdp-shard_grad_op", "fsdp-no_shard")
STORIES = Stories()
story = STORIES.story
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensor).*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
]


class Calls(nn.Module):
    """Two layers with a function of the user's between them, which gets the first one's output."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.last = nn.Linear(6, 5)
        self.between = None

    def forward(self, x):
        return self.last(self.between(self.first(x)))


class Doubled(torch.autograd.Function):
    """Saves its own output, which the user's in-place function is to find."""

    @staticmethod
    def forward(ctx, x):
        y = 2 * x
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y


def in_place_after(function, hidden):
    hidden = function(hidden)
    hidden.add_(1)
    return hidden


def input_of_square(hidden):
    square = hidden.square()
    hidden.mul_(2)
    return square


def view_of_the_saved(hidden):
    square = hidden.square()
    hidden[0].zero_()
    return square


def below_a_checkpoint(hidden):
    inside = hidden.tanh()
    out = checkpoint(torch.sin, inside, use_reentrant=False)
    inside.add_(1)
    return out


def written_in_a_checkpoint(hidden):
    return checkpoint(partial(in_place_after, torch.exp), hidden, use_reentrant=False)


def written_after_a_checkpoint(hidden):
    out = checkpoint(lambda x: x.sin().tanh(), hidden, use_reentrant=False).tanh()
    out.mul_(2)
    return out


def unneeded(hidden):
    """The sum saves nothing, so overwriting it harms nobody."""
    total = hidden + 1
    total.mul_(3)
    return total


BETWEEN = {
    "sigmoid": torch.sigmoid,
    "tanh": partial(in_place_after, torch.tanh),
    "softmax": partial(in_place_after, partial(torch.softmax, dim=-1)),
    "custom": partial(in_place_after, Doubled.apply),
    "dropout": partial(in_place_after, nn.Dropout(0.0)),
    "relu in place": nn.ReLU(inplace=True),
    "relu in place on a view": lambda hidden: functional.relu_(hidden.view(-1)).view_as(hidden),
    "several in place": nn.Sequential(nn.ReLU(inplace=True), nn.LeakyReLU(inplace=True)),
    **{
        function.__name__: function
        for function in (
            input_of_square,
            view_of_the_saved,
            below_a_checkpoint,
            written_in_a_checkpoint,
            written_after_a_checkpoint,
            unneeded,
        )
    },
}


def write_input(x, output):
    x.mul_(2)


def write_output(x, output):
    output.detach().mul_(2)


def write_nothing(x, output):
    """Backward comes as it should."""


AFTER = {function.__name__: function for function in (write_input, write_output, write_nothing)}


def outcome(forward, backward, x, y, after, state):
    """The parameters after a step, or 'refused'."""
    output = forward(x)
    loss = cases.loss_of(output, y)
    after(x, output)
    try:
        backward(loss)
    except RuntimeError as error:
        assert REFUSAL in str(error), error
        return "refused"
    return state()


def plain_outcome(between, after, num_ranks):
    model = build(Calls)
    model.between = BETWEEN[between]
    optimizer = momentum(list(model.parameters()))

    def state():
        optimizer.step()
        return {name: value.detach() for name, value in model.state_dict().items()}

    x, y = cases.rows("MLP", 0, 0, num_ranks)
    return outcome(model, torch.Tensor.backward, x.clone(), y, AFTER[after], state)


def outcomes(rank, key, num_ranks, todo):
    found = []
    for between, after, checkpointed in todo:
        model = build(Calls)
        model.between = BETWEEN[between]
        with engine_of(key, num_ranks, model, optimizer_fn=momentum) as engine:
            forward = partial(checkpoint, engine, use_reentrant=False) if checkpointed else engine

            def state(engine=engine):
                engine.step()
                return engine.full_state_dict()

            x, y = (part.clone() for part in own_batch(engine))
            found.append(outcome(forward, engine.backward, x, y, AFTER[after], state))
            engine.zero_grad()
    return found


def assert_outcomes(results, expected):
    for found in results:
        for one, other in zip(found, expected, strict=True):
            assert (one == "refused") == (other == "refused")
            if other != "refused":
                assert_states([one], other)


@pytest.mark.parametrize("setup", ["zero3", "fsdp"])
def test_overwriting_what_is_saved_is_refused_where_torch_refuses(pools, setup):
    num_ranks = 2
    todo = [(between, "write_nothing", False) for between in BETWEEN]
    todo += [("relu in place", after, False) for after in AFTER]
    # Round the engine a checkpoint changes nothing.
    todo += [(between, "write_nothing", True) for between in ("relu in place", "unneeded", "tanh")]
    expected = [plain_outcome(between, after, num_ranks) for between, after, _ in todo]
    assert [between for (between, *_), found in zip(todo, expected, strict=True) if found == "refused"] == [
        "tanh",
        "softmax",
        "custom",
        "several in place",
        "input_of_square",
        "view_of_the_saved",
        "below_a_checkpoint",
        "written_after_a_checkpoint",
        "relu in place",  # the input written after forward, and the output, which the loss has saved
        "relu in place",
        "tanh",
    ]
    assert_outcomes(pools(num_ranks).run(outcomes, setup, num_ranks, todo), expected)


class Spectral(nn.Module):
    """Complex weights, which torch's modules keep as pairs of real numbers; lazily conjugated and negated ones too."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.full((3,), 0.1))  # an odd number of elements in front of the others
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.spectrum, self.phase, self.gain = (
            nn.Parameter(torch.linspace(-1, place, 12).view(6, 2)) for place in (1, 2, 3)
        )

    def forward(self, x):
        waves = torch.fft.fft(x * self.scale) * torch.view_as_complex(self.spectrum)
        waves = waves * torch.view_as_complex(self.phase).conj()
        minus = torch.view_as_complex(self.gain).conj().imag
        return (waves.real * minus).view(-1, 2, 3) + self.bias


@story(model=Spectral, on=(*KINDS, "fsdp-no_shard"), optimizer=cases.OPTIMIZERS["sgd"], num_ranks=3)
def complex_views_of_parameters(user):
    for step in range(3):
        x, _ = user.rows(step)
        user.backward(user(x[:, :6]).square().mean())
        user.step_and_clear()


def through_unusual_tensors(hidden):
    """A sparse matrix, as in a graph network, a nested tensor and a derivative forward: no memory of the usual kind."""
    hidden = torch.sparse.mm(2 * torch.eye(hidden.shape[0], dtype=hidden.dtype).to_sparse(), hidden)
    nested = torch.nested.as_nested_tensor([hidden[:1], hidden[1:]], layout=torch.jagged)
    hidden = nested.cos().values()
    return torch.func.jvp(torch.sin, (hidden,), (torch.ones_like(hidden),))[1]


def unusual():
    model = Calls()
    model.between = through_unusual_tensors
    return model


@story(model=unusual, on=("zero1", "zero3", "fsdp", "fsdp-no_shard"), optimizer=momentum)
def tensors_without_memory_of_the_usual_kind_are_saved(user):
    user.train(0, 0)


def by_step(engine, x, y, directory):
    engine.backward(cases.loss_of(engine(x), y))
    engine.step()


def by_fused_step(engine, x, y, directory):
    """Torch's own fused optimizers do not raise the version."""
    for group in engine.optimizer.param_groups:
        group["fused"] = True
    by_step(engine, x, y, directory)


def by_loading(engine, x, y, directory):
    engine.load(directory)


def by_loading_a_state(engine, x, y, directory):
    engine.load_full_state_dict(engine.full_state_dict())


def by_hand(engine, x, y, directory):
    with engine.full_params(keep_changes=True) as module, torch.no_grad():
        for param in module.parameters():
            param.mul_(1)


def by_nothing(engine, x, y, directory):
    with torch.no_grad():
        engine(x)
    engine.full_state_dict()
    with engine.full_params():
        pass


CHANGES = {
    function.__name__: function
    for function in (by_step, by_loading, by_loading_a_state, by_hand, by_nothing, by_fused_step)
}


def changed_between(rank, key, num_ranks, directory):
    refused, model = {}, build(Calls)
    model.between = torch.sigmoid
    with engine_of(key, num_ranks, model, optimizer_fn=momentum) as engine:
        initial = engine.full_state_dict()
        engine.save(directory)
        x, y = own_batch(engine)
        for name, change in CHANGES.items():
            if name in ("by_hand", "by_nothing") and key not in BY_REFERENCE:
                continue  # parameters are whole, so torch itself sees what is written and what is needed
            if name == "by_fused_step" and key in ("ddp", "bucketed"):
                continue  # torch steps the parameters themselves, and refuses nothing
            loss = cases.loss_of(engine(x), y)
            change(engine, x, y, directory)
            engine.zero_grad()
            try:
                engine.backward(loss)
                refused[name] = False
            except RuntimeError as error:
                assert REFUSAL in str(error)
                refused[name] = True
            engine.zero_grad()
        engine.load_full_state_dict(initial)
        engine.optimizer.state.clear()
        engine.optimizer.param_groups[0]["fused"] = None
        by_step(engine, x, y, directory)
        return refused, engine.full_state_dict()


@pytest.mark.parametrize("key", [*KINDS, "fsdp-no_shard"])
def test_a_parameter_that_changes_between_forward_and_backward_is_refused(pools, key, tmp_path):
    """On every rank, also one that holds nothing of a unit; afterwards training goes on."""
    expected = plain_outcome("sigmoid", "write_nothing", 4)
    for refused, state in pools(4).run(changed_between, key, 4, tmp_path):
        assert refused == {name: name != "by_nothing" for name in refused}
        assert {"by_step", "by_loading", "by_loading_a_state"} <= refused.keys()
        assert_states([state], expected)


class NeedsNoWeight(nn.Module):
    """Its backward needs no parameter's value."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return x[:, :5] + self.weight


@story(model=NeedsNoWeight, on=(*KINDS, *BY_REFERENCE[2:]), optimizer=momentum)
def what_backward_does_not_need_is_changed(user):
    losses = [user.loss(0) for _ in range(2)]
    for loss in losses:
        user.backward(loss)
        user.step_and_clear()


def abandoned(rank, setup):
    """Whether outputs that were saved are gone when nobody holds the graph, without the garbage collector."""
    kept = []

    def remember(_, __, output):
        kept.append(weakref.ref(output))

    gc.collect()
    gc.disable()
    try:
        with engine_of(setup, 2, build(Deep), optimizer_fn=momentum) as engine:
            hooks = [module.register_forward_hook(remember) for module in engine.module.modules()]
            output = engine(cases.own_rows(cases.rows("MLP", 0, 0, 2)[0], rank))
            for hook in hooks:
                hook.remove()
            held = output.exp()
            del output, held
            return [reference() is None for reference in kept]
    finally:
        gc.enable()


@pytest.mark.parametrize("setup", BY_REFERENCE)
def test_a_graph_that_never_runs_backward_holds_nothing(pools, setup):
    for gone in pools(2).run(abandoned, setup):
        assert gone
        assert all(gone)


test_stories = STORIES.told()
