"""``same`` on scripts: right ones are the same, of broken ones the cause is named; ``bench --same`` has them all."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from typer.testing import CliRunner

from shardlab.cli import app
from shardlab.course.same_scripts import same_matrix, verdict
from shardlab.same.notes import Notes, Part, Step
from shardlab.same.process import Job
from shardlab.same.ranks import at_once, judged, too_large
from tests.launch.helpers import gone_within, start_forked, start_python

SCRIPTS = Path(__file__).parents[1] / "recording" / "scripts"


@pytest.mark.parametrize(
    ("script", "ranks", "word"),
    [("ddp", 2, "SAME"), ("fsdp2", 3, "SAME"), ("tensor_parallel", 2, "SAME"), ("zero", 2, "LOST")],
)
def test_scripts_of_torchs_tutorials_are_the_same(script, ranks, word):
    """That of ZeroRedundancyOptimizer gives all ranks the same rows."""
    said = judged(Job(SCRIPTS / f"{script}.py", ranks=ranks, float64=True), 60)
    assert said.word == word, str(said)
    assert "float64" in str(said)
    assert said.table["relative"].max() < 1e-12


@pytest.mark.parametrize(
    ("ranks", "kind", "stories"),
    [
        (2, "by hand", ("a rank skips a step", "gathered without a gradient", "a buffer that nobody clears")),
        (2, "DDP", ("cleared in each micro-batch", "not given to the optimizer", "learning rates that differ")),
        (2, "FSDP2", ("a mean of means", "buffers that drift", "no micro-batch syncs")),
        (2, "FSDP1", ("as it is", "the norm of own pieces")),
        (2, "ZeRO", ("as it is", "a rank does not clip")),
        (3, "by hand", ("reduced in every micro-batch", "nobody sends stepped weights", "frozen on one rank")),
        (4, "by hand", ("divided by one axis of two",)),
        (2, "DDP", ("uneven rows, counted over ranks", "unused", "bf16", "gathered with a gradient")),
    ],
)
def test_the_cause_of_a_broken_script_is_named_and_no_right_one_is_called_different(ranks, kind, stories):
    rows = list(same_matrix(ranks, stories, (kind,)))
    assert {row.story for row in rows} == {*stories}
    assert not [(row.story, row.kind, row.said) for row in rows if not row.is_right]
    assert "0 of them are called the same" in verdict(rows)


LOOP = """
import torch, torch.distributed as dist
from pathlib import Path
{begin}
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dist.init_process_group("gloo")
for step in range(100):
    model(torch.randn(3, 4)).square().mean().backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
    {step}
    optimizer.zero_grad()
    torch.save(model.state_dict(), "model.pt")
