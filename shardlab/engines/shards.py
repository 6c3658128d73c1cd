"""Replicated parameters whose optimizer is sharded: who steps what, and how the steps come together again.

Each bucket's parameters are moved into one flat buffer (the module's tensors become views of it), so that the piece a
rank steps is a slice of that buffer, and one all-gather per bucket puts all pieces back in place with no copy.

With a 16-bit precision the flat buffers are rounded ones, and of each this rank keeps its chunk unrounded: the master
weights, which are stepped. After the step the chunk is rounded into its place and the chunks of all ranks are gathered,
so the wire carries the few bits too.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import Pending, wait_all
from shardlab.engines.accounting import Held
from shardlab.engines.buckets import Bucket
from shardlab.engines.precision import Precision
from shardlab.engines.step_tensors import StepTensors
from shardlab.partition.layout import Piece
from shardlab.vocabulary import Role


class ParameterShards:
    """The pieces of every parameter over the ranks of one communicator.

    Args:
        params: parameters by name, in the module's order.
        buckets: their layout, with one chunk per rank.
        comm: the ranks.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], comm: Communicator) -> None:
        self.params = dict(params)
        self.buckets = buckets
        self.comm = comm
        self.flat = [self._flatten(bucket) for bucket in buckets]
        self.pieces: dict[str, tuple[Bucket, Piece]] = {
            piece.name: (bucket, piece) for bucket in buckets for piece in bucket.layout.pieces(comm.rank)
        }
        pieces = {name: self._piece_tensor(name) for name in self.params}
        self._tensors = StepTensors(pieces, are_parts=comm.num_ranks > 1)

    @property
    def tensors(self) -> StepTensors:
        """What this rank steps: slices of the flat buffers, empty where it holds nothing of a parameter."""
        return self._tensors

    def slice_of(self, name: str, full: Tensor) -> Tensor:
        """This rank's piece of a tensor that has the parameter's shape, in the shape of ``tensors``."""
        _, piece = self.pieces[name]
        return full if piece.whole else full.reshape(-1)[piece.param_start : piece.param_stop]

    def gather(self, is_due: Callable[[nn.Parameter], bool]) -> None:
        """Put the pieces of all ranks back into the parameters; blocking.

        Args:
            is_due: whether some rank may have stepped a parameter; buckets that have none such are not sent.
        """
        pending: list[Pending] = []
        for bucket, flat in zip(self.buckets, self.flat, strict=True):
            if any(is_due(param) for param in bucket.params):
                tag = f"parameters of bucket {bucket.index}"
                pending.append(self.comm.all_gather(flat, self._chunk(bucket), bounds=bucket.layout.bounds, tag=tag))
        wait_all(pending)
        # They were written through the buffers, which autograd does not see: it is to refuse a backward that needs the
        # former values.
        for bucket in self.buckets:
            if any(is_due(param) for param in bucket.params):
                increment_version(bucket.params)

    def held(self) -> Iterator[Held]:
        """Whole parameters, and the padding of the flat buffers."""
        yield from (Held(Role.PARAMETER, flat) for flat in self.flat)
        for name, param in self.params.items():
            yield Held(Role.PARAMETER, param, name, (0, param.numel()))

    def _piece_tensor(self, name: str) -> Tensor:
        param = self.params[name]
        if name not in self.pieces:
            # Keeps the number of dimensions (at least one), so that an optimizer that asks for matrices is content.
            return param.detach().reshape(param.shape or (1,))[:0].requires_grad_(param.requires_grad)
        bucket, piece = self.pieces[name]
        chunk = self._chunk(bucket)
        offset = bucket.layout.chunk(self.comm.rank)[0]
        if chunk is None:
            chunk, offset = self.flat[bucket.index], 0
        tensor = chunk[piece.flat_start - offset : piece.flat_stop - offset]
        if piece.whole:
            tensor = tensor.view(param.shape)
        return tensor.detach().requires_grad_(param.requires_grad)

    def _flatten(self, bucket: Bucket) -> Tensor:
        """Move a bucket's parameters into one buffer."""
        flat = bucket.new_buffer()
        for view, param in zip(bucket.slots_of(flat), bucket.params, strict=True):
            view.copy_(param.detach())
        bucket.show(flat)
        return flat

    def _chunk(self, bucket: Bucket) -> Tensor | None:  # noqa: ARG002
        """What this rank steps of a bucket, [chunk]; None where that lies in its place in the flat buffer."""
        return None


