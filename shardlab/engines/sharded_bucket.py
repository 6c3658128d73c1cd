"""Parameters that are sharded, gathered, computed with, resharded and reduced together: the bucket of ZeRO-3.

Gradients: ``param.grad`` of each full parameter until backward has made them all, then one flat buffer that is
reduce-scattered, then this rank's chunk, whose parts are the ``.grad`` of the pieces.
"""

from collections.abc import Iterator, Sequence, Set
from functools import cached_property

import torch
from torch import Tensor

from shardlab.comm.events import Pending
from shardlab.engines.held_parameters import HeldParameters
from shardlab.engines.holdings import Holding
from shardlab.engines.hooks import unrefused
from shardlab.engines.placeholder import PlaceholderGradient
from shardlab.engines.unused_params import mark_all_used, nobody_used
from shardlab.partition.chunks import first_elements
from shardlab.vocabulary import Role


class ShardedBucket(HeldParameters):
    """Adds to ``HeldParameters`` the reduction of their gradients."""

    # Defaults of the class, so that no constructor is needed.
    gradient_shard: Tensor | None = None  # [chunk], means
    _reducing: tuple[Tensor, Tensor, Pending] | None = None
    _unused: Set[str] = frozenset()

    @unrefused
    def start_reduce(self) -> None:
        """Begin to sum over the ranks the gradients that have accumulated in the parameters."""
        buffer = torch.empty(self.layout.padded_numel, dtype=self._reduce_dtype, device=self.device)
        if self.layout.padding_numel:
            buffer.zero_()  # no gradient is written to the padding, which must be 0 and not old memory
        self._unused = {name for name, param in self.params.items() if param.grad is None}
        self._tensors.write({name: param.grad for name, param in self.params.items()}, buffer)
        for param in self.params.values():
            param.grad = None  # or the next micro-batch would be added to it, and this one sent twice
        # After the cast to the dtype of the reduction, which may round a tiny gradient to -0, the sign of "unused".
        mark_all_used([buffer[place : place + 1] for name, place in self._looked_at if name not in self._unused])
        self._reducing = (buffer, *self._reduce(buffer))  # the buffer too: it is read until the reduction has ended

    @property
    def is_reducing(self) -> bool:
        """Whether that has begun and not ended."""
        return self._reducing is not None

    def finish_reduce(self) -> None:
        """Put the means into ``gradient_shard``, with those of earlier backwards, as the ``.grad`` of the pieces."""
        if self._reducing is None:
            return
        self._sum_over_replicas()
        _, sums, pending = self._reducing
        pending.wait()
        self._reducing = None
        # Read before the sums become means: casting or dividing a tiny one may give -0.
        unused = nobody_used(
            {name: self._tensors.piece_of(name, sums) for name in self._unused & self._tensors.own.keys()}
        )
        self._accept(sums.to(self.shard.dtype).div_(self._num_summed), unused)

    def drop_gradients(self) -> None:
        """Clear the means."""
        self.gradient_shard = None  # and the pieces' views of it, which would keep it in memory
        for piece in self.pieces.values():
            piece.grad = None

    def gradient_holdings(self) -> Iterator[Holding]:
        """Everything that holds gradients at this moment."""
        found = (param.grad for param in self.params.values())
        whole = [gradient for gradient in found if not isinstance(gradient, PlaceholderGradient | None)]
        chunk = [self.gradient_shard] if self.gradient_shard is not None else []
        in_flight = self._reducing[:2] if self._reducing is not None else ()
        yield from (Holding(Role.GRADIENT, tensor) for tensor in (*whole, *chunk, *in_flight))
        for name, piece in self._tensors.own.items():
            if (gradient := self.pieces[name].grad) is not None:
                yield Holding(Role.GRADIENT, gradient, name, (piece.param_start, piece.param_stop))

    # Steps that FSDP's buckets override, and helpers.

    @cached_property
    def _reduce_dtype(self) -> torch.dtype:
        return self._precision.reduce_dtype_of(self.shard)

    @cached_property
    def _looked_at(self) -> Sequence[tuple[str, int]]:
        """Where in the buffer some rank will look to detect an unused parameter, by name."""
        return first_elements(self.layout)

    def _reduce(self, buffer: Tensor) -> tuple[Tensor, Pending]:
        """Begin to sum a buffer of gradients over the ranks; return where this rank's sums will be, [chunk]."""
        if self.is_whole:
            # The buffer itself: with equal dtypes it is divided in place, and the means need no other memory.
            return buffer, Pending()
        sums = torch.empty(self.shard.shape, dtype=buffer.dtype, device=self.device)
        tag = f"gradients of {self.name}"
        return sums, self.comm.reduce_scatter(buffer, sums, bounds=self.layout.bounds, tag=tag)

    def _sum_over_replicas(self) -> None:
        """Where shards are replicated (FSDP), begin what is left to sum; ``_reducing`` is then the last of the sums."""

    @property
    def _num_summed(self) -> int:
        """Over how many ranks gradients are summed."""
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

    def _set_gradient(self, piece: Tensor, gradient: Tensor) -> None:
        piece.grad = gradient
