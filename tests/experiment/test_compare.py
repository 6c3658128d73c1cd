"""``compare`` end to end: equal losses, bytes that are the formulas', and what it leaves on disk."""

import json
import math
import os
import re
import sys
from dataclasses import replace
from html import escape
from pathlib import Path

import pandas as pd
import pytest
import torch

from shardlab.analysis.rows import timed_steps
from shardlab.course import NaN, faulty
from shardlab.engines import Bucketed
from shardlab.experiment import CompareConfig, Workload, claim, compare, load_comparison, prepare, write_report
from shardlab.experiment.directory import reserve
from shardlab.experiment.planned.forecast import seconds_in
from shardlab.experiment.run.manifest import _disagreement
from shardlab.experiment.run.rank_run import RankReport
from shardlab.experiment.told.answer import answer
from shardlab.experiment.told.losses import dead_verdict, verdict
from shardlab.experiment.told.report import _differs, _lead, peak_table
from shardlab.experiment.told.report import _parts as step_parts_of
from shardlab.experiment.told.saved_runs import load_saved
from shardlab.why.judged_steps import Recorded

from shardlab.experiment.told.verdicts import (  # isort: skip
    agreement_verdict, busy_verdict, unfinished_verdict, unseen_verdict, verdicts,
)  # fmt: skip
from shardlab.experiment.told.summary import summarise
from shardlab.launch import RankError, RankPool
from shardlab.models import build_model
from shardlab.testing.agreement_check import Did
from shardlab.vocabulary import Collective, Phase, Role

KEYS = {
    "strategy", "ranks", "steps", "loss_first", "loss_last", "max_loss_difference", "step_ms", "exposed_comm_ms",
    "overlap", "peak_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "wire_bytes_per_step",
}  # fmt: skip
STRATEGIES = ("single", "ddp", "bucketed", "zero1")
# Three buckets, none of a size that three ranks divide.
BUCKET_MIB = 0.75


IN_32_BITS = ("float32", 2, 1)
# Of what is made of records, whoever has trained.
once = pytest.mark.parametrize("comparison", [IN_32_BITS], ids=["float32"], indirect=True)


@pytest.fixture(scope="module", params=[IN_32_BITS, ("float64", 3, 2)], ids=["float32", "float64"])
def comparison(request, pools, tmp_path_factory):
    dtype, ranks, accumulation = request.param
    text = tmp_path_factory.mktemp("text") / "README.md"
    text.write_text(Path(__file__).read_text())
    config = CompareConfig(
        strategies=STRATEGIES, ranks=ranks, steps=4, model="mlp", text=str(text), seq_len=16, dtype=dtype,
        accumulation=accumulation, clip=1.0, bucket_mib=BUCKET_MIB, device="cpu",
    )  # fmt: skip
    progress = []
    directory = tmp_path_factory.mktemp("run") / "out"
    result = compare(config, directory, pool=pools(ranks), on_progress=progress.append)
    return config, result, progress


def test_losses_are_equal(comparison):
    config, result, _ = comparison
    assert result.losses_equal
    tolerance = 1e-9 if config.dtype == "float64" else 1e-5
    assert (result.summary["max_loss_difference"] <= tolerance).all()
    assert (result.summary["loss_last"] < result.summary["loss_first"]).all()
    norms = result.records.steps.pivot_table(index="step", columns="run", values="grad_norm")
    assert (norms.max(axis=1) - norms.min(axis=1)).max() <= 10 * tolerance


def test_summary_has_the_keys_of_the_issue_and_is_read_again(comparison):
    config, result, progress = comparison
    rows = json.loads((result.directory / "summary.json").read_text())
    assert [row["strategy"] for row in rows] == list(STRATEGIES)
    for row in rows:
        assert row.keys() >= KEYS
        assert row["steps"] == config.steps
        assert row["ranks"] == (1 if row["strategy"] == "single" else config.ranks)
        assert row["step_ms"] > 0
        assert row["recorder_share"] > 0
        assert row["peak_bytes"] > row["parameter_bytes"] + row["gradient_bytes"] + row["optimizer_bytes"]
    assert (rows[0]["overlap"], rows[0]["exposed_comm_ms"]) == (None, None)  # no communication: no number
    assert all(0 <= row["overlap"] <= 1 for row in rows[1:])
    steps = [(strategy, step) for strategy in STRATEGIES for step in range(config.steps)]
    assert [(done.strategy, done.step) for done in progress] == steps
    again = load_comparison(result.directory)
    assert again.summary["loss_last"].tolist() == result.summary["loss_last"].tolist()
    assert len(again.records.collectives) == len(result.records.collectives)
    assert again.losses_equal


