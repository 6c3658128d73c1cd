"""Scripts as torch's own pages write them, recorded from outside: the numbers are the same, and the tables are true."""

import json
import re
import runpy
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

from shardlab.cli import app, main
from shardlab.experiment.told.summary import LOOK_FOR
from shardlab.recording.record import record
from shardlab.records.store import load_run
from shardlab.why.slow_messages import repeated
from tests.export.trace_format import check
from tests.launch.helpers import as_under_torchrun

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 4


def run(script):
    runpy.run_path(str(script), run_name="__main__")


def run_recorded(script, directory):
    sys.argv = ["shardlab", "record", "--out", str(directory), str(script)]
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code


@pytest.fixture(scope="module", params=["ddp", "fsdp2", "zero", "tensor_parallel"])
def recorded(request, pools, tmp_path_factory):
    """Name, output without a recorder, output with it, records, their directory."""
    pools(2).start()  # and with it the server that forks
    script, place = SCRIPTS / f"{request.param}.py", tmp_path_factory.mktemp(request.param)
    plain, directory = as_under_torchrun(place / "plain.txt", run, script), place / "run"
    with_recorder = as_under_torchrun(place / "recorded.txt", run_recorded, script, directory)
    return request.param, plain, with_recorder, load_run(directory), directory


def labels(collectives, rank, column):
    """(tag without number, a column, phase) of each collective, in order."""
    rows = collectives[collectives["rank"] == rank]
    return list(zip(rows["tag"].str.rpartition(" ")[0], rows[column], rows["phase"], strict=True))


def at_rest(records, step):
    rows = records.memory[(records.memory["where"] == "rest") & (records.memory["step"] == step)]
    return {rank: dict(zip(own["role"], own["bytes"], strict=True)) for rank, own in rows.groupby("rank")}


def test_output_and_losses_are_bit_identical_and_every_step_is_there(recorded):
    name, plain, with_recorder, records, _ = recorded
    assert plain.count("loss") == STEPS
    assert with_recorder == plain
    steps = records.steps
    assert sorted(zip(steps["rank"], steps["step"], strict=True)) == list(product(range(2), range(STEPS)))
    assert (steps["step_us"] > 0).all()
    assert steps[["grad_norm", "num_tokens"]].isna().all(axis=None)
    assert steps.loc[steps["traced_memory"], "step"].unique().tolist() == [0, 2]
    printed = [float.fromhex(line.split()[1]) for line in plain.splitlines()]
    own = steps.sort_values("step").groupby("rank")["loss"].apply(list)
    # The DDP script prints the mean over ranks, into which it reduces its loss in place; the others print rank 0's.
    found = [sum(losses) / 2 for losses in zip(*own, strict=True)] if name == "ddp" else own[0]
    assert found == pytest.approx(printed, rel=1e-6)


def test_collectives_are_named_by_what_torch_sends_them_for_and_have_their_times_in_order(recorded):
    name, *_, records, _ = recorded
    units = 4  # three blocks and the root
    gradients = ("gradients of bucket", "all_reduce", "backward")
    expected = {
        "ddp": [("all_reduce of the script", "all_reduce", "data"), gradients],
        "fsdp2": [
            *[("parameters, gather", "all_gather", "forward")] * units,
            *[("parameters, gather", "all_gather", "backward"), ("gradients, reduction", "reduce_scatter", "backward")]
            * 3,
            ("gradients, reduction", "reduce_scatter", "backward"),
            ("all_reduce of DTensor", "all_reduce", "clip"),
        ],
        "zero": [gradients, *[("parameters", "broadcast", "step")] * 12],
        "tensor_parallel": [("all_reduce of DTensor", "all_reduce", "forward")],
    }[name]
    for _, rows in records.collectives.query("step in (2, 3)").groupby("step"):
        assert sorted(labels(rows, 0, "op")) == sorted(expected)
    assert set(records.collectives["axis"]) == {"tensor" if name == "tensor_parallel" else "data"}
    rows = records.collectives
    assert (rows["issue_us"] <= rows["start_us"]).all()
    assert (rows["start_us"] <= rows["end_us"]).all()
    waited = rows.dropna(subset="wait_start_us")
    assert (waited["wait_start_us"] <= waited["wait_end_us"]).all()
    # Both ranks count from the same moment, so a collective of all cannot end on one before it began on the other.
    for _, pair in rows[rows["op"] == "all_reduce"].groupby("seq"):
        assert pair["issue_us"].max() <= pair["end_us"].min() + 1e3


