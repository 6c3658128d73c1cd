"""What autograd saves for backward, without the weights.

A linear layer saves its weight for the gradient of its input. If that were the gathered tensor, resharding after
forward would free nothing. So a saved tensor that lies in a gathered parameter is saved as "these strides of that
parameter". When backward asks for it the unit is gathered again, unless that has happened.

With hooks on saved tensors, torch no longer checks whether they have been overwritten since. So the check is done here,
with the same counters: every tensor has a version, and shards raise theirs when their values change.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.engines.sharded_params import ByAddress, Shards


class _AsItIs(NamedTuple):
    tensor: Tensor
    version: int


class _Reference(NamedTuple):
    shards: Shards
    storage: str  # which of theirs
    version: int  # of the shards
    dtype: torch.dtype  # another than the parameters' where this is view_as_complex() of one
    size: torch.Size
    stride: tuple[int, ...]
    start: int  # in the storage


@contextlib.contextmanager
def saved_by_reference(at: ByAddress, gather: Callable[[Shards], None]) -> Iterator[None]:
    """Inside, autograd saves gathered parameters by reference; what has changed since is an error in backward.

    Args:
        at: the shards whose gathered parameters are in a storage, and which of their storages it is, by its address.
        gather: gathers the unit of shards, when backward asks for a parameter of it.
    """
    of_stubs: list[str] = []

    def pack(saved: Tensor) -> _AsItIs | _Reference:
        found = at.get(_address(saved))
        if found is None:
            return _packed_as_it_is(saved)
        shards, storage = found
        if storage not in shards.storages:
            of_stubs.append(storage)  # not raised here, where C++ calls
            return _packed_as_it_is(saved)
        # share_memory() has moved the parameters, and what is there now is something else. Or the strides do not say
        # all, as of a lazy conjugate: then the whole storage stays in memory.
        if _address(shards.storages[storage]) != _address(saved) or saved.is_conj() or saved.is_neg():
            return _packed_as_it_is(saved)
        start = int(saved.storage_offset())
        return _Reference(shards, storage, shards.version, saved.dtype, saved.size(), saved.stride(), start)

    def unpack(packed: _AsItIs | _Reference) -> Tensor:
        if isinstance(packed, _AsItIs):
            return _unpacked_as_it_is(packed)
        # Before the gather: the versions are the same on all ranks, so all refuse and none waits in it.
        if packed.shards.version != packed.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"parameters of {packed.shards.name} have changed between forward and backward, by step(), by loading "
                "a state or by hand. Call backward() before the change, or forward again after it"
            )
        gather(packed.shards)
        storage = packed.shards.storages[packed.storage].to(packed.shards.compute_dtype)
        view = storage.new_empty(0, dtype=packed.dtype)
        return view.set_(storage.untyped_storage(), packed.start, packed.size, packed.stride)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    if of_stubs:
        raise stub_used(of_stubs[0])


def saved_as_it_is(tell: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Inside, autograd keeps what it saves, though a parameter among it shows other data when backward comes.

    Args:
        tell: called whenever it saves something.
    """

    def pack(saved: Tensor) -> _AsItIs:
        tell()
        return _packed_as_it_is(saved)

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpacked_as_it_is)


def _packed_as_it_is(saved: Tensor) -> _AsItIs:
    # Not ``saved`` itself: an operation that saves its own output would hold itself, and a graph that never runs
    # backward would keep its activations for ever. A detached tensor shares the version.
    return _AsItIs(saved.detach(), saved._version)


def _unpacked_as_it_is(packed: _AsItIs) -> Tensor:
    if packed.tensor._version != packed.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {list(packed.tensor.shape)} and {packed.tensor.dtype} is at version {packed.tensor._version}; "
            f"expected version {packed.version} instead. Compute out of place (x = x + 1, not x += 1), or change a "
            "clone()"
        )
    return packed.tensor


def _address(saved: Tensor) -> int:
    """Where its storage begins; 0 for a tensor that has none, such as a sparse or nested one, and is no parameter."""
    try:
        return int(saved.untyped_storage().data_ptr())
    except RuntimeError:  # NotImplementedError too
        return 0


def stub_used(name: str) -> RuntimeError:
    """The error where C++ has computed with a parameter that is not gathered: it asks nothing of Python."""
    return RuntimeError(
        f"parameter {name!r} is sharded: code that bypasses its module, as TorchScript does, has computed with it "
        "where it is not gathered; choose larger FSDP units, as wrap='root', or compute inside 'with "
        "engine.full_params():'"
    )
