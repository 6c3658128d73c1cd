"""The loops in which ``check_strategy`` trains: under a strategy, and in one process on the rows of all ranks.

And what is wrong with a strategy on one rank, whatever it computes: messages not waited for, holdings not said.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardlab.comm.base_mesh import BaseMesh
from shardlab.comm.callers import PAST, num_sent_by_torch
from shardlab.comm.communicator import Communicator
from shardlab.comm.events import CollectiveEvent, Observer
from shardlab.comm.rank_life import observing_new
from shardlab.comm.same_on_all_ranks import number_among
from shardlab.engines import FSDP, Engine, Strategy, ZeRO1
from shardlab.testing.nasty_models import WITH_SKIPS, SmallGPT
from shardlab.vocabulary import FLAG, Role

ROWS_PER_RANK = 2
STEPS = 4
BUCKETS = 4  # or more, where a model has so many parameters
OF_ENGINE = (FLAG, "gradient norm")  # what the engine itself sends in a step, by its tags
OF_OURS = 1  # the step that one of our strategies takes between two checkpoints


class Loop(NamedTuple):
    """How a model is trained.

    Attributes:
        name: for the report.
        micro_batches: per step.
        clip: the largest norm of the gradients; None without clipping.
        is_plain: whether ``loss.backward()`` is called, and the model evaluated between backward and step.
        sends_all: every micro-batch, and not only the last; and the weights are halved after each step.
        resumes: every second parameter is frozen; after a step one of our strategies loads a checkpoint of it, takes a
            step and saves another, from which training goes on with nothing frozen.
    """

    name: str
    micro_batches: int = 1
    clip: float | None = None
    is_plain: bool = False
    sends_all: bool = False
    resumes: bool = False


LOOPS = (
    Loop("a plain loop"),
    Loop("micro-batches inside no_sync(), clipped", 3, 0.05),
    Loop("loss.backward(), evaluated before the step", 2, 0.05, is_plain=True),
    Loop("two backwards that send, weights written by hand", 2, sends_all=True),
    Loop("saved, loaded by ours and back, then unfrozen", resumes=True),
)


@dataclass
class Trained:
    """What a loop has computed.

    Attributes:
        begins: the state before the first step; of one process.
        losses: of each step, over all rows.
        norms: of the gradients in each step, where they are clipped.
        states: after each step.
        without_gradient: trainable parameters that had none in each step; of one process.
        loaded: the states after checkpoints were loaded.
        owned: elements (start, stop) of each parameter that this rank steps.
        fault: what is wrong with this rank whatever it has computed; empty if nothing is.
        silent: over which axis a step has sent nothing; likewise.
    """

    begins: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    without_gradient: list[set[str]] = field(default_factory=list)
    loaded: list[dict[str, Tensor]] = field(default_factory=list)
    owned: dict[str, tuple[int, int]] = field(default_factory=dict)
    fault: str = ""
    silent: str = ""


def train(mesh: BaseMesh, make: Callable[[], Strategy], model: str, loop: Loop, directory: Path) -> Trained:
    """This rank's part of a loop, under new strategies of ``make``; checkpoints go to ``directory``."""
    trained, unwaited, rank = Trained(), Unwaited(), number_among(mesh.communicators)[0]
    parts = [(make, range(STEPS))]
    if loop.resumes:
        ours = partial(_ours, make().axes)
        parts = [(make, range(OF_OURS)), (ours, range(OF_OURS, OF_OURS + 1)), (make, range(OF_OURS + 1, STEPS))]
    with mesh.observed_by(unwaited), observing_new(unwaited):  # and in meshes that are made inside
        for part, (strategy, steps) in enumerate(parts):
            # Ranks that start different must end equal; and a checkpoint must replace all that a model starts with.
            module = _built(model, seed=100 * part + rank, loop=loop)
            with Engine(module, _optimizer, mesh, _in_buckets(strategy(), module)) as engine:
                if part > 0:
                    engine.load(directory)
                    trained.loaded.append(engine.full_state_dict())
                if part == 2:
                    module.requires_grad_(True)
                before = num_sent_by_torch()
                for step in steps:
                    unwaited.partners.clear()
                    _step(engine, model, loop, step, trained, unwaited.partners)
                if num_sent_by_torch() != before:
                    trained.fault = trained.fault or f"it {PAST}"
                if part == 0:
                    trained.owned = dict.fromkeys(engine.params, (0, 0)) | engine.owned()
                if part + 1 < len(parts):
                    engine.save(directory)
    trained.fault = trained.fault or unwaited.told() or trained.silent
    return trained


