"""Linear layers in slices: by output features (column) and by input features (row).

::

    column parallel                            row parallel
    y_i = x A_i^T + b_i                        y = sum over i of x_i A_i^T, + b
    A = [A_0; A_1], rows of the weight         A = [A_0 | A_1], columns of the weight

    x whole -> y in parts                      x in parts -> y whole
    forward nothing, backward 1 all-reduce     forward 1 all-reduce, backward nothing

A column layer followed by a row layer, with anything between them that treats each feature (head) by itself, costs one
all-reduce forward and one backward: the MLP, and attention whose heads are divided. Sliced: weights, the column's bias.
Replicated: the row's bias, which is added once, after the sum, so that its gradient is whole on every rank.

With ``sequence_dim`` the activation outside is in parts along the sequence: the column's border becomes an all-gather
(backward a reduce-scatter), the row's a reduce-scatter (backward an all-gather), and the row's bias is added to a part
of the tokens, so its gradient is summed over the ranks. "Column" and "row" are those of A^T, as in the source.

Legend: N ranks, x of any rank with features last. Source: Shoeybi et al., arXiv 1909.08053, section 3.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardlab.comm import Communicator, broadcast_coalesced
from shardlab.comm.autograd_collectives import gather, reduce, reduce_scatter, scatter
from shardlab.comm.slices import cut
from shardlab.partition.slices import TensorSlice, even_slice, parts_slice, require_divisible
from shardlab.tensor_parallel.sequence import sum_gradient
from shardlab.tensor_parallel.shared_input import SharedInput, linear_of_gathered
from shardlab.tensor_parallel.sources import InputCheck


class ColumnParallelLinear(nn.Module):
    """This rank's output features of a full linear layer.

    In evaluation ``nn.TransformerEncoderLayer`` calls no layer and computes with their weights, as if these were whole;
    but not if one of its layers has a hook, as this one has.

    Args:
        linear: the full layer; its parameters become those of the axis' first rank, of which this layer keeps a slice.
        comm: the tensor axis.
        gather_output: return all output features, on every rank, by an all-gather.
        parts: sizes of projections that the layer makes at once (query, key and value), each of which is divided.
        sequence_dim: dim along which the input is in parts; None where every rank has all of it.
        regather: with ``sequence_dim``: keep only this rank's part of the input for backward, and gather it again
            there. Saves (N - 1)/N of the input's bytes for one more all-gather.
        name: in tags and errors.

    Raises:
        ValueError: the ranks do not divide the output features, or options that exclude each other.
    """

    def __init__(
        self, linear: nn.Linear, comm: Communicator, *, gather_output: bool = False, parts: Sequence[int] | None = None,
        sequence_dim: int | None = None, regather: bool = False, name: str = "column",
    ) -> None:  # fmt: skip
        super().__init__()
        # Before anything is sent: sizes are equal on all ranks, so all refuse alike and none waits for another.
        check_column(name, linear.out_features, comm.num_ranks, gather_output, parts, sequence_dim, regather)
        equalise(linear, comm, name)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.comm, self.gather_output, self.regather, self.name = comm, gather_output, regather, name
        self.shared_input = SharedInput(comm, sequence_dim, name)  # of other columns too, that read the same tensor
        shape, sizes = tuple(linear.weight.shape), parts or [linear.out_features]
        rows = parts_slice(shape, 0, sizes, comm.rank, comm.num_ranks)
        self.tensor_slices: dict[str, TensorSlice] = {"weight": rows}
        self.weight = sliced(linear.weight, rows)
        self.bias: nn.Parameter | None = None
        if linear.bias is not None:
            self.tensor_slices["bias"] = parts_slice(shape[:1], 0, sizes, comm.rank, comm.num_ranks)
            self.bias = sliced(linear.bias, self.tensor_slices["bias"])
        self.register_forward_pre_hook(InputCheck(comm, name, in_parts=sequence_dim is not None), with_kwargs=True)

    def forward(self, input: Tensor) -> Tensor:
        """Output features (..., out / N), all of them with ``gather_output``, for an input (..., in)."""
        require_width(self.name, input, self.in_features, self.comm.num_ranks)
        crossed = self.shared_input(input)
        if self.regather:
            y = linear_of_gathered(crossed, input, self.weight, self.bias, self.shared_input)
        else:
            y = functional.linear(crossed, self.weight, self.bias)
        return gather(y, self.comm, -1, tag=f"output of {self.name}") if self.gather_output else y

    def extra_repr(self) -> str:
        """Full sizes and the share."""
        return f"{self.in_features}, {self.out_features} / {self.comm.num_ranks}, gather_output={self.gather_output}"


class RowParallelLinear(nn.Module):
    """This rank's input features of a full linear layer.

    Args:
        linear: the full layer; its parameters become those of the axis' first rank, of which this layer keeps a slice
            of the weight and all of the bias.
        comm: the tensor axis.
        input_is_parallel: the input has this rank's features only, as a column-parallel layer leaves them; False takes
            an input with all features and cuts it.
        sequence_dim: dim along which the output is in parts; None where every rank gets all of it.
        name: in tags and errors.

    Raises:
        ValueError: the ranks do not divide the input features.
    """

    def __init__(
        self, linear: nn.Linear, comm: Communicator, *, input_is_parallel: bool = True, sequence_dim: int | None = None,
        name: str = "row",
    ) -> None:  # fmt: skip
        super().__init__()
        require_divisible(f"{name}: in_features", linear.in_features, comm.num_ranks)
        equalise(linear, comm, name)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.comm, self.name = comm, name
        self.input_is_parallel, self.sequence_dim = input_is_parallel, sequence_dim
        columns = even_slice(tuple(linear.weight.shape), 1, comm.rank, comm.num_ranks)
        self.tensor_slices: dict[str, TensorSlice] = {"weight": columns}
        self.weight = sliced(linear.weight, columns)
        self.bias: nn.Parameter | None = linear.bias
        if self.bias is not None and sequence_dim is not None:
            sum_gradient(self.bias, comm, f"{name}.bias")
        self.register_forward_pre_hook(InputCheck(comm, name, in_parts=input_is_parallel), with_kwargs=True)

    def forward(self, input: Tensor) -> Tensor:
        """Output (..., out), or its part of the sequence, for an input (..., in / N), or (..., in) if it is whole."""
        if self.bias is not None and self.bias.requires_grad and self.sequence_dim is not None:
            # Again, as the bias may be another one than before: the sum belongs to the parameter object.
            sum_gradient(self.bias, self.comm, f"{self.name}.bias")
        num_ranks = self.comm.num_ranks
        width = self.in_features // num_ranks if self.input_is_parallel else self.in_features
        require_width(self.name, input, width, num_ranks)
        x = input if self.input_is_parallel else scatter(input, self.comm, -1, tag=f"input of {self.name}")
        term, tag = functional.linear(x, self.weight), f"output of {self.name}"
        if self.sequence_dim is None:
            y = reduce(term, self.comm, tag=tag)
        else:
            y = reduce_scatter(term, self.comm, self.sequence_dim, tag=tag)
        if self.bias is None:
            return y
        # As autocast does to the bias inside of a linear layer, which it does not do to a sum.
        autocast = torch.is_autocast_enabled(y.device.type)
        return y + (self.bias.to(y.dtype) if autocast else self.bias)

    def extra_repr(self) -> str:
        """Full sizes and the share."""
        share = f"{self.in_features} / {self.comm.num_ranks}, {self.out_features}"
        return f"{share}, input_is_parallel={self.input_is_parallel}"


def check_column(
    name: str, out_features: int, num_ranks: int, gather_output: bool, parts: Sequence[int] | None,
    sequence_dim: int | None, regather: bool,
) -> None:  # fmt: skip
    """Refuse what a column-parallel layer cannot do.

    Raises:
        ValueError: see ``ColumnParallelLinear``.
    """
    for size in parts or [out_features]:
        require_divisible(f"{name}: {'a part of ' if parts else ''}out_features", size, num_ranks)
    if parts is not None and sum(parts) != out_features:
        raise ValueError(
            f"{name}: parts {tuple(parts)} add up to {sum(parts)}; they must add up to out_features, {out_features}"
        )
    if parts is not None and gather_output:
        raise ValueError(f"{name}: gather_output would mix the parts; use it without parts")
    if regather and sequence_dim is None:
        raise ValueError(f"{name}: regather is for an input in parts; set sequence_dim, or leave regather out")


def equalise(module: nn.Module, comm: Communicator, name: str) -> None:
    """Make a layer's parameters those of the axis' first rank, in place; blocking.

    Raises:
        ValueError: a parameter has no memory.
    """
    if meta := [key for key, param in module.named_parameters() if param.is_meta]:
        raise ValueError(f"{name}: {meta[0]!r} is on the meta device; parallelize_module makes such layers itself")
    # Before it is cut: ranks may have drawn different weights, and slices of different layers make no layer.
    broadcast_coalesced(comm, module.parameters(), tag=f"parameters of {name} from rank 0")


def sliced(param: Tensor, slice_: TensorSlice) -> nn.Parameter:
    """A new parameter that holds this rank's slice only."""
    return nn.Parameter(cut(param, slice_), requires_grad=param.requires_grad)


def require_width(layer: str, x: Tensor, width: int, num_ranks: int) -> None:
    """Refuse an input whose last dim is not ``width``; the error says if it is a part, or the whole, of what is needed.

    Raises:
        ValueError: it is not, or the input is a nested tensor.
    """
    if x.is_nested:
        raise ValueError(
            f"{layer}: the input is a nested tensor, which has no sizes to divide; pad it (nn.TransformerEncoder makes "
            "one of a padding mask in evaluation: build it with enable_nested_tensor=False)"
        )
    found = x.shape[-1] if x.dim() else 0
    if found == width:
        return
    hint = ""
    if found * num_ranks == width:
        hint = f": this is one of {num_ranks} parts; use gather_output=True in the layer before"
    elif found == width * num_ranks:
        hint = ": this is the whole of it; use input_is_parallel=False"
    raise ValueError(f"{layer}: the input has {found} input features; {width} are needed{hint}")
