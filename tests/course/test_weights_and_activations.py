"""The table behind the picture of slices, and what a forward keeps for backward."""

import torch
from torch import nn

from shardlab.course.divided_weights import weights_table
from shardlab.models import GPT, GPTConfig
from shardlab.partition.slices import even_slice, parts_slice

CONFIG = GPTConfig(vocab_size=12, seq_len=8, num_layers=1, num_heads=4, hidden=8)


def held(table, name, rank):
    rows = table[(table["parameter"] == name) & (table["rank"] == rank)]
    return [
        (tuple(row[["input_start", "input_stop"]]), tuple(row[["output_start", "output_stop"]]))
        for _, row in rows.iterrows()
    ]


def test_slices_as_they_multiply():
    with torch.device("meta"):
        model = GPT(CONFIG)
    slices = {
        "token_embedding.weight": even_slice((12, 8), 0, 0, 2),
        "blocks.0.mlp.fc1.weight": even_slice((32, 8), 0, 0, 2),
        "blocks.0.mlp.fc1.bias": even_slice((32,), 0, 0, 2),
        "blocks.0.mlp.fc2.weight": even_slice((8, 32), 1, 0, 2),
    }
    table = weights_table(model, slices)
    assert held(table, "token_embedding.weight", 1) == [((6, 12), (0, 8))]
    assert held(table, "blocks.0.mlp.fc1.weight", 1) == [((0, 8), (16, 32))]
    assert held(table, "blocks.0.mlp.fc1.bias", 1) == [((0, 1), (16, 32))]
    assert held(table, "blocks.0.mlp.fc2.weight", 1) == [((16, 32), (0, 8))]
    assert held(table, "blocks.0.mlp.fc2.bias", -1) == [((0, 1), (0, 8))]
    assert list(dict.fromkeys(table["parameter"])) == [name for name, _ in model.named_parameters()]
    sizes = (table["input_stop"] - table["input_start"]) * (table["output_stop"] - table["output_start"])
    assert sizes.sum() == sum(param.numel() for param in model.parameters())


def test_a_projection_of_several_parts_has_several_ranges_and_a_layer_alone_one():
    qkv = {"qkv.weight": parts_slice((12, 2), 0, [4] * 3, 0, 2)}
    table = weights_table(nn.ModuleDict({"qkv": nn.Linear(2, 12)}), qkv)
    assert held(table, "qkv.weight", 1) == [((0, 2), (2, 4)), ((0, 2), (6, 8)), ((0, 2), (10, 12))]
    table = weights_table(nn.Linear(2, 12), {"weight": even_slice((12, 2), 0, 0, 3)})
    assert held(table, "weight", 2) == [((0, 2), (8, 12))]
    assert held(table, "bias", -1) == [((0, 1), (0, 12))]