class MasterShards(ParameterShards):
    """As ``ParameterShards``; what is stepped are master weights, in the dtype the model came with.

    Args:
        params: parameters by name, in the module's order.
        buckets: their layout, with one chunk per rank.
        comm: the ranks.
        precision: ``compute`` is the dtype of the parameters that the module gets.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], comm: Communicator, precision: Precision
    ) -> None:
        self._precision = precision
        self._dtypes = {name: param.dtype for name, param in params.items()}
        self._masters: list[Tensor | None] = []  # [chunk] by bucket; None where nothing is rounded
        self._stored: dict[int, Tensor] = {}  # bucket index -> all master weights, [padded_numel], while held
        self._num_holders = self._num_keeping = 0
        super().__init__(params, buckets, comm)
        self._versions: dict[str, int] = {}
        self._note_versions()

    @property
    def is_held(self) -> bool:
        """Whether the module has all master weights now."""
        return self._num_holders > 0

    def held(self) -> Iterator[Held]:
        """As the base, with this rank's chunks of the master weights; all of them, while held, count as gathered."""
        yield from (Held(Role.GATHERED_PARAMETER, stored) for stored in self._stored.values())
        yield from super().held()
        for bucket, master in zip(self.buckets, self._masters, strict=True):
            if master is not None:
                yield Held(Role.MASTER_WEIGHT, master)
                for piece in bucket.layout.pieces(self.comm.rank):
                    span = (piece.param_start, piece.param_stop)
                    yield Held(Role.MASTER_WEIGHT, self.tensors.by_name(piece.name), piece.name, span)

    def gather(self, is_due: Callable[[nn.Parameter], bool]) -> None:
        """Round what this rank has stepped and gather what all have; who holds the master weights gets those anew."""
        super().gather(is_due)
        if self.is_held:
            self._gather_masters()
        self._note_versions()

    @contextlib.contextmanager
    def whole(self, *, keep_changes: bool) -> Iterator[None]:
        """Inside, the module has all master weights; see ``Engine.full_params``."""
        self.check_unwritten()
        if not self.is_held:
            self._gather_masters()
        self._num_holders += 1
        self._num_keeping += keep_changes
        try:
            yield
            if keep_changes:
                self.keep_changes()
        finally:
            self._num_holders -= 1
            self._num_keeping -= keep_changes
            if not self.is_held:
                self._show_rounded()

    def keep_changes(self) -> None:
        """Take what was written into the master weights, if whoever holds them said that it counts."""
        if not self._num_keeping:
            return
        for index, stored in self._stored.items():
            start, stop = self.buckets[index].layout.chunk(self.comm.rank)
            self._master(index).copy_(stored[start:stop])
            self.flat[index].copy_(stored)

    def give_back(self) -> None:
        """Leave the module with all master weights; collective."""
        if not self.is_held:
            self._gather_masters()
        self._num_holders = 1

    def check_unwritten(self) -> None:
        """Find out whether somebody has written into rounded parameters, which nobody would step from.

        Raises:
            RuntimeError: somebody has.
        """
        if self.is_held:
            return
        for name, version in self._versions.items():
            if self.params[name]._version != version:
                raise RuntimeError(
                    f"parameter {name!r}: it was written into in place, but with precision it is a rounded copy of the "
                    "master weights, which this does not reach; write inside 'with engine.full_params(keep_changes="
                    "True):', or use engine.load_full_state_dict(state)"
                )

    def forget_writes(self) -> None:
        """All parameters are about to be replaced, so what was written into them does not matter."""
        self._note_versions()

    def _gather_masters(self) -> None:
        pending = []
        for index, master in enumerate(self._masters):
            if master is None:
                continue
            bucket = self.buckets[index]
            if index not in self._stored:
                self._stored[index] = torch.empty(bucket.layout.padded_numel, dtype=master.dtype, device=master.device)
            tag, bounds = f"parameters of bucket {index}", bucket.layout.bounds
            pending.append(self.comm.all_gather(self._stored[index], master, bounds=bounds, tag=tag))
        wait_all(pending)
        for index, stored in self._stored.items():
            self.buckets[index].show(stored)

    def _show_rounded(self) -> None:
        for index in self._stored:
            self.buckets[index].show(self.flat[index])
        self._stored = {}
        self._note_versions()

    def _note_versions(self) -> None:
        rounded = (
            name for bucket, master in zip(self.buckets, self._masters, strict=True) if master is not None
            for name in bucket.names
        )  # fmt: skip
        self._versions = {name: self.params[name]._version for name in rounded}

    def _flatten(self, bucket: Bucket) -> Tensor:
        stored = super()._flatten(bucket)
        dtype = self._precision.compute_dtype_of(stored)
        if dtype == stored.dtype:
            self._masters.append(None)
            return stored
        start, stop = bucket.layout.chunk(self.comm.rank)
        self._masters.append(stored[start:stop].clone())
        rounded = stored.to(dtype)
        bucket.show(rounded)
        return rounded

    def _chunk(self, bucket: Bucket) -> Tensor | None:
        return self._masters[bucket.index]

    def _master(self, index: int) -> Tensor:
        master = self._masters[index]
        assert master is not None
        return master

    def _piece_tensor(self, name: str) -> Tensor:
        piece = super()._piece_tensor(name)
        # An empty one is cut from the rounded parameter; what is stepped has one dtype on all ranks.
        return piece.detach().to(self._dtypes[name]).requires_grad_(piece.requires_grad)
