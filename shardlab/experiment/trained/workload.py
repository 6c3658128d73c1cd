"""What is trained: a model, its data, its loss and its optimizer. The built-in models are workloads too.

    workload = Workload(
        model=lambda: Net(),
        data=Digits(),                                              # a Dataset, batches, or a function
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
    )
    compare(workload, "runs/mine", ranks=4)

Every rank makes the model and the data itself, from the same seed, so what a workload holds must be picklable by
cloudpickle: functions, lambdas and classes of a notebook are, open files and generators are not.
"""

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset, IterableDataset

from shardlab.comm import BaseMesh
from shardlab.comm.communicator import Communicator
from shardlab.engines.guards.model_checks import check_real, check_sparse
from shardlab.meta_device import InitFn, materialize, reset_parameters
from shardlab.tensor_parallel import Plan
from shardlab.tensor_parallel.rng import generators_seeded
from shardlab.units import AUTO, WrapPolicy
from shardlab.vocabulary import class_of

LossFn = Callable[..., Tensor]
"""Of (model, batch), and of the mesh where a workload's loss asks for it."""
Batches = Iterable[Any]
Data = Dataset[Any] | Batches | Callable[[int, int, int], Batches]
OptimizerFn = Callable[[Any], torch.optim.Optimizer]
SUGGESTED = "auto"
SchedulerFn = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def adamw(tensors: Any) -> torch.optim.Optimizer:
    """AdamW with a learning rate of 1e-3."""
    return torch.optim.AdamW(tensors, lr=1e-3)


