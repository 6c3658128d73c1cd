"""What users do with gathered parameters and with their pieces: hold them, write into them, put others in their place.

What the user holds is not resharded. What the user writes into it goes into the shard or is refused, and what is
written into the pieces makes whatever is gathered old.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import override

from shardlab.engines.gathered_parameters import BucketState, GatheredParameters
from shardlab.engines.hooks import in_plain_mode
from shardlab.engines.placeholder import check_replaced, is_at


class Resharded(Protocol):
    """What is gathered and resharded: a bucket, or a unit of FSDP."""

    def reshard(self) -> None: ...  # noqa: D102


def reshard_all(members: Iterable[Resharded]) -> None:
    """Reshard all, and only then raise what the first of them refused.

    Otherwise this rank alone would keep the rest gathered, and skip the next gather of it while the others wait there.
    """
    _of_all(member.reshard for member in members)


def let_go_all(buckets: "Iterable[HeldParameters]") -> None:
    """End a ``hold`` of all, and only then raise what the first of them refused."""
    _of_all(bucket.let_go for bucket in buckets)


def end_holds_by_hand(buckets: "Iterable[HeldParameters]") -> None:
    """End the holds by hand of all, and only then raise what the first of them refused."""
    _of_all(bucket.end_hold_by_hand for bucket in buckets)


def _of_all(calls: Iterable[Callable[[], None]]) -> None:
    refusal = None
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal


class HeldParameters(GatheredParameters):
    """Adds to ``GatheredParameters`` what the user does with them and with their pieces."""

    # Defaults of the class, so that no constructor is needed.
    held_by_hand = False  # gathered by the user, who will reshard it
    num_holders = 0  # open full_params(), which show parameters in their stored dtype
    num_ends_by_hand = 0  # of holds by hand
    _piece_versions: Mapping[str, int] = MappingProxyType({})  # of the pieces, when their values were last known
    _seen: list[tuple[int, int]] | None = None  # of the pieces, when nothing was left to follow
    _shows_copy = False  # of a whole shard, in a full_params() whose changes are lost

    @property
    def is_held(self) -> bool:
        """Whether the user holds the full parameters, so that nothing reshards them."""
        return self.held_by_hand or self.num_holders > 0

    @property
    def is_held_as_stored(self) -> bool:
        """Whether the user holds them in a dtype other than the one to compute in."""
        return self.num_holders > 0 and self.shard.dtype != self.compute_dtype

    @override
    @in_plain_mode
    def start_unshard(self, *, as_stored: bool = False) -> None:
        """As the base; first follows what another optimizer, or the user, has written or assigned to the pieces."""
        found = self._places_and_versions()
        if found is None or found != self._seen:
            self.take_assigned()
            self.follow_pieces()
            self._seen = self._places_and_versions()
        super().start_unshard(as_stored=as_stored)

    def reshard(self) -> None:
        """Free the full parameters unless the user holds them.

        Raises:
            RuntimeError: they were written to, which would be lost. This also ends a hold by hand.
        """
        if self.num_holders:
            return
        changed = [] if self.state is not BucketState.UNSHARDED else self._written_to()
        if self.held_by_hand and not changed:
            return
        self.free()  # before the error, which must not leave them in memory
        self.held_by_hand = False
        if changed:
            raise RuntimeError(
                f"parameter {changed[0]!r}: it was written to while it was gathered, which does not change the shards; "
                "write inside 'with engine.full_params(keep_changes=True):', or use a buffer for what forward changes"
            )

    def end_hold_by_hand(self) -> None:
        """Reshard what the user has gathered, and refuse backwards through what plain code has saved of it since.

        Such a graph, as of a penalty on weights, has the parameter itself, and would read its stub.
        """
        self.held_by_hand = False
        self.num_ends_by_hand += 1  # what is saved by reference stays right
        self.values_changed(self.params)
        self.reshard()

    def hold(self, *, as_copy: bool) -> None:
        """Gather the full parameters in their stored dtype, and keep them until ``let_go``.

        Args:
            as_copy: also of a whole shard, so that what is written into them is lost there too.
        """
        if self.num_holders:
            self.follow_pieces()
        else:
            self.free()  # what is held by hand too: in the compute dtype it may have fewer bits
            self._shows_copy = as_copy
            try:
                self.unshard(as_stored=True)
            except BaseException:
                self._shows_copy = False  # or what is gathered to compute with would be a copy too
                raise
        self.num_holders += 1

    def let_go(self) -> None:
        """End a ``hold``."""
        self.num_holders -= 1
        if self.num_holders == 0:
            lost = self._written_to() if self.state is BucketState.UNSHARDED else []
            self.free()  # and not reshard: changes that are not kept may be lost here
            self._shows_copy = False
            self.values_changed(lost)  # back to the shard's: a graph that was made with the changed ones is refused
            if self.held_by_hand:
                self.unshard()

    def give_back(self) -> None:
        """Leave the module with the full parameters in their stored dtype, for good."""
        if self.num_holders == 0 or self._written_pieces():
            self._shows_copy = False
            self.free()  # what is gathered to compute with may have fewer bits, and what is held may be stale
            self.unshard(as_stored=True, checked=False)
        # Where this is inside a ``full_params()``, that must not take them away when it is left.
        self.num_holders += 1

    def refresh(self) -> None:
        """After a step: gather again what the user holds, and follow the pieces."""
        if self.is_held:
            # Not ``reshard()``, which leaves alone what is held.
            self.free()
            self.unshard(as_stored=self.num_holders > 0)
        else:
            self.follow_pieces()

    @property
    def is_written(self) -> bool:
        """Whether the user has written into what ``full_params()`` shows."""
        return self.num_holders > 0 and bool(self._written_to())

    def check_changes(self) -> None:
        """Before ``keep_changes``, of all buckets: check what the user has put in the place of gathered data.

        Raises:
            RuntimeError: an attribute has another parameter, or the data another shape, dtype or device; or the pieces
                were written to as well.
        """
        self.follow_pieces()
        for name, param in self.params.items():
            self.sites[name].check()
            if not is_at(param, self.full[name]):
                check_replaced(param, self.full[name], name)

    def keep_changes(self) -> None:
        """Copy what was written into the full parameters back into the shard."""
        assert self.state is BucketState.UNSHARDED
        if any(not is_at(param, self.full[name]) for name, param in self.params.items()):
            self._renew_full()
        for name, piece in self._tensors.own.items():
            self.pieces[name].detach().view(-1).copy_(self.full[name].reshape(-1)[piece.param_start : piece.param_stop])
        # Writing has raised the versions of what was written to; a backward through the rest is still right.
        self._versions, self._piece_versions = self._versions_now(), self._versions_of_pieces()

    def take_assigned(self) -> None:
        """Take over what an optimizer, or the user, has put in the place of a piece's data."""
        if any(map(self._is_assigned, self.pieces)):
            self._renew_shard()
            self.count_as_written()

    def count_as_written(self) -> None:
        """Count the pieces as written, on all ranks alike, also where a write is not seen.

        A rank may hold nothing of what others write, and fused kernels do not raise autograd's versions.
        """
        increment_version(self.pieces.values())

    def follow_pieces(self) -> None:
        """Drop what was gathered, and refuse backwards that need it, if pieces were written to since.

        Raises:
            RuntimeError: the user holds it.
        """
        written = self._written_pieces()
        if not written:
            return
        if self.is_held and self.state is BucketState.UNSHARDED and not self._is_in_place:
            raise RuntimeError(
                "engine.step_tensors(): pieces were written to, by hand or by a step that raised or is under way, and "
                "the full parameters, which are held, would be stale; write outside 'with engine.full_params():' and "
                "after engine.reshard(unit), or, with keep_changes=True, into the module's parameters"
            )
        self.reshard()
        self.values_changed(written)
        self._piece_versions = self._versions_of_pieces()

    def is_current(self, name: str) -> bool:
        """Whether a parameter is gathered, and its piece was neither written to nor assigned since."""
        is_known = self.pieces[name]._version == self._piece_versions.get(name, 0)
        return self.state is BucketState.UNSHARDED and is_known and not self._is_assigned(name)

    def _is_assigned(self, name: str) -> bool:
        if (place := self._tensors.places.get(name)) is None:
            return self._empty.is_assigned(name)
        home = self._home()
        return self.pieces[name].data_ptr() != home.data_ptr() + place.start * home.element_size()

    @override
    def _shown_shard(self) -> Tensor:
        return self.shard.clone() if self._shows_copy else self.shard

    @in_plain_mode
    def _renew_shard(self) -> None:
        """Move the shard to new memory, from wherever the pieces' data is now.

        The optimizer may have kept the old memory, as its previous weights, and so may the user.
        """
        home = self._home().clone()
        for name in self._tensors.own:
            self._tensors.piece_of(name, home).copy_(self.pieces[name].detach())
        self._move_home(home)
        self._point_pieces_at(self._home())

    @in_plain_mode
    def _renew_full(self) -> None:
        """Give the full parameters new memory, from wherever their data is now.

        The old memory is left as it is: the user may have swapped the data of two parameters, or keep it to put it back
        later.
        """
        # Unseen by autograd: with a new version it refuses a backward that saved the old values.
        increment_version([self.params[name] for name in self.params if self._is_replaced(name)])
        if self._is_in_place:
            self._renew_shard()
            self._show({name: self._tensors.read(name, self.shard) for name in self.params})
        else:
            self._show({name: torch.empty_like(full) for name, full in self.full.items()})
        for name, param in self.params.items():
            param.data = self.full[name].copy_(param.detach())

    def values_changed(self, names: Iterable[str]) -> None:
        """Refuse backwards that need the former values of parameters, see ``saved_tensors.py``."""
        changed = list(names)
        increment_version([self.params[name] for name in changed])
        for name in changed:  # by one, and not to what it is now: the user may have written too, which is to be refused
            self._versions[name] += 1

    def _written_to(self) -> list[str]:
        """Gathered parameters that were written to or replaced since; writing is fine if they are the shard itself."""
        if replaced := [name for name in self.params if self._is_replaced(name)]:
            return replaced
        if self._is_in_place:
            return []
        return [name for name, version in self._versions_now().items() if version != self._versions[name]]

    @property
    def _is_in_place(self) -> bool:
        """Whether the full parameters are the shard itself."""
        address = self.shard.untyped_storage().data_ptr()
        return address in self.addresses

    def _written_pieces(self) -> list[str]:
        """Parameters whose pieces were written to, on this rank, since their values were last known."""
        known = self._piece_versions
        return [name for name, version in self._versions_of_pieces().items() if version != known.get(name, 0)]

    def _places_and_versions(self) -> list[tuple[int, int]] | None:
        if self._empty.are_assigned:
            return None
        return [(piece.data_ptr(), piece._version) for piece in self.pieces.values()]

    def _versions_of_pieces(self) -> dict[str, int]:
        return {name: piece._version for name, piece in self.pieces.items()}

    def _is_replaced(self, name: str) -> bool:
        """Whether the user has put other values in the place of the gathered data, by ``.data =``."""
        param, full = self.params[name], self.full[name]
        if is_at(param, full):
            return False
        # Equal values elsewhere are no change: an LSTM's flatten_parameters() moves them on CUDA.
        alike = (param.shape, param.dtype, param.device) == (full.shape, full.dtype, full.device)
        return not (alike and torch.equal(param.detach(), full))
