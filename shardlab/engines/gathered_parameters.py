"""Parameters of which each rank keeps a chunk, gathered to compute with and freed again.

For a layout of N chunks:

* ``shard``: this rank's chunk, [chunk], always there; ``pieces`` are its parts by parameter, which the optimizer steps;
* ``full``: the parameters while gathered, from a buffer of all chunks, [padded_numel]. If the layout keeps each in one
  stretch (flat) they are views of the buffer, otherwise (dim-0) copies, and the buffer is dropped at once; with a
  single chunk they are the shard itself, unless that has another dtype or is in host memory.

They are SHARDED, GATHERING or UNSHARDED. To free the full ones is to drop references. The autograd graph holds none
(``saved_tensors.py``), so the memory is free at once, and no computation loses a tensor that it still uses.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from functools import cached_property
from math import nan
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import Pending
from shardlab.engines.holdings import Division, Holding
from shardlab.engines.hooks import in_plain_mode
from shardlab.engines.placeholder import ParameterSites
from shardlab.engines.precision import Precision
from shardlab.engines.step_tensors import EmptyPieces
from shardlab.engines.tensor_layout import TensorLayout
from shardlab.partition.chunks import Layout
from shardlab.vocabulary import Role

# By the address of a storage: the bucket whose gathered parameters, or stubs, are there. It keeps no bucket in memory.
_GATHERED: WeakValueDictionary[int, "GatheredParameters"] = WeakValueDictionary()


class BucketState(Enum):
    """Where the full parameters are."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


