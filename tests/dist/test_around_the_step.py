"""What users do at the edges of a step: write into pieces, average in hooks, keep gradients, save the optimizer's state."""

from functools import partial

import pytest
import torch

from shardlab.launch import RankError, current
from tests.dist import cases
from tests.dist.every_engine import ENGINES, assert_states, engine_of
from tests.dist.test_users_code import PLACES, STEPPED_IN_PIECES, OnRanks, in_one_process, loss_of, sgd, train

GATHERED = [key for key in ENGINES if key.startswith(("zero3", "fsdp"))]
OTHERS = [(key, size) for key, size in PLACES if key not in STEPPED_IN_PIECES]


@torch.no_grad()
def clamp(optimizer):
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            tensor.clamp_(-0.1, 0.1)


def clamped_before_the_step(engine):
    for param in engine.module[0].parameters():
        param.requires_grad_(False)
    for step in range(3):
        engine.backward(loss_of(engine, step))
        clamp(engine.optimizer)
        engine.step()
        engine.zero_grad()


def clamped_after_the_step(engine):
    for step in range(3):
        train(engine, step)
        clamp(engine.optimizer)
    engine.step()


def surgery(engine):
    """Gradients of two losses, of which the first are kept while the second are made."""
    for step in range(2):
        engine.backward(loss_of(engine, step))
        tensors = engine.tensors_of(lambda _: True)
        first = [tensor.grad for tensor in tensors]
        engine.zero_grad()
        engine.backward(loss_of(engine, step + 1))
        for tensor, gradient in zip(tensors, first, strict=True):
            if gradient is not None:
                tensor.grad = tensor.grad + 2 * gradient
        engine.step()
        engine.zero_grad()


STORIES = {story.__name__: story for story in (clamped_before_the_step, clamped_after_the_step, surgery)}


def on_ranks(rank, key, name):  # noqa: ARG001
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        STORIES[name](OnRanks(engine))
        return engine.full_state_dict()


@pytest.mark.parametrize("name", ["clamped_before_the_step", "surgery"])
@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_pieces_are_written_and_gradients_kept_as_in_one_process(pools, key, num_ranks, name):
    expected = in_one_process(STORIES[name], num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(on_ranks, key, name), expected)


@pytest.mark.parametrize(("key", "num_ranks"), OTHERS)
def test_what_is_stepped_may_be_written_last_where_nothing_is_gathered_after(pools, key, num_ranks):
    expected = in_one_process(clamped_after_the_step, num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(on_ranks, key, "clamped_after_the_step"), expected)


def written_last(rank, key, precision):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=sgd, precision=precision) as engine:
        told = OnRanks(engine)
        train(told, 0)
        clamp(engine.optimizer)
        x = cases.rows("MLP", 0, 0, 4)[0]
        for refused in (lambda: engine(x), engine.full_state_dict, lambda: engine.full_params().__enter__()):
            with pytest.raises(RuntimeError, match="pieces were written to.*before engine.step"):
                refused()
        engine.step()  # gathers
        largest = max(value.abs().max().item() for value in engine.full_state_dict().values())
        clamp(engine.optimizer)
    return largest, max(value.abs().max().item() for value in engine.module.state_dict().values())


@pytest.mark.parametrize("precision", ["full", "bf16"])
@pytest.mark.parametrize("key", STEPPED_IN_PIECES)
def test_pieces_that_were_written_last_are_gathered_or_refused(pools, key, precision):
    for largest in pools(2).run(written_last, key, precision):
        assert largest == pytest.approx((0.1, 0.1), abs=1e-3)


def averaging(engine, read):
    average = []

    def update(*_):
        values = read(engine)
        average[:] = [0.7 * old + 0.3 * new for old, new in zip(average or values, values, strict=True)]

    engine.optimizer.register_step_post_hook(update)
    for step in range(3):
        train(engine, step)
    return average


def of_the_module(engine):
    return [param.detach().clone() for param in engine.module.parameters()]


def of_the_state(engine):
    state = engine.module.state_dict() if not hasattr(engine, "full_state_dict") else engine.full_state_dict()
    return [value.clone() for value in state.values()]


READS = {"module": of_the_module, "state": of_the_state}


def averaged(rank, key, read):  # noqa: ARG001
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        return dict(enumerate(averaging(OnRanks(engine), READS[read])))


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_a_hook_of_the_optimizer_finds_the_stepped_model(pools, key, num_ranks, read):
    if read == "module" and key in GATHERED:
        return  # refused, as outside of a step
    expected = []
    in_one_process(lambda engine: expected.extend(averaging(engine, READS[read])), num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(averaged, key, read), dict(enumerate(expected)))


class Steps(torch.optim.Optimizer):
    """Plain descent, in a class that calls no other's step."""

    after = None

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])
        if self.after is not None:
            self.after(self)


class StepsAndMore(Steps):
    """Goes on after its base class's step; torch runs hooks at the end of both, if there has been a plain one."""

    def step(self, closure=None):
        after, self.after = self.after, None
        super().step(closure)
        self.after = after
        if after is not None:
            after(self)


def steps(tensors, optimizer):
    Steps([torch.zeros(1)])  # from here on torch runs the hooks of this class
    return optimizer(tensors)


OPTIMIZERS = pytest.mark.parametrize("optimizer", [Steps, StepsAndMore])


