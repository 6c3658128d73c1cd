"""What every engine must do alike, whatever it keeps of parameters and gradients: told on each kind, others by turns.

At 3 ranks, which divide little, or at 4 where there are groups; torch's own engines at 2.
"""

import pytest
import torch
from torch import Tensor, nn

from tests.dist import cases
from tests.dist.every_engine import CUT_OTHERWISE, ENGINES, KINDS, PEERS, engine_of, momentum
from tests.dist.nasty import Block
from tests.dist.telling import Stories

STORIES = Stories()
story = STORIES.story
OTHERS = ("single", *(key for key in ENGINES if key.count("-") < 2 and key not in (*CUT_OTHERWISE, *KINDS)))
REDUCES_ONCE = ("torch_ddp", "torch_zero1")


def zeroed(user):
    """Before the first backward, after a plain one, and after each step, in which nobody uses some."""
    user.zero_grad(set_to_none=False)
    for step in range(4):
        user.loss(step).backward()
        user.zero_grad(set_to_none=False)
        if user.rank is None or user.name not in PEERS:  # what torch's engines have not reduced they never do
            user.quietly(step)
            user.zero_grad(set_to_none=False)
        user.go_back(step + 1)
        user.step()
        user.zero_grad(set_to_none=step == 2)
    user.step()  # with what momentum makes of zeros


def retained(user):
    """Twice through one graph: at once, after a ``no_sync`` one, and two losses of one output."""
    for step in range(3):
        x, y = user.rows(step)
        output = user(x)
        if step == 1:
            with user.no_sync():
                user.backward(cases.loss_of(output, y), retain_graph=True)
            user.backward(cases.loss_of(output, y))
        else:
            user.backward(cases.loss_of(output, y), retain_graph=True)
            user.backward(output.square().mean())
        user.step_and_clear()


def gradients_at_every_moment(user):
    """Of two micro-batches, with a third that is only pending, clipped, stepped and cleared."""
    found = {}

    def note(moment):
        if user.rank is not None:
            for gradient in user.full_gradients().values():
                if gradient is not None:
                    gradient.fill_(7.0)  # a copy: nothing of the engine changes
        gradients = user.full_gradients()
        assert list(gradients) == [name for name, _ in user.module.named_parameters()]
        for name, gradient in gradients.items():
            found[f"{moment} {name}"] = torch.tensor(torch.nan) if gradient is None else gradient.clone()

    for step in (0, 1):
        with user.no_sync():
            user.go_back(step, 0)
            if user.rank is not None:
                with pytest.raises(RuntimeError, match=r"full_gradients: inside no_sync\(\)"):
                    user.full_gradients()
        user.go_back(step, 2)
        note(f"{step} sent")
        user.loss(step, 1).backward()  # plain, so it is pending
        note(f"{step} pending")
        user.clip_grad_norm_(0.05)
        note(f"{step} clipped")
        user.step()
        note(f"{step} stepped")
        user.zero_grad()
        note(f"{step} cleared")
    return {name: value.nan_to_num(-1.0) for name, value in found.items()}


def full_parameters(user):
    """Read before and after a step; scaled, and a step on what has been written."""
    found = {}
    for step in range(2):
        with user.full_params() as module:
            assert module is user.module
            found |= {f"{step} {name}": param.detach().clone() for name, param in module.named_parameters()}
        user.train(step)
    if user.rank is None or user.name != "torch_fsdp2":
        with user.full_params(keep_changes=True) as module, torch.no_grad():
            for param in module.parameters():
                param.mul_(0.5)
        user.train(2)
    return found


# What only some ranks use is one unit with the root: a unit that only they run cannot be gathered by all.
MODELS = {"Uneven": {}, "Unused": {"wrap": "root"}}
for place, (told, not_on) in enumerate((
    (zeroed, ()),
    (retained, REDUCES_ONCE),
    (gradients_at_every_moment, ()),
    (full_parameters, ("torch_fsdp2",)),
)):  # fmt: skip
    for number, (kind, options) in enumerate(MODELS.items()):
        # By turns: each story with one of the models on each kind and on every second of the others.
        story(
            name=f"{told.__name__}_{kind}",
            model=kind,
            options=options,
            optimizer=momentum,
            on=(*KINDS[number::2], *OTHERS[(place + 2 * number) % 4 :: 4]),
            num_ranks=3,
        )(told)
    peers = tuple(key for key in PEERS if key not in not_on)
    story(name=f"{told.__name__}_of_torch", optimizer=momentum, on=peers)(told)


