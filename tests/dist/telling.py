"""Stories: what users write, told to an engine on ranks and to plain torch in one process, which must end alike.

A story is a function of a ``User``. It says on which kinds of engines it is told; what plain torch does instead, where
that is not the same; and, where something in it is refused, with which words. A refusal is raised on every rank that
does what is refused, and the story goes on after it, so that nothing waits and nothing half done stays.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import Engine, OptimizerFn
from shardlab.launch import current
from tests.dist import cases
from tests.dist.every_engine import KINDS, assert_states, axes_of, engine_of, sgd

SAME = object()


class User:
    """The verbs of both."""

    module: nn.Module
    num_ranks: int
    kind = "MLP"

    def rows(self, step: int, micro_batch: int = 0) -> tuple[Tensor, Tensor]:
        """Of the global batch, those that this user has."""
        raise NotImplementedError

    def loss(self, step: int, micro_batch: int = 0) -> Tensor:
        x, y = self.rows(step, micro_batch)
        return cases.loss_of(self(x), y)

    def go_back(self, step: int, micro_batch: int = 0) -> None:
        self.backward(self.loss(step, micro_batch))

    def quietly(self, step: int, micro_batch: int = 0) -> None:
        with self.no_sync():
            self.go_back(step, micro_batch)

    def step_and_clear(self) -> None:
        self.step()
        self.zero_grad()

    def train(self, *steps: int) -> None:
        for step in steps:
            self.go_back(step)
            self.step_and_clear()

    def tensors(self, wanted: Callable[[str], bool] = lambda _: True) -> list[Tensor]:
        """What is stepped."""
        raise NotImplementedError


class PlainTorch(User):
    """One process with the names of an engine; it has the rows of all ranks, and ``rank`` is None."""

    rank = None

    def __init__(self, model: nn.Module, optimizer_fn: OptimizerFn, num_ranks: int) -> None:
        self.module, self.num_ranks = model, num_ranks
        self.optimizer = optimizer_fn(StepTensorsAlone(model))
        self.no_sync, self.finish_gradients, self.close = contextlib.nullcontext, lambda: None, lambda: None

    def rows(self, step: int, micro_batch: int = 0) -> tuple[Tensor, Tensor]:
        return cases.rows(self.kind, step, micro_batch, self.num_ranks)

    def loss_of_rank(self, rank: int, step: int) -> Tensor:
        """That rank's part of the mean."""
        x, y = (cases.own_rows(part, rank) for part in self.rows(step))
        return cases.loss_of(self(x), y) / self.num_ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def full_params(self, *, keep_changes: bool = False) -> contextlib.AbstractContextManager[nn.Module]:
        return contextlib.nullcontext(self.module)

    def tensors(self, wanted: Callable[[str], bool] = lambda _: True) -> list[Tensor]:
        return [param for name, param in self.module.named_parameters() if wanted(name)]

    def full_gradients(self) -> dict[str, Tensor | None]:
        return {name: param.grad for name, param in self.module.named_parameters()}

    def full_state_dict(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.module.state_dict().items()}


class StepTensorsAlone(list):
    """A model's parameters, chosen by name as an engine's are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters())
        self._model = model

    def where(self, wanted: Callable[[str], bool]) -> list[Tensor]:
        return [param for name, param in self._model.named_parameters() if wanted(name)]


class OnRanks(User):
    """An engine that knows which rows are its own, and which words its story's refusals have."""

    def __init__(self, engine: Engine, words: str, directory: Path) -> None:
        self.engine, self.words, self.directory = engine, words, directory
        self.rank, self.num_ranks = engine.data_rank, engine.num_data_ranks
        self.num_refused, self.is_closed = 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def rows(self, step: int, micro_batch: int = 0) -> tuple[Tensor, ...]:
        batch = cases.rows(self.kind, step, micro_batch, self.num_ranks)
        return tuple(cases.own_rows(part, self.rank) for part in batch)

    def tensors(self, wanted: Callable[[str], bool] = lambda _: True) -> list[Tensor]:
        return list(self.engine.step_tensors().where(wanted))

    def close(self) -> None:
        self.engine.close()
        self.is_closed = True

    @contextlib.contextmanager
    def refused(self, *, here: bool = True) -> Iterator[None]:
        """What is inside raises the story's words, on this rank at least (``here``)."""
        if not here:
            yield
            return
        with pytest.raises((RuntimeError, ValueError), match=self.words):
            yield
        self.num_refused += 1

    def refuses(self, use: Callable[..., Any], *args: Any) -> None:
        """What it left is cleared."""
        with self.refused():
            use(*args)
        self.zero_grad()

    def state(self) -> dict[str, Tensor]:
        return self.module.state_dict() if self.is_closed else self.engine.full_state_dict()


