"""Replicated parameters whose optimizer is sharded: who steps what, and how the steps come together again.

Each bucket's parameters are moved into one flat buffer (the module's tensors become views of it), so that the piece a
rank steps is a slice of that buffer, and one all-gather per bucket puts all pieces back in place with no copy.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from traceback import walk_tb

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shardlab.comm import Communicator, Pending, wait_all
from shardlab.engines.buckets import Bucket
from shardlab.engines.step_tensors import StepTensors
from shardlab.partition.flat import Piece
from shardlab.vocabulary import Partition

# These look at a whole tensor (a factored second moment, a norm, an orthogonalisation): a slice gives another result.
WHOLE_TENSOR_OPTIMIZERS = frozenset({"Adafactor", "LAMB", "Lamb", "LARS", "Lars", "Muon", "Shampoo", "SOAP"})
WHOLE_MODEL_OPTIMIZERS = frozenset({"LBFGS"})


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
        self.flat = [_flatten(bucket) for bucket in buckets]
        self.pieces: dict[str, tuple[Bucket, Piece]] = {
            piece.name: (bucket, piece) for bucket in buckets for piece in bucket.layout.pieces(comm.rank)
        }
        self._tensors = StepTensors({name: self._piece_tensor(name) for name in self.params})

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
                pending.append(self.comm.all_gather(flat, bounds=bucket.layout.bounds, tag=tag))
        wait_all(pending)
        # They were written through the buffers, which autograd does not see: it is to refuse a backward that needs the
        # former values.
        for bucket in self.buckets:
            if any(is_due(param) for param in bucket.params):
                increment_version(bucket.params)

    def owners(self) -> dict[str, tuple[int, ...]]:
        """The ranks that step a piece of each parameter, in the module's order."""
        holders: dict[str, list[int]] = {name: [] for name in self.params}
        for bucket in self.buckets:
            for rank in range(self.comm.num_ranks):
                for piece in bucket.layout.pieces(rank):
                    holders[piece.name].append(rank)
        return {name: tuple(ranks) for name, ranks in holders.items()}

    def owned(self) -> dict[str, tuple[int, int]]:
        """The elements this rank steps, by name, in the module's order; only what it does step."""
        held = {name: self.pieces[name][1] for name in self.params if name in self.pieces}
        return {name: (piece.param_start, piece.param_stop) for name, piece in held.items()}

    def _piece_tensor(self, name: str) -> Tensor:
        param = self.params[name]
        if name not in self.pieces:
            # Keeps the number of dimensions (at least one), so that an optimizer that asks for matrices is content.
            return param.detach().reshape(param.shape or (1,))[:0].requires_grad_(param.requires_grad)
        bucket, piece = self.pieces[name]
        tensor = self.flat[bucket.index][piece.flat_start : piece.flat_stop]
        if piece.whole:
            tensor = tensor.view(param.shape)
        return tensor.detach().requires_grad_(param.requires_grad)


def check_partition(optimizer: torch.optim.Optimizer, partition: Partition, num_ranks: int) -> None:
    """Refuse an optimizer that a partition would make wrong.

    Raises:
        ValueError: the optimizer looks at more than one element at a time and the partition cuts what it looks at.
    """
    kind = type(optimizer).__name__
    if num_ranks == 1:
        return
    if kind in WHOLE_MODEL_OPTIMIZERS:
        raise ValueError(f"optimizer: {kind} looks at the whole model, so it cannot be sharded; use bucketed or ddp")
    if kind in WHOLE_TENSOR_OPTIMIZERS and partition is Partition.ELEMENTS:
        allowed = ", ".join(other for other in Partition if other is not Partition.ELEMENTS)
        raise ValueError(
            f"partition: {kind} looks at whole tensors, and 'elements' cuts through them; use one of {allowed} "
            "(zero1, zero2 and zero3 take it)"
        )


@contextlib.contextmanager
def refused_by_partition(partition: Partition, num_ranks: int) -> Iterator[None]:
    """Inside, an optimizer that by itself refuses slices, as Muon does, is refused with the partition's name.

    Raises:
        ValueError: as ``check_partition``, or what was raised inside.
    """
    try:
        yield
    except ValueError as error:
        for frame, _ in walk_tb(error.__traceback__):
            # It never came to be: only its constructor's frame knows it.
            if isinstance(optimizer := frame.f_locals.get("self"), torch.optim.Optimizer):
                check_partition(optimizer, partition, num_ranks)
        raise


def _flatten(bucket: Bucket) -> Tensor:
    flat = bucket.new_buffer()
    for view, param in zip(bucket.slots_of(flat), bucket.params, strict=True):
        view.copy_(param.detach())
        param.data = view
    return flat
