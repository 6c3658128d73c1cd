"""Torch's own modules whose forward reads the weights of the layers inside instead of calling them."""

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.tensor_parallel import Column, Row, parallelize_module

HIDDEN, HEADS = 8, 2


def encoder():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 16, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2).double().eval()


def batch():
    return torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def in_ranks(rank):
    """The output of what is divided; a nested tensor, which torch's fast path makes, is refused."""
    plan, padding = (
        {"layers.*.linear1": Column(), "layers.*.linear2": Row()},
        torch.arange(5) >= torch.tensor([[5], [3]]),
    )
    with Mesh({"tensor": 2}) as mesh:
        model = parallelize_module(encoder(), plan, mesh["tensor"])
        with torch.no_grad():
            with pytest.raises(
                ValueError, match=r"layers\.0\.linear1: the input is a nested tensor.*enable_nested_tens"
            ):
                model(batch(), src_key_padding_mask=padding)
            return model(batch())


def test_torchs_fast_path_does_not_read_slices_as_whole_weights(pools):
    with torch.no_grad():
        expected = encoder()(batch())
    for y in pools(2).run(in_ranks):
        torch.testing.assert_close(y, expected, atol=1e-10, rtol=0)