"""
NO_STEP = LOOP.format(begin="", step="break")
RAISES = LOOP.format(begin="", step="assert dist.get_world_size() == 2, 'two, please'; optimizer.step()")
OTHERS = LOOP.format(begin="", step="").replace("model.parameters(), lr", "[torch.zeros(3, requires_grad=True)], lr")
OTHERS = OTHERS.replace("    optimizer.zero_grad()", "    optimizer.step()")


SPARSE = LOOP.format(begin="", step="optimizer.step()").replace("Linear(4, 2)", "Embedding(4, 2, sparse=True)")
SPARSE = SPARSE.replace("randn(3, 4)", "tensor([0, 1, 1])")
IN_BACKWARD = LOOP.format(begin="", step="").replace(
    "dist.init", "model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())\ndist.init"
)
OF_RANK = LOOP.format(begin="import os", step="").replace("(4, 2)", "(4, 2 + int(os.environ['RANK']))")
CLIPS_EACH = LOOP.format(begin="", step="if step % 2 == 0: continue\n    optimizer.step()").replace(
    "    for param", "    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)\n    for param"
)
CLOSURE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    x = torch.randn(3, 4)
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss
    optimizer.step(closure)
"""
ENDLESS = LOOP.format(begin="import time", step="time.sleep(99)")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (OF_RANK, "ranks train different parameters, first 'bias': [2] on rank 0 and [3] on rank 1"),
        (ENDLESS, "it did not end"),
        (NO_STEP, "no step of an optimizer was seen"),
        (RAISES, "in one process: rank 0 ends after 0 steps: AssertionError: two, please"),
        (OTHERS, "no module has that was called"),
        (IN_BACKWARD, "an optimizer steps inside a backward, where other gradients are still to come"),
        (SPARSE, "gradients of 'weight' are sparse, which is not compared; build it with sparse=False"),
        (CLIPS_EACH, "gradients are clipped, and then others are added"),
        (CLOSURE.replace("SGD", "LBFGS"), "an optimizer calls its closure several times in a step, as LBFGS does"),
        ("raise ValueError('mine')", "ValueError: mine"),
    ],
)
def test_what_cannot_be_judged_is_said(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    told = judged(Job(tmp_path / "train.py"), 6 if text == ENDLESS else 60)
    assert told.word == "CANNOT BE SAID"
    assert said in str(told)


PENALTY = CLOSURE.replace("x = torch.randn(3, 4)", "x = torch.randn(3, 4).requires_grad_()").replace(
    "model(x).square().mean()", "torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)[0].square().mean()"
)


@pytest.mark.parametrize("text", [CLOSURE, PENALTY])
def test_gradients_that_a_closure_brings_and_penalties_on_those_of_rows_are_judged(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    assert judged(Job(tmp_path / "train.py"), 60).word == "SAME"


WITH_WORKERS = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = TensorDataset(torch.randn(40, 4), torch.randn(40, 2))
for x, y in DataLoader(rows, batch_size=5, sampler=DistributedSampler(rows), num_workers=2):
    torch.nn.functional.mse_loss(model(x), y).backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_rows_of_a_loader_with_workers_are_given_again(tmp_path):
    (tmp_path / "train.py").write_text(WITH_WORKERS)
    said = judged(Job(tmp_path / "train.py"), 60)
    assert said.word == "SAME", str(said)


def test_a_wrapper_that_one_process_does_without_changes_no_names(tmp_path):
    wrapped = "Linear(4, 2)\nmodel = torch.nn.Sequential(model) if dist.get_world_size() > 1 else model"
    text = WITH_WORKERS.replace("Linear(4, 2)", wrapped).replace("num_workers=2", "num_workers=0")
    (tmp_path / "train.py").write_text(text)
    said = judged(Job(tmp_path / "train.py"), 60)
    assert said.word == "SAME", str(said)


TWO_TOWERS = """
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy, normalize
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)
    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(world)[rank]
class Towers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(6, 4), torch.nn.Linear(5, 4)
    def forward(self, x, y):
        return normalize(self.left(x), dim=-1), normalize(self.right(y), dim=-1)
torch.manual_seed(0)
model = Towers()
matrices = torch.optim.SGD([one for one in model.parameters() if one.ndim > 1], lr=0.1, momentum=0.9)
others = torch.optim.AdamW([one for one in model.parameters() if one.ndim == 1], lr=0.01)
torch.manual_seed(1 + rank)
for step in range(5):
    for _ in range(2):
        x, y = model(torch.randn(8, 6), torch.randn(8, 5))
        logits = {features} * 5
        cross_entropy(logits, torch.arange({labels})).backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= 2 * world
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    matrices.step()
    others.step()
    model.zero_grad()
"""
OWN, ALL = ("x @ y.T", "8"), ("Gather.apply(x) @ Gather.apply(y).T", "8 * world")


@pytest.mark.parametrize(("features", "labels"), [OWN, ALL])
def test_gradients_may_be_scaled_after_backward_and_stepped_by_two_optimizers(tmp_path, features, labels):
    """``ALL`` as CLIP gathers embeddings: into a list, in a function with a backward of its own."""
    (tmp_path / "train.py").write_text(TWO_TOWERS.format(features=features, labels=labels))
    said = judged(Job(tmp_path / "train.py", float64=True), 60)
    assert said.word == "SAME", str(said)


COUNTS_ROWS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    torch.manual_seed(step * world + rank)
    known = (torch.arange(4) < 2 + step * rank).float()
    number = known.sum()
    dist.all_reduce(number)
    (((model(torch.randn(4, 4)).square().sum(1)) * known).sum() / number * world).backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= world
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_count_that_one_process_makes_of_other_rows_makes_no_right_script_different(tmp_path):
    """In step 0 each rank has as many as the single process counts, and both at once have twice as many."""
    (tmp_path / "train.py").write_text(COUNTS_ROWS)
    said = judged(Job(tmp_path / "train.py"), 60)
    assert said.word == "CANNOT BE SAID"
    assert "in step 1 the loss of rank 1 is 0.8 times" in str(said)


SUM_OVER_ROWS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mine = torch.randn(19, 4)[rank::world]
rows = {rows}
for x in rows:
    torch.nn.functional.mse_loss(model(x), x[:, :2], reduction="sum").backward()
    count = torch.tensor(2.0 * len(x))
    {count}
    for param in model.parameters():
        {send}
    optimizer.step()
    optimizer.zero_grad()
"""
SLICES, LOADER = "mine.split(4)", "torch.utils.data.DataLoader(mine, batch_size=4)"
OVER_RANKS, BY_ALL = "dist.all_reduce(count)", "dist.all_reduce(param.grad); param.grad /= count"


@pytest.mark.parametrize(
    ("rows", "count", "send", "said"),
    [
        (SLICES, OVER_RANKS, BY_ALL, "SAME"),
        (LOADER, OVER_RANKS, BY_ALL, "SAME"),
        (SLICES, OVER_RANKS, f"{BY_ALL} * world", "divided by the 2 ranks twice"),
        (LOADER, "", f"param.grad /= count * world; {BY_ALL.partition(';')[0]}", "a mean of means"),
        (SLICES, "", BY_ALL.replace("count", "32"), "divides gradients of a sum over rows by 32, and its loss is of 8"),
    ],
)
def test_rows_of_a_sum_may_be_counted_over_ranks_after_backward(tmp_path, rows, count, send, said):
    """In the last step ranks have unlike numbers; of slices one process then counts more than these."""
    (tmp_path / "train.py").write_text(SUM_OVER_ROWS.format(rows=rows, count=count, send=send))
    told = str(judged(Job(tmp_path / "train.py"), 60))
    assert said in told
    assert "NOTE" not in told


HAND_DIVIDED = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor_ranks = int(sys.argv[1])
assert dist.get_world_size() == tensor_ranks
rank = dist.get_rank()

class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        dist.all_reduce(tensor := tensor.clone())
        return tensor

    @staticmethod
    def backward(ctx, grad):
        return grad

class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor

    @staticmethod
    def backward(ctx, grad):
        {added}dist.all_reduce(grad := grad.clone())
        return grad

class Divided(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.whole = torch.nn.Linear(4, 4)
        first, second = torch.randn(8, 4), torch.randn(2, 8)
        self.first = torch.nn.Parameter(first.chunk(tensor_ranks)[rank].contiguous())
        self.second = torch.nn.Parameter(second.chunk(tensor_ranks, 1)[rank].contiguous())

    def forward(self, rows):
        return Summed.apply((Copied.apply(self.whole(rows)) @ self.first.T).tanh() @ self.second.T + {bias})

def added(grad):
    dist.all_reduce(grad := grad.clone())
    return grad

model = Divided()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{hook}
for step in range(9):
    model(torch.randn(3, 4)).square().mean().backward()
    {after}
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "SAME"),
        ({"after": "model.second.grad *= tensor_ranks"}, "gradient of second (1 of 4); ratio 2"),
        ({"after": "dist.all_reduce(model.first.grad)"}, "ranks 0, 1 hold different pieces of first"),
        ({"hook": "model.first.register_hook(added)"}, "ranks 0, 1 hold different pieces of first"),
        ({"added": "0 and "}, "different gradients of whole.weight, whole.bias: each a part"),
        ({"bias": "1"}, "a bias that each of them adds"),
    ],
)
def test_parameters_that_a_script_divides_by_itself_are_put_together(tmp_path, change, said):
    right = {"after": "", "added": "", "bias": "0", "hook": ""}
    (tmp_path / "train.py").write_text(HAND_DIVIDED.format(**right | change))
    told = judged(Job(tmp_path / "train.py", ("2",), alone=("1",)), 60)
    assert said in str(told)
    assert change or told.word == "SAME", str(told)


COUNTED = """
import sys, weakref, torch, torch.distributed as dist
from pathlib import Path
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

class Live(TorchDispatchMode):
    bytes = peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        known = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        if "from_file" not in str(function):
            for one in (one for one in tree_leaves(made) if isinstance(one, torch.Tensor)):
                if (storage := one.untyped_storage())._cdata not in known:
                    self.count(storage.nbytes())
                    weakref.finalize(storage, self.count, -storage.nbytes())
        return made

    def count(self, num_bytes):
        self.bytes += num_bytes
        self.peak = max(self.peak, self.bytes)

if len(sys.argv) > 2:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
else:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
live = Live()
try:
    with live:
        for step in range(4):
            for micro in range(2):
                (model(torch.randn(3, 256)).square().mean() / 2).backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
finally:
    Path(sys.argv[1]).write_text(f"{live.peak} {sum(param.nbytes for param in model.parameters())}")
"""


def test_one_process_takes_the_memory_of_one_gradient_more_than_the_script(tmp_path):
    script, alone, plain = tmp_path / "train.py", tmp_path / "alone", tmp_path / "plain"
    script.write_text(COUNTED)
    said = judged(Job(script, (str(tmp_path / "ranks"),), alone=(str(alone),)), 60)
    assert said.word == "SAME", str(said)
    done = start_python(script, plain, "by itself", cwd=tmp_path)
    assert done.communicate(timeout=120) == ("", "")
    (peak, gradient), (without, _) = (map(int, path.read_text().split()) for path in (alone, plain))
    assert gradient * 3 < without
    assert peak <= without + 1.05 * gradient


def test_a_model_that_does_not_fit_into_one_process_is_told(monkeypatch):
    halves = [Part("w", (1000,), ((start, 500),), torch.zeros(500)) for start in (0, 500)]
    ranks = [
        Notes([Step(weights=[half, Part("b", (), (), torch.tensor(rank + 1.0))])]) for rank, half in enumerate(halves)
    ]
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=50_000))
    assert at_once(ranks) == 2
    with monkeypatch.context() as patched:  # where notes lie in memory too, it does not suffice for two
        patched.setattr("shardlab.same.ranks.in_memory", lambda _: True)
        assert at_once(ranks) == 1
        assert "needs about 4.4e-05 GB" in str(too_large(ranks))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=19_000))
    assert at_once(ranks) == 0
    said = too_large(ranks)
    assert "4e-06 GB of parameters needs about 2e-05 GB, and 1.9e-05 GB are free" in str(said)
    assert "weights before of b (only the replicated ones) on rank 1 only differ" in str(said)
    assert "fewer or smaller layers" in str(said)
    assert "with 2 ranks on that axis and 1 on each other" in str(said)


@pytest.mark.parametrize("end", ["raise torch.OutOfMemoryError('CUDA out of memory')", "os.kill(os.getpid(), 9)"])
def test_one_process_that_finds_no_memory_is_told(tmp_path, end):
    step = f"optimizer.step()\n    if dist.get_world_size() == 1: {end}"
    (tmp_path / "train.py").write_text(LOOP.format(begin="import os", step=step).replace("torch.save", "0 and "))
    said = judged(Job(tmp_path / "train.py"), 60)
    assert said.word == "CANNOT BE SAID"
    assert "needs about 2e-07 GB, and " in str(said)


def test_the_command_prints_the_answer_and_leaves_the_scripts_files_to_the_ranks(tmp_path):
    begin = "torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)"
    (tmp_path / "train.py").write_text(LOOP.format(begin=begin, step="optimizer.step()"))
    under = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardlab", "same", "--json", "train.py")
    done = start_python(*under, cwd=tmp_path)
    printed, errors = done.communicate(timeout=120)
    assert done.returncode == 1, errors
    told = json.loads(printed)
    assert told["answer"][0][0] == "DIFFERENT SINCE" or "same rows" in str(told["answer"])
    assert {row["what"] for row in told["rows"]} >= {"gradient", "weights after"}
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "model.pt"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("none.py",), "script: none.py is not a file"),
        (("--ranks", "1", __file__), "ranks: 1 is given; one rank is one process already"),
        (("--steps", "0", __file__), "steps: 0 is given"),
        (("--ranks", "99999999", __file__), "ranks: 99999999 is given; one machine starts at most"),
        (("--limit-s", "nan", __file__), "limit-s: nan is given; it must be a number of seconds above 0"),
        (("--alone", "'--tp", __file__), 'alone: "\'--tp" is given, and cannot be read'),
        ((str(Path(__file__).parents[2] / "README.md"),), "README.md is no Python script that can be read: "),
    ],
)
def test_bad_input_is_said_in_a_line(words, said):
    done = CliRunner().invoke(app, ["same", *words])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_no_process_outlives_a_comparison_that_is_killed(tmp_path):
    script, deadline = tmp_path / "endless.py", time.monotonic() + 60
    script.write_text(f"""
import os, pathlib
(pathlib.Path({str(tmp_path)!r}) / f"ready{{os.getpid()}}").touch()
while True:
    pass
""")
    output = tmp_path / "printed.txt"
    process = start_forked("-m", "shardlab", "same", "--ranks", 2, script, cwd=tmp_path, output=output)
    while len(ready := list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    started = [psutil.Process(int(path.name.removeprefix("ready"))) for path in ready]
    process.kill()
    process.join()
    assert len(started) == 2, output.read_text()
    assert gone_within(started, 5)
