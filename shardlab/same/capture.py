"""Listens to a script and notes its steps; in a single process it also puts weights, rows and gradients in place.

Six functions of torch are replaced meanwhile: calling a module or an engine of ours, ``torch.autograd.backward``,
``zero_grad``, what ``clip_grad_norm_`` scales by, and what a DataLoader gives. A mode of torch sees the functions
between an output and its loss. Inside a forward torch's generator begins with a number of the step and the rank, and
goes on as before after it, so that noise that a module draws is the same in the single process.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

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
from shardlab.same.messages import Messages
from shardlab.same.notes import Backward, Cleared, Counted, Known, Notes, Part, Step, kept
from shardlab.same.pieces import Pieces, inside
from shardlab.same.rows import Rows, meets

DROPOUTS = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout",
            "scaled_dot_product_attention")  # fmt: skip
LOSSES = (F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy,
          F.binary_cross_entropy_with_logits, F.kl_div, F.huber_loss)  # fmt: skip
REDUCED = {torch.sum: False, Tensor.sum: False, torch.mean: True, Tensor.mean: True}  # whether by a mean
MOST = 4  # times the limit, of an optimizer that steps more often than another
_NUMBERS = (int, float, bool, str, type(None), tuple)
_ATTENDS = F.scaled_dot_product_attention


class Enough(BaseException):
    """All steps that were asked for have been noted; no script catches it by accident."""


class Capture(TorchFunctionMode):
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
        super().__init__()
        self._rows, self.notes, self._rank, self._limit, self._dropout = rows, notes, rank, limit, dropout
        self.pieces: list[Pieces] = []  # of each root
        self.has_engines = False  # of ours, which show gradients at the step alone
        self.names: dict[int, list[str]] = {}
        self.step = Step()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._called = -1  # the root that was called last
        self._waits: nn.Module | None = None  # the module of a root whose buffers are to be noted in this step
        self._is_inside = self._is_on_the_way = self._is_in_backward = False
        self._counted: list[Counted] = []
        self._held: dict[str, tuple[float, int, bool]] = {}  # norm, backward, whether another optimizer has stepped
        self._clearing = ""  # line
        self._stepping: list[torch.optim.Optimizer] = []
        self.on_step: Callable[[], None] = lambda: None
        """Called when a step, or a module's parameters, have been noted."""
        self._messages = Messages(self._name_of, lambda: len(self.step.backwards))

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
                (torch.optim.Optimizer, "zero_grad", self._around_zero), (DataLoader, "__len__", self._around_length),
                (DataLoader, "__iter__", self._around_iter), (_BaseDataLoaderIter, "__next__", self._around_next),
                (torch.amp.GradScaler, "scale", self._around_scale),
            ):  # fmt: skip
                stack.enter_context(replaced(owner, name, around))
            for name in () if self._dropout else DROPOUTS:
                stack.enter_context(replaced(F, name, _drops_nothing))
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.enter_context(self._messages)
            stack.enter_context(self)
            yield

    def finish(self) -> None:
        """Note what the last steps have left."""
        for pieces in self.pieces:
            self._note_after(pieces)

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A function of torch is called, with gradients or without."""
        kwargs = kwargs or {}
        if self._is_on_the_way and not self._is_in_backward and meets((args, kwargs)):
            key = getattr(function, "__name__", str(function)), line_of_caller()
            args, kwargs = self._rows.met(self.step, self._called, key, (args, kwargs))
        made = function(*args, **kwargs)
        is_loss = torch.is_grad_enabled() and isinstance(made, Tensor) and made.requires_grad and made.numel() == 1
        if is_loss and function in REDUCED and args[0].numel() > 1:
            number = args[0].numel()
            self._counted.append(Counted(number, float(made.detach()) * (number if REDUCED[function] else 1)))
        elif is_loss and function in LOSSES:
            self._counted += _counted(function, args, kwargs, made)
        return made

    def refuse(self, why: str) -> NoReturn:
        """End the script, which cannot be judged."""
        self.notes.refused = why
        raise Enough

    # What a single process does otherwise.

    def pieces_of(self, root: nn.Module | AnyEngine, prefix: str) -> Pieces:
        """What it holds, by names with this prefix."""
        return Pieces(root, prefix)

    def begin(self, pieces: Pieces) -> None:
        """A root is called for the first time in this step."""
        self.step.weights += _copies(pieces.weights())

    def begin_inside(self, pieces: Pieces) -> None:
        """So is its module, when DistributedDataParallel has sent the buffers."""
        self.step.buffers |= {name: kept(one) for name, one in pieces.buffers.items()}

    def brought(self, backward: Backward, before: Known) -> None:
        """A backward has ended."""

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

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
            backward.grew_from = {name: norm for name, (norm, since, _) in self._held.items() if since < 0 < norm}
        for part in self._gradients():
            # What the loss of another optimizer brought before stays that.
            is_of_another = part.name in self._held and self._held[part.name][2]
            self._held[part.name] = float(part.value.norm()), number, is_of_another
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
        self.step.gradients = _copies(self._gradients())
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

    def _around_length(self, plain: Callable[..., int], loader: DataLoader[Any]) -> int:
        return self._rows.length(loader, plain(loader))

    def _around_iter(self, plain: Callable[..., Any], loader: DataLoader[Any]) -> Any:
        made = plain(loader)
        if isinstance(made, _BaseDataLoaderIter):
            made._shardlab_loader = loader  # type: ignore[attr-defined]
        return made

    def _around_next(self, plain: Callable[..., Any], iterator: Any) -> Any:
        loader = getattr(iterator, "_shardlab_loader", None)
        return plain(iterator) if loader is None else self._rows.batch(loader, lambda: plain(iterator))

    def _around_scale(self, plain: Callable[..., Any], scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled():
            self.refuse("a GradScaler scales the loss and may skip steps; run the script without it, in float32")
        return plain(scaler, outputs)

    # Steps.

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            return
        step = self.step
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        step.optimizer = self._optimizers.index(optimizer)
        step.line, self._clearing = line_of_caller(), ""
        groups = optimizer.param_groups
        step.names = [name for group in groups for one in group["params"] for name in self.names.get(id(one), [""])]
        self._look_for_cleared()
        step.stepped = _copies(self._gradients())
        step.gradients = step.gradients or step.stepped  # or those from before they were clipped
        step.options = [{key: one for key, one in group.items() if isinstance(one, _NUMBERS)} for group in groups]
        step.messages = self._messages.taken()
        every = (one for pieces in self.pieces for one in pieces.unreduced())
        step.unreduced = {name: float(one.norm()) for name, one in every if name in step.names}
        self.step_begins(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        while self._stepping and self._stepping.pop() is not optimizer:
            pass  # optimizers inside of this one whose step raised
        if self._stepping:
            return
        for name, (norm, backward, _another) in list(self._held.items()):
            if name in self.step.names:
                self._held[name] = norm, -1, False  # stepped; if it stays, the next backward adds to it
            elif backward >= 0:
                self._held[name] = norm, backward, True
        self.notes.steps.append(self.step)
        self.step = Step()
        self.on_step()

    def _gradients(self) -> Iterator[Part]:
        for pieces in self.pieces:
            yield from pieces.gradients()

    def _look_for_cleared(self) -> None:
        """Gradients that backward has brought and that are gone, though nobody has stepped them."""
        held = {name: known for name, known in self._held.items() if known[0] > 0}
        if not held or self.has_engines:
            return
        now = {part.name: float(part.value.norm()) for part in self._gradients()}
        for name, (norm, backward, is_of_another) in held.items():
            if now.get(name, 0.0) > 0:
                continue
            if backward >= 0:
                self.step.cleared.append(Cleared(name, norm, backward, self._clearing, is_of_another))
            del self._held[name]

    def _note_after(self, pieces: Pieces) -> None:
        names, weights = {name for names in pieces.names.values() for name in names}, list[Part]()
        for step in self.notes.steps:
            if wanted := names & set(step.names) - {part.name for part in step.after}:
                weights = weights or _copies(pieces.weights())
                step.after += [part for part in weights if part.name in wanted]

    def _end_if_enough(self) -> None:
        counts = Counter(step.optimizer for step in self.notes.steps).values()
        if counts and (min(counts) >= self._limit or max(counts) >= MOST * self._limit):
            raise Enough

    def _number(self, root: nn.Module | AnyEngine) -> int:
        module = inside(root.module if isinstance(root, AnyEngine) else root)
        known = [pieces.module for pieces in self.pieces]
        if module in known:
            return known.index(module)
        try:
            pieces = self.pieces_of(root, f"{len(known)}:" if known else "")
        except ValueError as error:
            self.refuse(str(error))
        self.has_engines |= isinstance(root, AnyEngine)
        self.pieces.append(pieces)
        # Weights that two roots share keep the name of the first.
        self.names = pieces.names | self.names
        self.notes.trainable += [name for name in pieces.trainable if name not in self.notes.trainable]
        self.notes.shapes |= {part.name: part.shape for part in pieces.weights()}
        self.notes.tied += pieces.tied
        self.on_step()
        return len(known)

    def _name_of(self, tensor: Tensor) -> tuple[str, ...]:
        """The gradients, or parameters, that are in the memory of a message."""
        storage = tensor.untyped_storage().data_ptr()
        parts = (part for pieces in self.pieces for one in (pieces.gradients(), pieces.weights()) for part in one)
        return tuple(dict.fromkeys(part.name for part in parts if part.value.untyped_storage().data_ptr() == storage))

    def _note_dtypes(self, made: Any) -> None:
        kinds = {torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)}
        kinds |= {one.dtype for one in tensors_in(made)} & {torch.bfloat16, torch.float16}  # as FSDP2 may cast
        kinds |= {part.value.dtype for pieces in self.pieces for part in pieces.weights()}
        self.step.dtypes |= {str(kind).removeprefix("torch.") for kind in kinds}


def _trains(root: nn.Module | AnyEngine) -> bool:
    return isinstance(root, AnyEngine) or any(param.requires_grad for param in root.parameters())


def _copies(parts: Iterator[Part]) -> list[Part]:
    return [part._replace(value=kept(part.value)) for part in parts]


def _drops_nothing(plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    if plain is not _ATTENDS:
        return plain(args[0] if args else kwargs["input"], training=False)
    args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
    return plain(*args, **{key: one for key, one in kwargs.items() if key != "dropout_p"})


def _counted(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Tensor) -> list[Counted]:
    """How many rows or tokens a loss is of, and their sum."""
    reduction, target = kwargs.get("reduction", "mean"), args[1] if len(args) > 1 else kwargs["target"]
    number = target.numel()
    if function in (F.cross_entropy, F.nll_loss) and not target.is_floating_point():
        number = int((target != kwargs.get("ignore_index", -100)).sum())
    if reduction not in ("mean", "sum") or kwargs.get("weight") is not None:
        return []
    return [Counted(number, float(made.detach()) * (number if reduction == "mean" else 1))]
