"""Replicated parameters whose optimizer is sharded: who steps what, and how the steps come together again.

Each bucket's parameters are moved into one flat buffer (the module's tensors become views of it), so that the piece a
rank steps is a slice of that buffer, and one all-gather per bucket puts all pieces back in place with no copy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import Pending, wait_all
from shardlab.engines.accounting import Held
from shardlab.engines.buckets import Bucket
from shardlab.engines.step_tensors import StepTensors
from shardlab.partition.flat import Piece
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
