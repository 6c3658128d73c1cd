"""The flag: the last message of a reduction. By it all ranks raise together, and learn which parameters any has used.

One process leaves ``.grad`` None where no micro-batch used a parameter, and the optimizer skips it: no weight decay, no
momentum. No rank knows alone that the others did not use it either. So what a rank did not use it sends as zeros, and
behind each reduction the flag says, one number a parameter, whether a rank used it. The answer counts only where this
rank did not use all.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from shardlab.comm.communicator import Communicator
from shardlab.comm.same_on_all_ranks import number_among, share_texts
from shardlab.comm.streams import numbers_on, read_later
from shardlab.engines.plain_mode import unrefused
from shardlab.vocabulary import FLAG, TOLD


class Flag:
    """The flag of one engine, sent again and again, and what it has to say.

    Args:
        comms: the data axes, outer first.
        device: on which they communicate.
        params: of the module, in its order.
        stepped: what the optimizer steps of each: itself, or another tensor.
        is_due: whether any rank may have a gradient of a parameter.

    Attributes:
        moved: ids of parameters whose gradients may be elsewhere by now, and not in means yet: autograd has brought
            one, which the strategy may have moved.
    """

    def __init__(
        self, comms: Sequence[Communicator], device: torch.device, params: Iterable[nn.Parameter],
        stepped: Iterable[Tensor], is_due: Callable[[nn.Parameter], bool],
    ) -> None:  # fmt: skip
        self._comms, self._device, self._is_due = comms, device, is_due
        self._pairs = list(zip(params, stepped, strict=True))
        self._has_pieces = any(stepped is not param for param, stepped in self._pairs)
        self.moved: set[int] = set()
        self._raised: Exception | None = None  # what this rank raises, of the flag that was sent
        self._unused: list[int] = []  # places of the parameters that it did not use
        self._answer: Callable[[], list[int]] | None = None  # reads it; None where none waits to be read

    @unrefused
    def begin(self, *, sends: bool) -> None:
        """A backward begins: note what it may send, and what has means: new ones may come before it ends."""
        for param, stepped in self._pairs if sends or self._has_pieces else ():  # at each micro-batch
            if (sends and param.grad is not None) or (stepped is not param and stepped.grad is not None):
                self.moved.add(id(param))

    @unrefused
    def used_here(self, *, or_stepped: bool) -> list[bool]:
        """Whether this rank has a gradient of each parameter; ``or_stepped``: also where what is stepped has one.

        To be asked before the strategy moves what it has.
        """
        return [
            id(param) in self.moved or param.grad is not None or (or_stepped and stepped.grad is not None)
            for param, stepped in self._pairs
        ]

    def forget(self) -> None:
        """Gradients have been reduced, or cleared."""
        self.moved.clear()
        self._answer = None

    def send(self, raised: Exception | None, used: Sequence[bool]) -> bool:
        """Send it: one message over each data axis, a number and one for each of ``used``.

        Args:
            raised: what this rank raises.
            used: behind a reduction, ``used_here()`` of before it; else nothing.

        Returns:
            Whether to ``read`` the answer at once. On a GPU the host would wait for the whole backward: there the next
            verb that needs the means does, unless this rank raises or did not use all.
        """
        unused = [index for index, is_used in enumerate(used) if not is_used]
        if unused:
            due = [self._is_due(param) for param, _ in self._pairs]
            self._clear([index for index in unused if not due[index]])  # frozen, beside others that were sent
            unused = [index for index in unused if due[index]]
        # The largest number of a rank that raises, from 1: so all of them can name it.
        flag = numbers_on(self._device, [0 if raised is None else number_among(self._comms)[0] + 1, *used])
        for comm in self._comms:
            comm.all_reduce(flag, reduction="max", tag=FLAG).wait()
        self._raised, self._unused, self._answer = raised, unused, read_later(flag)
        return raised is not None or bool(unused) or not flag.is_cuda

    def read(self) -> None:
        """Wait for the flag that was sent, if it was not read yet, and clear what nobody used.

        Raises:
            Exception: a rank raises; on this one its own error, on the others a RuntimeError.
        """
        if self._answer is None:
            return
        read, raised, self._answer, self._raised = self._answer, self._raised, None, None
        number, *used = read()
        if number:
            why = "its own error says why"
            if self._device.type == "cpu":  # on a GPU ranks read the number at different times
                why = share_texts(self._comms, self._device, "" if raised is None else str(raised))[number - 1]
            raise raised or RuntimeError(f"rank {number - 1} {TOLD}: {why}; call engine.zero_grad() on all ranks")
        self._clear([index for index in self._unused if not used[index]])

    def _clear(self, indices: Sequence[int]) -> None:
        """Set to None the ``.grad`` of what is stepped of parameters that no rank has used, told by their places."""
        for index in indices:
            self._pairs[index][1].grad = None
