"""The rows that a rank saw: noted, and given again to a single process in the same order.

Noted in three places, the first of which is enough for most scripts: what a DataLoader gives, what a module that trains
is given, and what its output meets on the way to the loss (labels that never were in a loader). In the single process
each is put in the place of what the script there makes by itself, with a sampler that divides by one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shardlab.comm.trees import map_tensors, tensors_in
from shardlab.same.notes import Call, Notes, Step, UnlikeError

_ENDED = "no further batch"  # in place of one


class Rows:
    """Notes the rows of this process.

    Args:
        notes: get them.
        float64: whether floating ones are cast.
    """

    def __init__(self, notes: Notes, *, float64: bool) -> None:
        self._notes, self._float64 = notes, float64
        self._loaders: dict[int, DataLoader[Any]] = {}  # kept, so that no other gets its identity

    def begin(self, plain: Callable[..., Any], loader: DataLoader[Any]) -> Any:
        """Begin to read a loader: what it gives next is known to come from it."""
        made = plain(loader)
        if isinstance(made, _BaseDataLoaderIter):
            made._shardlab_loader = loader  # type: ignore[attr-defined]
        return made

    def batch(self, plain: Callable[..., Any], iterator: Any) -> Any:
        """What a loader gives next; StopIteration if it gives none."""
        loader = getattr(iterator, "_shardlab_loader", None)
        return plain(iterator) if loader is None else self.next_of(loader, lambda: plain(iterator))

    def next_of(self, loader: DataLoader[Any], fetch: Callable[[], Any]) -> Any:
        """The same of a loader."""
        batches = self._notes.batches[self._number(loader)]
        try:
            given = map_tensors(self._cast, fetch())
        except StopIteration:
            batches.append(_ENDED)
            raise
        batches.append(map_tensors(lambda one: one.detach().clone(), given))
        return given

    def length(self, plain: Callable[..., int], loader: DataLoader[Any]) -> int:
        """How many batches a loader says to have."""
        return self._notes.lengths.setdefault(self._number(loader), plain(loader))

    def given(self, step: Step, root: int, value: Any) -> Any:
        """What a module that trains is given."""
        call = Call([self._cast(one).detach().clone() if _is_given(one) else None for one in tensors_in(value)])
        step.calls.setdefault(root, []).append(call)
        return map_tensors(self._cast, value)

    def again(self, value: Any) -> Any:
        """What a module is given when a backward computes its forward again."""
        return map_tensors(self._cast, value)

    def met(self, step: Step, root: int, key: tuple[str, str], value: Any) -> Any:
        """What meets an output on the way to the loss: arguments of a function; ``root`` was called last."""
        value = map_tensors(lambda one: one if one.requires_grad else self._cast(one), value)
        call = step.calls[root][-1]
        number = sum(known[:2] == key for known in call.operands)
        call.operands[(*key, number)] = [one.detach().clone() for one in tensors_in(value) if _is_rows(one)]
        return value

    def _number(self, loader: DataLoader[Any]) -> int:
        if id(loader) not in self._loaders:
            self._loaders[id(loader)] = loader
            self._notes.batches.append([])
        return list(self._loaders).index(id(loader))

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.double() if self._float64 and tensor.is_floating_point() else tensor


class RowsAgain(Rows):
    """Gives the rows of one rank to a single process; where that takes more micro-batches a step, the others' follow.

    Args:
        notes: of this process.
        float64: see ``Rows``.
        ranks: notes of all ranks.
        rank: whose rows come first.
    """

    def __init__(self, notes: Notes, *, float64: bool, ranks: list[Notes], rank: int) -> None:
        super().__init__(notes, float64=float64)
        self._ranks, self._rank = ranks, rank
        self._call = Call()
        self._instead: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: what was given, and what in its place

    def next_of(self, loader: DataLoader[Any], fetch: Callable[[], Any]) -> Any:
        """As the base, of the rank."""
        number = self._number(loader)
        taken = self._notes.batches[number]
        noted = self._ranks[self._rank].batches
        if number >= len(noted) or len(taken) >= len(noted[number]):
            return super().next_of(loader, fetch)
        taken.append(noted[number][len(taken)])
        if isinstance(taken[-1], str) and taken[-1] == _ENDED:
            raise StopIteration
        return map_tensors(torch.clone, taken[-1])

    def length(self, plain: Callable[..., int], loader: DataLoader[Any]) -> int:
        """As the base, of the rank."""
        return self._ranks[self._rank].lengths.get(self._number(loader)) or plain(loader)

    def given(self, step: Step, root: int, value: Any) -> Any:
        """As the base, of the rank."""
        number = len(step.calls.setdefault(root, []))
        self._call = self._noted(len(self._notes.steps), root, number)
        tensors, again = list(tensors_in(value)), dict[int, Tensor]()
        if len(tensors) != len(self._call.given):
            raise UnlikeError(f"a forward takes {len(tensors)} tensors, and {len(self._call.given)} on the rank")
        for one, known in zip(tensors, self._call.given, strict=True):
            if known is None or not _is_given(one):
                continue
            if one.requires_grad and one.shape == known.shape:  # its gradient may be asked for: it stays itself
                one.data.copy_(known)
            else:
                again[id(one)] = known
        self._instead |= {id(one): (one, again[id(one)]) for one in tensors if id(one) in again}
        return super().given(step, root, map_tensors(lambda one: again.get(id(one), one), value))

    def again(self, value: Any) -> Any:
        """As the base, of the rank."""
        return super().again(map_tensors(lambda one: self._instead.get(id(one), (one, one))[1], value))

    def met(self, step: Step, root: int, key: tuple[str, str], value: Any) -> Any:
        """As the base, of the rank."""
        number = sum(known[:2] == key for known in step.calls[root][-1].operands)
        known = self._call.operands.get((*key, number), [])
        own = [one for one in tensors_in(value) if _is_rows(one)]
        if len(known) != len(own):
            raise UnlikeError(f"{key[0]} at {key[1]} takes {len(own)} tensors of rows, and {len(known)} on the rank")
        again = {id(one): other for one, other in zip(own, known, strict=True)}
        return super().met(step, root, key, map_tensors(lambda one: again.get(id(one), one), value))

    def _noted(self, step: int, root: int, number: int) -> Call:
        # In rank order, beginning with the own one: a script that divides its micro-batches by the ranks asks here for
        # those of all.
        turn, calls = number, list[Call]()
        for rank in range(len(self._ranks)):
            steps = self._ranks[(self._rank + rank) % len(self._ranks)].steps
            calls = steps[step].calls.get(root, []) if step < len(steps) else []
            if turn < len(calls):
                return calls[turn]
            turn -= len(calls)
        raise UnlikeError(f"in one process a step has {number + 1} forwards of a module or more, on all ranks fewer")


def joined(ranks: Sequence[Notes], dim: int) -> Notes:
    """The rows of all ranks at once, as one rank would have them, put together along a dim."""
    made = Notes(lengths=ranks[0].lengths)
    for noted in zip(*(one.steps for one in ranks), strict=False):
        calls = {root: zip(*(step.calls.get(root, []) for step in noted), strict=False) for root in noted[0].calls}
        made.steps.append(Step(calls={root: [_joined_call(one, dim) for one in some] for root, some in calls.items()}))
    for loaders in zip(*(one.batches for one in ranks), strict=False):
        made.batches.append([_joined_tree(some, dim) for some in zip(*loaders, strict=False)])
    return made


def _joined_call(calls: Sequence[Call], dim: int) -> Call:
    given = [_joined(tensors, dim) for tensors in zip(*(call.given for call in calls), strict=True)]
    first = next((one for one in calls[0].given if one is not None and one.ndim), None)
    num_rows = 1 if first is None else len(first)
    met = {key: zip(*(call.operands.get(key, []) for call in calls), strict=False) for key in calls[0].operands}
    return Call(given, {key: [_joined(one, dim, num_rows) for one in some] for key, some in met.items()})


def _joined_tree(trees: Sequence[Any], dim: int) -> Any:
    made = iter([_joined(tensors, dim) for tensors in zip(*map(tensors_in, trees), strict=True)])
    return map_tensors(lambda _: next(made), trees[0])


def _joined(tensors: Sequence[Any], dim: int, num_rows: int = 1) -> Any:
    first = tensors[0]
    if first is None or first.ndim == 0 or all(one.equal(first) for one in tensors[1:]):  # a mask, or positions
        return first
    if dim and first.ndim == 1 and first.numel() % num_rows == 0:  # labels that were flattened
        return torch.cat([one.reshape(num_rows, -1) for one in tensors], 1).reshape(-1)
    return torch.cat(list(tensors), min(dim, first.ndim - 1))


def _is_given(tensor: Tensor) -> bool:
    """Whether a tensor that a module is given is noted: what another module has made is computed again."""
    return not tensor.requires_grad or (tensor.is_leaf and not isinstance(tensor, nn.Parameter))


def _is_rows(tensor: Tensor) -> bool:
    """Whether a tensor that meets an output is noted: numbers are computed again, from the rows."""
    return not tensor.requires_grad and tensor.numel() > 1


def meets(value: Mapping[str, Any] | tuple[Any, ...]) -> bool:
    """Whether an output that trains meets tensors that do not, in the arguments of a function."""
    tensors = list(tensors_in(value))
    return any(one.requires_grad for one in tensors) and any(_is_rows(one) for one in tensors)
