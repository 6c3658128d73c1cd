"""Every sentence of the answer, against tables made by hand: ties, reversals, missing signals."""

import re
from dataclasses import replace

import pandas as pd
import pytest

from shardlab.engines import HFSDP
from shardlab.experiment import CompareConfig, Comparison
from shardlab.installed import data_path
from shardlab.records.store import Records
from tests.analysis.hand_made import collective, collectives, spans

from shardlab.experiment.told.answer import (  # isort: skip
    _alone,
    answer, answer_of_plan, cost, fastest, following, least_memory, quartiles, sent_by_axis, side_by_side,
)  # fmt: skip

MB = 1_000_000
COLUMNS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "peak_bytes", "wire_bytes_per_step")
LESS = "less than ddp, because each of 4 ranks keeps a quarter of the"
ALL = f"{LESS} parameters, gradients and optimizer state"
DDP, ZERO1, FSDP = (4, 4, 8, 30, 6), (4, 4, 2, 20, 6), (1, 1, 2, 10, 9)


def rows(**by_strategy):
    """Rows of a summary, of ``COLUMNS`` in MB; None where a signal is missing."""
    table = [
        {"strategy": name, "ranks": 1 if name == "single" else 4, "offloaded_bytes": 0, "overlap": 0.71}
        | {column: None if size is None else size * MB for column, size in zip(COLUMNS, held, strict=True)}
        for name, held in by_strategy.items()
    ]
    return side_by_side(pd.DataFrame(table))


MEMORY = [
    ({"single": DDP, "ddp": DDP, "zero1": ZERO1},
     f"zero1, 10.0 MB at rest on a rank, 38 % {LESS} optimizer state; at the peak too, 20.0 MB"),
    ({"zero3": FSDP, "fsdp": FSDP, "ddp": DDP},
     f"zero3 and fsdp, 4.00 MB at rest on a rank, 75 % {ALL}; at the peak too, 10.0 MB"),
    ({"ddp": DDP, "zero1": (4, 4, 2, 31, 6)},
     f"zero1, 10.0 MB at rest on a rank, 38 % {LESS} optimizer state; at the peak ddp has least, 30.0 MB"),
    ({"zero1": (4, 4, 2, None, 6), "ddp": (4, 4, 8, None, 6)},
     f"zero1, 10.0 MB at rest on a rank, 38 % {LESS} optimizer state; no peak was traced"),
    ({"ddp": DDP, "own": (4, 4, 5.6, 20, 6)},
     "own, 13.6 MB at rest on a rank, 15 % less than ddp, because each of 4 ranks keeps 70 % of ddp's bytes of "
     "optimizer state; "
     "at the peak too, 20.0 MB"),
    ({"ddp": DDP, "bucketed": (4, 4, 8, 34, 6)},
     "all hold the same, 16.0 MB at rest on a rank; at the peak ddp has least, 30.0 MB"),
    ({"single": DDP}, "single alone, 16.0 MB at rest on a rank; at the peak 30.0 MB"),
    ({"zero3": FSDP, "fsdp": (1, 1, 2, 12, 9), "ddp": DDP},
     f"zero3 and fsdp, 4.00 MB at rest on a rank, 75 % {ALL}; at the peak zero3 has least, 10.0 MB"),
    ({"fsdp": FSDP, "ddp": (4, 4, 8, 10, 6)},
     f"fsdp, 4.00 MB at rest on a rank, 75 % {ALL}; at the peak fsdp and ddp have least, 10.0 MB"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "said"), MEMORY)
def test_least_memory(table, said):
    assert least_memory(rows(**table)) == said


def test_master_weights_are_no_optimizer_state():
    """In 16 bits zero1 keeps a copy in 32 beside its moments; of ddp, which takes no precision, there is none."""
    table = rows(ddp=DDP, zero1=(2, 4, 3, 18, 5), fsdp=(1, 1, 2, 13, 7)).assign(precision=["full", "bf16", "bf16"])
    assert "67 % of zero1's bytes of optimizer state and master weights;" in least_memory(table.drop("ddp"))
    assert f"{ALL};" in least_memory(table)
    table = rows(ddp=(2, 2, 2, 10, 1), zero1=(1, 2, 8, 10, 1)).assign(precision=["full", "bf16"])  # stages of one rank
    assert "each of 4 ranks keeps 25 % of zero1's bytes of optimizer" in least_memory(table), "ddp divides nothing"


