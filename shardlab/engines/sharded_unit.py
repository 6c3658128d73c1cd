"""Parameters that are sharded, gathered, computed with, resharded and reduced together.

Tensors of a unit, for a layout of N chunks:

* ``shard``: this rank's chunk of the parameters, [chunk], always there, in host memory where it is offloaded;
  ``pieces`` are its parts by parameter, which the optimizer steps;
* ``buffer``: all chunks, [N x chunk], while gathered; where the layout keeps a parameter in one stretch (flat) the full
  parameter is a view of it, else (dim-0) it is a copy and the buffer is dropped at once; of one chunk it is the shard;
* gradients: ``param.grad`` of each full parameter until backward has made them all, then one flat buffer that is
  reduce-scattered, then this rank's chunk, whose parts are the ``.grad`` of the pieces.

A unit is SHARDED, GATHERING or UNSHARDED. Freeing is dropping references: the autograd graph holds none
(``saved.py``), so what is resharded is free, and what is still needed can never be pulled away under a computation.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from math import prod

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shardlab.comm import Communicator, Pending
from shardlab.engines.offload import OFFLOADS, Offload, in_host_memory
from shardlab.engines.precision import Precision
from shardlab.engines.released import Seats
from shardlab.engines.unit_layout import UnitLayout, has_whole_rows, stretches_of
from shardlab.engines.unused import mark_all_used, nobody_used, write_unused

FULL_PRECISION = Precision()


class UnitState(Enum):
    """Where the full parameters are."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