def row_of(result, strategy):
    return result.summary.set_index("strategy").loc[strategy]


def whole_bytes(config):
    """P, in bytes."""
    numel = sum(param.numel() for param in build_model(config.model, config.seq_len).parameters())
    return {"float32": 4, "float64": 8}[config.dtype] * numel


def test_bytes_are_those_of_the_formulas(comparison):
    config, result, _ = comparison
    whole = whole_bytes(config)
    for strategy in ("single", "ddp", "bucketed"):
        row = row_of(result, strategy)
        held = (row["parameter_bytes"], row["gradient_bytes"], row["optimizer_bytes"])
        assert held == (whole, whole, 2 * whole), strategy
        assert row["padding_bytes"] == 0
    row = row_of(result, "zero1")  # shards the state and nothing else
    padding = row["padding_bytes"]
    assert (row["parameter_bytes"], row["gradient_bytes"]) == (whole + padding, whole + padding)
    assert 0 <= padding < config.ranks * 8 * 10  # less than a chunk's remainder in each of a few buckets
    rest = result.records.memory.query("where == 'rest' and run == 'zero1' and role == @Role.OPTIMIZER_STATE")
    last = rest[rest["step"] == rest["step"].max()]
    assert len(last) == config.ranks
    assert last["bytes"].sum() == 2 * whole  # nothing is held twice, padding has no state
    assert row["optimizer_bytes"] == last["bytes"].max() == pytest.approx(2 * whole / config.ranks, rel=1e-4)


def test_wire_bytes_are_2p_times_n_minus_1_over_n(comparison):
    config, result, _ = comparison
    n, whole = config.ranks, whole_bytes(config)
    assert row_of(result, "single")["wire_bytes_per_step"] == 0
    for strategy in ("ddp", "bucketed", "zero1"):
        steps = result.records.steps[result.records.steps["run"] == strategy]
        padding = row_of(result, strategy)["padding_bytes"]
        traffic = result.records.collectives.query("run == @strategy")
        clip = traffic[traffic["phase"] == Phase.CLIP].groupby(["rank", "step"])["wire_bytes"].sum()
        norm = 0 if clip.empty else float(clip.iloc[0])  # zero1 sums the norm over the ranks: one number
        assert norm <= 2 * 8
        # Two all-reduces: whether a rank refuses, and after backward also which parameters are used; 4 bytes a number.
        flags = 2 * 4 * (2 + len(list(config.on_meta.parameters()))) * (n - 1) / n
        expected = 2 * (whole + padding) * (n - 1) / n + norm + flags
        assert steps["wire_bytes"].tolist() == pytest.approx([expected] * len(steps), rel=1e-12), strategy


def test_table_and_causes_know_one_step(comparison):
    """And ``what-if``, whose step as recorded is the table's."""
    _, result, _ = comparison
    records = result.records
    for strategy in STRATEGIES[1:]:
        own = [table[table["run"] == strategy] for table in (records.collectives, records.spans, records.steps)]
        record = Recorded(*own, records.manifests[strategy]["mesh"])
        lengths = record.timed.groupby("step")["step_us"].median() / 1e3
        assert record.base / 1e3 == pytest.approx(lengths.to_numpy(), abs=1e-3)
        assert 1e3 * row_of(result, strategy)["step_ms"] == pytest.approx(result.reasons[strategy].step_us, abs=1e-3)
        assert 1e6 * seconds_in(own[2]) == pytest.approx(result.reasons[strategy].step_us, abs=1e-3)