def test_what_is_at_rest_has_the_buffers_in_it():
    """As the table beside it; what is offloaded is named apart."""
    table = rows(ddp=DDP, fsdp=FSDP).assign(rest_bytes=[18 * MB, 7 * MB], offloaded_bytes=[0, MB])
    held = "6.00 MB at rest on a rank, 67 %"
    assert least_memory(table) == f"fsdp, {held} {ALL}, and 1.00 MB in host memory; at the peak too, 10.0 MB"


def times(**by_run):
    """Steps after the first, in ms."""
    table = [
        {"run": run, "step": step, "rank": rank, "step_us": 1e3 * ms, "traced_memory": False, "learning_rate": 0.1}
        for run, each in by_run.items() for step, ms in enumerate((1000, *each)) for rank in range(2)
    ]  # fmt: skip
    return quartiles(pd.DataFrame(table))


TIMES = [
    ({"ddp": (100, 101, 102, 103), "zero1": (80, 81, 82, 83)}, "",
     "zero1, 81.5 ms a step (median), 20 % less than ddp; 71 % of its communication is hidden"),
    ({"ddp": (80, 100, 102, 110), "zero1": (79, 81, 101, 103)}, "",
     "cannot be said: zero1 and ddp take about as long, half of their steps 80.5 to 102 ms and 95 to 104 ms"),
    ({"ddp": (100,), "zero1": (80,)}, "", "cannot be said: 1 timed steps are too few; give --steps 20"),
    ({"ddp": (100,) * 5, "zero1": (80,) * 5}, "slept", "cannot be said: times are uncertain, see below"),
    ({"ddp": (100,) * 5}, "", "ddp alone, 100 ms a step"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "doubt", "said"), TIMES)
def test_fastest(found, doubt, said):
    table = rows(**{name: {"ddp": DDP, "zero1": ZERO1}[name] for name in found})
    assert fastest(table, times(**found), doubt) == said


def test_one_process_that_is_faster_than_all_is_named():
    table = rows(ddp=DDP)
    assert _alone(table, times(single=(80,) * 5, ddp=(100,) * 5)).endswith("faster with the rows of all, 80 ms")
    assert not _alone(table, times(single=(99, 100, 101), ddp=(100,) * 5))
    assert not _alone(table, times(ddp=(100,) * 5))


def test_fastest_where_nothing_is_sent_or_nobody_saw_what_is_hidden():
    found, said = times(a=(80,) * 5, b=(100,) * 5), "a, 80 ms a step (median), 20 % less than b"
    assert fastest(rows(a=(4, 4, 8, 1, 0), b=DDP), found) == said
    unseen = rows(a=DDP, b=DDP).assign(overlap=None)
    assert fastest(unseen, found) == f"{said}; how much of its communication is hidden is not known"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"ddp": DDP, "fsdp": FSDP},
         "ddp sends 6.00 MB a rank and step, fsdp 1.50 times as much, 9.00 MB; messages: ddp 86, fsdp 18"),
        ({"ddp": (4, 4, 8, 30, 0)}, "nothing is sent"),
        ({"ddp": (4, 4, 8, 30, None)}, "not known: no step of ddp was watched"),
        ({"a": (4, 4, 8, 30, 0), "ddp": DDP}, "a nothing, ddp sends 6.00 MB a rank and step; messages: a 0, ddp 86"),
    ],
)  # fmt: skip
def test_cost(table, said):
    assert cost(rows(**table), {"ddp": 86, "fsdp": 18}) == said


def test_bytes_by_axis_are_said_of_what_sends_over_several():
    places = [(run, axis, rank, step) for run, axes in {"a": ["data"] * 2, "b": ["replica", "shard", "shard"]}.items()
              for axis in axes for rank in (0, 1) for step in (1, 2)]  # fmt: skip
    sent = [collective(rank, 0, (0, 0, 1), run=run, axis=axis, step=step) for run, axis, rank, step in places]
    by_axis = sent_by_axis(collectives(*sent))
    assert by_axis == sent_by_axis(collectives(*sent), averaged=["b"]) == {"b": {"replica": 1000, "shard": 2000}}
    said = "a sends 6.00 MB a rank and step, b 1.50 times as much, 9.00 MB; b: 1.00 kB over replica and 2.00 kB over "
    assert cost(rows(a=DDP, b=FSDP), {}, by_axis) == f"{said}shard"