def test_units_are_timed_and_memory_is_known_by_role(recorded):
    name, *_, records, _ = recorded
    # On a busy machine a short unit, all of whose time was off the CPU, is missing in a step; never in every step.
    spans = records.spans
    units = {
        "ddp": {"net1", "relu", "net2"},
        "fsdp2": {"tok_embeddings", "pos_embeddings", "layers.0", "layers.1", "layers.2", "norm", "output"},
        "zero": set("012345"),
        "tensor_parallel": {"in_proj", "relu", "out_proj"},
    }[name]
    assert units <= set(spans.loc[spans["kind"] == "forward", "unit"])
    whole = spans[spans["unit"] == "model"]
    assert {"forward", "backward", "optimizer"} == set(whole["kind"]) - {"off_cpu"}
    for rank, held in at_rest(records, 1).items():
        parts = [held[role] for role in ("parameter", "gradient", "optimizer_state", "communication_buffer")]
        if name == "ddp":  # its bucket: gradients are no views of it by default
            assert parts == [4 * (10 * 10 + 10 + 10 * 5 + 5)] * 4
        elif name == "fsdp2":
            assert parts[2] == 2 * parts[0] == 2 * parts[1]
        elif name == "zero":  # Adam's two moments, of the half that this rank owns
            assert parts == [*[4 * 6 * (64 * 64 + 64)] * 3, 0]
        else:
            assert parts == [4 * (16 * 10 + 16 + 5 * 16 + 5) * times for times in (1, 1, 2, 0)]
        assert held["unattributed"] < 20_000, rank  # the batch and the loss
    peak = records.memory[records.memory["where"] == "peak"]
    assert set(peak["step"]) == {0, 2}
    total = peak.groupby(["rank", "step"])["bytes"].sum()
    assert (total == records.steps.set_index(["rank", "step"])["peak_bytes"].dropna()).all()


def train_ddp(rank, directory):
    used, unused = nn.Linear(4, 4), nn.Linear(4, 4)
    used.unused = unused
    used.register_buffer("counts", torch.zeros(3, dtype=torch.int32))  # a buffer of whole numbers is still a buffer
    first = nn.parallel.DistributedDataParallel(used, find_unused_parameters=True)
    second = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD([*used.parameters(), *second.parameters()], lr=0.1)
    with record(directory, trace_memory=None):
        for _ in range(3):
            second(first(torch.ones(2, 4))).sum().backward()
            optimizer.step()


def train_pipeline(rank, directory):
    """Two micro-batches, as 1F1B sends them at the first of two stages and at the last."""
    group, stage = dist.new_group([0, 1]), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    with record(directory, trace_memory=None):
        for _ in range(3):
            got = torch.empty(2, 4)
            for _ in range(2):
                if rank == 1:
                    dist.recv(got, 0, group=group)
                given = got.clone().requires_grad_()
                result = stage(given)
                if rank == 0:
                    dist.send(result.detach(), 1, group=group)
                    dist.recv(got, 1, group=group)
                result.backward(got)
                if rank == 1:
                    dist.send(given.grad, 0, group=group)
            optimizer.step()


def test_what_ddp_sends_beside_gradients_and_buffers_has_names_of_its_own(pools, tmp_path):
    pools(2).run(train_ddp, tmp_path)
    for rank in range(2):
        tags = [tag for tag, *_ in labels(load_run(tmp_path).collectives.query("step > 0"), rank, "axis")]
        gradients = [*["gradients of bucket"] * 2, "map of used parameters"]
        assert sorted(tags) == sorted([*["order of the new buckets"] * 2, *["parameters or buffers", *gradients] * 2])


def train_in_turn(rank, directory):
    """Two models of DDP, of which each step trains one."""
    models = [nn.parallel.DistributedDataParallel(nn.Linear(size, 4, bias=False)) for size in (16, 32)]
    with record(directory, trace_memory=None):
        for _ in range(2):
            for model in models:
                model(torch.ones(2, model.module.in_features)).sum().backward()
                torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_buckets_of_a_model_that_rests_are_buckets_too(pools, tmp_path):
    pools(2).run(train_in_turn, tmp_path)
    records = load_run(tmp_path)
    buckets = [at_rest(records, step)[rank]["communication_buffer"] for step in (0, 1) for rank in (0, 1)]
    assert buckets == [4 * 4 * 16] * 2 + [4 * 4 * (16 + 32)] * 2


