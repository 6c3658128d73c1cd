"""Parameters that are sharded, gathered, computed with, resharded and reduced together: the bucket of ZeRO-3.

Tensors of a bucket, for a layout of N chunks:

* ``shard``: this rank's chunk of the parameters, [chunk], always there; ``pieces`` are its parts by parameter, which
  the optimizer steps;
* ``full``: the parameters while gathered, from a buffer of all chunks, [padded_numel]. If the layout keeps a parameter
  in one stretch (flat) it is a view of the buffer, otherwise (dim-0) a copy, and the buffer is dropped at once; with a
  single chunk it is the shard;
* gradients: ``param.grad`` of each full parameter until backward has made them all, then one flat buffer that is
  reduce-scattered, then this rank's chunk, whose parts are the ``.grad`` of the pieces.

A bucket is SHARDED, GATHERING or UNSHARDED. To reshard is to drop references. The autograd graph holds none
(``saved_tensors.py``), so the memory is free at once, and no computation loses a tensor that it still uses.
"""

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from math import nan

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import Pending
from shardlab.engines.holdings import Division, Held
from shardlab.engines.hooks import outside_inference
from shardlab.engines.placeholder import ParameterSites, check_replaced, is_at
from shardlab.engines.precision import Precision
from shardlab.engines.tensor_layout import LayoutOfTensors
from shardlab.engines.unused_params import mark_all_used, nobody_used
from shardlab.partition.chunks import Layout, first_elements
from shardlab.vocabulary import Role