TAKES = "takes 16.6 GB, and 7.40 GB are left for activations"
PLANS = [
    ({"ddp": (-8.0, 2), "zero2": (7.4, 2), "fsdp": (22.1, 3)},
     f"of 24.0 GB, ddp does not fit; zero2 is the first that fits: it {TAKES}; fsdp leaves 22.1 GB and sends 1.50 "
     "times as much"),
    ({"zero1": (7.4, 2), "zero2": (8.0, 2), "fsdp": (22.1, 3)},
     f"of 24.0 GB, all fit: zero1 {TAKES}; zero2 sends as much and leaves 8.00 GB; fsdp leaves 22.1 GB and sends 1.50 "
     "times as much"),
    ({"single": (-8.0, 0), "zero1": (7.4, 2), "zero2": (8.0, 2)},
     f"of 24.0 GB, all fit: zero1 {TAKES}; zero2 leaves 8.00 GB and sends as much"),
    ({"ddp": (7.4, float("nan")), "fsdp": (9.0, float("nan"))},
     f"of 24.0 GB, all fit: ddp {TAKES}; fsdp leaves 9.00 GB"),
    ({"ddp": (-90.0, 2), "fsdp": (-6.0, 3)},
     "of 24.0 GB, nothing fits: fsdp, which needs least, needs 30.0 GB. Try --ranks 10 or more, or an optimizer with "
     "less state; checkpointing saves activations alone"),
    ({"ddp": (-90.0, 2), "zero1": (-6.0, 2)},
     "of 24.0 GB, nothing fits: zero1, which needs least, needs 30.0 GB. Try fsdp, which keeps 1/8 of everything, or "
     "an optimizer with less state; checkpointing saves activations alone"),
]  # fmt: skip


@pytest.mark.parametrize(("plans", "said"), PLANS)
def test_what_fits(plans, said):
    held = dict(zip(COLUMNS[:3], (4e9, 4e9, 8e9), strict=True))
    table = [
        {"strategy": name, "left_bytes": left * 1e9, "wire_bytes_per_step": sent, **held}
        for name, (left, sent) in plans.items()
    ]
    (_, fits), (_, least), *_ = answer_of_plan(pd.DataFrame(table), 8, 24e9)
    assert fits == said
    assert least == "all hold the same, 16.0 GB at rest on a rank"


@pytest.mark.parametrize(
    ("fitting", "said"),
    [
        (11, ", 11 rows"),
        (pd.NA, ""),
        (3_600_000, ", 3.6 million rows"),
    ],
)
def test_how_many_rows_fit(fitting, said):
    plans = rows(ddp=DDP).assign(left_bytes=7.4e9).reset_index()
    plans["rows_that_fit"] = pd.array([fitting], "Int64")
    assert answer_of_plan(plans, 4, 24e9)[0].text == f"of 24.0 GB, ddp fits: it {TAKES}{said}"


def test_what_has_no_room_for_a_row_does_not_fit():
    """'all fit' never stands beside rows that fit: 0."""
    plans = rows(ddp=DDP, zero2=ZERO1, fsdp=FSDP).reset_index().assign(left_bytes=[1e6, 7.4e9, 9e9])
    plans["rows_that_fit"] = [0, 11, 20]
    said = answer_of_plan(plans, 4, 24e9)[0].text
    assert said.startswith(f"of 24.0 GB, ddp does not fit; zero2 is the first that fits: it {TAKES}, 11 rows; fsdp")
    plans["rows_that_fit"] = 0
    assert answer_of_plan(plans, 4, 24e9)[0].text == (
        "of 24.0 GB, nothing fits with a row: fsdp leaves most, 9.00 GB, and one row keeps more. Checkpoint layers in "
        "the model, or compute in 16 bits; where logits are most of it, a chunked loss helps"
    )


def test_a_plan_without_a_gpu_and_with_messages_that_depend_on_rows():
    plans = rows(ddp=DDP, zero3=FSDP, fsdp=FSDP).reset_index().drop(columns="peak_bytes")
    plans["messages_per_step"] = pd.array([86, 5, None], "Int64")
    plans.loc[2, "wire_bytes_per_step"] = None
    assert answer_of_plan(plans, 4)[:-1] == [
        ("LEAST MEMORY", f"zero3 and fsdp, 4.00 MB at rest on a rank, 75 % {ALL}"),
        ("COST", "ddp sends 6.00 MB a rank and step, zero3 1.50 times as much, 9.00 MB; messages: ddp 86, zero3 5; "
                 "what fsdp sends is not known"),
    ]  # fmt: skip


