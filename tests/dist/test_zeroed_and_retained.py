"""``zero_grad(set_to_none=False)`` and ``backward(retain_graph=True)``: each equals one process under every engine."""

import pytest

from tests.dist import cases
from tests.dist.every_engine import PEERS, PLACES, assert_states, engine_of, kinds_of, options_of

STEPS = 4
# Torch's two refuse it, see below; four ranks only where there are groups.
RETAINED = [
    (key, size) for key, size in PLACES if key not in ("torch_ddp", "torch_zero1") and (size < 4 or "hybrid" in key)
]


def zeroed(rank, key, kind, optimizer, num_ranks):
    """Zeroed before the first backward, after a plain one, and after each step, in which nobody uses some."""
    with engine_of(key, num_ranks, cases.build(kind, seed=rank), optimizer, **options_of(key, kind)) as engine:

        def loss_of(step):
            x, y = (cases.own_rows(part, rank) for part in cases.rows(kind, step, 0, num_ranks))
            return cases.loss_of(engine(x), y)

        engine.zero_grad(set_to_none=False)
        for step in range(STEPS):
            loss_of(step).backward()
            engine.zero_grad(set_to_none=False)
            if key not in PEERS:  # what torch's engines have not reduced they never do
                with engine.no_sync():
                    engine.backward(loss_of(step))
                engine.zero_grad(set_to_none=False)
            engine.backward(loss_of(step + 1))
            engine.step()
            engine.zero_grad(set_to_none=step == 2)
        engine.step()  # with what momentum and weight decay make of zeros
        return engine.full_state_dict()


def zeroed_in_one_process(kind, optimizer, num_ranks):
    model = cases.build(kind)
    optim = cases.OPTIMIZERS[optimizer](list(model.parameters()))

    def backward(step):
        x, y = cases.rows(kind, step, 0, num_ranks)
        cases.loss_of(model(x), y).backward()

    for step in range(STEPS):
        backward(step)
        optim.zero_grad(set_to_none=False)
        backward(step + 1)
        optim.step()
        optim.zero_grad(set_to_none=step == 2)
    optim.step()
    return model.state_dict()


@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_zeroed_gradients_step_as_in_one_process(pools, key, num_ranks):
    for kind in kinds_of(key, num_ranks):
        optimizer = "sgd" if kind == "Unused" else "adamw"
        expected = zeroed_in_one_process(kind, optimizer, num_ranks)
        assert_states(pools(num_ranks).run(zeroed, key, kind, optimizer, num_ranks), expected)


def retained(rank, key, kind, num_ranks):
    """Twice through one graph: at once, after a ``no_sync`` one, and two losses of one output."""
    with engine_of(key, num_ranks, cases.build(kind, seed=rank), "sgd", **options_of(key, kind)) as engine:
        for step in range(STEPS):
            x, y = (cases.own_rows(part, rank) for part in cases.rows(kind, step, 0, num_ranks))
            if step == 1:
                with engine.no_sync():
                    loss = cases.loss_of(engine(x), y)
                    engine.backward(loss, retain_graph=True)
                engine.backward(loss)
            else:
                output = engine(x)
                engine.backward(cases.loss_of(output, y), retain_graph=True)
                engine.backward(output.square().mean())
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


def retained_in_one_process(kind, num_ranks):
    model = cases.build(kind)
    optim = cases.OPTIMIZERS["sgd"](list(model.parameters()))
    for step in range(STEPS):
        x, y = cases.rows(kind, step, 0, num_ranks)
        output = model(x)
        cases.loss_of(output, y).backward(retain_graph=True)
        (cases.loss_of(output, y) if step == 1 else output.square().mean()).backward()
        optim.step()
        optim.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(("key", "num_ranks"), RETAINED)
def test_two_backwards_through_one_graph_add(pools, key, num_ranks):
    for kind in kinds_of(key, num_ranks):
        assert_states(pools(num_ranks).run(retained, key, kind, num_ranks), retained_in_one_process(kind, num_ranks))


def refused(rank, key):
    with engine_of(key, 2, cases.build("MLP"), "sgd") as engine:
        x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", 0, 0, 2))
        with pytest.raises(ValueError, match="retain_graph: .* call backward on the sum of the losses"):
            engine.backward(cases.loss_of(engine(x), y), retain_graph=True)


@pytest.mark.parametrize("key", ["torch_ddp", "torch_zero1"])
def test_torch_ddp_would_not_reduce_a_second_backward(pools, key):
    pools(2).run(refused, key)


def zeroed_after_an_error(rank, key, num_ranks):
    """The last rank's backward raises in the middle; all zero their gradients and go on."""
    # Units, of which the first that backward reaches has been sent when it raises.
    more = {"wrap": lambda name, _: name in ("first", "last")} if key.startswith("fsdp") else {}
    with engine_of(key, num_ranks, cases.build("Uneven", seed=rank), "adamw", **more) as engine:
        for step in range(STEPS):
            x, y = (cases.own_rows(part, rank) for part in cases.rows("Uneven", step, 0, num_ranks))
            hidden = []
            hook = engine.module.first.register_forward_hook(lambda _, __, output: hidden.append(output))  # noqa: B023
            loss = cases.loss_of(engine(x), y)
            hook.remove()
            if rank == num_ranks - 1:
                hidden[0].register_hook(lambda _: 1 / 0)
            with pytest.raises((ZeroDivisionError, RuntimeError), match="division by zero|rank 1 "):
                engine.backward(loss)
            engine.zero_grad(set_to_none=False)
            engine.backward(cases.loss_of(engine(x), y))
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize("key", ["ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp", "fsdp-no_shard"])
def test_zeroed_after_a_backward_that_raised(pools, key):
    expected = cases.reference("Uneven", "adamw", 2, steps=STEPS)
    assert_states(pools(2).run(zeroed_after_an_error, key, 2), expected.state)
