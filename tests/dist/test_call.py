"""``engine.call``: methods beside ``forward`` under every engine, which equal one process."""

import pytest
import torch
from torch import Tensor, nn

from tests.dist import cases
from tests.dist.every_engine import PEERS, PLACES, assert_states, engine_of

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Coder(nn.Module):
    """Parameters in units and in the root, which ``loss`` uses before, in and after a forward of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
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
        raise KeyError(float(self.scale.sum() + x.sum() * 0))


def build(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Coder().double()


def train(model, run, optimizer, backward, step_rows):
    """What one process and an engine both do; ``run`` is how a function is called."""
    made = []
    for step in range(STEPS):
        x, y = step_rows(step)
        if step == 1:
            loss = run(model.loss, x, y)["loss"] + run(model.encode, x, depth=2).square().mean()
        elif step == 2:
            loss = run(lambda x: model.head(model.encode(x)).square().mean(), x)
        elif step == 3:
            loss = cases.loss_of(run(model.forward, x), y) + run(model.loss, x, y)["loss"]
        else:
            loss = run(model.loss, x, y)["loss"]
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        made.append(run(model.generate, x, length=2))
    return made


def called(rank, key, num_ranks):
    model = build(rank)
    with engine_of(key, num_ranks, model, "sgd") as engine:

        def step_rows(step):
            return [cases.own_rows(part, rank) for part in cases.rows("MLP", step, 0, num_ranks)]

        with pytest.raises(KeyError, match=r"1\.5"):
            engine.call(model.fails, step_rows(0)[0])
        with pytest.raises(ValueError, match=r"function: .* for example engine\.call\(engine\.module\.encode, x\)"):
            engine.call("encode", step_rows(0)[0])
        made = train(model, engine.call, engine, engine.backward, step_rows)
        assert "forward" not in vars(model)
        after = torch.cat([made[-1][:, -5:], engine(step_rows(0)[0]).detach()])
        return made, after, engine.full_state_dict()


@pytest.mark.parametrize(("key", "num_ranks"), [place for place in PLACES if place[0] not in PEERS])
def test_methods_equal_one_process(pools, key, num_ranks):
    model = build(0)
    optimizer = cases.OPTIMIZERS["sgd"](list(model.parameters()))
    made = train(
        model,
        lambda function, *args, **kwargs: function(*args, **kwargs),
        optimizer,
        lambda loss: loss.backward(),
        lambda step: cases.rows("MLP", step, 0, num_ranks),
    )
    results = pools(num_ranks).run(called, key, num_ranks)
    assert_states([state for *_, state in results], model.state_dict())
    for step, expected in enumerate(made):
        found = torch.cat([own[step] for own, *_ in results])
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def named_in_the_error(rank, strategy):
    model = build(0)
    with (
        engine_of(strategy, 2, model, "sgd"),
        pytest.raises(RuntimeError, match=r"or engine\.call\(function, \.\.\.\)"),
    ):
        model.encode(torch.ones(1, 7).double())


@pytest.mark.parametrize("key", ["zero3", "fsdp"])
def test_a_released_parameter_names_it(pools, key):
    pools(2).run(named_in_the_error, key)


def called_peer(rank, key):
    model = build(rank)
    with engine_of(key, 2, model, "sgd") as engine:
        for step in range(2):
            x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", step, 0, 2))
            engine.backward(engine.call(lambda x, y: cases.loss_of(model.head(model.encode(x)) * model.scale, y), x, y))
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize("key", PEERS)
def test_torch_engines_call_functions_too(pools, key):
    model = build(0)
    optimizer = cases.OPTIMIZERS["sgd"](list(model.parameters()))
    for step in range(2):
        x, y = cases.rows("MLP", step, 0, 2)
        cases.loss_of(model.head(model.encode(x)) * model.scale, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_states(pools(2).run(called_peer, key), model.state_dict())