EQUAL, PLANNED, CORES = "losses equal to 1.0e-07", "bytes and messages as planned", "ranks had their cores"
TRUST = [
    ({}, 1.0, "", f"{EQUAL} · {PLANNED} · {CORES}"),
    ({"losses_equal": [None, False], "judged_loss_difference": [None, 0.5]}, 1.0, "",
     f"losses NOT equal: they differ by 5.0e-01 · {PLANNED} · {CORES}"),
    ({"judged_loss_difference": [None, None]}, 1.0, "", f"losses not compared: one strategy ran · {PLANNED} · {CORES}"),
    ({}, float("nan"), "", f"losses NOT finite · {PLANNED} · {CORES}"),
    ({"as_planned": [True, None]}, 1.0, "", f"{EQUAL} · {PLANNED}, without a plan those of zero1 · {CORES}"),
    ({"as_planned": [True, False]}, 1.0, "", f"{EQUAL} · bytes or messages of zero1 NOT as planned · {CORES}"),
    ({"as_planned": [None, None]}, 1.0, "", f"{EQUAL} · bytes and messages have no plan · {CORES}"),
    ({}, 1.0, "Times are UNCERTAIN: ranks slept.", f"{EQUAL} · {PLANNED} · times uncertain, because ranks slept"),
    ({"disagreement": "rank 1 took a step more"}, 1.0, "",
     f"Ranks DISAGREE, so the numbers are of no one run: in ddp rank 1 took a step more · "
     f"{EQUAL} · {PLANNED} · {CORES}"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "loss", "doubt", "said"), TRUST)
def test_can_i_trust_it(tmp_path, monkeypatch, changed, loss, doubt, said):
    monkeypatch.setattr("shardlab.experiment.told.verdicts.busy_verdict", lambda *_: doubt)
    manifests = {"ddp": {"disagreement": changed.get("disagreement"), "config": {}}, "zero1": {"config": {}}}
    known = {"losses_equal": [None, True], "judged_loss_difference": [None, 1e-7], "as_planned": [True, True]}
    table = rows(ddp=DDP, zero1=ZERO1).reset_index().assign(**known | {k: v for k, v in changed.items() if k in known})
    step = {"step": 1, "rank": 0, "step_us": 1e3, "traced_memory": False, "learning_rate": 0.1, "loss": loss}
    steps = pd.DataFrame([step | {"run": run} for run in manifests])
    sent = collectives(*(collective(0, 0, (0, 0, 1), run=run) for run in manifests))
    records = Records(sent, spans(), steps, steps, steps, manifests=manifests)
    found = answer(Comparison(table, records, tmp_path), CompareConfig(ranks=4))
    assert found[2].text == "ddp and zero1 send 6.00 MB a rank and step; messages: ddp 1, zero1 1"
    assert found[4].text == said
    assert found[5].text.startswith("see below why losses are not equal") == ("NOT equal" in said)
    failed = answer(Comparison(table, records, tmp_path, {"fsdp": "rank 0 raised ValueError"}), CompareConfig(ranks=4))
    assert failed[5].text == "see below what fsdp raised, and what it says to change"


