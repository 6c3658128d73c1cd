"""Replicated parameters with a sharded optimizer: which piece each rank steps, and how the pieces are gathered again.

Each bucket's parameters are moved into one flat buffer (the module's tensors become views of it), so that the piece a
rank steps is a slice of that buffer, and one all-gather per bucket puts all pieces back in place without a copy.

Users and optimizers also change values without this class's knowledge, in three ways, with a word for each: what is
*written* was changed in place, a parameter is *replaced* by ``param.data = ...``, and a piece is *assigned* by
``piece.data = ...``, as some optimizers do. Where something was replaced or assigned, the memory is *renewed*: values
move to a new buffer, or to a new chunk of master weights.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shardlab.comm.communicator import Communicator
from shardlab.comm.events import Pending, wait_all
from shardlab.engines.buckets import Bucket
from shardlab.engines.holdings import Holding
from shardlab.engines.hooks import in_plain_mode
from shardlab.engines.placeholder import check_replaced
from shardlab.engines.step_tensors import EmptyPieces, StepTensors
from shardlab.partition.chunks import Piece
from shardlab.vocabulary import Role


class FlatParameters:
    """The pieces of every parameter over the ranks of one communicator.

    Args:
        params: parameters by name, in the module's order.
        buckets: their layout, with one chunk per rank.
        comm: the ranks.
    """

    _gathered_versions: list[int]  # by bucket, of the pieces when all were last gathered
    _is_step_gathered = False

    def __init__(self, params: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], comm: Communicator) -> None:
        self.params = dict(params)
        self.buckets = buckets
        self.comm = comm
        self.flat = [self._flatten(bucket) for bucket in buckets]
        self.pieces: dict[str, tuple[Bucket, Piece]] = {
            name: (bucket, piece) for bucket in buckets for name, piece in bucket.own.items()
        }
        pieces = {name: self._piece_tensor(name) for name in self.params}
        for bucket in buckets:
            bucket.pieces = {name: pieces[name] for name in bucket.names}
        self._tensors = StepTensors(pieces, are_parts=comm.num_ranks > 1)
        self._empty = [self._empty_pieces(bucket) for bucket in buckets]
        self._note_gathered()

    @property
    def tensors(self) -> StepTensors:
        """What this rank steps: slices of the flat buffers, empty for parameters it holds nothing of."""
        return self._tensors

    def slice_of(self, name: str, full: Tensor) -> Tensor:
        """This rank's piece of a tensor that has the parameter's shape, in the shape of ``tensors``."""
        _, piece = self.pieces[name]
        return full if piece.whole else full.reshape(-1)[piece.param_start : piece.param_stop]

    def gather(self, is_due: Callable[[nn.Parameter], bool]) -> None:
        """Put the pieces of all ranks back into the parameters; blocking.

        Args:
            is_due: whether any rank may have stepped a parameter. A bucket without such a parameter is sent only if
                its pieces were written to, which all ranks must do alike.
        """
        due = [bucket for bucket in self.buckets if any(map(is_due, bucket.params)) or self._is_written(bucket)]
        # All are issued, in the order of the buckets on every rank, before the first is waited for.
        pending: list[Pending] = []
        for bucket in due:
            flat, tag = self.flat[bucket.index], f"parameters of bucket {bucket.index}"
            pending.append(self.comm.all_gather(flat, self._master_chunk(bucket), bounds=bucket.layout.bounds, tag=tag))
        wait_all(pending)
        # The parameters were written through the buffers, unseen by autograd. With a new version it refuses a backward
        # that saved the old values; without one it would compute with the new ones.
        for bucket in due:
            increment_version(bucket.params)
        self._note_gathered()

    def begin_step(self) -> None:
        """A step begins, which ``gather_step()`` is to gather."""
        self._is_step_gathered = False

    def gather_step(self, is_due: Callable[[nn.Parameter], bool]) -> None:
        """Gather what the optimizer has stepped; called again for the same step, only if anything was written since.

        Args:
            is_due: as for ``gather``.
        """
        if not self._is_step_gathered:
            self.gather(is_due)
        elif self.are_written:
            # Every bucket: a rank that has nothing of one cannot see that others have written there.
            self.gather(lambda _: True)
        self._is_step_gathered = True

    @property
    def are_written(self) -> bool:
        """Whether this rank's pieces were written to, or assigned, since all pieces were gathered."""
        return any(map(self._is_written, self.buckets))

    def check_gathered(self) -> None:
        """Refuse what would read a model of which one part is old and another new.

        Raises:
            RuntimeError: this rank's pieces were written to since all pieces were gathered.
        """
        if self.are_written:
            raise RuntimeError(
                "engine.step_tensors(): this rank's pieces were written to, by hand or by a step that raised, and "
                "nobody has gathered them since; call engine.step() on all ranks, which does (after engine.zero_grad() "
                "it steps nothing); write before engine.step(), or into the module's parameters, inside 'with "
                "engine.full_params(keep_changes=True):'"
            )

    @contextlib.contextmanager
    def loading_all(self) -> Iterator[None]:
        """Inside, every parameter gets another value, so that what was written or put in its place counts no more.

        After an error it counts as before.
        """
        versions, data = self._gathered_versions, {param: param.data for param in self.params.values()}
        self._note_gathered()
        self._show()
        try:
            yield
        except BaseException:
            self._gathered_versions = versions
            for param, values in data.items():
                param.data = values
            raise

    def _is_written(self, bucket: Bucket) -> bool:
        if self._is_assigned(bucket):
            return True
        # One process alone writes into the parameters themselves, unless these are rounded copies.
        is_in_place = self.comm.num_ranks == 1 and self._master_chunk(bucket) is None
        return not is_in_place and self._sum_of_versions(bucket) != self._gathered_versions[bucket.index]

    def _note_gathered(self) -> None:
        self._gathered_versions = [self._sum_of_versions(bucket) for bucket in self.buckets]

    def _sum_of_versions(self, bucket: Bucket) -> int:
        return sum(self.tensors.by_name(name)._version for name in bucket.names)

    def take_replaced(self) -> None:
        """Take over what the user has put in the place of a parameter's data, as ``module.to()`` does too.

        Raises:
            RuntimeError: it has another shape, dtype or device, or the parameter is a rounded copy.
        """
        replaced = [(bucket, *found) for bucket in self.buckets for found in self._replaced(bucket)]
        for bucket, place, view in replaced:
            self._check_replaceable(bucket, place)
            check_replaced(bucket.params[place], view, bucket.names[place])
        for bucket in dict.fromkeys(bucket for bucket, _, _ in replaced):
            self._renew(bucket)

    def _show(self) -> None:
        """Give every parameter its place in the buffers again, whatever the user has put there by ``.data =``."""
        for bucket in self.buckets:
            if self._replaced(bucket):
                bucket.show(self._shown(bucket.index))

    def take_assigned(self) -> None:
        """Take over what an optimizer has put in the place of a piece's data."""
        for bucket in filter(self._is_assigned, self.buckets):
            values = {name: self.tensors.by_name(name).data for name in bucket.own}
            self._renew_stepped(bucket)
            for name, value in values.items():
                self.tensors.by_name(name).detach().copy_(value)
            # On a rank without values too: all ranks must count the bucket as written.
            increment_version([self.tensors.by_name(name) for name in bucket.names])

    def _is_assigned(self, bucket: Bucket) -> bool:
        """Whether a piece of this rank has other data than its place in the buffer, or its empty one."""
        if self._empty[bucket.index].are_assigned:
            return True
        buffer, first = self._stepped(bucket)
        itemsize = buffer.element_size()
        start = buffer.data_ptr() - first * itemsize
        return any(
            self.tensors.by_name(name).data_ptr() != start + piece.flat_start * itemsize
            for name, piece in bucket.own.items()
        )

    def _renew_stepped(self, bucket: Bucket) -> None:
        """Move the pieces of a bucket to new memory: the optimizer may have kept the old, as its previous weights."""
        self._renew(bucket)

    @in_plain_mode
    def _renew(self, bucket: Bucket) -> None:
        """Move a bucket to a new buffer, from wherever its parameters' data is now.

        The optimizer steps a slice of the buffer, and the next gather would pass the user's tensors by. The old buffer
        is left as it is: the user may have swapped the data of two parameters, or keep it to put it back later.
        Whatever else refers to the old buffer, such as another parameter's ``.data``, follows the parameter no longer.
        """
        flat = self._shown(bucket.index).clone()
        for view, param in zip(bucket.slots_of(flat), bucket.params, strict=True):
            view.copy_(param.detach())
        bucket.show(flat)
        self._swap_shown(bucket, flat)

    def _swap_shown(self, bucket: Bucket, flat: Tensor) -> None:
        self.flat[bucket.index] = flat
        self._point_pieces(bucket)

    def _point_pieces(self, bucket: Bucket) -> None:
        for name in bucket.names:
            # By ``.data``: the optimizer finds its state by these very tensor objects.
            self.tensors.by_name(name).data = self._piece_tensor(name).data
        self._empty[bucket.index] = self._empty_pieces(bucket)

    def _empty_pieces(self, bucket: Bucket) -> EmptyPieces:
        return EmptyPieces({name: self.tensors.by_name(name) for name in bucket.names})

    def _replaced(self, bucket: Bucket) -> list[tuple[int, Tensor]]:
        """Slots whose parameters have other data than the buffer's, and their views of it."""
        shown = self._shown(bucket.index)
        start, itemsize = shown.data_ptr(), shown.element_size()
        # Views are made only where something differs: there may be thousands of parameters, in each step.
        return [
            (place, bucket.slots_of(shown)[place])
            for place, (slot, param) in enumerate(zip(bucket.layout.slots, bucket.params, strict=True))
            if param.shape != bucket.shapes[place]
            or not param.is_contiguous()
            or (slot.stop > slot.start and param.data_ptr() != start + slot.start * itemsize)
        ]

    def _check_replaceable(self, bucket: Bucket, place: int) -> None:
        """Refuse data in the place of a rounded copy, where there are any."""

    def _shown(self, index: int) -> Tensor:
        """The buffer that the parameters of a bucket are views of now."""
        return self.flat[index]

    def holdings(self) -> Iterator[Holding]:
        """The whole parameters, and the flat buffers with their padding."""
        yield from (Holding(Role.PARAMETER, flat) for flat in self.flat)
        for name, param in self.params.items():
            yield Holding(Role.PARAMETER, param, name, (0, param.numel()))

    def _piece_tensor(self, name: str) -> Tensor:
        param = self.params[name]
        if name not in self.pieces:
            # With the parameter's number of dims (at least one), since some optimizers accept only matrices.
            return param.detach().new_empty((0, *param.shape[1:])).requires_grad_(param.requires_grad)
        bucket, piece = self.pieces[name]
        chunk, offset = self._stepped(bucket)
        tensor = chunk[piece.flat_start - offset : piece.flat_stop - offset]
        if piece.whole:
            tensor = tensor.view(param.shape)
        # Detached: a view would keep the memory it was cut from, also when its data is elsewhere. Of one buffer all
        # pieces share a version still, and it is the sum over a bucket that is compared.
        return tensor.detach().requires_grad_(param.requires_grad)

    def _stepped(self, bucket: Bucket) -> tuple[Tensor, int]:
        """What the pieces are slices of, and the place in the layout at which it begins."""
        chunk = self._master_chunk(bucket)
        # Without masters the piece is a view of the parameter, so that a step needs no copy back.
        return (self.flat[bucket.index], 0) if chunk is None else (chunk, bucket.own_chunk.start)

    def _flatten(self, bucket: Bucket) -> Tensor:
        """Move a bucket's parameters into one buffer."""
        flat = bucket.new_buffer()
        for view, param in zip(bucket.slots_of(flat), bucket.params, strict=True):
            view.copy_(param.detach())
        # This drops the last references to the parameters' own storages, so no second copy stays.
        bucket.show(flat)
        return flat

    def _master_chunk(self, bucket: Bucket) -> Tensor | None:  # noqa: ARG002
        """The master weights that this rank steps, [chunk]; None if it steps its chunk of the flat buffer itself."""
        return None
