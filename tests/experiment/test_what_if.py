"""A recorded run with one thing changed: against runs whose clock is told, so that the truth is known exactly."""

from dataclasses import replace
from functools import cache

import pandas as pd
import pytest

from shardlab.comm.foretold import Costs, ToldClock, Wire
from shardlab.engines import ZeRO1
from shardlab.experiment import CompareConfig, Workload
from shardlab.experiment.planned.dry_run import dry_run
from shardlab.experiment.planned.forecast import phase_of_autograd
from shardlab.experiment.planned.what_if import RecordedClock, WhatIf, what_if
from shardlab.models import GPT, GPTConfig
from shardlab.partition.ring_cost import Link
from tests.experiment.test_run_plan import Tokens, loss


def gpt():
    return GPT(GPTConfig(vocab_size=256, seq_len=8, num_layers=2, num_heads=4, hidden=128))


OPERATION = {"forward": 2e-4, "backward": 3e-4, "optimizer": 1e-5}
CONFIG = CompareConfig(
    strategies=("fsdp",), ranks=2, steps=3, workload=Workload(gpt, Tokens(), loss), batch=8, device="cpu",
    link="500Mbps,50us",
)  # fmt: skip


@cache
def trained(config):
    """The records of a run in which each operation takes as long as any of its phase."""
    (strategy,) = config.strategies
    link = None if config.link is None else Link.parse(config.link)

    def message(event):
        moves = 1e-4 + event.num_bytes / 1e9
        return Costs(moves, link.ring_time_us(event.op, event.num_bytes, event.group_size) / 1e6 if link else moves)

    told = ToldClock(Wire(message)), lambda *_: OPERATION[phase_of_autograd()]
    found = dry_run(config, strategy, *told, traces_memory=False)
    tables = {name: getattr(found, name) for name in ("steps", "spans", "collectives")}
    again = {name: table[table["step"] == 1].assign(step=2) for name, table in tables.items()}
    return replace(found, **{name: pd.concat([tables[name], again[name]], ignore_index=True) for name in tables})


@pytest.fixture
def clock_once(monkeypatch):
    """What the record says of times is looked for once."""
    monkeypatch.setattr("shardlab.experiment.planned.what_if.RecordedClock", lambda *_: clock_of_record())


@cache
def clock_of_record():
    return RecordedClock(trained(CONFIG), CONFIG, "fsdp")


def seconds(records):
    return records.steps["step_us"].iloc[-1] / 1e6


@pytest.mark.parametrize(
    "changes",
    [
        {"link": "5Gbps,50us"}, {"link": "100Mbps,2000us"}, {"prefetch": 0}, {"wrap": "root"},
        {"strategies": ("zero1",), "bucket_mib": 0.25}, {"accumulation": 2}, {"precision": "bf16"},
    ],
)  # fmt: skip
def test_a_change_takes_what_the_changed_run_takes(clock_once, changes):
    found = what_if(trained(CONFIG), CONFIG, "fsdp", **changes)
    assert found.replayed == pytest.approx(found.recorded, rel=0.02)
    assert found.is_reproduced
    # What the record says of the operations of one strategy is less true of another's.
    near = 0.3 if "strategies" in changes else 0.15
    assert found.changed == pytest.approx(seconds(trained(replace(CONFIG, **changes))), rel=near)


def test_a_strategy_of_the_readers_own_is_replayed_and_no_option_of_another_run_is_in_the_way():
    class Mine(ZeRO1):
        name = "mine"

    both = replace(CONFIG, strategies=("fsdp", Mine()), prefetch=0)
    alone = (Mine(),)
    found = what_if(trained(replace(CONFIG, strategies=alone)), both, "mine", link="5Gbps,50us")
    faster = replace(CONFIG, strategies=alone, link="5Gbps,50us")
    assert found.changed == pytest.approx(seconds(trained(faster)), rel=0.15)
    with pytest.raises(ValueError, match=r"^strategy: 'mine' is given; give one of ours, or in Python one of your own"):
        what_if(trained(CONFIG), CONFIG, "mine")


def test_a_replay_that_misses_is_doubtful_and_says_by_how_much():
    assert WhatIf(0.1, 0.102, 0.051).sentence() == "100 ms would become 50 ms"
    missed = WhatIf(0.1, 0.12, 0.06)
    assert not missed.is_reproduced
    assert missed.sentence() == ("100 ms would become 50 ms (doubtful: the run as it was is replayed in 120 ms, +20%)")


def test_what_was_not_recorded_or_is_not_allowed_is_refused():
    records = trained(CONFIG)
    with pytest.raises(ValueError, match=r"^strategy: 'zero3' is given; the record has fsdp$"):
        what_if(records, CONFIG, "zero3")
    with pytest.raises(ValueError, match=r"^link: 'fast' is not understood"):
        what_if(records, CONFIG, "fsdp", link="fast")
    with pytest.raises(ValueError, match=r"^schedule: 'fsdp' is a run without stages; leave it out$"):
        what_if(records, CONFIG, "fsdp", schedule=("1f1b",))
