"""Of which parameters this rank has gradients, which the engine's flag tells the others.

One process leaves ``.grad`` None where no micro-batch used a parameter, and the optimizer skips it: no weight decay, no
momentum. No rank knows alone that the others did not use it either. So what a rank did not use it sends as zeros, and
behind each reduction the flag says, one number a parameter, whether a rank used it. The answer counts only where this
rank did not use all.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from shardlab.engines.plain_mode import unrefused


class UsedParams:
    """Those of one engine.

    Args:
        params: of the module, in its order.
        stepped: what the optimizer steps of each: itself, or another tensor.

    Attributes:
        moved: ids of those whose gradients may be elsewhere by now, and not in means yet: autograd has brought one,
            which the strategy may have moved.
    """

    def __init__(self, params: Iterable[nn.Parameter], stepped: Iterable[Tensor]) -> None:
        self._pairs = list(zip(params, stepped, strict=True))
        self.moved: set[int] = set()

    @unrefused
    def begin(self, *, sends: bool) -> None:
        """A backward begins: note what it may send, and what has means: new ones may come before it ends."""
        for param, stepped in self._pairs:
            if (sends and param.grad is not None) or (stepped is not param and stepped.grad is not None):
                self.moved.add(id(param))

    @unrefused
    def here(self, *, or_stepped: bool) -> list[bool]:
        """Whether this rank has a gradient of each parameter; ``or_stepped``: also where what is stepped has one."""
        return [
            id(param) in self.moved or param.grad is not None or (or_stepped and stepped.grad is not None)
            for param, stepped in self._pairs
        ]

    def forget(self) -> None:
        """Gradients have been reduced, or cleared."""
        self.moved.clear()

    def clear(self, indices: Sequence[int]) -> None:
        """Set to None the ``.grad`` of what is stepped of parameters that no rank has used, told by their places."""
        for index in indices:
            self._pairs[index][1].grad = None