class Coder(nn.Module):
    """Parameters in units and in the root, which ``loss`` uses before, in and after a forward of the whole."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.head = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def encode(self, x: Tensor, *, depth: int = 3) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks[:depth]:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))

    def loss(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self(x * self.scale)
        return {"loss": nn.functional.mse_loss(logits * self.scale, y) + self.head.bias.square().sum()}

    @torch.no_grad()
    def generate(self, x: Tensor, length: int) -> Tensor:
        made = []
        for _ in range(length):
            made.append(self(x) * self.scale)
            x = torch.cat([x[:, 5:], made[-1]], 1)
        return torch.cat(made, 1)

    def fails(self, x: Tensor) -> Tensor:
        raise KeyError(float((self.scale.sum() + x.sum() * 0).detach()))


@story(model=Coder, on=("single", *KINDS, "fsdp-shard_grad_op", "fsdp-hybrid"),
       num_ranks=3, optimizer=momentum)  # fmt: skip
def methods_beside_forward_are_called(user):
    model, made = user.module, []
    with pytest.raises(KeyError, match=r"1\.5"):
        user.call(model.fails, user.rows(0)[0])
    if user.rank is not None:
        with pytest.raises(ValueError, match=r"function: .* for example engine\.call\(engine\.module\.encode, x\)"):
            user.call("encode", user.rows(0)[0])
    for step in range(4):
        x, y = user.rows(step)
        if step == 1:
            loss = user.call(model.loss, x, y)["loss"] + user.call(model.encode, x, depth=2).square().mean()
        elif step == 2:
            loss = user.call(lambda x: model.head(model.encode(x)).square().mean(), x)
        elif step == 3:
            loss = cases.loss_of(user.call(model.forward, x), y) + user.call(model.loss, x, y)["loss"]
        else:
            loss = user.call(model.loss, x, y)["loss"]
        user.backward(loss)
        user.step_and_clear()
        made.append(user.call(model.generate, x, length=2))
    assert "forward" not in vars(model)
    return [*made, user(user.rows(0)[0]).detach()]


@story(model=Coder, on=tuple(PEERS))
def torch_s_engines_call_functions_too(user):
    model = user.module
    for step in range(2):
        x, y = user.rows(step)
        user.backward(user.call(lambda x, y: cases.loss_of(model.head(model.encode(x)) * model.scale, y), x, y))
        user.step_and_clear()


@story(model=Coder, on=("zero3", "fsdp"), refused=r"or engine\.call\(function, \.\.\.\)", instead=None)
def a_method_is_called_without_the_engine(user):
    with user.refused():
        user.module.encode(torch.ones(1, 7).double())


test_stories = STORIES.told()


class Renamed(nn.Module):
    """Takes states with an old name, and states of its first version, whose weight was the other way round."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(6, 6)), nn.BatchNorm1d(6)

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if f"{prefix}old" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}old")
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def old_states(rank, key, states):
    """What is there after each state is loaded."""
    found = []
    with engine_of(key, 2, Renamed().double(), optimizer_fn=momentum) as engine:
        for state in states:
            engine.load_full_state_dict(state)
            found.append(engine.full_state_dict())
    return found


@pytest.mark.parametrize("key", KINDS)
def test_what_plain_torch_loads_of_an_older_module_is_loaded(pools, key):
    model, states, expected = Renamed().double(), [], []
    for change in ("none", "renamed", "version 1"):
        state = Renamed().double().state_dict()
        if change == "renamed":
            state["old"] = state.pop("weight")
        if change == "version 1":
            del state["norm.num_batches_tracked"]  # which BatchNorm's first version had not
        states.append(dict(state) if change == "version 1" else state)
        model.load_state_dict(states[-1])
        expected.append({name: value.clone() for name, value in model.state_dict().items()})
    for found in pools(2).run(old_states, key, states):
        for own, wanted in zip(found, expected, strict=True):
            assert all(torch.equal(own[name], value) for name, value in wanted.items())
            assert own._metadata[""] == {"version": 2}
