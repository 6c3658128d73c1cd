"""``ShardedOptimizer`` alone, under gradients that are averaged by hand or equal on all ranks."""

import contextlib
import pickle
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from shardlab.comm.mesh import Mesh
from shardlab.optimizers import ShardedOptimizer
from tests.dist import cases
from tests.dist.every_engine import assert_states
from tests.dist.own_optimizers import FusedAndRaises, Raises

CLASSES = {"raises": Raises, "fused": FusedAndRaises}


def alone(rank, partition, num_ranks):
    with Mesh({"data": num_ranks}) as mesh:
        model = cases.build("Uneven")
        optimizer = ShardedOptimizer(
            model.named_parameters(), torch.optim.AdamW, comm=mesh.data, partition=partition, lr=1e-2, weight_decay=0.1
        )
        for step in range(5):
            x, y = (cases.own_rows(part, rank) for part in cases.rows("Uneven", step, 0, num_ranks))
            cases.loss_of(model(x), y).backward()
            for param in model.parameters():
                mesh.data.all_reduce(param.grad).wait()
                param.grad.div_(num_ranks)
            optimizer.step()
            optimizer.zero_grad()
        kept = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        state_bytes = sum(value.nbytes for value in kept)
        return model.state_dict(), optimizer.owned(), optimizer.num_steps, state_bytes


@pytest.mark.parametrize("partition", ["elements", "round_robin", "contiguous", "balanced"])
def test_it_equals_one_process(pools, partition):
    expected = cases.reference("Uneven", "adamw", 3).state
    results = pools(3).run(alone, partition, 3)
    assert sum(result[3] for result in results) == 2 * 8 * sum(value.numel() for value in expected.values())
    numels = {name: param.numel() for name, param in cases.build("Uneven").named_parameters()}
    assert_states([result[0] for result in results], expected)
    owned = Counter()
    for _, spans, num_steps, _ in results:
        owned.update({name: stop - start for name, (start, stop) in spans.items()})
        assert num_steps == 5
        if partition != "elements":
            assert all(span == (0, numels[name]) for name, span in spans.items())
    assert owned == numels, "each element has one owner"


def with_all_rows(make, story, step=0):
    """A model and its optimizer behind one backward on all rows, so that the gradients are the means."""
    model = cases.build("MLP")
    optimizer = make(CLASSES.get(story, torch.optim.SGD), model)
    x, y = cases.rows("MLP", step, 0, 4)
    cases.loss_of(model(x), y).backward()
    return model, optimizer


def stepped(rank, story):
    with Mesh({"data": 2}) as mesh:

        def make(kind, model):
            return ShardedOptimizer(model.parameters(), kind, comm=mesh.data, lr=0.1, bucket_bytes=256)

        model, optimizer = with_all_rows(make, story)
        pieces = optimizer.param_groups[0]["params"]
        if story == "clipped":
            for clip in (clip_grad_norm_, clip_grad_value_):
                with pytest.raises(RuntimeError, match="clip the gradients of the parameters"):
                    clip(pieces, 0.01)
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.ones(()))
            with pytest.raises(RuntimeError, match=r"scaler: it unscales .* with an engine and shardlab\.GradScaler"):
                scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        else:
            optimizer.inner.fails = rank == 0
            with pytest.raises(KeyError) if rank == 0 else contextlib.nullcontext():
                optimizer.step()
        found = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for piece in pieces:
                piece.mul_(0.9)
        with pytest.raises(RuntimeError, match="pieces were written to"):
            optimizer.step()
        return found


@pytest.mark.parametrize("story", ["raises", "fused", "clipped"])
def test_all_ranks_have_one_model_and_written_pieces_are_refused(pools, story):
    model, optimizer = with_all_rows(lambda kind, model: kind(model.parameters(), lr=0.1), story)
    if story == "clipped":
        clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    assert_states(pools(2).run(stepped, story), model.state_dict())


def goes_on(rank):
    def made(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
        return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, comm=mesh.data, lr=0.1)

    def train(model, optimizer, steps):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(steps):
            model(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    with Mesh({"data": 2}) as mesh:
        model, optimizer = made(mesh)
        train(model, optimizer, 2)
        written = pickle.dumps((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, 2)
        other, again = made(mesh)
        weights, state = pickle.loads(written)
        other.load_state_dict(weights)
        again.load_state_dict(state)
        train(other, again, 2)
        with pytest.raises(ValueError, match="the state is not of these pieces"):
            again.load_state_dict({**state, "shardlab_pieces": {}})
        same = all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
        return same, optimizer.param_groups[0]["lr"] == again.inner.param_groups[0]["lr"]


def test_it_goes_on_with_the_state_it_loads(pools):
    assert pools(2).run(goes_on) == [(True, True)] * 2