@dataclass(frozen=True, eq=False)
class Workload:
    """A model and how it is trained, for ``compare`` under any strategy.

    Attributes:
        model: makes the module; called on each rank with the same seed. Parameters on the meta device are made there
            and initialised by ``init_fn``.
        data: a map-style ``Dataset`` of samples, which is shuffled and collated as a ``DataLoader`` does; an iterable
            of batches such as a ``DataLoader``, read again from the start when it ends; or a function of (rank, ranks,
            seed) that returns the batches of one rank. A batch is any nest of tensors whose first dim is the row.
            Ranks train on different rows of each batch, except a function's, which divides them itself.
        loss: (model, batch) -> scalar, the mean over the rows of the batch. ``model`` is called as the module is. One
            that compares the rows of all ranks takes the mesh too, (model, batch, mesh), and sends over its axis
            ``mesh.data``; one process has a mesh of one rank.
        optimizer: (tensors) -> a torch optimizer of them.
        scheduler: (optimizer) -> a learning rate scheduler, stepped after each optimizer step.
        wrap: which modules are units, see ``wrapped_modules``.
        tp_plan: how layers are divided over tensor-parallel ranks, by name pattern; used only with ``tp``. By default,
            'auto', one is suggested, see ``show_tp_plan``; None says that the model must not be divided.
        tp_loss: (model, batch, axis) -> scalar, in place of ``loss`` where a ``tp_plan`` of your own leaves the model's
            output divided over the tensor axis.
        init_fn: initialises what is on the meta device, as (name, module); by default ``module.reset_parameters()``.
        name: in titles and manifests; by default the name of the module's class.
        weight: (batch) -> number, 0 or more: what the loss divides by, where that is not the number of rows: of a
            language model, the tokens that count in this rank's rows. Losses are then weighed by it, so that a step
            trains on the mean over all that its ranks and micro-batches count. None: each row weighs the same.

    Raises:
        TypeError: a field is of the wrong type; the message names it.
        ValueError: ``data`` can be read only once, or ``tp_loss`` has no plan.
    """

    model: Callable[[], nn.Module]
    data: Data
    loss: LossFn
    optimizer: OptimizerFn = adamw
    scheduler: SchedulerFn | None = None
    wrap: WrapPolicy = AUTO
    tp_plan: Plan | str | None = SUGGESTED
    tp_loss: Callable[[Any, Any, Communicator], Tensor] | None = None
    init_fn: InitFn = reset_parameters
    name: str = ""
    weight: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        """Check the types: an error on a rank, after everything has started, would say less."""
        if isinstance(self.model, nn.Module):
            raise TypeError(
                f"model: {class_of(self.model)} was given; give a function that makes one, such as lambda: "
                f"{type(self.model).__name__}(...), because every rank and every strategy needs its own"
            )
        _require_function("model", self.model, "that takes nothing and returns a module", 0)
        loss_args = 3 if self.takes_mesh else 2
        _require_function("loss", self.loss, "of (model, batch) that returns the mean loss", loss_args)
        _require_function("optimizer", self.optimizer, "of (tensors) that returns a torch optimizer", 1)
        if self.scheduler is not None:
            _require_function("scheduler", self.scheduler, "of (optimizer) that returns a scheduler", 1)
        if self.tp_loss is not None:
            _require_function("tp_loss", self.tp_loss, "of (model, batch, axis) that returns the mean loss", 3)
        if self.weight is not None:
            _require_function("weight", self.weight, "of (batch) that returns what the loss divides by", 1)
        if not isinstance(self.tp_plan, Mapping | NoneType) and self.tp_plan != SUGGESTED:
            raise TypeError(
                f"tp_plan: {self.tp_plan!r:.60} was given; give {SUGGESTED!r}, a mapping of name patterns to styles, "
                "or None"
            )
        if self.tp_loss is not None and not isinstance(self.tp_plan, Mapping):
            raise ValueError("tp_loss: it is for a tp_plan of your own, which leaves the output divided; give one")
        _check_data(self.data)

    def __str__(self) -> str:
        # The class that is made, if the function is the class itself or says so; else the function's name.
        return self.name or getattr(self.model, "__name__", type(self.model).__name__).replace("<lambda>", "model")

    def loss_over(self, axis: Communicator) -> LossFn:
        """The loss of a model whose layers are divided over ``axis``."""
        of_parts = self.tp_loss
        return self.loss_on() if of_parts is None else lambda model, batch: of_parts(model, batch, axis)

    def loss_on(self, mesh: BaseMesh | None = None) -> LossFn:
        """The loss of (model, batch) on a mesh; None for this process alone."""
        if not self.takes_mesh:
            return self.loss
        own, loss = BaseMesh.alone() if mesh is None else mesh, self.loss
        return lambda model, batch: loss(model, batch, own)

    def apart(self, *names: str) -> "Workload":
        """The same with fields of its own, as a rank has them, for a plan that tries them in the reader's process.

        A loss may keep something between batches, and what makes the model may return one that the reader has.
        """
        try:
            own = cloudpickle.loads(cloudpickle.dumps([getattr(self, name) for name in names]))
        except Exception:  # it can be sent to no rank either, which is told elsewhere
            return self
        return replace(self, **dict(zip(names, own, strict=True)))

    def optimizer_of(self, tensors: Any) -> torch.optim.Optimizer:
        """The optimizer of what is stepped.

        Raises:
            ValueError: ``optimizer`` returned something else.
        """
        made: Any = self.optimizer(tensors)
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(f"optimizer: it returned {class_of(made)}; return a torch.optim.Optimizer")
        return made

    @property
    def takes_mesh(self) -> bool:
        """Whether the loss asks for the mesh, to communicate over it."""
        return _binds(self.loss, 3) and (not _binds(self.loss, 2) or "mesh" in inspect.signature(self.loss).parameters)

    @property
    def is_dataset(self) -> bool:
        """Whether ``data`` holds samples that are yet to be put into batches."""
        return isinstance(self.data, Dataset)

    @property
    def divides_rows(self) -> bool:
        """Whether the rows of its batches are divided among ranks; a function divides them itself."""
        return isinstance(self.data, Dataset) or not callable(self.data)

    def build(self, seed: int) -> nn.Module:
        """The module, with parameters drawn from ``seed``; those on the meta device stay there.

        Raises:
            TypeError: ``model`` returned something else.
            ValueError: the module has no parameters, some without a shape, complex ones, or sparse gradients.
        """
        with seeded(seed):
            module = self.model()
        if not isinstance(module, nn.Module):
            raise TypeError(f"model: returned {type(module).__name__}; it must return a torch.nn.Module")
        if next(module.parameters(), None) is None:
            raise ValueError(f"model: {type(module).__name__} has no parameters, so there is nothing to train")
        if lazy := [name for name, param in module.named_parameters() if is_lazy(param)]:
            raise ValueError(f"model: {lazy[0]!r} has no shape yet; call the module once in the function that makes it")
        check_real(dict(module.named_parameters()))
        check_sparse(module)
        return module

    def on_meta(self) -> nn.Module:
        """The module without memory for its parameters, where that can be had: planning needs names and shapes only."""
        own = self.apart("model")
        try:
            with torch.device("meta"):
                return own.build(0)
        except (NotImplementedError, RuntimeError):  # its construction computes with values
            return own.build(0)

    def initialiser(self, seed: int) -> InitFn:
        """``init_fn`` with a seed for each module, so that values do not depend on the order in which they are made."""
        init_fn = self.init_fn  # an engine that keeps this is not to keep the data

        def initialise(name: str, module: nn.Module) -> None:
            with seeded(f"{seed}/{name}"):
                init_fn(name, module)

        return initialise

    def made(self, module: nn.Module, device: torch.device, seed: int) -> nn.Module:
        """``module`` on ``device``, with memory and values for what was on the meta device."""
        params = dict(module.named_parameters())
        materialize(module, list(params), params, device, self.initialiser(seed))
        return module.to(device)


