"""Notes the steps of a script: what its modules hold, what they send, and what optimizers are given and make of it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardlab.comm.callers import line_of_caller, locate
from shardlab.comm.events import CollectiveEvent, Observer
from shardlab.comm.trees import tensors_in
from shardlab.engines.any_engine import AnyEngine
from shardlab.recording.global_hooks import inside
from shardlab.recording.script_collectives import TorchCalls
from shardlab.recording.torch_callers import Caller
from shardlab.same.notes import Cleared, Message, Notes, Part, Step, kept
from shardlab.same.pieces import Pieces
from shardlab.vocabulary import Collective

MOST = 4  # times the limit, of an optimizer that steps more often than another
_NUMBERS = (int, float, bool, str, type(None), tuple)


class Enough(BaseException):
    """All steps that were asked for have been noted; no script catches it by accident."""


class Held:
    """Gradients that backwards have brought, by name: until an optimizer steps them, somebody clears them, or both.

    They are known from one step to the next.
    """

    def __init__(self) -> None:
        # Norm, backward (-1 when it has been stepped), whether another optimizer has stepped since.
        self._known: dict[str, tuple[float, int, bool]] = {}

    def kept(self) -> dict[str, float]:
        """Norms of those that were stepped, and that nobody has cleared: the next backward adds to them."""
        return {name: norm for name, (norm, backward, _) in self._known.items() if backward < 0 < norm}

    def brought(self, parts: Iterable[Part], backward: int) -> None:
        """Gradients as a backward leaves them; it has brought nothing of one that it leaves as it was."""
        for part in parts:
            # What the loss of another optimizer brought before stays that.
            before, _, is_of_another = self._known.get(part.name, (0.0, 0, False))
            if (norm := float(part.value.norm())) != before:
                self._known[part.name] = norm, backward, is_of_another

    def stepped(self, names: Collection[str]) -> None:
        """An optimizer has stepped these."""
        for name, (norm, backward, _) in self._known.items():
            if name in names or backward >= 0:
                self._known[name] = (norm, -1, False) if name in names else (norm, backward, True)

    def cleared(self, parts: Iterable[Part], line: str) -> list[Cleared]:
        """Those that are gone, though nobody has stepped them; ``parts`` are all that are there."""
        held = {name: known for name, known in self._known.items() if known[0] > 0}
        if not held:
            return []
        now = {part.name: float(part.value.norm()) for part in parts}
        gone = {name: known for name, known in held.items() if not now.get(name, 0.0) > 0}
        for name in gone:
            del self._known[name]
        return [
            Cleared(name, norm, number, line, another) for name, (norm, number, another) in gone.items() if number >= 0
        ]


class Messages(Observer):
    """Notes what a script sends before a step, with the line that sends it and the gradients that are in it.

    Args:
        names_of: the parameters or gradients that lie in a tensor's memory.
        backward: how many there were in this step.
    """

    def __init__(self, names_of: Callable[[Tensor], tuple[str, ...]], backward: Callable[[], int]) -> None:
        self._names_of, self._backward = names_of, backward
        self._names: tuple[str, ...] = ()
        self._caller = ""
        self._found: list[Message] = []
        self.calls = TorchCalls(self, self._tag)
        """Messages are noted while this is entered."""

    def taken(self) -> list[Message]:
        """Those since the last call."""
        self.calls.end_waits()
        self.calls.forget_ended()
        found, self._found = self._found, []
        return found

    def issued(self, event: CollectiveEvent) -> None:
        """As the base."""
        line, number = locate(event), self._backward()
        sent = str(event.op), self._caller, line, event.ranks, event.dtype, self._names, number, event.numel
        self._found.append(Message(*sent))

    def _tag(self, op: Collective, caller: Caller, tensors: Sequence[Tensor]) -> str:
        self._caller = caller.name
        self._names = tuple(name for tensor in tensors for name in self._names_of(tensor)) if not caller.name else ()
        return caller.name or "the script"


class Steps:
    """Steps of one process.

    Args:
        notes: get them.
        limit: of each optimizer.
    """

    def __init__(self, notes: Notes, limit: int) -> None:
        self.notes, self._limit = notes, limit
        self.pieces: list[Pieces] = []  # of each root
        self.has_engines = False  # of ours, which show gradients at the step alone
        self.names: dict[int, list[str]] = {}
        self._aliases: set[str] = set()  # of weights that a root before has under another name
        self.step = Step()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._held = Held()
        self._clearing = ""  # line
        self._stepping: list[torch.optim.Optimizer] = []
        self.on_step: Callable[[], None] = lambda: None
        """Called when a step, or a module's parameters, have been noted."""
        self._messages = Messages(self._name_of, lambda: len(self.step.backwards))

    def refuse(self, why: str) -> NoReturn:
        """End the script, which cannot be judged."""
        self.notes.refused = why
        raise Enough

    def pieces_of(self, root: nn.Module | AnyEngine, prefix: str) -> Pieces:
        """What it holds, by names with this prefix."""
        return Pieces(root, prefix)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def _step_called(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """A step begins here or, where it is given a closure that brings the gradients, behind that."""
        closure: Callable[[], Any] | None = next(iter(args[1:]), kwargs.get("closure"))
        if closure is None:
            self._before_step(optimizer)
            return None

        def brings() -> Any:
            if optimizer in self._stepping:
                self.refuse("an optimizer calls its closure several times in a step, as LBFGS does")
            made = closure()
            self._before_step(optimizer)
            return made

        return args[:1], {**kwargs, "closure": brings}

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            return
        step = self.step
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        step.optimizer = self._optimizers.index(optimizer)
        if self.notes.steps and self.notes.steps[-1].optimizer != step.optimizer and not step.backwards:
            self._share(self.notes.steps[-1])
        step.line, self._clearing = line_of_caller(), ""
        groups = optimizer.param_groups
        step.names = [name for group in groups for one in group["params"] for name in self.names.get(id(one), [""])]
        self._look_for_cleared()
        step.stepped = copies(self._gradients())
        step.gradients = step.gradients or step.stepped  # or those from before they were clipped
        step.options = [{key: one for key, one in group.items() if isinstance(one, _NUMBERS)} for group in groups]
        step.messages = step.messages + self._messages.taken()
        every = (one for pieces in self.pieces for one in pieces.unreduced())
        step.unreduced = {name: float(one.norm()) for name, one in every if name in step.names}
        self.step_begins(optimizer)

    def _share(self, before: Step) -> None:
        """The optimizer before has stepped a part of what its backwards brought, and this one steps another part."""
        step = self.step
        step.backwards, step.messages = before.backwards, before.messages
        if before.clipped and not step.clipped:
            step.gradients, step.clipped, step.scale = before.gradients, before.clipped, before.scale
            step.norm, step.max_norm = before.norm, before.max_norm

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        while self._stepping and self._stepping.pop() is not optimizer:
            pass  # optimizers inside of this one whose step raised
        if self._stepping:
            return
        self._held.stepped(self.step.names)
        self.notes.steps.append(self.step)
        self.step = Step()
        self.on_step()

    def _gradients(self) -> Iterator[Part]:
        every = (part for pieces in self.pieces for part in pieces.gradients())
        for part in (part for part in every if part.name not in self._aliases):
            if part.value.is_sparse:
                self.refuse(f"gradients of {part.name!r} are sparse, which is not compared; build it with sparse=False")
            yield part

    def _look_for_cleared(self) -> None:
        """Gradients that backward has brought and that are gone, though nobody has stepped them."""
        if self.has_engines or not (cleared := self._held.cleared(self._gradients(), self._clearing)):
            return
        before = {part.key: part.value for part in self.step.weights}
        now = (part for pieces in self.pieces for part in pieces.weights() if part.key in before)
        # Gradients by which a script has moved the weights are not lost: SAM steps by those at another place.
        moved = {part.name for part in now if not part.value.cpu().equal(before[part.key])}
        self.step.is_moved |= bool(moved)
        self.step.cleared += [one for one in cleared if one.name not in moved]

    def _note_after(self, pieces: Pieces) -> None:
        names, weights = {name for names in pieces.names.values() for name in names}, list[Part]()
        for step in self.notes.steps:
            if wanted := names & set(step.names) - {part.name for part in step.after}:
                weights = weights or copies(pieces.weights())
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
        self._aliases |= {name for key, names in pieces.names.items() if key in self.names for name in names}
        self.names = pieces.names | self.names
        known_names = self._aliases.union(self.notes.trainable)
        self.notes.trainable += [name for name in pieces.trainable if name not in known_names]
        self.notes.shapes |= {part.name: part.shape for part in pieces.weights()}
        self.notes.tied += pieces.tied
        self.on_step()
        return len(known)

    def _name_of(self, tensor: Tensor) -> tuple[str, ...]:
        """The gradients, or parameters, that are in the memory of a message."""
        if tensor.is_sparse:
            return ()
        storage = tensor.untyped_storage().data_ptr()
        parts = (part for pieces in self.pieces for one in (pieces.gradients(), pieces.weights()) for part in one)
        return tuple(dict.fromkeys(part.name for part in parts if part.value.untyped_storage().data_ptr() == storage))

    def _note_dtypes(self, made: Any) -> None:
        kinds = {torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)}
        kinds |= {one.dtype for one in tensors_in(made)} & {torch.bfloat16, torch.float16}  # as FSDP2 may cast
        kinds |= {part.value.dtype for pieces in self.pieces for part in pieces.weights()}
        self.step.dtypes |= {str(kind).removeprefix("torch.") for kind in kinds}


def copies(parts: Iterable[Part]) -> list[Part]:
    """Pieces with values of their own."""
    return [part._replace(value=kept(part.value)) for part in parts]