def test_the_peak_by_role_adds_up_to_the_peak(comparison):
    _, result, _ = comparison
    table = peak_table(result.records).set_index("strategy")
    roles = table.drop(columns=["step", "rank", "unit", "phase", "all (MB)"])
    assert roles.sum(axis=1).to_numpy() == pytest.approx(table["all (MB)"].to_numpy())
    assert (roles > 0).any().all()  # a role that nobody holds has no column
    summary = result.summary.set_index("strategy").loc[table.index]
    assert (table["all (MB)"] == summary["peak_bytes"] / 1e6).all()


def test_the_first_broadcast_is_recorded_but_in_no_step(comparison):
    config, result, _ = comparison
    setup = result.records.collectives[result.records.collectives["step"] == -1]
    assert set(setup["run"]) == {"ddp", "bucketed", "zero1"}
    sent = setup[setup["op"] == Collective.BROADCAST]
    assert (sent.groupby(["run", "rank"])["bytes"].sum() == whole_bytes(config)).all()
    # Whether all ranks have the same module; zero1's, also whether the optimizer fits their pieces.
    agreed = {"ddp": [16], "bucketed": [16], "zero1": [16, 8 * config.ranks]}
    for (run, _), rows in setup[setup["op"] != Collective.BROADCAST].groupby(["run", "rank"]):
        assert rows["bytes"].tolist() == agreed[run]


def test_shards_say_who_holds_what(comparison):
    config, result, _ = comparison
    shards = result.records.shards
    state = shards[(shards["run"] == "zero1") & (shards["role"] == Role.OPTIMIZER_STATE)]
    for _, pieces in state.groupby("parameter"):
        ordered = pieces.sort_values("start")
        size = math.prod(int(side) for side in ordered["shape"].iloc[0].split("x") if side)
        assert [0, *ordered["stop"]] == [*ordered["start"], size]
    assert state["bytes"].sum() == 2 * whole_bytes(config)


@once
def test_the_report_is_one_self_contained_page(comparison):
    config, result, _ = comparison
    page = write_report(result, config).read_text()
    headings = ("Loss by step", "Difference of the loss", "Timeline of step", "Bytes on the wire", "Time of a step")
    for words in (*headings, *STRATEGIES, f"{config.ranks} ranks", escape(_lead(result, config)), _differs(result)):
        assert words in page, words
    assert not re.search(r"<(script|link|img|iframe)[^>]*\b(src|href)=", page)  # nothing is fetched


@once
def test_each_step_of_the_figure_is_split_as_it_was(comparison):
    _, result, _ = comparison
    parts = step_parts_of(result.records)
    assert set(parts["step"]) == set(timed_steps(result.records.steps)["step"])
    assert (parts["compute_us"] > 0).all()


def test_a_directory_that_holds_something_is_refused(tmp_path):
    config = CompareConfig(strategies=("single",), ranks=1, text="grammar", device="cpu")
    (tmp_path / "notes.txt").write_text("mine")
    for out, words in (
        (tmp_path, r"out: .* holds another run; name a new or an empty directory"),
        (tmp_path / "notes.txt", "is a file"),
        (tmp_path / "notes.txt" / "deeper", "cannot be made"),
    ):
        with pytest.raises(ValueError, match=words):
            compare(config, out)
    with pytest.raises(ValueError, match=r"has no summary\.json"):
        load_comparison(tmp_path)
    for text in ("", "{", "[]", "{}", "[1]", '[{"ranks": 2}]'):
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(ValueError, match=r"run: .*summary\.json is damaged: .*; remove the file"):
            load_comparison(tmp_path)