@dataclass(frozen=True)
class Story:
    """See above.

    Attributes:
        tell: what the user does. It may return a list of tensors [rows, ...], which are those of one process row by
            row, or a dict of tensors, which are equal everywhere.
        instead: what plain torch does; None where there is nothing to compare.
        on: keys of ``every_engine``.
        refused: words, if something in it is.
        model: one of ``cases``, or a function.
        options: of the engine; ``wrap`` of FSDP alone.
    """

    tell: Callable[[Any], Any]
    instead: Callable[[Any], Any] | None
    on: tuple[str, ...] = KINDS
    refused: str = ""
    model: str | Callable[[], nn.Module] = "MLP"
    optimizer: OptimizerFn = sgd
    dtype: torch.dtype = torch.float64
    num_ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Of ``cases.rows``."""
        return self.model if isinstance(self.model, str) else "MLP"

    def build(self) -> nn.Module:
        if isinstance(self.model, str):
            return cases.build(self.model).to(self.dtype)
        return cases.seeded(self.model).to(self.dtype)


class Stories(dict[str, Story]):
    """A table of stories, each entered by decorating its function."""

    def story(self, *, instead: Any = SAME, name: str = "", **more: Any) -> Callable[[Any], Any]:
        def enter(tell: Callable[[Any], Any]) -> Callable[[Any], Any]:
            key = name or tell.__name__
            assert key not in self, key
            self[key] = Story(tell, tell if instead is SAME else instead, **more)
            return tell

        return enter

    def told(self) -> Callable[..., None]:
        """The test that tells all of them, each on all of its engines."""

        @pytest.mark.parametrize("name", self)
        def test_story(pools: Any, tmp_path: Path, name: str) -> None:
            check(pools, self[name], tmp_path)

        return test_story


Told = tuple[Any, dict[str, Tensor], int]


def tell_ranks(rank: int, keys: Sequence[str], story: Story, directory: Path) -> list[Told]:
    """One after another, where it can be on one mesh: what a refusal left there would be found by the next."""
    num_ranks = 1 if "single" in keys else current().world_size
    with contextlib.ExitStack() as stack:
        meshes = {str(axes): axes for axes in (axes_of(key, num_ranks) for key in keys)}
        made = {name: stack.enter_context(Mesh(axes)) for name, axes in meshes.items()}
        return [tell_rank(key, made[str(axes_of(key, num_ranks))], story, directory / key) for key in keys]


def tell_rank(key: str, mesh: Mesh, story: Story, directory: Path) -> Told:
    num_ranks = 1 if key == "single" else current().world_size
    options = {name: value for name, value in story.options.items() if name != "wrap" or key.startswith("fsdp")}
    try:
        with engine_of(key, num_ranks, story.build(), mesh=mesh, optimizer_fn=story.optimizer, **options) as engine:
            user = OnRanks(engine, story.refused, directory)
            user.kind = story.kind
            returned = story.tell(user)
            return returned, {} if story.instead is None else user.state(), user.num_refused
    except BaseException as error:
        error.add_note(f"told to {key}")
        raise


def in_one_process(story: Story, num_ranks: int) -> tuple[Any, dict[str, Tensor]]:
    user = PlainTorch(story.build(), story.optimizer, num_ranks)
    user.kind = story.kind
    returned = story.instead(user)
    return returned, user.full_state_dict()


def check(pools: Any, story: Story, directory: Path) -> None:
    """Tell a story to ranks and, if there is something to compare, to one process."""
    places: dict[int, list[str]] = {}
    for key in story.on:
        places.setdefault(4 if "hybrid" in key else 1 if key == "single" else story.num_ranks, []).append(key)
    for num_ranks, keys in places.items():
        args = (keys, story, directory)
        results = [tell_ranks(0, *args)] if num_ranks == 1 else pools(num_ranks).run(tell_ranks, *args)
        expected = None if story.instead is None else in_one_process(story, num_ranks)
        for key, *told in zip(keys, *results, strict=True):
            try:
                compare(told, expected, bool(story.refused))
            except AssertionError as error:
                error.add_note(f"told to {key}")
                raise


def compare(told: Sequence[Told], expected: tuple[Any, dict[str, Tensor]] | None, has_refused: bool) -> None:
    """What the ranks of one engine have come to."""
    returned, states, refused = zip(*told, strict=True)
    assert any(refused) is has_refused
    if expected is None:
        return
    wanted, state = expected
    if isinstance(wanted, dict):
        assert_states(returned, wanted)
    elif wanted is not None:
        for number, whole in enumerate(wanted):
            found = torch.cat([parts[number] for parts in returned])
            torch.testing.assert_close(found, whole, atol=1e-10, rtol=0)
    assert_states(states, state)
