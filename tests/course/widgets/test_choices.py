"""The controls of the workbench, without ranks: which of them count, and what is refused."""

import copy
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

from shardlab import CompareConfig, Workload
from shardlab.course import workbench
from shardlab.course.widgets.choices import Choices
from shardlab.course.widgets.history import WORDS, PastRun, State, runs_table, unlike
from shardlab.engines import STRATEGIES
from shardlab.experiment import Comparison
from shardlab.experiment.config import ENGINE_FIELDS
from shardlab.experiment.options import CompareOptions
from shardlab.experiment.told.summary import COLUMNS
from shardlab.records.store import Records
from shardlab.records.tables import STEPS, TABLES

OTHER = {
    "bucket_mib": 0.25, "precision": "bf16", "sharding": "shard_grad_op", "prefetch": 3, "offload": "all",
}  # fmt: skip
COURSE = {"batch", "seq_len", "accumulation", "tp", "prefetch", "wrap", "offload", "clip"}


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]).squeeze(-1), batch[1])


def samples():
    return torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64))


def batches():
    return torch.utils.data.DataLoader(samples(), batch_size=8)


def test_a_control_is_enabled_where_compare_takes_its_option():
    assert set(Choices(CompareConfig(text="grammar")).inputs) >= COURSE
    assert set(OTHER) <= set(ENGINE_FIELDS)
    for strategy in STRATEGIES:
        choices = Choices(CompareConfig(text="grammar", device="cpu", ranks=2))
        choices.choose({"strategies": strategy, **OTHER})
        for name, value in OTHER.items():
            if choices.inputs[name].disabled:
                with pytest.raises(ValueError, match=f"{name}: only for"):
                    CompareConfig(strategies=strategy, text="grammar", device="cpu", ranks=2, **{name: value})
        config = choices.config()
        taken = {name for name in OTHER if getattr(config, name) == OTHER[name]}
        assert taken == {name for name in OTHER if not choices.inputs[name].disabled}


def test_what_a_workload_says_itself_cannot_be_chosen():
    own = Workload(make_model, samples(), loss)
    bench = workbench(own, batch=16, clip=0.5)
    assert bench.inputs["seq_len"].disabled
    assert not bench.inputs["batch"].disabled
    config = bench.config()
    assert (config.workload, config.batch, config.clip, config.strategies) == (own, 16, 0.5, ("zero1",))
    bench.choose(model="gpt-1m", seq_len=32)
    assert (bench.config().workload, bench.config().seq_len) == (None, 32)
    bench.choose(model=own, batch=None)
    assert (bench.config().workload, bench.config().batch) == (own, None)
    assert workbench(make_model, batches(), loss).inputs["batch"].disabled


def test_the_batch_by_default_is_that_of_the_run_whatever_a_disabled_control_says():
    choices = Choices(CompareConfig(text="grammar", device="cpu", ranks=4, tp=2, strategies="ddp"))
    for strategy, batch in (("ddp", 8), ("single", 16)):
        choices.choose({"strategies": strategy, "batch": None})
        assert choices.inputs["tp"].disabled == (strategy == "single")
        assert choices.config().global_batch == batch
        assert choices.inputs["batch"].placeholder == f"{batch} by default"


def test_options_without_a_control_are_kept_where_they_apply():
    choices = Choices(CompareConfig(strategies="fsdp", layout="dim0", text="grammar", seed=7))
    assert (choices.config().layout, choices.config().seed) == ("dim0", 7)
    choices.choose({"strategies": "zero1"})
    assert (choices.config().layout, choices.config().seed) == ("flat", 7)