def test_overwrite_removes_a_run_whatever_became_of_it_and_nothing_else(tmp_path):
    config = CompareConfig(strategies=("single",), ranks=1, steps=1, text="grammar", device="cpu")
    run = tmp_path / "records" / "fsdp"
    run.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"out: .* another run, which did not finish; .*, or overwrite it"):
        prepare(config, tmp_path)

    def put(*places):
        for place in places:
            (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place).write_text("a file")

    foreign = (
        "notes.txt",
        "records/notes.txt",
        "records/fsdp/notes.txt",
        "records/fsdp/a/manifest.json",
        "checkpoints/a/b",
    )
    for place in foreign:
        put(place)
        with pytest.raises(ValueError, match=rf"overwrite: .*/{place} is not of a comparison"):
            prepare(config, tmp_path, overwrite=True)
        assert run.is_dir()
        (tmp_path / place).unlink()
    (run / "manifest.json").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"overwrite: .*manifest\.json is not of a comparison"):
        prepare(config, tmp_path, overwrite=True)
    (run / "manifest.json").unlink()
    put("records/fsdp/manifest.json", "records/fsdp/steps.rank0.parquet", "records/fsdp/rank1.journal",
        "checkpoints/a/latest", "checkpoints/a/version-000001/rank-00000.safetensors")  # fmt: skip
    with pytest.raises(ValueError, match=r"overwrite: .* holds the checkpoints to resume from"):
        claim(tmp_path, overwrite=True, resume=str(tmp_path))
    prepare(config, tmp_path, overwrite=True)
    assert list(tmp_path.rglob("*")) == [tmp_path / "records"]


def test_the_ranks_of_a_pool_have_their_device_whatever_the_machine_has(pools, tmp_path, monkeypatch):
    """With a GPU 'auto' is that GPU: torch's engines were refused, and the plan was that of a GPU."""
    ranks = pools(2)
    ranks.run(abs)  # they start before this machine seems to have a GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    made = Workload(lambda: torch.nn.Linear(3, 1), [torch.ones(4, 3)] * 4, lambda model, batch: model(batch).mean())
    own = compare(made, tmp_path / "own", ranks=2, strategies=("single", "fsdp", "torch_ddp"), steps=2, pool=ranks)
    builtin = compare(CompareConfig(("bucketed",), 2, steps=2, text="grammar"), tmp_path / "builtin", pool=ranks)
    for found in (own, builtin):
        assert found.losses_equal
        assert {manifest["config"]["device"] for manifest in found.records.manifests.values()} == {"cpu"}
    config = CompareConfig(("ddp",), 2, text="grammar")
    for changes, words in (
        ({"device": "cuda"}, r"pool: its ranks are on cpu, but config\.device is 'cuda'; leave device out"),
        ({"ranks": 3}, r"pool: 2 ranks, but config\.ranks is 3"),
    ):
        with pytest.raises(ValueError, match=words):
            compare(replace(config, **changes), tmp_path / "other", pool=ranks)


SMALL = {"ranks": 2, "model": "mlp", "text": "grammar", "seq_len": 8, "device": "cpu"}


def test_one_strategy_alone_has_nothing_to_compare_with(pools, tmp_path):
    config = CompareConfig(strategies=("bucketed",), steps=1, **SMALL)
    result = compare(config, tmp_path / "out", pool=pools(2))
    assert result.summary["max_loss_difference"].isna().all()
    assert result.losses_equal
    assert "not compared" in write_report(result, config).read_text()


def test_ranks_import_no_pictures(tmp_path):
    """Each would take a second for it, and search what it imported for cycles after every call."""
    with RankPool(2, device="cpu") as pool:
        compare(CompareConfig(strategies=("single", "zero1"), steps=1, **SMALL), tmp_path / "out", pool=pool)
        assert pool.run(lambda rank: {"plotly", "narwhals"} & sys.modules.keys()) == [set(), set()]


def test_the_single_process_has_the_cores_of_all_ranks_and_no_more_threads(pools, tmp_path):
    cores = len(os.sched_getaffinity(0))

    def loss(model, batch):
        if torch.get_num_threads() != min(4, cores):
            raise ValueError(f"loss: {torch.get_num_threads()} threads on {cores} cores")
        return model(batch).mean()

    rows = torch.ones(8, 3)
    workload = Workload(lambda: torch.nn.Linear(3, 1), lambda rank, ranks, seed: iter([rows] * 9), loss)
    compare(workload, tmp_path / "out", pool=pools(4), strategies="single", ranks=4, steps=2)


def test_without_single_strategies_are_compared_with_the_first(pools, tmp_path):
    config = CompareConfig(strategies=("zero1", "ddp"), steps=2, dtype="float64", **SMALL)
    result = compare(config, tmp_path / "out", pool=pools(2))
    assert result.summary["loss_reference"].tolist() == ["zero1", "zero1"]
    assert (result.summary["max_loss_difference"] <= 1e-9).all()
    page = write_report(result, config).read_text()
    assert "Difference of the loss from zero1" in page
    assert "messages by shared_memory, torch" in page


