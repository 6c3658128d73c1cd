"""What autograd saves for backward, without the weights.

A linear layer saves its weight for the gradient of its input. If that were the gathered tensor, resharding after
forward would free nothing. So a saved tensor that is part of a gathered parameter is saved as "these strides of that
parameter of that bucket". When backward asks for it the bucket is gathered again, unless a prefetch has done so.

With hooks on saved tensors, torch no longer checks whether they have been overwritten since. So the check is done here,
with the same counter: every tensor has a version, which views share and in-place operations raise. A parameter keeps
its version when it is gathered again; its bucket raises it when the values change (``HeldParameters.values_changed``).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.engines.gathered_parameters import gathered_at, place_of
from shardlab.engines.placeholder import sharded_parameter
from shardlab.engines.sharded_bucket import ShardedBucket


class _Kept(NamedTuple):
    tensor: Tensor
    version: int


class _Reference(NamedTuple):
    bucket: ShardedBucket
    name: str
    version: int  # of the parameter
    num_ends: int  # of holds by hand, which raise the version and change nothing
    dtype: torch.dtype  # another than the parameter's where this is view_as_complex() of it
    size: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int  # from the parameter's first element
    is_conj: bool
    is_neg: bool


@contextlib.contextmanager
def saved_by_reference(buckets: Sequence[ShardedBucket]) -> Iterator[None]:
    """Inside, autograd saves gathered parameters of ``buckets`` by reference.

    Backward raises a RuntimeError for a tensor that has changed since, as it does without this.

    Raises:
        RuntimeError: at the end, if something was computed with the stub of a parameter that is not gathered.
    """
    own = set(buckets)
    of_stubs: list[str] = []

    def pack(saved: Tensor) -> _Kept | _Reference:
        address = _address(saved)
        bucket = gathered_at(address)
        if isinstance(bucket, ShardedBucket) and bucket in own:
            # In a flat layout all parameters of a bucket share a storage: the place in it tells them apart.
            name = bucket.name_at(place_of(saved))
            # share_memory() may have moved the parameter, and something else lies where it was.
            if name is not None and _address(bucket.full[name]) == address and not bucket.is_held_as_stored:
                return _reference(saved, bucket, name)
            if (name := bucket.stub_at(place_of(saved))) is not None:
                of_stubs.append(name)  # by C++, which asks nothing of Python, and would lose the text of an error here
        # (In another dtype than that to compute in they are kept as they are.)
        # Not ``saved`` itself: an operation that saves its own output would hold itself, and a graph that never runs
        # backward would keep its activations for ever. A detached tensor shares the version.
        return _Kept(saved.detach(), saved._version)

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
        if of_stubs:
            raise RuntimeError(sharded_parameter(of_stubs[0]))
    except RuntimeError as error:
        if "support saved tensor hooks" not in str(error):
            raise
        raise RuntimeError(
            "torch.func: its grad, vjp, jacrev and hessian do not run inside a forward whose parameters are sharded, "
            "since what they save cannot be resharded; write torch.autograd.grad(..., create_graph=True), use strategy "
            "'zero2', whose parameters are whole, or call them under torch.no_grad() inside 'with "
            "engine.full_params():'"
        ) from error


def _address(saved: Tensor) -> int:
    """Where its storage begins; 0 for a tensor that has none, such as a sparse or nested one, and is no parameter."""
    try:
        return int(saved.untyped_storage().data_ptr())
    except RuntimeError:  # NotImplementedError too
        return 0


def _unpack(packed: _Kept | _Reference) -> Tensor:
    if isinstance(packed, _Kept):
        if packed.tensor._version != packed.version:
            raise _overwritten(packed)
        return packed.tensor
    # Asked of this parameter alone: of all in its bucket, a backward through many would ask for the square of them.
    is_current = packed.bucket.is_current(packed.name)
    if not is_current:
        packed.bucket.take_assigned()
        packed.bucket.follow_pieces()
    # Before the gather: the versions are the same on all ranks, so all refuse and none waits in it.
    ended_since = packed.bucket.num_ends_by_hand - packed.num_ends
    if packed.bucket.params[packed.name]._version - ended_since != packed.version:
        raise _changed(packed)
    # Not resharded here: the node that asked is about to compute with it. The engine reshards when backward has ended,
    # and after ``torch.autograd.grad``, whose end nobody sees, at the next forward or step.
    if not is_current:
        packed.bucket.unshard()
    # In the dtype to compute in, also where they are held, or left by ``close()``, in the one they are stored in.
    return _view_of(packed.bucket.full[packed.name].to(packed.bucket.compute_dtype), packed)


def _reference(saved: Tensor, bucket: ShardedBucket, name: str) -> _Reference:
    offset_bytes = place_of(saved) - place_of(bucket.full[name])
    version, conj_neg = bucket.params[name]._version, (saved.is_conj(), saved.is_neg())
    return _Reference(
        bucket,
        name,
        version,
        bucket.num_ends_by_hand,
        saved.dtype,
        saved.size(),
        saved.stride(),
        offset_bytes,
        *conj_neg,
    )


def _view_of(full: Tensor, saved: _Reference) -> Tensor:
    """The part of a gathered parameter that was saved."""
    start_bytes = full.storage_offset() * full.element_size() + saved.offset_bytes
    start = start_bytes // saved.dtype.itemsize
    if saved.dtype == full.dtype:
        view = full.as_strided(saved.size, saved.stride, start)
    else:
        view = full.new_empty(0, dtype=saved.dtype).set_(full.untyped_storage(), start, saved.size, saved.stride)
    # The bits in which a lazy conjugate and a lazy minus differ from the memory they are views of.
    view = view.conj() if saved.is_conj else view
    return -view if saved.is_neg else view


def _overwritten(kept: _Kept) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {list(kept.tensor.shape)} and {kept.tensor.dtype} is at version {kept.tensor._version}; expected "
        f"version {kept.version} instead. Compute out of place (x = x + 1, not x += 1), or change a clone()"
    )


def _changed(reference: _Reference) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: parameter "
        f"{reference.name!r} has changed between forward and backward, by step(), by loading a state or by hand. Call "
        "backward() before the change, or forward again after it"
    )