def evaluating(rank, key, optimizer):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=partial(steps, optimizer=optimizer)) as engine:
        told = OnRanks(engine)
        engine.optimizer.after = lambda _: loss_of(told, 0)
        engine.backward(loss_of(told, 0))
        for refused in (engine.step, lambda: loss_of(told, 0)):
            with pytest.raises(RuntimeError, match="pieces were written to"):
                refused()
        engine.optimizer.after = None
        engine.zero_grad()
        engine.step()  # of nothing: it gathers what the step that was refused had stepped
        train(told, 1)
        return engine.full_state_dict()


def stepped_twice(engine):
    train(engine, 0)
    train(engine, 1)


@OPTIMIZERS
@pytest.mark.parametrize("key", STEPPED_IN_PIECES)
def test_inside_an_optimizers_step_a_model_of_old_and_new_pieces_is_refused(pools, key, optimizer):
    expected = in_one_process(stepped_twice, 2, cases.build("MLP"))
    assert_states(pools(2).run(evaluating, key, optimizer), expected)


def clamping(rank, key, optimizer):  # noqa: ARG001
    optimizer_fn = partial(steps, optimizer=optimizer)
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=optimizer_fn) as engine:
        engine.optimizer.after = clamp
        stepped_twice(OnRanks(engine))
        return engine.full_state_dict()


def clamped_in_the_step(engine):
    for step in range(2):
        train(engine, step)
        clamp(engine.optimizer)


@OPTIMIZERS
@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_what_an_optimizer_does_after_its_base_classes_step_counts(pools, key, num_ranks, optimizer):
    expected = in_one_process(clamped_in_the_step, num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(clamping, key, optimizer), expected)


def hooked_halfway(rank, key):  # noqa: ARG001
    optimizer_fn = partial(steps, optimizer=StepsAndMore)
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=optimizer_fn) as engine:
        engine.optimizer.register_step_post_hook(lambda *_: None)
        engine.backward(loss_of(OnRanks(engine), 0))
        engine.step()


@pytest.mark.parametrize("key", STEPPED_IN_PIECES)
def test_a_hook_that_torch_runs_halfway_through_a_step_of_pieces_is_refused(pools, key):
    with pytest.raises(RankError, match="StepsAndMore.step.. calls the step of a base class"):
        pools(2).run(hooked_halfway, key)


class Extrapolates(torch.optim.Optimizer):
    """Keeps the gradient of the step before, and no copy of it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    last = self.state[param].get("last", param.grad)
                    param.sub_(1.5 * param.grad - 0.5 * last, alpha=group["lr"])
                    self.state[param]["last"] = param.grad


def four_steps(engine):
    for step in range(4):
        train(engine, step)


def extrapolating(rank, key):  # noqa: ARG001
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=Extrapolates) as engine:
        four_steps(OnRanks(engine))
        return engine.full_state_dict()


@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_an_optimizer_may_keep_the_last_gradients(pools, key, num_ranks):
    expected = in_one_process(four_steps, num_ranks, cases.build("MLP"), Extrapolates)
    assert_states(pools(num_ranks).run(extrapolating, key), expected)


def adam(tensors):
    return torch.optim.AdamW(tensors, lr=0.05, eps=0.1)


def states_loaded(rank, key, path):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=adam) as engine:
        told = OnRanks(engine)
        train(told, 0)
        own = engine.optimizer.state_dict()
        if rank == 0:
            torch.save(own, path)
        engine.mesh.data.barrier().wait()
        model = cases.build("MLP")
        plain = adam(model.parameters()).state_dict()
        for refused in (*([torch.load(path)] if rank == 1 else []), plain):
            with pytest.raises(ValueError, match="not of these pieces; write engine.load_full_optimizer_state_dict"):
                engine.optimizer.load_state_dict(refused)
        engine.optimizer.load_state_dict(own)
        engine.load_full_optimizer_state_dict(engine.full_optimizer_state_dict())
        train(told, 1)
        return engine.full_state_dict()


@pytest.mark.parametrize("key", ["zero1", "zero2-round_robin", "zero3", "fsdp", "fsdp-dim0", "fsdp-offload-all"])
def test_the_state_of_another_ranks_pieces_is_refused(pools, tmp_path, key):
    expected = in_one_process(stepped_twice, 2, cases.build("MLP"), adam)
    assert_states(pools(2).run(states_loaded, key, str(tmp_path / "state.pt")), expected)


def plain_state_loaded(rank, key):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=adam) as engine:
        train(OnRanks(engine), 0)
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        return list(engine.optimizer.state_dict())


@pytest.mark.parametrize("key", ["ddp", "bucketed", "fsdp-no_shard"])
def test_the_state_of_whole_parameters_is_torchs(pools, key):
    assert pools(2).run(plain_state_loaded, key) == [["state", "param_groups"]] * 2


class SkipsNaN(torch.optim.SGD):
    """Leaves out the step if any gradient is not finite."""

    def step(self, closure=None):
        gradients = [param.grad for group in self.param_groups for param in group["params"]]
        if all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None):
            super().step(closure)


def skipping(rank, key):
    def optimizer_fn(tensors):
        return SkipsNaN(tensors, lr=0.1)

    with (
        pytest.raises(ValueError, match="SkipsNaN looks at the whole model"),
        engine_of(key, 2, cases.build("MLP"), optimizer_fn=optimizer_fn),
    ):
        raise AssertionError


@pytest.mark.parametrize("key", ["zero1", "zero2-round_robin", "zero3", "fsdp"])
def test_an_optimizer_that_looks_for_nan_everywhere_is_refused(pools, key):
    pools(2).run(skipping, key)