def train_sparse(rank, directory):
    """Each rank looks up other rows, and some of them twice."""
    model = nn.parallel.DistributedDataParallel(nn.Embedding(50, 4, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(directory, trace_memory=None):
        for _ in range(3):
            model(torch.tensor([[1, 2, 1], [2, 3, 4]][rank])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_of_a_sparse_gradient_ddp_sends_the_rows_that_each_rank_has(pools, tmp_path):
    pools(2).run(train_sparse, tmp_path)
    sent = load_run(tmp_path).collectives.query("step == 2").sort_values("rank")
    assert sent["op"].tolist() == ["all_gather"] * 2
    assert sent["wire_bytes"].tolist() == [num_rows * (8 + 4 * 4) for num_rows in (2, 3)]
    assert "72 B a rank and step; messages: 1" in reported(tmp_path)["answer"]["SENT"]


def train_seldom_together(rank, directory, steps):
    """Parameters are averaged in every fourth step, before the optimizer's."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(directory, trace_memory=None, watch_every=8):
        for step in range(steps):
            model(torch.randn(2, 4)).square().mean().backward()
            for param in model.parameters() if step % 4 == 0 else ():
                dist.all_reduce(param.data)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (18, "20 B a rank and step; messages: 0.5; means over the first 16 steps"),
        (8, "20 B a rank and step; messages: 0.5; means over the first 8 steps"),
    ],
)
def test_where_steps_send_unlike_bytes_it_is_a_mean_of_steps_watched_in_turn(pools, tmp_path, steps, said):
    """Not of the last one watched, which sends nothing or, as 16 divides by four, more than most."""
    pools(2).run(train_seldom_together, tmp_path, steps)
    found = reported(tmp_path)
    assert found["answer"]["SENT"] == f"{said}, of which some send more"
    row = found["strategies"][0]
    assert (row["wire_bytes_per_step"], row["moved_bytes_per_step"]) == (20.0, 20.0)
    assert row["exposed_comm_ms"] == 0.0, "of most steps"
    waited = re.search(r"is waited for most in (\S+) % of all steps", found["answer"]["LATE"])
    assert waited is None or float(waited[1]) < 50


def train_accumulating(rank, directory, wrap, syncs):
    """Two twins of two layers, each with a forward and backward of its own, in two micro-batches."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    twins = [nn.parallel.DistributedDataParallel(one) if wrap == "ddp" else _sharded(one) for one in layers]
    optimizer = torch.optim.SGD([param for twin in twins for param in twin.parameters()], lr=0.1)
    with record(directory, trace_memory=None):
        for _ in range(3):
            for micro_batch, twin in product(range(2), twins):
                is_last = syncs or micro_batch == 1
                if wrap == "ddp":
                    twin.require_backward_grad_sync = is_last  # as no_sync() does
                else:
                    twin.set_requires_gradient_sync(is_last)
                twin(torch.ones(2, 4)).sum().backward()
            optimizer.step()


def _sharded(module):
    for layer in module:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return fully_shard(module)


@pytest.mark.parametrize(("wrap", "buckets"), [("ddp", 1), ("fsdp2", 2)])
def test_a_reduction_of_the_next_micro_batch_has_the_number_of_the_one_before(pools, tmp_path, wrap, buckets):
    found = {}
    for syncs in (True, False):
        directory = tmp_path / str(syncs)
        pools(2).run(train_accumulating, directory, wrap, syncs)
        records = load_run(directory)
        in_a_step = [
            table[(table["rank"] == 0) & (table["step"] == 2)] for table in (records.collectives, records.spans)
        ]
        sent = in_a_step[0]["tag"][in_a_step[0]["tag"].str.startswith("gradients")]
        found[syncs] = (sent.nunique(), len(sent), len(repeated(*in_a_step)))
        said = "is sent 2 times a step" in reported(directory)["answer"]["SENT"]
        assert said == syncs
    # Twins of one size are two models: what the second reduces is not what the first has.
    assert found == {True: (2 * buckets, 4 * buckets, 2 * buckets), False: (2 * buckets, 2 * buckets, 0)}


def train_clipped(rank, directory, loss, clippings=1):
    """Two ranks of DDP with targets of their own, so that the loss moves; gradients are clipped."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    targets, norms = torch.Generator().manual_seed(rank), []
    with record(directory, trace_memory=None):
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(torch.ones(2, 4)), torch.randn(2, 1, generator=targets)).backward()
            norms += [float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) for _ in range(clippings)]
            optimizer.step()
    return norms


def nothing(found, targets):
    return (0 * found - targets).square().mean()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (nothing, "the norm of the gradients is 0"),
        (lambda found, targets: (found - targets).mean(), "the norm of the gradients is 2.23607 in every step"),
        (lambda found, targets: (found - targets).square().mean(), None),
    ],
    ids=["outputs times 0", "outputs alone", "it trains"],
)
def test_a_script_that_does_not_train_is_told_by_the_norm_that_it_clips_by(pools, tmp_path, loss, said):
    norms = pools(2).run(train_clipped, tmp_path, loss)
    steps = load_run(tmp_path).steps
    assert steps.sort_values("step").groupby("rank")["grad_norm"].apply(list).tolist() == norms
    assert reported(tmp_path)["answer"].get("TRAINS") == (said and f"cannot be said: {said}; look for {LOOK_FOR}")


def test_of_a_step_that_is_clipped_twice_the_norm_is_not_known(pools, tmp_path):
    pools(2).run(train_clipped, tmp_path, nothing, clippings=2)
    assert load_run(tmp_path).steps["grad_norm"].isna().all()


def test_what_stages_of_a_pipeline_send_each_other_is_not_clipping(pools, tmp_path):
    pools(2).run(train_pipeline, tmp_path)
    records = load_run(tmp_path)
    sent, got = ("send of the script", "pipeline"), ("recv of the script", "pipeline")
    first = [(*sent, "forward"), (*got, "forward"), (*sent, "forward"), (*got, "forward")]
    last = [(*got, "data"), (*sent, "backward"), (*got, "backward"), (*sent, "backward")]
    sent_in = records.collectives.query("step > 0")
    assert [labels(sent_in, rank, "axis") for rank in range(2)] == [first * 2, last * 2]
    assert next(iter(records.manifests.values()))["mesh"] == {"pipeline": 2}


def test_the_answer_and_a_timeline_are_made_of_it(recorded, tmp_path):
    *_, directory = recorded
    found = reported(directory)
    assert list(found["answer"]) == ["MEMORY", "TIME", "WHY", "SENT", "LATE", "NEXT"]
    assert found["answer"]["LATE"].startswith(("rank ", "no rank; "))
    assert "; shardlab same --ranks 2 " in found["answer"]["NEXT"]
    (row,) = found["strategies"]
    assert (row["ranks"], row["steps"], row["losses_equal"]) == (2, STEPS, None)
    assert shardlab("trace", directory, "-o", tmp_path / "timeline.json").exit_code == 0
    check(json.loads((tmp_path / "timeline.json").read_text()))


# Of one whose units are sharded and one whose are not: pages and comparisons ask nothing else of a script.
@pytest.mark.parametrize("recorded", ["ddp", "fsdp2"], indirect=True)
def test_report_and_diff_read_it(recorded):
    *_, directory = recorded
    done = shardlab("report", directory)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == f"Report: {directory / 'report.html'}"
    page = (directory / "report.html").read_text()
    for words in ("Timeline of step", "Where the peak", "Why a step takes", "on 2 ranks", "unattributed"):
        assert words in page, words
    found = reported(directory)
    assert all(name in done.stdout and text.split()[0] in page for name, text in found["answer"].items())
    done = shardlab("diff", directory, directory)
    assert done.exit_code == 0
    assert "Losses were not compared" in done.stdout
    rows = json.loads(shardlab("diff", directory, directory, "--json").stdout)
    assert {row["difference"] for row in rows} <= {0.0, None}
    assert {row["quantity"] for row in rows} >= {"buffer_bytes", "unattributed_bytes", "unwatched_recorder_share"}
    refused = shardlab("what-if", directory, "--strategy", "run", "--link", "10Gbps,50us")
    assert refused.exit_code
    assert "is the record of a script" in refused.output


def reported(directory):
    """What ``report --json`` says, without the page that it writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardlab.recording.report.write_report", lambda _: None)
        return json.loads(shardlab("report", directory, "--json").stdout)


def shardlab(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