def alone(model: str, loop: Loop, num_ranks: int) -> Trained:
    """The same training by plain torch, on the rows of all ranks."""
    module, trained = _built(model, seed=0, loop=loop), Trained()
    trained.begins = _state(module)
    optimizer = _optimizer(list(module.parameters()))
    for step in range(STEPS):
        if loop.resumes and step == OF_OURS + 1:
            module.requires_grad_(True)
        total = 0.0
        for number in range(loop.micro_batches):
            x, y = _rows(model, step, number, num_ranks)
            loss = _loss(module(x), y) / loop.micro_batches
            loss.backward()
            total += float(loss.detach())
        trained.losses.append(total)
        params = module.named_parameters()
        trained.without_gradient.append({name for name, param in params if param.requires_grad and param.grad is None})
        if loop.clip is not None:
            trained.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), loop.clip)))
        optimizer.step()
        optimizer.zero_grad()
        if loop.sends_all:
            _halve(module)
        trained.states.append(_state(module))
    return trained


def _step(engine: Engine, model: str, loop: Loop, step: int, trained: Trained, partners: set[int]) -> None:
    total, rank = torch.zeros((), dtype=torch.float64), engine.data_rank
    for number in range(loop.micro_batches):
        rows = _rows(model, step, number, engine.num_data_ranks)
        x, y = (part[rank * ROWS_PER_RANK :][:ROWS_PER_RANK] for part in rows)
        is_sent = loop.sends_all or number == loop.micro_batches - 1
        with contextlib.nullcontext() if is_sent else engine.no_sync():
            loss = _loss(engine(x), y) / loop.micro_batches
            loss.backward() if loop.is_plain else engine.backward(loss)
        total += loss.detach()
    if loop.clip is not None:
        trained.norms.append(float(engine.clip_grad_norm_(loop.clip)))
    if loop.is_plain:
        with torch.no_grad():
            engine(x)
    engine.step()
    trained.silent = trained.silent or _silent(engine, partners)
    trained.fault = trained.fault or held_wrong(engine)
    engine.zero_grad()
    if loop.sends_all:
        with engine.full_params(keep_changes=True) as whole:
            _halve(whole)
    trained.losses.append(float(engine.mean_over_ranks(total, tag="loss")))
    trained.states.append(engine.full_state_dict())


def _ours(axes: tuple[str, ...]) -> Strategy:
    """One of our strategies that divides otherwise than most, over some axes."""
    strategy = ZeRO1() if len(axes) == 1 else FSDP(sharding="hybrid_shard", wrap="root")
    strategy.axes = axes
    return strategy