class GatheredParameters:
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
        self.layout, self.comm, self._precision = layout, comm, precision
        self.device = next(iter(self.params.values())).device
        self.state = BucketState.UNSHARDED
        self.full: dict[str, Tensor] = {}  # gathered parameters, while UNSHARDED
        self.addresses: set[int] = set()  # of their storages
        self._places: tuple[list[int], list[str]] = [], []  # where in memory each begins, ascending
        self._versions: dict[str, int] = {}  # of the parameters, when they were last gathered or resharded
        self._gathering: tuple[Tensor, Pending] | None = None
        self._tensors = TensorLayout(layout, comm.rank, {key: tuple(param.shape) for key, param in params.items()})
        self.shard = self._keep_shard(self._tensors.cut(self.params))
        self.compute_dtype = precision.compute_dtype_of(self.shard)
        self.pieces = {
            # By ``.data``: a view keeps the shard it was cut from in memory, also when its data is in another shard. It
            # also shares the shard's version, which would not tell which piece was written.
            key: self._tensors.piece_of(key, self.shard).data.requires_grad_(param.requires_grad)
            for key, param in params.items()
        }
        self._empty = EmptyPieces(self.pieces)
        self.free()  # the full parameters that the model came with

    @property
    def is_whole(self) -> bool:
        """Whether the shard is all of the parameters."""
        return self.layout.num_ranks == 1

    @property
    def division(self) -> Division:
        """How the parameters are divided."""
        return Division(self.layout, self.comm, self.shard.element_size())

    @in_plain_mode
    def start_unshard(self, *, as_stored: bool = False) -> None:
        """Begin to gather unless that has begun; ``as_stored``: in the shard's dtype, not the compute dtype."""
        if self.state is BucketState.SHARDED:
            dtype = self.shard.dtype if as_stored else self.compute_dtype
            if self._needs_no_gather(dtype):
                self._gathering = (self._shown_shard(), Pending())  # no copy, as a rule: they are views of the shard
            else:
                buffer = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.device)
                tag = f"parameters of {self.name}"
                pending = self.comm.all_gather(buffer, self._chunk_to_gather(), bounds=self.layout.bounds, tag=tag)
                self._gathering = (buffer, pending)
            self.state = BucketState.GATHERING

    @in_plain_mode
    def unshard(self, *, as_stored: bool = False, checked: bool = True) -> None:
        """Gather, and put the full parameters into the module.

        Args:
            as_stored: in the shard's dtype, not the compute dtype.
            checked: raise if the user has put another parameter into the module; if False, leave it there.
        """
        if checked and self.state is not BucketState.UNSHARDED:
            # Before anything of this bucket is gathered, or a refusal would leave a part of it.
            for site in map(self.sites.__getitem__, self.params):
                site.check()
        self.start_unshard(as_stored=as_stored)
        if self.state is BucketState.GATHERING:
            assert self._gathering is not None
            buffer, pending = self._gathering
            # Waited for, and only then dropped: after an error a transport may still write into the buffer.
            pending.wait()
            self._gathering = None
            self._show({name: self._tensors.read(name, buffer) for name in self.params})
            for name, param in self.params.items():
                self.sites[name].put_parameter()
                param.data = self.full[name]  # the same parameter object, with its hooks and its version
            self._versions = self._versions_now()
            self.state = BucketState.UNSHARDED

    @in_plain_mode
    def free(self) -> None:
        """Free the full parameters; a prefetch that was not used is waited for and dropped."""
        if self._gathering is not None:
            self._gathering[1].wait()  # a transport may still write into the buffer
            self._gathering = None
        if self.state is BucketState.UNSHARDED:
            self._versions = self._versions_now()
            for name, param in self.params.items():
                param.data = self._stubs[name]
                self.sites[name].put_placeholder()
            # Our last references: from here on only a view that the user has kept can hold the memory.
            self._show({})
        self.state = BucketState.SHARDED

    def name_at(self, place: int) -> str | None:
        """The gathered parameter of this bucket that lies at a place in memory."""
        begins, names = self._places
        found = bisect_right(begins, place) - 1
        if found < 0:
            return None
        full = self.full[names[found]]
        # Not ``nbytes``, which torch.compile cannot trace.
        return names[found] if place - begins[found] < full.numel() * full.element_size() else None

    def parameter_holdings(self) -> Iterator[Holding]:
        """The shard, and the full parameters while they are gathered."""
        yield Holding(Role.PARAMETER, self.shard)
        for name, piece in self._tensors.own.items():
            yield Holding(Role.PARAMETER, self.pieces[name], name, (piece.param_start, piece.param_stop))
        gathered = [*self.full.values(), *([self._gathering[0]] if self._gathering is not None else [])]
        yield from (Holding(Role.GATHERED_PARAMETER, tensor) for tensor in gathered)

    @cached_property
    def _stubs(self) -> dict[str, Tensor]:
        """What a freed parameter has as its data, since autograd may ask for the shape.

        It has the dtype of what is gathered: with another dtype a parameter gets a new node for its gradients in
        autograd. NaN, so that what computes with it all the same (C++, which is not refused) shows it.
        """
        value = nan if self.compute_dtype.is_floating_point else 0
        elements = torch.full((len(self.sites),), value, dtype=self.compute_dtype, device=self.device)
        _GATHERED[elements.untyped_storage().data_ptr()] = self
        return {
            name: element.expand(site.shape)
            for (name, site), element in zip(self.sites.items(), elements.unbind(), strict=True)
        }

    def stub_at(self, place: int) -> str | None:
        """The parameter of this bucket whose stub lies at a place in memory."""
        return next((name for name, stub in self._stubs.items() if place_of(stub) == place), None)

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

    def _shown_shard(self) -> Tensor:
        """A whole shard, where the full parameters will be views of it."""
        return self.shard

    def _home(self) -> Tensor:
        """What the pieces are parts of now, [chunk]: with offload this is elsewhere during a step."""
        return self.shard

    def _move_home(self, home: Tensor) -> None:
        self.shard = home

    def _point_pieces_at(self, shard: Tensor) -> None:
        # By ``.data``: the optimizer finds its state by these very tensor objects.
        for name, piece in self.pieces.items():
            piece.data = self._tensors.piece_of(name, shard)
        self._empty = EmptyPieces(self.pieces)

    def _show(self, full: dict[str, Tensor]) -> None:
        """Note what is gathered and where; nothing if it has been freed."""
        for address in self.addresses:
            if _GATHERED.get(address) is self:  # another bucket may be there, if the user has moved this one's memory
                del _GATHERED[address]
        own = {name: tensor for name, tensor in full.items() if tensor.numel()}  # the others have no place
        self.full, self.addresses = full, {tensor.untyped_storage().data_ptr() for tensor in own.values()}
        _GATHERED.update(dict.fromkeys(self.addresses, self))
        begins = sorted((place_of(tensor), name) for name, tensor in own.items())
        self._places = [begin for begin, _ in begins], [name for _, name in begins]

    def _versions_now(self) -> dict[str, int]:
        """Autograd's counters of writes in place, which a change of ``.data`` leaves as they are."""
        return {name: param._version for name, param in self.params.items()}


def place_of(tensor: Tensor) -> int:
    """The address of its first element, also of a tensor without elements."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()


def gathered_at(address: int) -> GatheredParameters | None:
    """The bucket whose gathered parameters are in the storage that begins at an address."""
    return _GATHERED.get(address) if address else None
