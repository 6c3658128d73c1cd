"""The input that several column-parallel layers share: it enters their parallel region once for all of them.

Query, key and value projections read one tensor. If each of them copied (or gathered) it for itself, backward would
have three all-reduces where one does. So the columns of one parent share a ``SharedInput``, which remembers the last
tensor that came in while the forward that calls them runs. It compares tensors by identity: any other tensor is sent on
its own, at worst by one more message. Outside of that forward, as in another method, nothing is remembered: no hook
would say when that ends, nor a version that numpy has refilled the tensor's memory, and the next input may lie there.

With sequence parallelism this input is the only large activation that is whole on every rank. Autograd keeps it for the
weight's gradient: 2sbh bytes of 16-bit values in front of attention, as much in front of the MLP. With
``linear_of_gathered`` it keeps this rank's part, 2sbh/N, and backward gathers the whole again, once for all columns
that share it.
Source: Korthikanti et al., arXiv 2205.05198, section 4.2.2 (the end).

Legend: b micro-batch, s sequence, h hidden, N ranks.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardlab.comm import Communicator
from shardlab.comm.autograd_collectives import all_gather, copy


class SharedInput:
    """What brings an input into one or more column-parallel layers.

    Args:
        comm: the tensor axis.
        sequence_dim: the dim along which the tensor is in parts outside; None where it is whole there.
        name: whose input it is, in the tags.
    """

    def __init__(self, comm: Communicator, sequence_dim: int | None, name: str) -> None:
        self.comm, self.sequence_dim, self.name = comm, sequence_dim, name
        self.num_crossings = 0
        self._last: tuple[Tensor, int, bool, Tensor] | None = None
        self._again: tuple[int, Tensor] | None = None
        self._is_shared = self._caller_runs = False

    def share(self, caller: nn.Module) -> None:
        """Remember the last input for other columns while the forward of ``caller``, which calls them all, runs."""
        self._is_shared = True
        caller.register_forward_pre_hook(lambda *_: self._begin())
        # Also after an error: the remembered tensors would otherwise live until the next forward.
        caller.register_forward_hook(lambda *_: self._end(), always_call=True)

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor as the columns take it: whole, and its gradient summed over the ranks."""
        if not self._caller_runs or tensor.is_inference():
            return self._cross(tensor)
        as_it_is = (tensor, tensor._version, torch.is_grad_enabled())  # the version says whether it was written into
        if self._last is None or self._last[0] is not tensor or self._last[1:3] != as_it_is[1:]:
            self._last = (*as_it_is, self._cross(tensor))
        return self._last[3]

    def regather(self, part: Tensor, crossing: int, *, for_all: bool) -> Tensor:
        """Gather the whole input again, in backward.

        Args:
            part: this rank's part.
            crossing: ``num_crossings`` when the part had come in.
            for_all: remember it for the other columns, until the gradient of the whole is there.
        """
        # By its number: the memory of a part may hold another input by now, and each column has a tensor of its own.
        if self._again is not None and self._again[0] == crossing:
            return self._again[1]
        assert self.sequence_dim is not None
        whole = all_gather(part, self.comm, self.sequence_dim, tag=f"input of {self.name} again")
        # Only where the whole has a gradient: the hook on that is what forgets it again.
        if self._is_shared and for_all:
            self._again = (crossing, whole)
        return whole

    def _cross(self, tensor: Tensor) -> Tensor:
        self.num_crossings += 1
        tag = f"input of {self.name}"
        if self.sequence_dim is None:
            return copy(tensor, self.comm, tag=tag)
        crossed = all_gather(tensor, self.comm, self.sequence_dim, tag=tag)
        if crossed.requires_grad:
            # When its gradient is complete, all columns have used the gathered input: without this the whole of it
            # would stay until the next backward.
            crossed.register_hook(lambda _: self._forget_again())
        return crossed

    def _begin(self) -> None:
        # A backward to the weights alone leaves what it gathered, as does a forward that it runs again.
        self._caller_runs, self._last, self._again = True, None, None

    def _end(self) -> None:
        self._caller_runs, self._last = False, None

    def _forget_again(self) -> None:
        self._again = None


def caller_around(name: str, model: nn.Module) -> nn.Module | None:
    """The module whose forward calls what module ``name`` holds: itself, or what holds it if it is a mere container.

    None if all that hold it are containers, such as ``nn.ModuleList``, of which torch never calls a forward.
    """
    module = model.get_submodule(name)
    if type(module).forward is not nn.Module.forward:
        return module
    return caller_around(name.rpartition(".")[0], model) if name else None


def linear_of_gathered(
    gathered: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, shared_input: SharedInput
) -> Tensor:
    """``gathered @ weight.T + bias``; for backward only ``part`` is kept.

    Args:
        gathered: what ``shared_input`` made of ``part``.
        part: this rank's part along the shared input's dim.
        weight: (out, in).
        bias: (out,) or None.
        shared_input: which both came through.
    """
    result: Tensor = _LinearOfGathered.apply(gathered, part.detach(), weight, bias, shared_input)  # type: ignore[no-untyped-call]
    return result


class _LinearOfGathered(torch.autograd.Function):
    runs_no_backward = True  # for engines that ask what a backward will reach

    @staticmethod
    def forward(
        ctx: Any, gathered: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, shared_input: SharedInput
    ) -> Tensor:
        # The part, not ``gathered``: that is the memory this class exists to save.
        ctx.save_for_backward(part, weight)
        ctx.shared_input, ctx.crossing = shared_input, shared_input.num_crossings
        return functional.linear(gathered, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        needs_input, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        d_weight = d_bias = d_input = None
        # Under autocast forward ran in the gradient's dtype, and the tensors that came in have their own.
        if needs_weight:
            whole = ctx.shared_input.regather(part, ctx.crossing, for_all=needs_input)
            d_weight = (rows.T @ whole.flatten(0, -2).to(gradient.dtype)).to(weight.dtype)
        if needs_bias:
            d_bias = rows.sum(0).to(weight.dtype)
        if needs_input:
            d_input = (gradient @ weight.to(gradient.dtype)).to(part.dtype)
        return d_input, None, d_weight, d_bias, None
