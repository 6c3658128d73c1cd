"""Variants take turns and train the same model; a sweep of bucket sizes counts its messages; what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest

from shardlab.course import small_records
from shardlab.course.small_records import link_for, run_interleaved
from shardlab.experiment import CompareConfig
from shardlab.models import build_model
from shardlab.vocabulary import FLAG
from tests.conftest import Pools

BASE = CompareConfig(
    strategies=("bucketed",), ranks=2, steps=3, model="gpt-1m", text="grammar", seq_len=8, batch=4, device="cpu",
    dtype="float64", bucket_mib=64,
)  # fmt: skip
PARAMETER_BYTES = 8 * sum(param.numel() for param in build_model("gpt-1m", 8).parameters())


def test_each_step_belongs_to_all_variants_in_turn_and_their_losses_are_equal(pools: Pools) -> None:
    variants = {
        "naive": replace(BASE, strategies=("ddp",), bucket_mib=1.0),
        "flat": BASE,
        "small": replace(BASE, bucket_mib=0.5),
    }
    records = run_interleaved(variants, pools(2))
    losses = records.steps.pivot(index=["step", "rank"], columns="run", values="loss")
    assert losses.shape == (6, 3)
    assert losses.sub(losses["naive"], axis=0).abs().to_numpy().max() < 1e-10
    on_rank_0 = records.collectives[records.collectives["rank"] == 0]
    order = on_rank_0[on_rank_0["step"] >= 0].groupby(["step", "run"])["issue_us"].min().sort_values().index.tolist()
    assert order == [(step, run) for step in range(3) for run in variants]
    # Each records its own collectives alone.
    gradients = records.collectives.query("phase == 'backward' and run == 'flat'")
    gradients = gradients[gradients["tag"] != FLAG]
    assert set(gradients.groupby(["rank", "step"]).size()) == {1}
    assert set(gradients["bytes"]) == {PARAMETER_BYTES}
    assert list(records.manifests) == list(variants)


def test_each_variant_has_the_mesh_of_its_strategy(pools: Pools) -> None:
    variants = {
        "divided": replace(BASE, tp=2),
        "hybrid": replace(BASE, strategies=("fsdp",), sharding="hybrid_shard", shard_group=1, bucket_mib=1.0),
        "flat": BASE,
    }
    losses = run_interleaved(variants, pools(2)).steps.pivot(index=["step", "rank"], columns="run", values="loss")
    assert losses.sub(losses["flat"], axis=0).abs().to_numpy().max() < 1e-10


def test_a_link_is_as_slow_as_the_compute(monkeypatch) -> None:
    """Two ranks that compute for 90 and 110 ms, in two pieces, and send 1 MB."""
    times = {(0, 0): 900e3, (0, 1): 90e3, (0, 2): 90e3, (1, 1): 110e3, (1, 2): 110e3}
    spans = [
        {"rank": rank, "step": step, "unit": unit, "kind": "backward", "start_us": start, "end_us": start + us / 2}
        for (rank, step), us in times.items()
        for unit in ("model", "block")
        for start in (0, us)
    ]
    records = SimpleNamespace(spans=pd.DataFrame(spans), steps=pd.DataFrame({"wire_bytes": [1e6]}))
    monkeypatch.setattr(small_records, "run_interleaved", lambda variants, pool: records)
    link = link_for(BASE, None, sends_for=2, latency=0.01)
    assert (link.latency_us, link.bandwidth_gbps) == (1000, 0.04)
    assert link.transfer_us(1e6) == pytest.approx(2 * 100e3)


def test_a_link_that_was_found_can_be_emulated(pools: Pools) -> None:
    link = link_for(replace(BASE, link="1Gbps,1ms"), pools(2))
    run_interleaved({"flat": replace(BASE, steps=1, link=str(link))}, pools(2))


def test_what_cannot_take_turns_is_refused(pools: Pools) -> None:
    for variants, words in (
        ({}, "give one or more"),
        ({"a": replace(BASE, save_every=2)}, "'a' has save_every=2, but here are no checkpoints; leave it out"),
        ({"a": replace(BASE, strategies=("single",), bucket_mib=1.0)}, "'a' needs one strategy"),
        ({"a": replace(BASE, strategies=("ddp", "bucketed"))}, "'a' needs one strategy"),
        ({"a": replace(BASE, ranks=1)}, r"variants\['a'\]\.ranks is 1"),
        ({"a": BASE, "b": replace(BASE, steps=1)}, "all with the same number of steps"),
    ):
        with pytest.raises(ValueError, match=words):
            run_interleaved(variants, pools(2))
