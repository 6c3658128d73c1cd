"""Who called is known also where autograd runs a backward in a thread of its own, as on a device."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.comm.callers import callers
from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.recording.torch_callers import AUTOGRAD, SCRIPT, caller_of
from shardlab.records.store import load_run
from tests.autograd_threads import in_a_thread_of_autograd
from tests.comm.test_communicator import Log
from tests.dist.every_engine import sgd


def names(frame):
    return [found.f_code.co_name for found in callers(frame)]


def test_a_backward_in_another_thread_was_called_here():
    weight, seen = torch.ones(3, requires_grad=True), []
    weight.register_hook(lambda _: seen.append((threading.get_ident(), names(None), caller_of(None))))

    def the_users_function():
        weight.sum().backward()

    in_a_thread_of_autograd(the_users_function)
    ((thread, found, caller),) = seen
    assert thread != threading.main_thread().ident
    assert the_users_function.__name__ in found
    assert caller is AUTOGRAD


def test_a_thread_that_begins_in_python_has_frames_of_its_own():
    seen = []
    thread = threading.Thread(target=lambda: seen.extend([names(None), caller_of(None)]))
    thread.start()
    thread.join()
    assert seen[0] == names(None) == []
    assert caller_of(None) is SCRIPT


def lines_of(rank, strategy):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    log = Log()
    with Mesh({"data": 2}) as mesh, build_engine(strategy, model, sgd, mesh) as engine:
        loss = engine(torch.ones(2, 3, dtype=torch.float64)).sum()
        with mesh.observed_by(log):
            in_a_thread_of_autograd(lambda: engine.backward(loss))
    return [event.source_line for event in log.events]


@pytest.mark.parametrize("strategy", ["bucketed", "zero2", "fsdp"])
def test_collectives_name_the_line_that_called_backward(pools, strategy):
    for lines in pools(2).run(lines_of, strategy):
        assert lines
        assert all(line.startswith(f"{__file__}:") for line in lines)


def train_recorded(rank, directory):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    optimizer = sgd(model.parameters())
    with shardlab.record(directory):
        for _ in range(4):
            loss = model(torch.ones(2, 3)).sum()
            in_a_thread_of_autograd(loss.backward)
            optimizer.step()
            optimizer.zero_grad()


def test_a_script_is_recorded_whose_backward_runs_in_another_thread(pools, tmp_path):
    """ValueError: call stack is not deep enough."""
    pools(2).run(train_recorded, tmp_path / "run")
    rows = load_run(tmp_path / "run").collectives
    rows = rows[rows["step"] == 3]
    assert rows.groupby("rank")["tag"].apply(list).to_dict() == {rank: ["gradients of bucket 0"] for rank in (0, 1)}
    assert set(rows["phase"]) == {"backward"}