@pytest.mark.parametrize(
    ("strategies", "options", "said"),
    [
        (("ddp",), {"transport": "gloo", "link": "1Gbps,50us"}, "messages by gloo, link emulated as 1Gbps,50us, torch"),
        (("ddp", "torch_ddp"), {}, "ddp sent through shared memory, torch_ddp over gloo; with transport=gloo all do."),
    ],
)
def test_the_report_says_how_messages_travelled(pools, tmp_path, strategies, options, said):
    config = CompareConfig(strategies=strategies, steps=2, **SMALL, **options)
    lead = _lead(compare(config, tmp_path / "out", pool=pools(2)), config)
    assert said in lead
    assert ("Times compare more" in lead) == ("torch_ddp over" in said)


@once
def test_one_loss_that_is_not_finite_is_enough(comparison):
    config, result, _ = comparison
    for value in (math.nan, math.inf, -math.inf):
        steps = result.records.steps.copy()
        steps.loc[(steps["run"] == "ddp") & (steps["step"] == 2), "loss"] = value
        rows = {row["strategy"]: row for row in summarise(replace(result.records, steps=steps), config.dtype)}
        equal = {name: row["losses_equal"] for name, row in rows.items()}
        assert equal == {"single": True, "ddp": False, "bucketed": True, "zero1": True}
        assert rows["ddp"]["max_loss_difference"] is None
        assert rows["ddp"]["loss_last"] is not None  # the last step's is a number again
        steps.loc[(steps["run"] == "single") & (steps["step"] == 3), "loss"] = value
        rows = summarise(replace(result.records, steps=steps), config.dtype)
        assert [row["losses_equal"] for row in rows] == [False] * len(STRATEGIES)  # nothing to compare with


@once
def test_exposed_time_is_of_steps_as_their_length_is(comparison):
    _, result, _ = comparison
    steps = result.records.steps
    steps = steps.assign(exposed_comm_us=(10.0 * steps["step"] ** 2).where(steps["rank"] == 1, 1.0 * steps["step"]))
    rows = {row["strategy"]: row for row in summarise(replace(result.records, steps=steps), "float32")}
    timed = timed_steps(steps[steps["run"] == "ddp"])
    by_step = timed.groupby("step")["exposed_comm_us"].median()
    assert rows["ddp"]["exposed_comm_ms"] == pytest.approx(by_step.median() / 1e3)
    assert timed["exposed_comm_us"].median() < by_step.median()


@once
def test_losses_are_judged_by_the_coarsest_parameters(comparison):
    _, result, _ = comparison
    steps = result.records.steps.copy()
    steps.loc[steps["run"] == "ddp", "loss"] += 1e-3
    for dtypes, equal in ((["float32", "int64"], False), (["bfloat16", "float32"], True)):
        manifests = {
            run: {**manifest, "workload": {**manifest["workload"], "dtypes": dtypes}}
            for run, manifest in result.records.manifests.items()
        }
        rows = summarise(replace(result.records, steps=steps, manifests=manifests), "float32")
        assert [row["losses_equal"] for row in rows if row["strategy"] == "ddp"] == [equal]


def test_the_rank_on_which_a_loss_first_was_nan_is_named(pools, tmp_path):
    model = faulty(lambda: torch.nn.Linear(4, 1), NaN(rank=1, step=1, phase="forward"))
    workload = Workload(model, [torch.ones(4, 4)], lambda model, rows: model(rows).mean())
    result = compare(workload, tmp_path / "out", pool=pools(2), strategies="ddp", ranks=2, steps=3)
    assert "In ddp it began on rank 1, with the loss of its own rows in step 1." in verdict(result)
    assert agreement_verdict(result) == ""