def test_the_sentence_of_a_refusal_is_in_the_panel_before_ranks_start(tmp_path):
    bench = workbench(make_model, samples(), loss, tmp_path / "runs")
    for chosen, sentence, back in (
        ({"tp": 3}, "tp: 3 does not divide 2 ranks; take a divisor of 2", {"tp": 1}),
        ({"batch": 5}, "batch: 5 sequences do not divide among 2 ranks x 1 micro-batches", {"batch": None}),
        ({"batch": "many"}, "batch: 'many' is not a whole number; or leave it empty", {"batch": None}),
        ({"clip": "-1"}, "clip: -1.0 is not a finite number above 0", {"clip": None}),
        ({"strategies": "fsdp", "wrap": "blocks.*"}, "blocks.*", {"wrap": "auto"}),
        ({"strategies": "fsdp", "prefetch": -1}, "prefetch: -1 is too small", {}),
    ):
        bench.choose(**chosen)
        with pytest.raises((ValueError, TypeError)) as refused:
            bench.config()
        assert sentence in bench.message.text == str(refused.value)
        bench.start()
        assert not bench.is_running
        bench.choose(**back)
    assert not list(tmp_path.iterdir())


def differently(field, config):
    """The same configuration but for one field, unchecked: a table shows what a manifest says."""
    if field == "workload":
        return replace(config, workload=Workload(make_model, samples(), loss))
    if field == "strategies":
        return replace(config, strategies="zero2")
    if field in OF_ENGINES:  # of which a strategy is made
        return replace(config, **{field: OF_ENGINES[field]})
    other = copy.copy(config)
    value = getattr(config, field)
    changed = (*value, "gpipe") if isinstance(value, tuple) else None
    object.__setattr__(other, field, changed or (f"not_{value}" if isinstance(value, str | None) else value + 1))
    return other


OF_ENGINES = {
    "partition": "balanced", "sharding": "no_shard", "layout": "dim0", "precision": "bf16", "offload": "all",
}  # fmt: skip


def past(config, state=State.STOPPED):
    """A run of one strategy of which one step was finished."""
    (name,) = config.strategies
    summary = pd.DataFrame([dict.fromkeys(COLUMNS) | {"strategy": name, "ranks": config.ranks, "steps": 1}])
    step = {"run": name, "source": "measured", "rank": 0, "step": 0, "learning_rate": 1e-3, "num_tokens": 8}
    tables = {name: table.frame([]) for name, table in TABLES.items()}
    tables["steps"] = STEPS.frame([dict.fromkeys(STEPS.column_names) | step])
    records = Records(**tables, manifests={name: {"config": config.as_dict(name)}})
    return PastRun(state, Comparison(summary, records, Path()), config)


def test_the_table_has_a_column_for_every_option_in_which_two_runs_differ():
    for field in [field.name for field in fields(CompareOptions)]:
        config = CompareConfig(strategies="zero1" if field == "bucket_mib" else "fsdp", ranks=2, batch=12, device="cpu")
        both = (config, differently(field, config))
        table = runs_table({number: past(one) for number, one in enumerate(both)})
        differing = [name for name in table.columns if name != "run" and table[name].astype(str).nunique() > 1]
        assert differing == ["model" if field == "workload" else WORDS.get(field, field)]
    table = runs_table(dict.fromkeys((1, 2), past(config, State.FINISHED)))
    assert not {"model", "prefetch", "wrap", "batch", "state"} & set(table.columns)


def test_a_batch_that_nobody_touched_is_shown_and_stays_where_the_ranks_change(monkeypatch):
    config = CompareConfig(strategies="fsdp", ranks=2, text="grammar", device="cpu")
    for changes, batch, words in (({"ranks": 3}, 12, "ranks, batch"), ({"tp": 2}, 4, "batch, tp")):
        runs = {n: past(one) for n, one in enumerate((config, replace(config, **changes)))}
        assert runs_table(runs)["batch"].tolist() == [str(batch), "8"]
        assert unlike({str(n): (run, "fsdp") for n, run in runs.items()}) == f"the runs differ in {words}"
        choices = Choices(config)
        choices.choose(changes)
        assert choices.inputs["batch"].value == "8"
        choices.choose({"batch": None})
        assert choices.config().global_batch == batch
    monkeypatch.setattr(PastRun, "manifest", lambda run, name: {"config": {}, "mesh": {}, "batches": [run.state]})
    both = {state: (past(config, state), "fsdp") for state in (State.STOPPED, State.FAILED)}
    assert unlike(both) == "the runs differ in the rows they trained on"
