"""Listens to a script and notes its steps; in a single process it also puts weights, rows and gradients in place.

Six functions of torch are replaced meanwhile: calling a module or an engine of ours, ``torch.autograd.backward``,
``zero_grad``, what ``clip_grad_norm_`` scales by, and what a DataLoader gives. A mode of torch sees the functions
between an output and its loss. Inside a forward torch's generator begins with a number of the step and the rank, and
goes on as before after it, so that noise that a module draws is the same in the single process.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shardlab.comm.callers import line_of_caller
from shardlab.comm.trees import tensors_in
from shardlab.engines import Engine
from shardlab.engines.any_engine import AnyEngine
from shardlab.recording.global_hooks import replaced
from shardlab.recording.inferred_loop import scalars
from shardlab.same.notes import Backward, Counted, Known, Notes, kept
from shardlab.same.pieces import Pieces
from shardlab.same.rows import Rows, meets
from shardlab.same.steps import Steps, copies

DROPOUTS = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout",
            "scaled_dot_product_attention")  # fmt: skip
LOSSES = (F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy,
          F.binary_cross_entropy_with_logits, F.kl_div, F.huber_loss)  # fmt: skip
REDUCED = {torch.sum: "sum", Tensor.sum: "sum", torch.mean: "mean", Tensor.mean: "mean"}
_ATTENDS = F.scaled_dot_product_attention


class Capture(Steps, TorchFunctionMode):
    """One process of a script; as a mode of torch it is told of every function that is called.

    Args:
        rows: notes them, or gives them again.
        notes: of this process.
        rank: of which the rows are, which seeds what a forward draws.
        limit: steps of each optimizer.
        dropout: whether it is left on.
    """

    keeps_local = False
    """Whether gradients are noted as backward leaves them, with what each has brought."""

    def __init__(self, rows: Rows, notes: Notes, *, rank: int, limit: int, dropout: bool) -> None:
        TorchFunctionMode.__init__(self)
        Steps.__init__(self, notes, limit)
        self._rows, self._rank, self._dropout = rows, rank, dropout
        self._called = -1  # the root that was called last
        self._waits: nn.Module | None = None  # the module of a root whose buffers are to be noted in this step
        self._is_inside = self._is_on_the_way = self._is_in_backward = False
        self._counted: list[Counted] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the script is noted."""
        with contextlib.ExitStack() as stack:
            for owner, name, around in (
                (nn.Module, "__call__", self._around_call), (Engine, "__call__", self._around_call),
                (torch.autograd, "backward", self._around_backward), (clip_grad, "_clip_grads_with_norm_", self._clip),
                (nn.utils, "clip_grads_with_norm_", self._clip),
                (AnyEngine, "clip_grad_norm_", self._around_clip), (Engine, "backward", self._around_verb),
                (FullyShardedDataParallel, "clip_grad_norm_", self._around_clip),
                (nn.Module, "zero_grad", self._around_zero),
                (torch.optim.Optimizer, "zero_grad", self._around_zero), (DataLoader, "__len__", self._rows.length),
                (DataLoader, "__iter__", self._rows.begin), (_BaseDataLoaderIter, "__next__", self._rows.batch),
                (torch.amp.GradScaler, "scale", self._around_scale),
            ):  # fmt: skip
                stack.enter_context(replaced(owner, name, around))
            stack.enter_context(contextlib.nullcontext() if self._dropout else without_dropout())
            stack.callback(register_optimizer_step_pre_hook(self._step_called).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.enter_context(self._messages.calls)
            stack.enter_context(self)
            yield

    def finish(self) -> None:
        """Note what the last steps have left."""
        for pieces in self.pieces:
            self._note_after(pieces)

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A function of torch is called, with gradients or without."""
        kwargs = kwargs or {}
        sends = str(getattr(function, "__module__", "")).startswith("torch.distributed")  # into memory, not rows
        if self._is_on_the_way and not self._is_in_backward and not sends and meets((args, kwargs)):
            key = getattr(function, "__name__", str(function)), line_of_caller()
            args, kwargs = self._rows.met(self.step, self._called, key, (args, kwargs))
        made = function(*args, **kwargs)
        self._counted += counted(function, args, kwargs, made)
        return made

    # What a single process does otherwise.

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_in_backward:
            why = "an optimizer steps inside a backward, where other gradients are still to come: what one process "
            self.refuse(f"{why}would make of all rows is not known; call its step() after backward")
        super()._before_step(optimizer)

    def begin(self, pieces: Pieces) -> None:
        """A root is called for the first time in this step."""
        self.step.weights += copies(pieces.weights())

    def begin_inside(self, pieces: Pieces) -> None:
        """So is its module, when DistributedDataParallel has sent the buffers."""
        self.step.buffers |= {name: kept(one) for name, one in pieces.buffers.items()}

    def brought(self, backward: Backward, before: Known) -> None:
        """A backward has ended."""

    # What is replaced.

    def _around_call(self, plain: Callable[..., Any], root: Any, *args: Any, **kwargs: Any) -> Any:
        self._look_inside(root)
        is_unseen = self._is_inside or not torch.is_grad_enabled() or not _trains(root)
        if is_unseen or self._is_in_backward:
            if not is_unseen:  # a checkpointed forward again, with what it was given at first
                args, kwargs = self._rows.again((args, kwargs))
            return plain(root, *args, **kwargs)
        self._is_inside, self._is_on_the_way = True, False
        try:
            number = self._called = self._number(root)
            if number not in self.step.calls:
                self._note_after(self.pieces[number])
                self._end_if_enough()
                self.begin(self.pieces[number])
                self._waits = self.pieces[number].module
                self._look_inside(root)
            args, kwargs = self._rows.given(self.step, number, (args, kwargs))
            with self._noise(number):
                made = plain(root, *args, **kwargs)
            self._note_dtypes(made)
        finally:
            self._is_inside = False
        self._is_on_the_way = any(one.requires_grad for one in tensors_in(made))
        return made

    def _look_inside(self, root: Any) -> None:
        if root is self._waits:
            self._waits = None
            self.begin_inside(self.pieces[self._called])

    @contextlib.contextmanager
    def _noise(self, number: int) -> Iterator[None]:
        """Inside, torch's generator begins with a number that the single process knows too."""
        with torch.random.fork_rng():
            torch.manual_seed(hash((len(self.notes.steps), number, len(self.step.calls[number]), self._rank)))
            yield

    def _around_backward(self, plain: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self._is_in_backward:
            return plain(tensors, *args, **kwargs)
        backward = Backward(sum(map(float, scalars(tensors))), line_of_caller(), self._counted)
        self._counted = []
        self._look_for_cleared()
        held = self._gradients() if self.keeps_local or self.step.gradients else ()
        before = {part.key: part.value.clone() for part in held}
        self._is_in_backward = True
        try:
            plain(tensors, *args, **kwargs)
        finally:
            self._is_in_backward = self._is_on_the_way = False
        self._look_at_clipped(before)
        number = len(self.step.backwards)
        self.step.backwards.append(backward)
        if not self.has_engines:  # which keep gradients elsewhere
            backward.grew_from = self._held.kept()
        self._held.brought(self._gradients(), number)
        self.brought(backward, before)
        return None

    def _clip(self, plain: Any, parameters: Any, max_norm: float, total_norm: Tensor, *rest: Any, **named: Any) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self.step.gradients:
            self.step.max_norm = None  # several norms, of parts: what they should be is not known
        else:
            self._note_clip(max_norm, [name for one in given for name in self.names.get(id(one), [])])
            self.step.norm = next((float(one) for one in scalars(total_norm)), None)
        plain(given, max_norm, total_norm, *rest, **named)

    def _around_clip(self, plain: Any, root: Any, max_norm: float, *rest: Any, **named: Any) -> Tensor:
        if isinstance(root, AnyEngine):
            root.finish_gradients()
        self._note_clip(max_norm, list(self.notes.trainable))
        norm: Tensor = plain(root, max_norm, *rest, **named)
        self.step.norm = float(norm)
        return norm

    def _note_clip(self, max_norm: float, names: list[str]) -> None:
        self.step.gradients = copies(self._gradients())
        self.step.max_norm, self.step.clipped = float(max_norm), names

    def _look_at_clipped(self, before: Known) -> None:
        """A backward has followed a clip: what it adds to that is not known of all rows, and else begins again."""
        step, noted = self.step, {part.key: part.value for part in self.step.gradients}
        now = {part.key: part.value for part in self._gradients()} if noted else {}
        grown = [key for key in noted.keys() & now.keys() if key not in before or not now[key].equal(before[key])]
        if any(key in before and before[key].any() and not before[key].cpu().equal(noted[key]) for key in grown):
            why = "gradients are clipped, and then others are added to them in the same step: what one process would "
            self.refuse(f"{why}make of all rows is not known; clip once, after the last backward")
        if grown:
            step.gradients, step.clipped, step.max_norm, step.norm = [], [], None, None

    def _around_verb(self, plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._is_on_the_way = False  # what an engine does to gradients is no function of the script
        plain(*args, **kwargs)

    def _around_zero(self, plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._clearing = line_of_caller()
        plain(*args, **kwargs)
        self._look_for_cleared()
        self._clearing = ""

    def _around_scale(self, plain: Callable[..., Any], scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled():
            self.refuse("a GradScaler scales the loss and may skip steps; run the script without it, in float32")
        return plain(scaler, outputs)


def _trains(root: nn.Module | AnyEngine) -> bool:
    return isinstance(root, AnyEngine) or any(param.requires_grad for param in root.parameters())


@contextlib.contextmanager
def without_dropout() -> Iterator[None]:
    """Inside, dropout drops nothing."""
    with contextlib.ExitStack() as stack:
        for name in DROPOUTS:
            stack.enter_context(replaced(F, name, drops_nothing))
        yield


def drops_nothing(plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """In place of a dropout, or of attention that has one."""
    if plain is not _ATTENDS:
        return plain(args[0] if args else kwargs["input"], training=False)
    args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
    return plain(*args, **{key: one for key, one in kwargs.items() if key != "dropout_p"})


def counted(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> list[Counted]:
    """Of how many rows or tokens a loss is, and what they add up to; nothing of what is no loss, or a weighed one."""
    if not (torch.is_grad_enabled() and isinstance(made, Tensor) and made.requires_grad and made.numel() == 1):
        return []
    if function in LOSSES:
        reduction, target = kwargs.get("reduction", "mean"), args[1] if len(args) > 1 else kwargs["target"]
        number = target.numel()
        if function in (F.cross_entropy, F.nll_loss) and not target.is_floating_point():
            number = int((target != kwargs.get("ignore_index", -100)).sum())
    elif function in REDUCED and args[0].numel() > 1:
        number, reduction = args[0].numel(), REDUCED[function]
    else:
        return []
    if reduction not in ("mean", "sum") or kwargs.get("weight") is not None:
        return []
    return [Counted(number, float(made.detach()) * (number if reduction == "mean" else 1))]