class ShardedUnit:
    """Shards parameters at once and releases them.

    Args:
        name: in the tags of its collectives.
        params: full parameters by name, in the layout's slot order, all of one dtype and device.
        seats: their places in the module.
        layout: which elements which rank holds.
        comm: the ranks of the layout.
        replicas: axes whose ranks hold the same chunk, in the order in which gradients are summed over them.
        precision: dtypes of gathered parameters and of the reduction.
        offload: what lives in host memory.
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, nn.Parameter],
        seats: Mapping[str, Seats],
        layout: UnitLayout,
        comm: Communicator,
        replicas: Sequence[Communicator] = (),
        precision: Precision = FULL_PRECISION,
        offload: Offload = OFFLOADS["none"],
    ) -> None:
        self.name, self.params, self.seats = name, dict(params), {key: seats[key] for key in params}
        self.layout, self.comm, self.replicas, self.offload = layout, comm, tuple(replicas), offload
        self.device = next(iter(self.params.values())).device
        self.state = UnitState.UNSHARDED
        self.held_by_hand = False  # gathered by the user, until he lets it go
        self.num_holders = 0  # of the full parameters as they are stored
        self.full: dict[str, Tensor] = {}  # gathered parameters, while UNSHARDED
        self.addresses: set[int] = set()  # of their storages
        self._versions: dict[str, int] = {}  # of the parameters, when they were gathered
        self.gradient_shard: Tensor | None = None  # [chunk], means
        self._gathering: tuple[Tensor, Pending] | None = None
        self._reducing: tuple[Tensor, Tensor, Pending] | None = None
        self._unused: set[str] = set()
        self._stretches = stretches_of(layout, list(params))
        self._own = {piece.name: piece for piece in layout.pieces(comm.rank)}
        self._looked_at = [  # first element of each piece that some rank looks at, by parameter
            (piece.name, piece.flat_start) for rank in range(layout.num_ranks) for piece in layout.pieces(rank)
        ]
        self._visiting: Tensor | None = None  # an offloaded shard on the device, while the optimizer steps
        self.shard = in_host_memory(self._cut()) if offload.parameters else self._cut()
        self._compute_dtype = precision.compute_dtype_of(self.shard)
        self._reduce_dtype = precision.reduce_dtype_of(self.shard)
        self.pieces = {
            key: self._piece_of(key, self.shard).requires_grad_(param.requires_grad) for key, param in params.items()
        }
        self.release()

    @property
    def trainable(self) -> bool:
        """Whether any parameter requires a gradient now."""
        return any(param.requires_grad for param in self.params.values())

    @property
    def is_held(self) -> bool:
        """Whether the user holds the full parameters."""
        return self.held_by_hand or self.num_holders > 0

    @property
    def is_held_as_stored(self) -> bool:
        """Whether the user holds them in another dtype than they are computed with."""
        return self.num_holders > 0 and self.shard.dtype != self._compute_dtype

    @property
    def is_whole(self) -> bool:
        """Whether the shard is all of the parameters."""
        return self.comm.num_ranks == 1

    @property
    def padding_bytes(self) -> int:
        """Bytes of the gathered buffer that belong to no parameter."""
        return self.layout.padding_numel * self.shard.element_size()

    @property
    def owned(self) -> dict[str, tuple[int, int]]:
        """Elements (start, stop) of each flattened parameter that this rank holds; only what it does hold."""
        return {name: (piece.param_start, piece.param_stop) for name, piece in self._own.items()}

    def start_unshard(self, *, as_stored: bool = False) -> None:
        """Begin to gather, unless it has begun or is done; ``as_stored``: in the shard's dtype, not the compute one."""
        if self.state is UnitState.SHARDED:
            dtype = self.shard.dtype if as_stored else self._compute_dtype
            if self.is_whole and dtype == self.shard.dtype and not self.offload.parameters:
                self._gathering = (self.shard, Pending())
            else:
                buffer = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.device)
                tag = f"parameters of {self.name}"
                pending = self.comm.all_gather(buffer, self.shard, bounds=self.layout.bounds, tag=tag)
                self._gathering = (buffer, pending)
            self.state = UnitState.GATHERING

    def unshard(self, *, as_stored: bool = False) -> None:
        """Have the full parameters in the module."""
        self.start_unshard(as_stored=as_stored)
        if self.state is UnitState.GATHERING:
            assert self._gathering is not None
            (buffer, pending), self._gathering = self._gathering, None
            pending.wait()
            self.full = {name: self._read(name, buffer) for name in self.params}
            self.addresses = {full.untyped_storage().data_ptr() for full in self.full.values()}
            for name, param in self.params.items():
                param.data = self.full[name]
                self.seats[name].seat()
            self._versions = self._versions_now()
            self.state = UnitState.UNSHARDED

    def reshard(self) -> None:
        """Let go of the full parameters unless the user holds them.

        Raises:
            RuntimeError: something has written into them, which would be lost.
        """
        if self.is_held:
            return
        changed = [] if self.state is not UnitState.UNSHARDED else self._written_to()
        self.release()
        if changed:
            raise RuntimeError(
                f"parameter {changed[0]!r}: it was written to while it was gathered, which does not reach the shards; "
                "write inside 'with engine.full_params(keep_changes=True):', or keep in a buffer what forward changes"
            )

    def release(self) -> None:
        """Let go of the full parameters; what was gathered ahead and not used is waited for and dropped."""
        if self._gathering is not None:
            self._gathering[1].wait()
            self._gathering = None
        for name, param in self.params.items():
            if self.state is UnitState.UNSHARDED:
                self.seats[name].vacate()
            # One element seen as the whole shape: autograd may ask for the shape, nobody for the values.
            stub = torch.zeros((), dtype=self.shard.dtype, device=self.device)
            param.data = stub.expand(self.seats[name].shape)
        self.full, self.addresses = {}, set()
        self.state = UnitState.SHARDED

    def hold(self) -> None:
        """Have the full parameters as they are stored, and let nothing take them away until ``let_go``."""
        if self.num_holders == 0:
            self.reshard()
            self.release()  # also what is held by hand: for compute it may have fewer bits
            self.unshard(as_stored=True)
        self.num_holders += 1

    def let_go(self) -> None:
        """The end of a ``hold``."""
        self.num_holders -= 1
        if self.num_holders == 0:
            self.release()
            if self.held_by_hand:
                self.unshard()

    def refresh(self) -> None:
        """The shard has changed: what the user holds is gathered anew."""
        if self.is_held:
            self.release()
            self.unshard(as_stored=self.num_holders > 0)

    def keep_changes(self) -> None:
        """Copy what was written into the full parameters back into the shard."""
        assert self.state is UnitState.UNSHARDED
        for name, piece in self._own.items():
            self.pieces[name].detach().view(-1).copy_(self.full[name].reshape(-1)[piece.param_start : piece.param_stop])
        self.values_changed()

    def values_changed(self) -> None:
        """The shard has other values now: a backward that needs the former ones is refused, see ``saved.py``.

        Every rank calls it alike, whatever it holds of the unit, so that all refuse.
        """
        increment_version(self.params.values())
        self._versions = self._versions_now()

    def start_reduce(self) -> None:
        """Begin to sum the gradients that have accumulated in the parameters over the ranks."""
        buffer = torch.empty(self.layout.padded_numel, dtype=self._reduce_dtype, device=self.device)
        if self.layout.padding_numel:
            buffer.zero_()
        self._unused = {name for name, param in self.params.items() if param.grad is None}
        for name, param in self.params.items():
            self._write(name, param.grad, buffer)
            param.grad = None
        # Now that they have the dtype they are reduced in: the cast may have made a tiny one -0, which says "unused".
        mark_all_used(buffer, [place for name, place in self._looked_at if name not in self._unused])
        tag = f"gradients of {self.name}"
        if self.is_whole:
            pending = self.replicas[0].all_reduce(buffer, tag=tag) if self.replicas else Pending()
            self._reducing = (buffer, buffer, pending)
        else:
            output = torch.empty(self.shard.shape, dtype=self._reduce_dtype, device=self.device)
            pending = self.comm.reduce_scatter(buffer, output, bounds=self.layout.bounds, tag=tag)
            self._reducing = (buffer, output, pending)

    def finish_reduce(self) -> None:
        """Have the means in ``gradient_shard``, added to those that are there, and in the ``.grad`` of the pieces."""
        if self._reducing is None:
            return
        (_, shard, pending), self._reducing = self._reducing, None
        pending.wait()
        for replicas in self.replicas[1 if self.is_whole else 0 :]:
            replicas.all_reduce(shard, tag=f"gradients of {self.name}").wait()
        num_ranks = prod(comm.num_ranks for comm in (self.comm, *self.replicas))
        unused = {name for name in self._unused & self._own.keys() if nobody_used(self._piece_of(name, shard).view(-1))}
        means = shard.to(self.shard.dtype).div_(num_ranks)
        self._accept(in_host_memory(means) if self.offload.gradients_and_state else means, unused)

    def drop_gradients(self) -> None:
        """Forget the means."""
        self.gradient_shard = None
        for piece in self.pieces.values():
            piece.grad = None

    def visit_device(self) -> None:
        """Bring an offloaded shard to the device, for an optimizer that steps there."""
        if self._steps_on_device and self._visiting is None:
            self._visiting = torch.empty(self.shard.shape, dtype=self.shard.dtype, device=self.device)
            self._visiting.copy_(self.shard)
            for name, piece in self.pieces.items():
                piece.data = self._piece_of(name, self._visiting)

    def return_to_host(self) -> None:
        """Take what has been stepped back into host memory."""
        if self._visiting is not None:
            self.shard.copy_(self._visiting)
            self._visiting = None
            for name, piece in self.pieces.items():
                piece.data = self._piece_of(name, self.shard)

    def live_shards(self) -> list[Tensor]:
        """This rank's chunk, and its visit to the device."""
        return [self.shard] if self._visiting is None else [self.shard, self._visiting]

    def live_gradients(self) -> list[Tensor]:
        """Everything that holds gradients now."""
        held = [param.grad for param in self.params.values() if param.grad is not None]
        held += [self.gradient_shard] if self.gradient_shard is not None else []
        return held + list(self._reducing[:2] if self._reducing is not None else ())

    def gathered(self) -> list[Tensor]:
        """Full parameters that are there beside the shard."""
        return [*self.full.values(), *([self._gathering[0]] if self._gathering is not None else [])]

    def _accept(self, shard: Tensor, unused: set[str]) -> None:
        had = {name for name, piece in self.pieces.items() if piece.grad is not None}
        if self.gradient_shard is not None and had:
            shard.add_(self.gradient_shard)
        self.gradient_shard = shard
        for name in self._own:
            if name not in unused or name in had:
                self._give(self.pieces[name], self._piece_of(name, shard))

    @staticmethod
    def _give(piece: Tensor, gradient: Tensor) -> None:
        """Set ``.grad``, also of a piece in host memory whose gradient is on the device, which torch would refuse."""
        home, piece.data = piece.data, gradient
        piece.grad = gradient
        piece.data = home

    def _versions_now(self) -> dict[str, int]:
        """Autograd's counters of writes in place, which a change of ``.data`` leaves as they are."""
        return {name: param._version for name, param in self.params.items()}

    def _written_to(self) -> list[str]:
        """Names of gathered parameters that somebody has written to since; where they are the shard itself none."""
        if self.shard.untyped_storage().data_ptr() in self.addresses:
            return []
        return [name for name, version in self._versions_now().items() if version != self._versions[name]]

    @property
    def _steps_on_device(self) -> bool:
        return self.offload.parameters and not self.offload.gradients_and_state

    def _cut(self) -> Tensor:
        """This rank's chunk of the full parameters, padding as zeros."""
        start, stop = self.layout.chunk(self.comm.rank)
        first = next(iter(self.params.values()))
        shard = torch.zeros(stop - start, dtype=first.dtype, device=first.device)
        for name, piece in self._own.items():
            flat = self.params[name].detach().reshape(-1)
            shard[piece.flat_start - start : piece.flat_stop - start].copy_(flat[piece.param_start : piece.param_stop])
        return shard

    def _piece_of(self, name: str, shard: Tensor) -> Tensor:
        """A parameter's part of a chunk-sized tensor: whole rows in their shape where it is rows, else flat."""
        shape = self.seats[name].shape
        if name not in self._own:
            return shard.new_empty((0, *(shape or (1,))[1:]))
        piece, offset = self._own[name], self.layout.chunk(self.comm.rank)[0]
        part = shard[piece.flat_start - offset : piece.flat_stop - offset]
        if piece.whole:
            part = part.view(shape)
        elif has_whole_rows(piece, shape):
            part = part.view(-1, *shape[1:])
        return part

    def _read(self, name: str, buffer: Tensor) -> Tensor:
        shape = self.seats[name].shape
        stretches = self._stretches[name]
        if len(stretches) == 1:
            start, stop, _ = stretches[0]
            return buffer[start:stop].view(shape)
        full = buffer.new_empty(shape)
        for start, stop, at in stretches:
            full.view(-1)[at : at + stop - start].copy_(buffer[start:stop])
        return full

    def _write(self, name: str, gradient: Tensor | None, buffer: Tensor) -> None:
        for start, stop, at in self._stretches[name]:
            if gradient is None:
                write_unused(buffer[start:stop])
            elif len(self._stretches[name]) == 1:
                buffer[start:stop].view(gradient.shape).copy_(gradient)
            else:
                buffer[start:stop].copy_(gradient.reshape(-1)[at : at + stop - start])