@once
def test_ranks_that_drift_apart_are_told(comparison):
    _, result, _ = comparison
    manifests = {**result.records.manifests}
    did = [Did(2, 2, 5), Did(2, 2, 6)]
    reports = [RankReport(0.0, 0, {}, {0: did[0], 1: one}, drew=False) for one in did]
    words = _disagreement(reports, range(2), 1)
    assert words.startswith("after step 1, ranks differ in sum of the parameters' bits")
    of_stages = [*reports[:1] * 4, reports[1], reports[0]]
    assert _disagreement(of_stages, range(3), 1) == ""
    assert "(rank 4" in _disagreement(of_stages, range(3, 6), 1), "of all ranks, not of the second stage"
    of_tensor_ranks = [RankReport(0.0, 0, {}, {0: one}, drew=False) for one in did]
    assert _disagreement(of_tensor_ranks, range(2), 2) == "", "each tensor rank has its own"
    manifests["ddp"] = {**manifests["ddp"], "disagreement": words}
    wrong = replace(result, records=replace(result.records, manifests=manifests))
    assert agreement_verdict(wrong).startswith(
        "Ranks DISAGREE, so the numbers are of no one run: in ddp after step 1, ranks"
    )


@once
def test_ranks_that_were_off_the_cpu_make_times_uncertain_and_what_no_stream_was_seen_to_wait_for_unknown(comparison):
    _, result, _ = comparison
    steps, spans = result.records.steps, result.records.spans
    own = steps[(steps["run"] == "ddp") & (steps["step"] == 1)]
    away = own[["run", "source", "rank", "step"]].assign(kind="off_cpu", start_us=0.0, end_us=own["step_us"])
    quiet = spans[spans["kind"] != "off_cpu"]
    assert busy_verdict(replace(result.records, spans=quiet)) == ""
    busy = replace(result.records, spans=pd.concat([quiet, away]))
    assert busy_verdict(busy).startswith("Times are UNCERTAIN: in ddp ranks were off the CPU for ")
    assert unseen_verdict(result) == ""
    unseen = result.summary["strategy"].isin(["single", "ddp"])
    for column in ("exposed_comm_ms", "overlap"):  # in every step, or in one
        summary = result.summary.assign(**{column: result.summary[column].mask(unseen)})
        assert "not known for ddp: streams ran it" in unseen_verdict(replace(result, summary=summary))


@pytest.mark.parametrize("share", [1.0, 1e-3])
def test_a_loss_that_compares_rows_with_one_another_is_told(pools, tmp_path, share):
    def contrastive(model, batch):
        outputs = model(batch)
        return outputs.square().mean() + share * torch.nn.functional.cross_entropy(
            outputs @ batch.T, torch.arange(len(batch))
        )

    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    workload = Workload(lambda: torch.nn.Linear(4, 4), [rows], contrastive)
    result = compare(workload, tmp_path / "out", pool=pools(2), strategies=("single", "ddp", "zero3"), ranks=2, steps=3)
    assert not result.losses_equal
    assert "From the first step on ddp, zero3 agree with each other" in verdict(result)
    assert _differs(result) == "More than rounding differs."


def test_what_fails_on_the_ranks_leaves_a_report_of_the_others(pools, tmp_path):
    class Whole(torch.optim.SGD):
        shardlab_looks_at = "element"  # it does not

        def step(self, closure=None):
            self.param_groups[0]["params"][0].grad.norm()
            super().step(closure)
            try:
                self.param_groups[0]["params"][0].detach().view(3, 4)
            except RuntimeError as error:
                error.add_note("Whole looks at whole tensors")
                raise

    workload = Workload(lambda: torch.nn.Linear(4, 3), [torch.ones(4, 4)], lambda model, rows: model(rows).sum(),
                        optimizer=lambda tensors: Whole(tensors, lr=0.1))  # fmt: skip
    strategies = ("single", "ddp", "zero3", "fsdp")
    result = compare(workload, tmp_path / "out", pool=pools(2), strategies=strategies, ranks=2, steps=2)
    assert list(result.summary["strategy"]) == ["single", "ddp"]
    assert list(result.failed) == ["zero3", "fsdp"]
    assert all(re.match(r"rank \d raised .*; Whole looks at whole tensors$", why) for why in result.failed.values())
    saved, config = load_saved(tmp_path / "out")
    assert saved.failed == result.failed
    said = [sentence for sentence in verdicts(saved) if sentence.startswith("NOT run to the end: zero3: rank")]
    assert len(said) == 1
    assert not unfinished_verdict(saved)
    assert said[0].rstrip(".").split(": ", 1)[1][:9] in write_report(saved, config).read_text()
    with pytest.raises(RankError, match=r"^zero3: rank \d raised ") as refused:
        compare(workload, tmp_path / "alone", pool=pools(2), strategies=("zero3", "fsdp"), ranks=2, steps=2)
    assert "frames of libraries are left out" in str(refused.value)
    assert "agreement.py" not in str(refused.value)


