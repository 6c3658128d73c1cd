"""Master weights of ZeRO-1 and 2: the flat buffers are rounded, and each rank steps its chunk of each unrounded.

After the step the chunk is rounded into its place and the chunks of all ranks are gathered, so that the wire carries 16
bits too. While the user holds the full parameters, the master weights are gathered and shown in place of the rounded.
(In ZeRO-3 and FSDP the shards themselves are the master weights.)
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import wait_all
from shardlab.engines.buckets import Bucket
from shardlab.engines.flat_parameters import FlatParameters
from shardlab.engines.holdings import Holding
from shardlab.engines.hooks import in_plain_mode
from shardlab.engines.precision import Precision
from shardlab.vocabulary import Role


class MasterWeights(FlatParameters):
    """As ``FlatParameters``, but steps master weights, in the dtype the model came with.

    Args:
        params: parameters by name, in the module's order.
        buckets: their layout, with one chunk per rank.
        comm: the ranks.
        precision: the module's parameters get its ``compute`` dtype.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], comm: Communicator, precision: Precision
    ) -> None:
        # All of these before the base, whose construction rounds each bucket and keeps its master weights.
        self._precision = precision
        self._dtypes = {name: param.dtype for name, param in params.items()}
        self._masters: list[Tensor | None] = []  # [chunk] by bucket; None if nothing is rounded
        self._stored: dict[int, Tensor] = {}  # bucket index -> all master weights, [padded_numel], while held
        self._num_holders = self._num_keeping = 0
        self._is_given_back = False
        super().__init__(params, buckets, comm)
        self._versions: dict[str, int] = {}
        self._note_versions()

    @property
    def is_held(self) -> bool:
        """Whether the module has all master weights now."""
        return self._num_holders > 0

    @override
    def holdings(self) -> Iterator[Holding]:
        """As the base, with this rank's chunks of the master weights; while all are held, they count as gathered."""
        # Before the base, since the parameters are views of them meanwhile, and a storage counts in its first role.
        yield from (Holding(Role.GATHERED_PARAMETER, stored) for stored in self._stored.values())
        yield from super().holdings()
        for bucket, master in zip(self.buckets, self._masters, strict=True):
            if master is not None:
                yield Holding(Role.MASTER_WEIGHT, master)
                for name, piece in bucket.own.items():
                    span = (piece.param_start, piece.param_stop)
                    yield Holding(Role.MASTER_WEIGHT, self.tensors.by_name(name), name, span)

    @override
    def gather(self, is_due: Callable[[nn.Parameter], bool]) -> None:
        """Round what this rank has stepped and gather all chunks; master weights that are held are gathered again."""
        super().gather(is_due)
        # Or the user would read the values from before the step.
        if self.is_held:
            self._gather_masters()
        # Last: the gather raises versions too, and is not a write of the user's.
        self._note_versions()

    @contextlib.contextmanager
    def whole(self, *, keep_changes: bool) -> Iterator[None]:
        """Inside, the module has all master weights; see ``Engine.full_params``."""
        # First: what was written into rounded parameters would disappear behind the master weights.
        self.check_unwritten()
        if not self.is_held:
            self._gather_masters()
        self._num_holders += 1
        self._num_keeping += keep_changes
        try:
            yield
            # Not after an error: half of a change must not reach the master weights.
            if keep_changes and not self._is_given_back:
                self.take_replaced()
                self.keep_changes()
        finally:
            self._num_holders -= 1
            self._num_keeping -= keep_changes
            # These contexts may be nested: only the outermost frees what the others still use.
            if not self.is_held:
                self._show_rounded()

    def keep_changes(self) -> None:
        """Take over what was written into the master weights, if they are held with ``keep_changes``."""
        if not self._num_keeping:
            return
        self.check_gathered()  # or what was written into pieces would be lost
        for index, stored in self._stored.items():
            self._master(index).copy_(stored[self.buckets[index].own_chunk])
            # The whole buffer and not only the chunk: every rank wrote the same, so there is nothing to gather.
            self.flat[index].copy_(stored)
        self._note_gathered()

    def give_back(self) -> None:
        """Leave the module with all master weights; collective."""
        if not self.is_held:
            self._gather_masters()
        self._is_given_back = True
        # For good, also where this is inside a ``whole()`` that is left later.
        self._num_holders += 1

    def check_unwritten(self) -> None:
        """Find out whether rounded parameters were written to, which would never reach the master weights.

        Raises:
            RuntimeError: they were.
        """
        if self.is_held:
            return
        for name, version in self._versions.items():
            if self.params[name]._version != version:
                raise _written(name)
        for bucket in self.buckets:
            for place, _ in self._replaced(bucket):
                self._check_replaceable(bucket, place)

    @contextlib.contextmanager
    @override
    def loading_all(self) -> Iterator[None]:
        """As the base, of rounded parameters too."""
        before = self._versions
        try:
            with super().loading_all():
                self._note_versions()
                yield
        except BaseException:
            self._versions = before
            raise

    @in_plain_mode
    def _gather_masters(self) -> None:
        pending, stored = [], dict(self._stored)
        for index, master in enumerate(self._masters):
            if master is None:
                continue
            bucket = self.buckets[index]
            # While held, the same buffers are filled again: the user's parameters are views of them.
            if index not in stored:
                stored[index] = torch.empty(bucket.layout.padded_numel, dtype=master.dtype, device=master.device)
            tag, bounds = f"parameters of bucket {index}", bucket.layout.bounds
            pending.append(self.comm.all_gather(stored[index], master, bounds=bounds, tag=tag))
        wait_all(pending)
        # Only when all have arrived: a gather that raises leaves the module what it has.
        self._stored = stored
        for index, values in stored.items():
            self.buckets[index].show(values)

    def _show_rounded(self) -> None:
        for index in self._stored:
            self.buckets[index].show(self.flat[index])
        # Last: now no parameter is a view of them, and their memory is free.
        self._stored = {}
        self._note_versions()

    def _note_versions(self) -> None:
        rounded = (
            name for bucket, master in zip(self.buckets, self._masters, strict=True) if master is not None
            for name in bucket.names
        )  # fmt: skip
        self._versions = {name: self.params[name]._version for name in rounded}

    @override
    def _shown(self, index: int) -> Tensor:
        return self._stored.get(index, self.flat[index])

    @override
    def _swap_shown(self, bucket: Bucket, flat: Tensor) -> None:
        if bucket.index in self._stored:
            self._stored[bucket.index] = flat
        else:
            super()._swap_shown(bucket, flat)

    @override
    def _renew_stepped(self, bucket: Bucket) -> None:
        if self._masters[bucket.index] is None:
            super()._renew_stepped(bucket)
        else:
            self._masters[bucket.index] = self._master(bucket.index).clone()
            self._point_pieces(bucket)

    @override
    def _check_replaceable(self, bucket: Bucket, place: int) -> None:
        if self._masters[bucket.index] is not None and not self.is_held:
            raise _written(bucket.names[place])

    @override
    def _flatten(self, bucket: Bucket) -> Tensor:
        stored = super()._flatten(bucket)
        dtype = self._precision.compute_dtype_of(stored)
        if dtype == stored.dtype:
            self._masters.append(None)
            return stored
        # A clone: a view would keep the unrounded chunks of all ranks in memory.
        self._masters.append(stored[bucket.own_chunk].clone())
        rounded = stored.to(dtype)
        # Takes the parameters off the unrounded buffer, which is free when this returns.
        bucket.show(rounded)
        return rounded

    @override
    def _master_chunk(self, bucket: Bucket) -> Tensor | None:
        return self._masters[bucket.index]

    def _master(self, index: int) -> Tensor:
        master = self._masters[index]
        assert master is not None
        return master

    @override
    def _piece_tensor(self, name: str) -> Tensor:
        piece = super()._piece_tensor(name)
        # An empty piece is cut from the rounded parameter, but the optimizer must see one dtype on all ranks.
        return piece.detach().to(self._dtypes[name]).requires_grad_(piece.requires_grad)


def _written(name: str) -> RuntimeError:
    return RuntimeError(
        f"parameter {name!r}: it was written into in place or replaced, but with precision it is a rounded copy, and "
        "the master weights do not change with it; write inside 'with engine.full_params(keep_changes=True):', or use "
        "engine.load_full_state_dict(state)"
    )