class BucketState(Enum):
    """Where the full parameters are."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


class ShardedBucket:
    """Shards parameters when it is built, and frees the full ones.

    Args:
        name: in the tags of its collectives.
        params: full parameters by name, in the layout's slot order, all of one dtype and device.
        sites: where they are in the module.
        layout: which elements which rank holds.
        comm: the ranks of the layout.
        precision: dtypes of gathered parameters and of the reduction.
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, nn.Parameter],
        sites: Mapping[str, ParameterSites],
        layout: Layout,
        comm: Communicator,
        precision: Precision,
    ) -> None:
        self.name, self.params, self.sites = name, dict(params), {key: sites[key] for key in params}
        self.layout, self.comm = layout, comm
        self.device = next(iter(self.params.values())).device
        self.state = BucketState.UNSHARDED
        self.held_by_hand = False  # gathered by the user, who will reshard it
        self.stepped_by_others = False  # since the last gather, by an optimizer that is not the engine's
        self.num_holders = 0  # open full_params(), which show parameters in their stored dtype
        self.full: dict[str, Tensor] = {}  # gathered parameters, while UNSHARDED
        self.addresses: set[int] = set()  # of their storages
        self.gradient_shard: Tensor | None = None  # [chunk], means
        self._versions: dict[str, int] = {}  # of the parameters, when they were gathered
        self._gathering: tuple[Tensor, Pending] | None = None
        self._reducing: tuple[Tensor, Tensor, Pending] | None = None
        self._unused: set[str] = set()
        self._tensors = LayoutOfTensors(layout, comm.rank, {key: tuple(param.shape) for key, param in params.items()})
        self._looked_at = first_elements(layout)  # by some rank, to detect unused parameters
        self.shard = self._keep_shard(self._tensors.cut(self.params))
        self._compute_dtype = precision.compute_dtype_of(self.shard)
        self._reduce_dtype = precision.reduce_dtype_of(self.shard)
        self.pieces = {
            # Detached: the view would keep the shard's memory when another shard takes its place.
            key: self._tensors.piece_of(key, self.shard).detach().requires_grad_(param.requires_grad)
            for key, param in params.items()
        }
        self.release()  # the full parameters that the model came with

    @property
    def is_whole(self) -> bool:
        """Whether the shard is all of the parameters."""
        return self.layout.num_ranks == 1

    @property
    def is_held(self) -> bool:
        """Whether the user holds the full parameters."""
        return self.held_by_hand or self.num_holders > 0

    @property
    def is_held_as_stored(self) -> bool:
        """Whether the user holds them in a dtype other than the one to compute in."""
        return self.num_holders > 0 and self.shard.dtype != self._compute_dtype

    @property
    def division(self) -> Division:
        """How the parameters are divided."""
        return Division(self.layout, self.comm, self.shard.element_size())

    # Gathering: sharded -> gathering -> unsharded -> sharded.

    @outside_inference
    def start_unshard(self, *, as_stored: bool = False) -> None:
        """Begin to gather unless that has begun; ``as_stored``: in the shard's dtype, not the compute dtype."""
        if self.state is BucketState.SHARDED:
            if self.stepped_by_others:
                self.take_assigned()
                self.stepped_by_others = False
            dtype = self.shard.dtype if as_stored else self._compute_dtype
            if self._needs_no_gather(dtype):
                self._gathering = (self.shard, Pending())  # no copy: the full parameters will be views of the shard
            else:
                buffer = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.device)
                tag = f"parameters of {self.name}"
                pending = self.comm.all_gather(buffer, self._chunk_to_gather(), bounds=self.layout.bounds, tag=tag)
                self._gathering = (buffer, pending)
            self.state = BucketState.GATHERING

    @outside_inference
    def unshard(self, *, as_stored: bool = False, checked: bool = True) -> None:
        """Gather, and put the full parameters into the module.

        Args:
            as_stored: in the shard's dtype, not the compute dtype.
            checked: refuse to where the user has put another parameter into the module; else that one stays.
        """
        if checked and self.state is not BucketState.UNSHARDED:
            # Before anything is gathered, or a refusal would leave a part of it.
            for site in map(self.sites.__getitem__, self.params):
                site.check()
        self.start_unshard(as_stored=as_stored)
        if self.state is BucketState.GATHERING:
            assert self._gathering is not None
            buffer, pending = self._gathering
            # Waited for, and only then dropped: after an error a transport may still write into the buffer.
            pending.wait()
            self._gathering = None
            self.full = {name: self._tensors.read(name, buffer) for name in self.params}
            self.addresses = {full.untyped_storage().data_ptr() for full in self.full.values()}
            for name, param in self.params.items():
                param.data = self.full[name]  # the same parameter object, with its hooks and its version
                self.sites[name].put_parameter()
            self._versions = self._versions_now()
            self.state = BucketState.UNSHARDED

    def reshard(self) -> None:
        """Free the full parameters unless the user holds them.

        Raises:
            RuntimeError: they were written to, which would be lost.
        """
        if self.is_held:
            return
        changed = [] if self.state is not BucketState.UNSHARDED else self._written_to()
        self.release()  # before the error, which must not leave them in memory
        if changed:
            raise RuntimeError(
                f"parameter {changed[0]!r}: it was written to while it was gathered, which does not change the shards; "
                "write inside 'with engine.full_params(keep_changes=True):', or use a buffer for what forward changes"
            )

    @outside_inference
    def release(self) -> None:
        """Free the full parameters; a prefetch that was not used is waited for and dropped."""
        if self._gathering is not None:
            self._gathering[1].wait()  # a transport may still write into the buffer
            self._gathering = None
        if self.state is BucketState.UNSHARDED:
            # The stub: autograd may ask for the shape. In the dtype it is gathered in, or autograd would accumulate the
            # next use's gradient as another parameter's. One for the whole bucket, since each costs a launch on a
            # device. NaN, for code that kept the parameter from before the engine: it must not compute with zeros.
            stub = torch.full(
                (), nan if self._compute_dtype.is_floating_point else 0, dtype=self._compute_dtype, device=self.device
            )
            for name, param in self.params.items():
                self.sites[name].put_placeholder()
                param.data = stub.expand(self.sites[name].shape)
            # Our last references: from here on only a view that the user has kept can hold the memory.
            self.full, self.addresses = {}, set()
        self.state = BucketState.SHARDED

    # What the user holds, and what the user writes.

    def hold(self) -> None:
        """Gather the full parameters in their stored dtype, and keep them until ``let_go``."""
        if self.num_holders == 0:
            self.reshard()  # first: it refuses what was written before, which would be lost unseen
            self.release()  # what is held by hand too: in the compute dtype it may have fewer bits
            self.unshard(as_stored=True)
        self.num_holders += 1

    def let_go(self) -> None:
        """End a ``hold``."""
        self.num_holders -= 1
        if self.num_holders == 0:
            self.release()  # and not reshard: changes that are not kept may be lost here
            if self.held_by_hand:
                self.unshard()

    def refresh(self) -> None:
        """Gather again what the user holds, since the shard has changed."""
        if self.is_held:
            # Not ``reshard()``, which leaves alone what is held.
            self.release()
            self.unshard(as_stored=self.num_holders > 0)

    def check_replaced(self) -> None:
        """Before ``keep_changes``, of all buckets: check what the user has put in the place of gathered data.

        Raises:
            RuntimeError: an attribute has another parameter, or the data another shape, dtype or device.
        """
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
        self._versions = self._versions_now()

    def take_assigned(self) -> None:
        """Take over what an optimizer has put in the place of a piece's data."""
        home, first = self._home(), self.layout.chunk(self.comm.rank)[0]
        start, itemsize = home.data_ptr() - first * home.element_size(), home.element_size()
        if any(
            piece.flat_stop > piece.flat_start and self.pieces[name].data_ptr() != start + piece.flat_start * itemsize
            for name, piece in self._tensors.own.items()
        ):
            self._renew_shard()

    @outside_inference
    def _renew_shard(self) -> None:
        """Move the shard to new memory, from wherever the pieces' data is now.

        The optimizer may have kept the old memory, as its previous weights, and so may the user.
        """
        home = self._home().clone()
        for name in self._tensors.own:
            self._tensors.piece_of(name, home).copy_(self.pieces[name].detach())
        self._move_home(home)
        self._point_pieces_at(self._home())

    @outside_inference
    def _renew_full(self) -> None:
        """Give the full parameters new memory, from wherever their data is now.

        The old memory is left as it is: the user may have swapped the data of two parameters, or keep it to put it back
        later.
        """
        # Unseen by autograd: with a new version it refuses a backward that saved the old values.
        increment_version([self.params[name] for name in self.params if self._is_replaced(name)])
        if self.shard.untyped_storage().data_ptr() in self.addresses:
            self._renew_shard()
            self.full = {name: self._tensors.read(name, self.shard) for name in self.params}
        else:
            self.full = {name: torch.empty_like(full) for name, full in self.full.items()}
        self.addresses = {full.untyped_storage().data_ptr() for full in self.full.values()}
        for name, param in self.params.items():
            param.data = self.full[name].copy_(param.detach())

    def values_changed(self) -> None:
        """Refuse backwards that need the shard's former values, see ``saved_tensors.py``.

        Every rank calls it, even if it holds nothing of the bucket, so that all of them refuse.
        """
        increment_version(self.params.values())
        self._versions = self._versions_now()

    # Gradients: in the parameters -> in a buffer that is reduced -> in this rank's chunk.

    def start_reduce(self) -> None:
        """Begin to sum over the ranks the gradients that have accumulated in the parameters."""
        buffer = torch.empty(self.layout.padded_numel, dtype=self._reduce_dtype, device=self.device)
        if self.layout.padding_numel:
            buffer.zero_()  # no gradient is written to the padding, which must be 0 and not old memory
        self._unused = {name for name, param in self.params.items() if param.grad is None}
        for name, param in self.params.items():
            self._tensors.write(name, param.grad, buffer)
            param.grad = None  # or the next micro-batch would be added to it, and this one sent twice
        # After the cast to the dtype of the reduction, which may round a tiny gradient to -0, the sign of "unused".
        mark_all_used([buffer[place : place + 1] for name, place in self._looked_at if name not in self._unused])
        self._reducing = (buffer, *self._reduce(buffer))  # the buffer too: it is read until the reduction has ended

    def finish_reduce(self) -> None:
        """Put the means into ``gradient_shard``, with those of earlier backwards, as the ``.grad`` of the pieces."""
        if self._reducing is None:
            return
        # First: where shards are replicated (FSDP), this replaces ``_reducing`` by the reduction over replicas.
        num_ranks = self._sum_over_replicas()
        _, sums, pending = self._reducing
        pending.wait()
        self._reducing = None
        # Read before the sums become means: casting or dividing a tiny one may give -0.
        unused = nobody_used(
            {name: self._tensors.piece_of(name, sums) for name in self._unused & self._tensors.own.keys()}
        )
        self._accept(sums.to(self.shard.dtype).div_(num_ranks), unused)

    def drop_gradients(self) -> None:
        """Clear the means."""
        self.gradient_shard = None  # and the pieces' views of it, which would keep it in memory
        for piece in self.pieces.values():
            piece.grad = None

    # What it holds.

    def held_parameters(self) -> Iterator[Held]:
        """The shard, and the full parameters while they are gathered."""
        yield Held(Role.PARAMETER, self.shard)
        for name, piece in self._tensors.own.items():
            yield Held(Role.PARAMETER, self.pieces[name], name, (piece.param_start, piece.param_stop))
        gathered = [*self.full.values(), *([self._gathering[0]] if self._gathering is not None else [])]
        yield from (Held(Role.GATHERED_PARAMETER, tensor) for tensor in gathered)

    def held_gradients(self) -> Iterator[Held]:
        """Everything that holds gradients at this moment."""
        whole = [param.grad for param in self.params.values() if param.grad is not None]
        chunk = [self.gradient_shard] if self.gradient_shard is not None else []
        in_flight = self._reducing[:2] if self._reducing is not None else ()
        yield from (Held(Role.GRADIENT, tensor) for tensor in (*whole, *chunk, *in_flight))
        for name, piece in self._tensors.own.items():
            if (gradient := self.pieces[name].grad) is not None:
                yield Held(Role.GRADIENT, gradient, name, (piece.param_start, piece.param_stop))

    # Steps that FSDP's buckets override, and helpers.

    def _chunk_to_gather(self) -> Tensor:
        """The shard, where it can be sent from."""
        return self.shard

    def _keep_shard(self, shard: Tensor) -> Tensor:
        """The shard, in the memory where it stays between steps."""
        return shard

    def _needs_no_gather(self, dtype: torch.dtype) -> bool:
        """Whether the shard is already what a gather in ``dtype`` would return."""
        return self.is_whole and dtype == self.shard.dtype

    def _reduce(self, buffer: Tensor) -> tuple[Tensor, Pending]:
        """Begin to sum a buffer of gradients over the ranks; return where this rank's sums will be, [chunk]."""
        if self.is_whole:
            return buffer, Pending()
        sums = torch.empty(self.shard.shape, dtype=buffer.dtype, device=self.device)
        tag = f"gradients of {self.name}"
        return sums, self.comm.reduce_scatter(buffer, sums, bounds=self.layout.bounds, tag=tag)

    def _sum_over_replicas(self) -> int:
        """Over how many ranks these are sums; where shards are replicated, also begin the sum over replicas."""
        return self.comm.num_ranks

    def _accept(self, means: Tensor, unused: set[str]) -> None:
        self.gradient_shard = means
        for name in self._tensors.own:
            gradient, earlier = self._tensors.piece_of(name, means), self.pieces[name].grad
            # What stands at the piece, and not the earlier chunk: the user may have cleared or replaced it.
            if earlier is not None:
                gradient.add_(earlier)
            if name not in unused or earlier is not None:
                self._set_gradient(self.pieces[name], gradient)

    def _home(self) -> Tensor:
        """What the pieces are parts of now, [chunk]."""
        return self.shard

    def _move_home(self, home: Tensor) -> None:
        self.shard = home

    def _point_pieces_at(self, shard: Tensor) -> None:
        # By ``.data``: the optimizer finds its state by these very tensor objects.
        for name, piece in self.pieces.items():
            piece.data = self._tensors.piece_of(name, shard)

    def _set_gradient(self, piece: Tensor, gradient: Tensor) -> None:
        piece.grad = gradient

    def _versions_now(self) -> dict[str, int]:
        """Autograd's counters of writes in place, which a change of ``.data`` leaves as they are."""
        return {name: param._version for name, param in self.params.items()}

    def _written_to(self) -> list[str]:
        """Gathered parameters that were written to or replaced since; writing is fine if they are the shard itself."""
        if replaced := [name for name in self.params if self._is_replaced(name)]:
            return replaced
        if self.shard.untyped_storage().data_ptr() in self.addresses:
            return []
        return [name for name, version in self._versions_now().items() if version != self._versions[name]]

    def _is_replaced(self, name: str) -> bool:
        """Whether the user has put other values in the place of the gathered data, by ``.data =``."""
        param, full = self.params[name], self.full[name]
        # The values, too: an LSTM's flatten_parameters() moves them on CUDA and leaves them what they are.
        return not is_at(param, full) and not (param.shape == full.shape and torch.equal(param.detach(), full))