def _in_buckets(strategy: Strategy, module: nn.Module) -> Strategy:
    """The strategy, with several buckets of the module where it has a size of them: all would fit into the default."""
    if hasattr(strategy, "bucket_bytes"):
        num_bytes = sum(param.nbytes for param in module.parameters())
        strategy.bucket_bytes = min(strategy.bucket_bytes, num_bytes // BUCKETS)
    return strategy


def _built(model: str, seed: int, loop: Loop) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = WITH_SKIPS[model]().double()
    if loop.resumes:
        for param in list(module.parameters())[::2]:
            param.requires_grad_(False)
    return module


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _halve(module: nn.Module) -> None:
    for param in module.parameters():
        param.data = param.data / 2  # which ``full_params(keep_changes=True)`` promises to keep, as writes in place


def _optimizer(tensors: object) -> torch.optim.Optimizer:
    # Adam forgives a gradient that is off by a factor; this does not, nor one that is 0 where nobody used a parameter.
    return torch.optim.SGD(tensors, lr=1e-2, momentum=0.9, weight_decay=0.1)  # type: ignore[arg-type]


def _rows(model: str, step: int, micro_batch: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """The rows of all ranks; the first feature's sign, by which ``Unused`` chooses, differs by row, so also by rank."""
    generator, num_rows = torch.Generator().manual_seed(1000 * step + micro_batch), num_ranks * ROWS_PER_RANK
    if WITH_SKIPS[model] is SmallGPT:
        tokens = torch.randint(0, 11, (num_rows, 7), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(num_rows, 7, generator=generator, dtype=torch.float64)
    x[:, 0] = -x[:, 0].abs()
    if step % 2:
        x[-(step // 2 % 2), 0] = 1.0  # used by the first or the last rank in odd steps in turns, by none in even ones
    return x, torch.randn(num_rows, 5, generator=generator, dtype=torch.float64)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    if target.dtype == torch.int64:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
    return nn.functional.mse_loss(output, target)


class Unwaited(Observer):
    """Which messages nobody has waited for.

    Attributes:
        partners: with which ranks something of a strategy was sent; what the engine itself sends does not count.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, CollectiveEvent] = {}
        self.partners: set[int] = set()

    def issued(self, event: CollectiveEvent) -> None:
        """As the base."""
        self._under_way[id(event)] = event
        if event.tag not in OF_ENGINE:
            self.partners.update(event.ranks)

    def waited(self, event: CollectiveEvent) -> None:
        """As the base."""
        self._under_way.pop(id(event), None)

    def told(self) -> str:
        """The first of them, in a sentence; empty if all were waited for."""
        first = next(iter(self._under_way.values()), None)
        if first is None:
            return ""
        return (
            f"{len(self._under_way)} messages were never waited for, first the {first.op} {first.tag!r}, so what it "
            "brings may be read before it is there; keep the Pending, and call its wait() before the result is used"
        )


def _silent(engine: Engine, partners: set[int]) -> str:
    """A sentence if a step has sent nothing over an axis of the strategy's; empty if not."""
    for axis, comm in zip(engine.strategy.axes, engine.data_comms, strict=True):
        if comm.num_ranks > 1 and not partners & set(comm.ranks) - {comm.ranks[comm.rank]}:
            return (
                f"nothing travelled over axis {str(axis)!r}, which its axes name, so these ranks average nothing; "
                "reduce over each of self.comms, or leave the axis out; where ranks are to train on with parameters of "
                "their own, as in local SGD, set ranks_differ = True"
            )
    return ""


def held_wrong(engine: Engine) -> str:
    """What is wrong with what an engine says that it holds, in a sentence; empty if nothing is.

    Whatever has memory of a parameter, a piece or a gradient must be in one of ``holdings()``, and whatever else the
    strategy keeps, scalars apart; and a holding has the elements that it names.
    """
    held = {holding.tensor.untyped_storage().data_ptr() for holding in engine.holdings()}
    for name, tensor in (*engine.params.items(), *engine.step_tensors().items()):
        for role, one in ((Role.PARAMETER, tensor), (Role.GRADIENT, tensor.grad)):
            if one is None or one.untyped_storage().data_ptr() in held:
                continue
            # What stands for a sharded parameter has one element, however large that is.
            is_placeholder = engine.strategy.full_gathers and one is engine.params[name] and one.numel() == 1
            if not is_placeholder and one.untyped_storage().nbytes() >= one.nbytes > 0:
                if role is Role.PARAMETER and one is not engine.params[name]:
                    return (
                        f"the piece of {name!r} that the optimizer steps is no view of a parameter, nor of anything in "
                        "holdings(): cut it without a copy, or yield a copy that is meant there (a master weight)"
                    )
                return (
                    f"holdings(): the {role} of {name!r} is in none, so that no table would count it; after those of "
                    f"super().holdings() yield Holding(Role.{role.name}, tensor, {name!r}, (start, stop)) too"
                )
    for holding in engine.holdings():
        start, stop = holding.span
        if holding.name and holding.tensor.numel() != stop - start:
            return (
                f"holdings(): {holding.tensor.numel()} elements are said to be elements {start} to {stop} of "
                f"{holding.name!r}; give the range of the flattened parameter, (start, stop), that the tensor has"
            )
    known = held | {one.untyped_storage().data_ptr() for one in (*engine.module.buffers(), *engine.params.values())}
    for place, tensor in _kept(engine.strategy):
        storage = tensor.untyped_storage()
        if tensor.numel() and storage.nbytes() > tensor.element_size() and storage.data_ptr() not in known:
            return (
                f"holdings(): {tensor.numel()} elements that {place} keeps from step to step are in none, so that no "
                "table would count them; after those of super().holdings() yield Holding(Role.COMMUNICATION_BUFFER, "
                "tensor) too, or their own role"
            )
    return ""


def _kept(strategy: Strategy) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a strategy's attributes lead to, with the attribute's name; not through modules."""
    seen, found = set[int](), [(f"self.{name}", value) for name, value in vars(strategy).items()]
    while found:
        place, one = found.pop()
        if id(one) in seen or isinstance(one, nn.Module | Communicator | type) or callable(one):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield place, one
        elif isinstance(one, Mapping):
            found += [(place, value) for value in one.values()]
        elif isinstance(one, list | tuple | set):
            found += [(place, value) for value in one]
        else:
            found += [(place, value) for value in getattr(one, "__dict__", {}).values()]
