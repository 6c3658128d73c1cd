"""Steps on the virtual clock: what arithmetic says of their messages, in the order that the lessons teach."""

from dataclasses import replace

import pytest
import torch

from shardlab.analysis import overlap
from shardlab.course import on_a_clock as clock
from shardlab.course.on_a_clock import virtual_steps
from shardlab.experiment import CompareConfig
from shardlab.partition.ring_cost import Link

BASE = CompareConfig(
    strategies=("bucketed",), ranks=2, steps=9, model="gpt-1m", text="grammar", seq_len=16, batch=192, device="cpu",
    bucket_mib=1, link="1Gbps,500us",
)  # fmt: skip


def test_a_step_takes_what_its_compute_and_its_exposed_messages_take() -> None:
    variants = {
        "naive": replace(BASE, strategies=("ddp",)), "flat": replace(BASE, bucket_mib=64), "bucketed": BASE,
        "alone": replace(BASE, ranks=1, batch=96),
    }  # fmt: skip
    records = virtual_steps(variants)
    sent = records.collectives[(records.collectives["phase"] != "metrics") & (records.collectives["rank"] == 0)]
    measures = overlap(sent, records.spans[records.spans["rank"] == 0]).set_index("run")
    steps, exposed = records.steps.groupby("run")["step_us"].first(), measures["exposed_us"]
    assert set(records.steps["source"]) == {"predicted"}
    assert records.steps.groupby("run")["rank"].agg(list).to_dict() == {
        name: list(range(config.ranks)) for name, config in variants.items()
    }
    # What the link needs for each message is arithmetic; naive hides none of it.
    link = Link.parse(str(BASE.link))
    alone_us = float(steps["alone"])
    for run, messages in sent.groupby("run"):
        needed = sum(link.ring_time_us(row.op, row.bytes, 2) for row in messages.itertuples())
        assert measures.loc[run, "comm_us"] == pytest.approx(needed)
        own = steps[run] - alone_us - exposed[run]  # copies into buckets, and the division by N
        assert abs(own) < 0.05 * alone_us, run
    assert exposed["naive"] == pytest.approx(measures.loc["naive", "comm_us"])
    assert exposed["naive"] > exposed["flat"] > 2 * exposed["bucketed"]
    again = virtual_steps({"flat": variants["flat"]})
    assert again.steps["step_us"].tolist() == [steps["flat"]] * 2, "nothing is measured"


def test_what_has_no_link_or_several_strategies_is_refused() -> None:
    for wrong in (replace(BASE, link=None), replace(BASE, strategies=("ddp", "bucketed"))):
        with pytest.raises(ValueError, match="needs one strategy and a link"):
            virtual_steps({"wrong": wrong})


def test_products_take_their_flops_and_all_else_its_bytes() -> None:
    left, right = torch.ones(300, 200), torch.ones(200, 100)
    for func, args, wanted in (
        (torch.ops.aten.mm.default, (left, right), 2 * 300 * 200 * 100 / clock.FLOPS_PER_S),
        (torch.ops.aten.add.Tensor, (left, left), 2 * left.nbytes / clock.BYTES_PER_S),  # one is read, one is written
    ):
        assert clock._seconds(func, args, func(*args)) == pytest.approx(clock.OPERATION_S + wanted)
