"""When units are gathered, let go and reduced: what hooks on the wrapped modules and on the parameters do.

Forward gathers a group before it computes and lets it go after; backward gathers it again, and reduces and lets it go
when its last gradient is there. Both gather the next ``prefetch`` groups ahead, in the order of the last forward.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from shardlab.engines.fsdp.group import Group
from shardlab.engines.fsdp.order import Order
from shardlab.engines.fsdp.policy import ROOT
from shardlab.engines.trees import tensors_in


class Schedule:
    """What happens to which group, and when.

    Args:
        groups: in the module's order; every rank makes the same.
        prefetch: groups gathered ahead.
        reshard_after_forward: whether a group is let go between its forward and its backward.
        held: whether the user holds all full parameters now, so that none may be let go.
    """

    def __init__(
        self, groups: Sequence[Group], *, prefetch: int, reshard_after_forward: bool, held: Callable[[], bool]
    ) -> None:
        self._groups, self._prefetch, self._held = groups, prefetch, held
        self._reshard_after_forward = reshard_after_forward
        self._root = next((group for group in groups if group.name == ROOT), None)
        self._order = Order(groups, self._root)
        self._group_of = {param: group for group in groups for unit in group.units for param in unit.params.values()}
        self._in_backward = False
        self._reducing = False  # some groups have been sent, and not all have been waited for
        self.new_round()

    def watch(self) -> list[RemovableHandle]:
        """Put the hooks on the groups' modules."""
        return [hook for group in self._groups for hook in self._watch(group)]

    def new_pass(self) -> None:
        """A forward of the whole model begins."""
        if self._in_backward:
            self._order.new_pass()
        self._in_backward = False

    def new_round(self) -> None:
        """Expect every gradient anew."""
        for group in self._groups:
            group.reduced = False
            group.arm()
        self._reducing = False

    def comes_too_late(self, param: nn.Parameter) -> bool:
        """Whether a gradient of ``param`` would be added to one that is being reduced."""
        return self._reducing and self._group_of[param].reduced

    def gradient_came(self, param: nn.Parameter, *, reduce: bool) -> None:
        """Let the parameter's group go when this was its last gradient; with ``reduce``, reduce what is complete."""
        group = self._group_of[param]
        if group.reduced:
            self.new_round()
        group.waiting.discard(param)
        if group.waiting:
            return
        if not self._held():
            group.reshard()
        if reduce:
            self._reduce_complete()
        else:
            group.arm()

    def finish(self) -> None:
        """Reduce what has not been, and return when all gradients are means."""
        for group in self._order.reduction(self._groups):
            self._reduce(group)
        for group in self._groups:
            group.finish_reduce()
        self._reducing = False
        self.let_go()

    def let_go(self) -> None:
        """Reshard whatever is still gathered: unused, prefetched in vain, or left by an error."""
        if not self._held():
            for group in self._groups:
                group.reshard()

    def _watch(self, group: Group) -> list[RemovableHandle]:
        return [
            group.module.register_forward_pre_hook(lambda *_: self._before_forward(group)),
            group.module.register_forward_hook(lambda _, __, output: self._after_forward(group, output)),
        ]

    def _before_forward(self, group: Group) -> None:
        group.unshard()
        if not self._in_backward:  # a recomputation in backward follows backward's order
            for following in self._order.forward_of(group, self._prefetch):
                following.start_unshard()

    def _after_forward(self, group: Group, output: Any) -> None:
        if self._in_backward:
            return
        if self._reshard_after_forward and not self._held():
            group.reshard()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._before_backward(group))

    def _before_backward(self, group: Group) -> None:
        if not self._in_backward and self._root is not None:
            # The last unit's output may be the model's: then its hook comes before the root's. One order for both.
            self._root.start_unshard()
        self._in_backward = True
        group.unshard()
        for following in self._order.backward_of(group, self._prefetch):
            following.start_unshard()

    def _reduce_complete(self) -> None:
        """Reduce the groups that are complete, in the order all ranks share, up to the first that is not."""
        for group in self._order.reduction(self._groups):
            if group.waiting:
                return
            self._reduce(group)

    def _reduce(self, group: Group) -> None:
        if group.reduced or not group.trainable:
            return
        self._reducing = True
        for earlier in self._groups:
            earlier.finish_reduce()  # one reduction at a time, behind the backward of the next unit
        group.start_reduce()