class InPlaceOf:
    """What a loss takes for the module: it has the module's attributes, and is called as a function.

    Args:
        module: whose attributes.
        function: called in its place.
        method: what takes the place of each of its methods; by default the method itself.
    """

    def __init__(
        self, module: nn.Module, function: Callable[..., Any], method: Callable[[Any], Any] = lambda own: own
    ) -> None:
        vars(self).update(_module=module, _function=function, _method=method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self._method(value) if inspect.ismethod(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)  # where forward reads it

    def __getitem__(self, key: Any) -> Any:
        return self._module[key]


@contextmanager
def seeded(seed: int | str) -> Iterator[None]:
    """Inside, torch, NumPy and ``random`` draw from ``seed``; outside they go on as if nothing had been drawn."""
    with generators_seeded(seed if isinstance(seed, int) else random.Random(seed).getrandbits(63)):
        yield


def _check_data(data: Any) -> None:
    if callable(data) and not isinstance(data, Dataset):
        _require_function("data", data, "of (rank, ranks, seed) that returns batches", 3)
    elif isinstance(data, str | bytes) or not (isinstance(data, Dataset) or hasattr(data, "__iter__")):
        raise TypeError(
            f"data: {data!r:.80} is neither a Dataset, nor an iterable of batches, nor a function of (rank, ranks, "
            "seed) that returns one"
        )
    elif isinstance(data, Dataset) and not isinstance(data, IterableDataset | Sized):
        raise TypeError(f"data: {class_of(data)} has no __len__, without which it cannot be shuffled; give it one")
    elif hasattr(data, "__next__"):
        raise ValueError(
            "data: an iterator can be read only once, and each strategy reads it; give the function that makes it, of "
            "(rank, ranks, seed)"
        )


def _require_function(field: str, function: Any, what: str, num_args: int) -> None:
    if not callable(function):
        given = " ".join(repr(function).split())  # that of an optimizer has several lines
        raise TypeError(f"{field}: {given:.80} was given; it must be a function {what}")
    if not _binds(function, num_args):
        raise TypeError(f"{field}: it takes {inspect.signature(function)}; it must be a function {what}")


def _binds(function: Any, num_args: int) -> bool:
    """Whether a function takes so many arguments; one without a signature, in C, is taken to take two at most."""
    try:
        inspect.signature(function).bind(*range(num_args))
    except ValueError:
        return num_args < 3
    except TypeError:
        return False
    return True
