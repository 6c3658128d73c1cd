"""Every field of ``CompareConfig`` that a user can get wrong is refused by name, with what it may be."""

import re

import pytest
import torch
from torch import nn

from shardlab.engines import STRATEGIES
from shardlab.experiment import CompareConfig, Workload
from shardlab.models import MODELS

ALLOWED = {
    "strategies": STRATEGIES, "model": MODELS, "dtype": ("float32", "float64"),
    "partition": ("elements", "round_robin", "contiguous", "balanced"), "device": ("auto", "cpu", "cuda"),
}  # fmt: skip
WRONG = {
    "strategies": [("ddp", "zero9"), (), ("ddp", "ddp")],
    "dtype": ["float16"],
    "ranks": [0, -1],
    "steps": [0],
    "seq_len": [0],
    "accumulation": [0],
    "learning_rate": [0.0, -1.0, float("nan"), float("inf")],
    "clip": [0.0, float("nan")],
    "bucket_mib": [0.0],
    "timeout_s": [0.0, float("inf")],
    "link": ["fast", "10Gbps", "0Gbps,1us"],
    "batch": [0, -4, 7],
}


def test_a_wrong_value_is_refused_by_its_field():
    wrong = [(field, value) for field, values in WRONG.items() for value in values]
    for field, value in (*wrong, *((field, "x") for field in ALLOWED)):
        with pytest.raises(ValueError, match=field) as refusal:
            CompareConfig(**{"ranks": 2, "text": "grammar", field: value})
        assert len(str(refusal.value).splitlines()) == 1
        assert value != "x" or all(name in str(refusal.value) for name in ALLOWED[field])


def test_a_batch_that_does_not_divide_names_one_that_does():
    with pytest.raises(ValueError, match="a multiple of 6 does, for example 12"):
        CompareConfig(ranks=3, accumulation=2, batch=13, text="grammar")
    assert CompareConfig(ranks=3, accumulation=2, batch=12, text="grammar").global_batch == 12
    assert CompareConfig(ranks=3, accumulation=2, text="grammar").global_batch == 24


def test_an_option_that_no_strategy_takes_is_refused():
    for field, value, takers in (
        ("sharding", "no_shard", "fsdp"),
        ("offload", "all", "fsdp"),
        ("replicate_below", 100, "fsdp"),
        ("partition", "balanced", "zero1, zero2, zero3, fsdp"),
        ("bucket_mib", 2.0, "bucketed, zero1, zero2, zero3"),
    ):
        with pytest.raises(ValueError, match=f"{field}: only for {takers}.*, and the strategies are single, ddp"):
            CompareConfig(("single", "ddp"), text="grammar", **{field: value})
    with pytest.raises(ValueError, match="shard_group: no strategy here has two axes"):
        CompareConfig(("fsdp",), ranks=4, shard_group=2, text="grammar")


def test_a_manifest_has_only_what_its_strategy_took():
    config = CompareConfig(("single", "zero1", "fsdp"), text="grammar", offload="all", partition="balanced")
    assert {"partition", "offload"}.isdisjoint(config.as_dict("single"))
    assert config.as_dict("zero1")["partition"] == "balanced"
    assert "offload" not in config.as_dict("zero1")
    assert config.as_dict("fsdp")["offload"] == "all"


def test_fsdp_options():
    for field, value in (("offload", "disk"), ("replicate_below", -1), ("prefetch", -1), ("precision", "int8")):
        with pytest.raises(ValueError, match=field):
            CompareConfig(("fsdp",), text="grammar", **{field: value})
    with pytest.raises(ValueError, match="every rank has all parameters"):
        CompareConfig(("fsdp",), text="grammar", sharding="no_shard", replicate_below=10)
    for options, words in (
        ({"layout": "dim0"}, "layout='dim0' cuts each into rows"),
        ({"sharding": "no_shard"}, "leave it out"),
    ):
        with pytest.raises(ValueError, match=f"partition: .*{words}"):
            CompareConfig(("zero1", "fsdp"), text="grammar", partition="balanced", **options)
        assert CompareConfig(("fsdp",), text="grammar", **options).partition == "elements"


def test_a_batch_norm_in_16_bits_is_refused_before_ranks_start():
    normed = Workload(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), [torch.ones(4, 4)], lambda m, x: m(x).sum()
    )
    with pytest.raises(ValueError, match=r"^precision: BatchNorm1d '1' .*autocast"):
        CompareConfig(("ddp", "zero2"), workload=normed, precision="bf16")
    assert CompareConfig(("ddp", "zero2"), workload=normed).precision == "full"


def test_torchrun_must_have_started_as_many(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="ranks: 4, but torchrun started 2 processes"):
        CompareConfig(ranks=4, text="grammar")
    assert CompareConfig(ranks=2, text="grammar").ranks == 2


WRONG_TYPES = (
    ("strategies", 3, "strategies: 3 was given; give one or several of"),
    ("model", nn.Linear(2, 3), "own with workload=Workload(model=lambda: Net(), data=..., loss=...)"),
    ("model", nn.Linear, "model: a class was given, where a built-in model's name belongs"),
    ("ranks", "2", "ranks: '2' was given; it must be a whole number"),
    ("ranks", 2.5, "ranks: 2.5 was given; it must be a whole number"),
    ("steps", True, "steps: True was given; it must be a whole number"),
    ("batch", "8", "batch: '8' was given; it must be a whole number or None"),
    ("clip", "1", "clip: '1' was given; it must be a number or None"),
    ("text", None, "text: None was given; it must be a text"),
    ("sequence_parallel", 1, "sequence_parallel: 1 was given; it must be True or False"),
    ("seed", 2**64, "seed: 18446744073709551616 was given; it must be a whole number of 64 bits"),
    ("timeout_s", 1e300, "timeout_s: 1e+300 is not a finite number above 0 and below 1e+09"),
    ("learning_rate", 1e300, "learning_rate: 1e+300 is not a finite number above 0 and below 1e+38"),
    ("steps", 2**64, "steps: 18446744073709551616 was given; it must be a whole number of 64 bits"),
    ("accumulation", 2**64, "accumulation: 18446744073709551616 is given; at most 10000000 are allowed in a step"),
)


def test_a_wrong_type_is_named():
    for field, value, said in WRONG_TYPES:
        with pytest.raises(ValueError, match=re.escape(said)):
            CompareConfig(**{field: value})
    assert CompareConfig(strategies="zero2").strategies == ("zero2",)


def test_torchs_engines_are_refused_where_ranks_share_a_gpu(monkeypatch):
    """Before ranks start, and before the strategies in front of them have run."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    with pytest.raises(ValueError, match="device: torch's own engines send by NCCL, and here ranks share a GPU"):
        CompareConfig(strategies=("single", "torch_ddp"), ranks=2)
    assert CompareConfig(strategies=("single", "torch_ddp"), ranks=1).ranks == 1
    assert CompareConfig(strategies=("single", "ddp"), ranks=2).ranks == 2
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert CompareConfig(strategies=("single", "torch_ddp"), ranks=2).ranks == 2