def test_one_command_to_try_next():
    config, linked = CompareConfig(ranks=4), CompareConfig(ranks=4, link="10Gbps,50us")
    of = {"has_failed": False, "doubt": ""}
    assert following(CompareConfig(), {"ddp"}, has_failed=True, doubt="").startswith("shardlab compare --clip 1, or")
    assert "--ranks 2" in following(config, {"ddp"}, has_failed=False, doubt="slept")
    assert "--steps 50" in following(CompareConfig(ranks=2), {"ddp"}, has_failed=False, doubt="slept")
    two_axes = CompareConfig(("single", "fsdp"), sharding="hybrid_shard", ranks=4, model="mlp")
    assert "--model mlp --ranks 4 --sharding hybrid_shard --steps 50 --strategies single,fsdp, with" in following(
        two_axes, {"fsdp"}, has_failed=False, doubt="slept"
    ), "2 have no groups"
    own = CompareConfig(("single", HFSDP()), ranks=4)
    assert "the same with steps=50" in following(own, {"hfsdp"}, has_failed=False, doubt="slept"), "no command names it"
    stages = CompareConfig(ranks=4, pipe=4)
    assert following(stages, {"ddp+1f1b"}, has_failed=False, doubt="slept").startswith(
        "shardlab compare --ranks 4 --pipe 4 --steps 50"
    ), "2 are no 4 stages"
    given = {"schedule": "gpipe", "micro_batches": 3, "batch": 6, "begins": "blocks.2"}
    stages = CompareConfig(("single", "ddp"), ranks=2, pipe=2, **given)
    for failed, doubt in ((True, ""), (False, "slept")):
        said = following(stages, {"ddp+gpipe"}, has_failed=failed, doubt=doubt)
        words = "--batch 6 --pipe 2 --begins blocks.2 --schedule gpipe --micro-batches 3 --"
        assert f"shardlab compare {words}" in said, "the same again"
    assert "compare --pipe 2 --begins blocks.2 --schedule gpipe --batch 6 --m" in following(stages, {"ddp"}, **of)
    halved = {"schedule": "interleaved", "batch": 4, "micro_batches": 4, "begins": ("blocks.0", "blocks.1", "logits")}
    said = following(CompareConfig(ranks=2, pipe=2, **halved), {"ddp+interleaved"}, **of)
    assert said.startswith("shardlab compare --pipe 2 --schedule 1f1b,zb-h1 --batch 4"), "of two stages, not four"
    many = CompareConfig(("ddp",), ranks=3, batch=18, wrap=("blocks.*", "head"), model="gpt-1m")
    assert " --batch 18 --wrap 'blocks.*,head' --strategies zero1" in following(many, {"ddp"}, **of)
    assert "--batch" in following(many, {"ddp"}, has_failed=False, doubt="slept"), "18 rows divide among 2 ranks too"
    assert "--batch" not in following(replace(many, batch=15), {"ddp"}, has_failed=False, doubt="slept")
    divided = CompareConfig(("single", "ddp"), ranks=4, tp=2)
    assert "--ranks 4 --tp 2 --steps 50" in following(divided, {"ddp"}, has_failed=False, doubt="slept")
    chosen = CompareConfig(("ddp",), ranks=2, accumulation=4, clip=1.0, link="1Gbps,5us", broadcast_buffers=True)
    kept = "--broadcast-buffers --link 1Gbps,5us"
    assert f"--accumulation 4 --clip 1.0 {kept} --strategies zero1,zero3,fsdp" in following(chosen, {"ddp"}, **of)
    assert f"--accumulation 4 {kept} --clip 0.1, or" in following(chosen, {"ddp"}, has_failed=True, doubt="")
    sharded = CompareConfig(("fsdp",), ranks=4, pipe=2, schedule=("1f1b", "zb-h1"), link="1Gbps,5us")
    assert following(sharded, {"fsdp+1f1b"}, **of).startswith(
        "shardlab compare --ranks 4 --pipe 2 --strategies fsdp --link 1Gbps,5us --schedule 1f1b,zb-h1"
    )
    # Records hold the workload's name alone, and the units of fsdp follow from the workload.
    recorded = CompareConfig(ranks=3, strategies=("zero2", "fsdp"))
    object.__setattr__(recorded, "workload", "words")
    assert "--ranks 2 --strategies zero2,fsdp, with" in following(  # half of 3, but one sends nothing
        recorded, {"zero2", "fsdp"}, has_failed=False, doubt="slept"
    )
    for options, words in (
        ({}, "--pipe 2 --schedule 1f1b --batch 32 --micro-batches 16: a smaller bubble"),
        ({"batch": 8}, "--schedule zb-h1 --batch 8 --micro-batches 8: which bubble"),
        ({"batch": 8, "schedule": ("1f1b", "zb-h1")}, "--schedule 1f1b,zb-h1 --batch 16 --micro-batches 16: a smaller"),
        ({"schedule": "interleaved"}, "--schedule interleaved --batch 32 --micro-batches 16"),
    ):
        stages = CompareConfig(ranks=2, pipe=2, **options)
        said = following(stages, {"ddp+1f1b"}, **of)
        assert words in said
        given = dict(re.findall(r"--([a-z-]+) (\S+?):?(?: |$)", said))
        assert CompareConfig(
            ranks=2, pipe=2, schedule=tuple(given["schedule"].split(",")), batch=int(given["batch"]),
            micro_batches=int(given["micro-batches"]),
        )  # fmt: skip
    own = CompareConfig(workload=data_path("train.py").as_posix() + ":workload", ranks=2)
    assert own.place is not None
    assert own.place in following(own, {"ddp"}, **of, place=own.place)
    assert "FILE.py:NAME" in following(own, {"ddp"}, **of)
    assert " --workload 'my own/train.py:net' " in following(own, {"ddp"}, **of, place="my own/train.py:net")
    tuned = CompareConfig(
        ("zero2", "fsdp"), ranks=2, seed=3, bucket_mib=0.5, wrap="root", prefetch=2, replicate_below=9
    )
    kept = "--seed 3 --bucket-mib 0.5 --wrap root --prefetch 2 --replicate-below 9"
    assert f"{kept} --steps 50" in following(tuned, {"fsdp"}, has_failed=False, doubt="slept"), "another run else"
    for given, ran, words in (
        (config, {"ddp"}, "fsdp"),
        (config, {"fsdp"}, "--link"),
        (linked, {"fsdp"}, "shardlab plan"),
    ):
        assert words in following(given, ran, **of)
