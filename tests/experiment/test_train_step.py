"""``TrainStep`` against plain torch: accumulation, clipping, scheduling, and what it reports."""

import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.experiment import CompareConfig, TrainStep, Workload
from shardlab.experiment.run.rank_run import recorded_run
from shardlab.records.store import RunWriter

MICRO_BATCHES = 3


def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def sgd(tensors):
    return torch.optim.SGD(tensors, lr=0.5, momentum=0.9)


def rows(seed, count=2):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(count, 2, generator=generator, dtype=torch.float64)


def mse(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def engine_of(plain):
    return build_engine("single", plain, sgd, Mesh.alone())


def test_nothing_is_returned_while_it_accumulates():
    with engine_of(model()) as engine:
        train_step = TrainStep(engine, mse, accumulation=MICRO_BATCHES)
        for step in (1, 2):
            before = [param.clone() for param in engine.params.values()]
            for micro_batch in range(MICRO_BATCHES - 1):
                assert train_step(rows(micro_batch)) is None
                assert engine.num_steps == step - 1
                assert all(torch.equal(a, b) for a, b in zip(before, engine.params.values(), strict=True))
            result = train_step(rows(9))
            assert result.step == engine.num_steps == step
            assert not all(torch.equal(a, b) for a, b in zip(before, engine.params.values(), strict=True))


def test_accumulated_micro_batches_are_one_batch():
    plain = model()
    optimizer = sgd(plain.parameters())
    batches = [rows(seed) for seed in range(MICRO_BATCHES)]
    loss = nn.functional.mse_loss(plain(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches]))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    optimizer.step()
    with engine_of(model()) as engine:
        train_step = TrainStep(engine, mse, accumulation=MICRO_BATCHES, max_norm=0.01)
        *nothing, result = [train_step(batch) for batch in batches]
        assert nothing == [None] * (MICRO_BATCHES - 1)
        assert result.loss == pytest.approx(float(loss.detach()), abs=1e-12)
        assert result.grad_norm == pytest.approx(float(norm), abs=1e-12)
        assert result.grad_norm > 0.01  # before clipping
        for name, param in plain.named_parameters():
            torch.testing.assert_close(engine.params[name], param, atol=1e-12, rtol=0)


def test_the_learning_rate_is_the_one_of_the_step():
    with engine_of(model()) as engine:
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.1)
        train_step = TrainStep(engine, mse, accumulation=2, scheduler=scheduler)
        rates = [result.learning_rate for seed in range(6) if (result := train_step(rows(seed))) is not None]
        assert rates == pytest.approx([0.5, 0.05, 0.005])  # once a step, not once a micro-batch
        assert engine.learning_rate == pytest.approx(0.0005)


def test_without_clipping_nobody_asked_for_a_norm_and_accumulation_below_one_is_refused():
    with engine_of(model()) as engine:
        assert math.isnan(TrainStep(engine, mse)(rows(0)).grad_norm)
        with pytest.raises(ValueError, match="accumulation: 0 is below 1"):
            TrainStep(engine, mse, accumulation=0)


def test_a_loss_that_calls_backward_is_refused():
    def trains(model, batch):
        (loss := mse(model, batch)).backward(retain_graph=True)  # a second backward would add the same once more
        return loss

    with engine_of(model()) as engine, pytest.raises(ValueError, match="loss: it has called backward"):
        TrainStep(engine, trains)(rows(0))


def test_a_loader_ends_with_its_run_and_not_with_a_cycle(tmp_path):
    """In which its workers would not hear of it, and torch waits 5 s for each."""
    loader = DataLoader(TensorDataset(*rows(0)), batch_size=2)
    config = CompareConfig(workload=Workload(model, loader, mse), strategies=("fsdp",), ranks=1)
    with recorded_run(config, "fsdp", Mesh.alone(), RunWriter(tmp_path, 0, "fsdp", "measured"), 0) as run:
        run.step(0)
    held = [weakref.ref(run.shares), weakref.ref(loader)]
    del run, config, loader
    assert [one() for one in held] == [None, None]
