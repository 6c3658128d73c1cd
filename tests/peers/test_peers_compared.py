"""Torch's own engines in ``compare``: the same losses, all five tables, and what they cannot do is said early."""

import pytest

from shardlab.experiment import CompareConfig, compare
from shardlab.experiment.told.summary import readable_summary
from shardlab.experiment.told.verdicts import traffic_verdict
from shardlab.vocabulary import SpanKind
from shardlab.why import critical_path, recorded_step

PEERS = ("torch_ddp", "torch_zero1", "torch_fsdp2", "torch_tp")
BLOCKS = 5  # of gpt-1m


@pytest.fixture(scope="module")
def comparison(pools, tmp_path_factory):
    config = CompareConfig(
        strategies=("single", *PEERS), ranks=2, steps=4, model="gpt-1m", text="grammar", seq_len=8, batch=4,
        dtype="float64", clip=1.0, device="cpu",
    )  # fmt: skip
    return compare(config, tmp_path_factory.mktemp("peers") / "out", pool=pools(2))


def test_they_train_the_same_model(comparison):
    assert comparison.losses_equal
    assert (comparison.summary["max_loss_difference"] < 1e-9).all()
    norms = comparison.records.steps.pivot_table(index="step", columns="run", values="grad_norm")
    assert (norms.max(axis=1) - norms.min(axis=1)).max() < 1e-9


def test_what_gloo_moves_beyond_what_is_needed_is_said(comparison):
    summary = comparison.summary.set_index("strategy")
    assert summary.at["torch_fsdp2", "moved_bytes_per_step"] > 1.3 * summary.at["torch_fsdp2", "wire_bytes_per_step"]
    said = traffic_verdict(comparison)
    assert said.startswith("torch_fsdp2 moves 1.3")
    assert "torch_ddp" not in said
    assert {"to send (MB/step)", "moved (MB/step)"} <= set(readable_summary(comparison.summary).columns)
    ours_alone = comparison.summary[comparison.summary["strategy"] == "single"]
    assert "sent (MB/step)" in readable_summary(ours_alone).columns


@pytest.mark.parametrize("strategy", PEERS)
def test_all_five_tables_are_filled(comparison, strategy):
    records = comparison.records
    for table in (records.collectives, records.spans, records.memory, records.shards, records.steps):
        assert set(table.loc[table["run"] == strategy, "rank"]) == {0, 1}
    sent = records.collectives.query("run == @strategy and phase in ['forward', 'backward', 'step']")
    assert (sent["transport"] == "gloo").all()
    assert (sent["end_us"] >= sent["start_us"]).all()
    assert (sent["tag"].str.len() > 0).all()
    spans = records.spans.query("run == @strategy")
    assert {f"blocks.{number}" for number in range(BLOCKS)} <= set(spans["unit"])
    assert {SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER} <= set(spans["kind"])


@pytest.mark.parametrize("strategy", PEERS)
def test_a_rank_waits_for_one_after_the_other_and_its_steps_can_be_explained(comparison, strategy):
    records = comparison.records
    own = records.collectives.query("run == @strategy and step >= 0 and phase != 'metrics'").dropna(
        subset="wait_end_us"
    )
    for _, waits in own.sort_values("wait_start_us").groupby("rank"):
        assert (waits["wait_start_us"].to_numpy()[1:] >= waits["wait_end_us"].to_numpy()[:-1]).all()
    axes = records.manifests[strategy]["mesh"]
    for step in range(4):
        tables = records.collectives, records.spans, records.steps
        path = critical_path(recorded_step(*tables, run=strategy, step=step, axes=axes))
        for _, to_end in path.groupby("end_rank"):
            assert to_end["duration_us"].sum() == pytest.approx(to_end["end_us"].max() - to_end["start_us"].min())


def test_waiting_is_no_compute(comparison):
    """DDP waits in C++, at the end of backward: that time is exposed, not overlapped."""
    rows = comparison.records.collectives.query("run == 'torch_ddp' and phase == 'backward' and step > 1")
    waited = rows[rows["wait_end_us"] > rows["wait_start_us"]]
    spans = comparison.records.spans.query("run == 'torch_ddp' and unit == 'model' and kind == 'backward'")
    assert len(waited)
    for row in waited.itertuples():
        own = spans[(spans["rank"] == row.rank) & (spans["step"] == row.step)]
        inside = (own["start_us"] < row.wait_end_us - 1e-3) & (own["end_us"] > row.wait_start_us + 1e-3)
        assert not inside.any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"strategies": ("torch_ddp",), "link": "1Gbps,10us"}, "link: .* leave out torch_ddp"),
        ({"strategies": ("torch_tp",), "model": "mlp"}, "model: 'torch_tp' cuts a GPT, not 'mlp'"),
        ({"strategies": ("torch_tp",), "ranks": 3}, "ranks: .* the 4 of gpt-1m do not divide among 3 ranks"),
    ],
)
def test_what_they_cannot_do_is_refused_before_a_rank_starts(wrong, message):
    with pytest.raises(ValueError, match=message):
        CompareConfig(**{"text": "grammar", "device": "cpu", "ranks": 2, **wrong})
