"""``full_gradients()``: the gradients of one process, by name, on every rank, whatever the strategy keeps of them."""

import pytest
import torch
from torch import nn

from tests.dist import cases
from tests.dist.every_engine import PLACES, engine_of, kinds_of, options_of

CLIP = 0.05


def backward(engine, rank, kind, step, micro_batch, num_ranks):
    x, y = (cases.own_rows(part, rank) for part in cases.rows(kind, step, micro_batch, num_ranks))
    loss = cases.loss_of(engine(x), y)
    loss.backward() if micro_batch == 1 else engine.backward(loss)


def gradients(rank, key, kind, num_ranks):
    """After a step, for each moment: two micro-batches, a third that is only pending, the clip, the step."""
    found = []
    with engine_of(key, num_ranks, cases.build(kind, seed=rank), "sgd", **options_of(key, kind)) as engine:
        for step in (0, 1):
            with engine.no_sync():
                backward(engine, rank, kind, step, 0, num_ranks)
                with pytest.raises(RuntimeError, match=r"full_gradients: inside no_sync\(\)"):
                    engine.full_gradients()
            backward(engine, rank, kind, step, 2, num_ranks)
            found.append(engine.full_gradients())
            backward(engine, rank, kind, step, 1, num_ranks)  # plain, so it is pending
            found.append(engine.full_gradients())
            for gradient in engine.full_gradients().values():
                if gradient is not None:
                    gradient.fill_(7.0)  # a copy: nothing of the engine changes
            engine.clip_grad_norm_(CLIP)
            found.append(engine.full_gradients())
            engine.step()
            found.append(engine.full_gradients())
            engine.zero_grad()
            found.append(engine.full_gradients())
    return found


def expected_gradients(kind, num_ranks):
    model = cases.build(kind)
    optimizer = cases.OPTIMIZERS["sgd"](list(model.parameters()))
    found = []

    def note():
        found.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})

    def add(step, micro_batch):
        x, y = cases.rows(kind, step, micro_batch, num_ranks)
        cases.loss_of(model(x), y).backward()

    for step in (0, 1):
        add(step, 0)
        add(step, 2)
        note()
        add(step, 1)
        note()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        note()
        optimizer.step()
        note()
        optimizer.zero_grad()
        note()
    return found


@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_equal_those_of_one_process(pools, key, num_ranks):
    for kind in kinds_of(key, num_ranks):
        expected = expected_gradients(kind, num_ranks)
        if kind == "Unused":
            assert expected[0]["spare.weight"] is None
            assert expected[0]["sometimes.weight"] is None
            assert expected[5]["sometimes.weight"] is not None, "in odd steps one rank uses it"
        for found in pools(num_ranks).run(gradients, key, kind, num_ranks):
            for moment, (own, plain) in enumerate(zip(found, expected, strict=True)):
                assert list(own) == list(plain)
                for name, gradient in plain.items():
                    if gradient is None:
                        assert own[name] is None, (name, moment)
                        continue
                    torch.testing.assert_close(
                        own[name],
                        gradient,
                        atol=1e-10,
                        rtol=0,
                        msg=lambda m: f"{kind} {name} {moment}: {m}",  # noqa: B023
                    )