@once
def test_a_strategy_that_was_cut_off_is_not_finished(comparison):
    _, result, _ = comparison
    steps = result.records.steps
    cut = replace(result, records=replace(result.records, steps=steps[(steps["run"] != "ddp") | (steps["step"] < 2)]))
    assert unfinished_verdict(cut) == "NOT finished: ddp after 2 of 4 steps; the comparison was cut off before."


def test_a_directory_is_taken_by_one_comparison_alone(tmp_path):
    claim(tmp_path)
    claim(tmp_path)  # of another process, which comes at the same time
    reserve(tmp_path)
    with pytest.raises(ValueError, match=r"out: .* holds another run, which did not finish"):
        reserve(tmp_path)


class NoMean(Bucketed):
    """Sums gradients in place of their mean, which Adam does not show in the losses."""

    name = "no_mean"

    def lay_out(self, given):
        laid_out = super().lay_out(given)
        for bucket in self.buckets:
            bucket.scale = 1.0
        return laid_out


def test_a_factor_of_the_gradients_that_adam_hides_is_told(pools, tmp_path):
    config = CompareConfig(("single", "fsdp", NoMean()), steps=3, **SMALL)
    result = compare(config, tmp_path / "out", pool=pools(2))
    by_strategy = result.summary.set_index("strategy")
    assert by_strategy["losses_equal"].tolist() == [True, True, False]
    assert by_strategy["norm_ratio"].tolist() == pytest.approx([1, 1, 2], abs=1e-3)
    assert "The norm of the gradients is another than the reference's, by these factors: no_mean 2" in verdict(result)
    assert _differs(result) == "More than rounding differs."


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, rows: 2.3 + (0 * model(rows)).mean(), "the norm of the gradients is 0"),
        (lambda model, rows: model(rows).mean(), r"the norm of the gradients is \S+ in every step"),
    ],
)
def test_of_a_run_that_does_not_train_nothing_is_said(pools, tmp_path, loss, said):
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    workload = Workload(lambda: torch.nn.Linear(4, 1), [rows], loss)
    result = compare(workload, tmp_path / "out", pool=pools(2), strategies=("single", "zero1"), ranks=2, steps=5)
    assert result.summary["losses_equal"].isna().all()
    assert re.match(f"nothing can be said of the losses: {said}", dead_verdict(result))
    assert re.match(f"nothing can be said of the losses: {said}", answer(result)[4].text)


def test_rows_that_hold_nan_are_named_and_no_clipping_is_advised(pools, tmp_path):
    rows = torch.ones(4, 4)
    rows[3, 1] = math.nan
    workload = Workload(lambda: torch.nn.Linear(4, 1), [rows], lambda model, rows: model(rows).square().mean())
    result = compare(workload, tmp_path / "out", pool=pools(2), strategies="ddp", ranks=2, steps=2)
    assert "In ddp it began on rank 1, with the data of its own rows in step 0." in verdict(result)
    assert verdict(result).endswith("The rows themselves hold inf or NaN: look at the data.")
    assert answer(result)[5].text.startswith("look at the data, whose rows hold inf or NaN")


def test_what_torchs_fsdp_does_not_take_is_said_before_ranks_start():
    class Model(torch.nn.Module):
        def __init__(self, param):
            super().__init__()
            self.odd = torch.nn.Parameter(param)

    for param in (torch.ones(()), torch.ones(4, 3).t()):
        workload = Workload(lambda param=param: Model(param), [torch.ones(4, 4)], lambda model, rows: model.odd.sum())
        said = r"strategies: .* parameter 'odd', which is .*; leave out 'torch_fsdp2'"
        with pytest.raises(ValueError, match=said):
            CompareConfig(workload=workload, strategies=("ddp", "torch_fsdp2"), ranks=2)
