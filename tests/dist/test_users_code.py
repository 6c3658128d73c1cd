"""What users write around a training step, done with an engine on ranks and with plain torch in one process."""

import contextlib
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from shardlab.engines import build_engine
from shardlab.engines.precision import Precision
from shardlab.launch import current
from tests.dist import cases
from tests.dist.every_engine import ENGINES, assert_states, engine_of

PLACES = [(key, size) for key in ENGINES for size in ((4,) if "hybrid" in key else (2, 3))]
WHOLE = [key for key in ENGINES if not key.startswith(("zero3", "fsdp"))]
PIECES = [key for key in ENGINES if key.startswith(("zero", "fsdp"))]
STEPPED_IN_PIECES = [key for key in ENGINES if key.startswith(("zero1", "zero2"))]


def sgd(tensors):
    return torch.optim.SGD(tensors, lr=0.1)


class Assigns(torch.optim.SGD):
    """Puts new tensors in the place of what it steps."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad.data


class HeavyBall(torch.optim.SGD):
    """Keeps the weights of the step before, and no copy of them."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    last, before = param.data, self.state[param].get("before", param.data)
                    param.data = last - group["lr"] * param.grad.data + 0.5 * (last - before)
                    self.state[param]["before"] = last


ASSIGNING = {"assigns": Assigns, "heavy ball": HeavyBall}


class PlainTorch:
    """One process, with the names of an engine; it has all rows."""

    def __init__(self, model, optimizer_fn, num_rows):
        self.module, self.optimizer, self.num_rows = model, optimizer_fn(list(model.parameters())), num_rows

    def rows(self, x):
        return x[: self.num_rows]

    def __call__(self, x):
        return self.module(x)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

    def full_params(self, *, keep_changes=False):
        return contextlib.nullcontext(self.module)

    def tensors_of(self, wanted):
        return [param for name, param in self.module.named_parameters() if wanted(name)]


class OnRanks:
    """An engine that knows which rows are its own."""

    def __init__(self, engine):
        self.engine = engine

    def rows(self, x):
        return cases.own_rows(x, self.engine.data_rank)

    def __call__(self, x):
        return self.engine(x)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def tensors_of(self, wanted):
        return list(self.engine.step_tensors().where(wanted))


def loss_of(engine, step):
    x, y = cases.rows("MLP", step, 0, 4)
    return nn.functional.mse_loss(engine(engine.rows(x)), engine.rows(y))


def train(engine, step):
    engine.backward(loss_of(engine, step))
    engine.step()
    engine.zero_grad()


def averaged_weights_are_put_in_and_back(engine):
    """As classes do that keep a moving average: the backup is the memory that was there, and no copy."""
    with engine.full_params() as model:
        average = {name: param.detach().clone() for name, param in model.named_parameters()}
    for step in range(3):
        train(engine, step)
        backup = {}
        with engine.full_params(keep_changes=True) as model:
            for name, param in model.named_parameters():
                average[name] = (average[name] + param.data) / 2
                backup[name] = param.data
                param.data = average[name]
        with torch.no_grad():
            engine(engine.rows(cases.rows("MLP", step, 0, 4)[0]))
        with engine.full_params(keep_changes=True) as model:
            for name, param in model.named_parameters():
                param.data = backup[name]


def others_are_trained_meanwhile(engine):
    """A step between taking weights out and putting them back leaves the ones that were taken out alone."""
    train(engine, 0)
    backup = {}
    with engine.full_params(keep_changes=True) as model:
        for name, param in model.named_parameters():
            backup[name] = param.data
            param.data = torch.full_like(param, 0.1)
    train(engine, 1)
    with engine.full_params(keep_changes=True) as model:
        for name, param in model.named_parameters():
            param.data = backup[name] + param.data
    train(engine, 2)


def weights_get_other_strides(engine):
    train(engine, 0)
    with engine.full_params(keep_changes=True) as model:
        for param in model.parameters():
            param.data = param.data.t().contiguous().t() if param.dim() == 2 else param.data
    for step in range(1, 3):
        train(engine, step)


def halved(param):
    param.grad.mul_(0.5)


def hooks_change_gradients(engine):
    """Registered after the engine's own, which take gradients away."""

    with engine.full_params() as model:
        hooks = [param.register_post_accumulate_grad_hook(halved) for param in model.parameters()]
    for step in range(2):
        train(engine, step)
    hooks[0].remove()
    train(engine, 2)


def a_second_optimizer_steps_first(engine):
    """A step of nothing by the engine's own gathers what the second has stepped."""
    second = torch.optim.SGD(engine.tensors_of(lambda name: name.startswith("2.")), lr=0.5)
    for step in range(3):
        engine.backward(loss_of(engine, step))
        second.step()
        engine.step()
        engine.zero_grad()


def a_second_optimizer_assigns_first(engine):
    second = Assigns(engine.tensors_of(lambda name: name.startswith("2.")), lr=0.5)
    for step in range(3):
        engine.backward(loss_of(engine, step))
        second.step()
        engine.step()
        engine.zero_grad()


def a_second_optimizer_assigns_last(engine):
    second = Assigns(engine.tensors_of(lambda name: name.startswith("2.")), lr=0.5)
    for step in range(3):
        engine.backward(loss_of(engine, step))
        engine.step()
        second.step()
        engine.zero_grad()


def averaged_weights_are_put_in_and_back_by_inference(engine):
    train(engine, 0)
    with torch.inference_mode():
        backup = {}
        with engine.full_params(keep_changes=True) as model:
            for name, param in model.named_parameters():
                backup[name], param.data = param.data, torch.zeros_like(param)
        loss_of(engine, 1)
        with engine.full_params(keep_changes=True) as model:
            for name, param in model.named_parameters():
                param.data = backup[name]
    train(engine, 1)


def inference_between_forward_and_backward(engine):
    for step, plain in enumerate((False, True, False)):
        loss = loss_of(engine, step)
        with torch.inference_mode():
            loss_of(engine, step + 1)
        if plain:
            loss.backward()
        else:
            engine.backward(loss)
        with torch.inference_mode():
            loss_of(engine, step)
        engine.step()
        engine.zero_grad()


def inference_before_layers_are_thawed(engine):
    for param in engine.module[0].parameters():
        param.requires_grad_(False)
    train(engine, 0)
    with torch.inference_mode():
        loss_of(engine, 1)
    for param in engine.module[0].parameters():
        param.requires_grad_(True)
    train(engine, 1)
    with torch.inference_mode(), engine.full_params():
        pass
    train(engine, 2)


STORIES = {
    story.__name__: story
    for story in (
        averaged_weights_are_put_in_and_back,
        others_are_trained_meanwhile,
        weights_get_other_strides,
        hooks_change_gradients,
        a_second_optimizer_steps_first,
        a_second_optimizer_assigns_first,
        averaged_weights_are_put_in_and_back_by_inference,
        inference_between_forward_and_backward,
        inference_before_layers_are_thawed,
    )
}


def in_one_process(story, num_ranks, model, optimizer_fn=sgd):
    told = PlainTorch(model, optimizer_fn, num_ranks * cases.ROWS_PER_RANK)
    story(told)
    return told.module.state_dict()


def on_ranks(rank, key, story):  # noqa: ARG001
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        story(OnRanks(engine))
        return engine.full_state_dict()


@pytest.mark.parametrize("name", STORIES)
@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_a_story_ends_as_in_one_process(pools, key, num_ranks, name):
    expected = in_one_process(STORIES[name], num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(on_ranks, key, STORIES[name]), expected)


def assigned_last(rank, key):  # noqa: ARG001
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        a_second_optimizer_assigns_last(OnRanks(engine))
        return engine.full_state_dict()


@pytest.mark.parametrize("key", [key for key in ENGINES if key not in STEPPED_IN_PIECES])
def test_a_second_optimizer_may_step_last_where_nothing_is_gathered_after(pools, key):
    num_ranks = 4 if "hybrid" in key else 2
    expected = in_one_process(a_second_optimizer_assigns_last, num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(assigned_last, key), expected)


def steps_of(engine):
    for step in range(3):
        train(engine, step)


def assigned(rank, key, kind):  # noqa: ARG001
    def optimizer_fn(tensors):
        return ASSIGNING[kind](tensors, lr=0.1)

    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=optimizer_fn) as engine:
        steps_of(OnRanks(engine))
        return engine.full_state_dict()


@pytest.mark.parametrize("kind", ASSIGNING)
@pytest.mark.parametrize(("key", "num_ranks"), [("single", 1), *PLACES])
def test_an_optimizer_may_assign_new_tensors(pools, key, num_ranks, kind):
    expected = in_one_process(steps_of, num_ranks, cases.build("MLP"), lambda tensors: ASSIGNING[kind](tensors, lr=0.1))
    assert_states(pools(num_ranks).run(assigned, key, kind), expected)


# Strides that change outside full_params(), where parameters are whole.


class Pictures(nn.Module):
    """Rows are made into pictures of 3 channels."""

    def __init__(self):
        super().__init__()
        self.spread = nn.Linear(7, 27)
        self.conv = nn.Conv2d(3, 4, 2)
        self.last = nn.Linear(16, 5)

    def forward(self, x):
        return self.last(torch.tanh(self.conv(self.spread(x).view(-1, 3, 3, 3))).flatten(1))


def pictures():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Pictures().double()


def channels_last(engine):
    engine.module.to(memory_format=torch.channels_last)
    steps_of(engine)


def channels_last_on_ranks(rank, key):  # noqa: ARG001
    with engine_of(key, current().world_size, pictures(), optimizer_fn=sgd) as engine:
        channels_last(OnRanks(engine))
        return engine.full_state_dict()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("key", WHOLE)
def test_whole_parameters_may_get_another_memory_format(pools, key, num_ranks):
    expected = in_one_process(channels_last, num_ranks, pictures())
    assert_states(pools(num_ranks).run(channels_last_on_ranks, key), expected)


# Modules that compute their weights in hooks of their own.

HOOKED = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.4),
    "weight_norm": lambda layer: nn.utils.weight_norm(layer),
}


def hooked(way):
    model = cases.build("MLP")
    for layer in (model[0], model[2]):
        HOOKED[way](layer)
    return model


def hooked_on_ranks(rank, key, way):  # noqa: ARG001
    more = {"wrap": nn.Linear} if key.startswith("fsdp") else {}
    with engine_of(key, current().world_size, hooked(way), optimizer_fn=sgd, **more) as engine:
        steps_of(OnRanks(engine))
        return engine.full_state_dict()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("way", HOOKED)
@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_hooks_of_a_layer_find_its_parameters(pools, key, num_ranks, way):
    expected = in_one_process(steps_of, num_ranks, hooked(way))
    assert_states(pools(num_ranks).run(hooked_on_ranks, key, way), expected)


# What is refused, with the line to write instead.


def second_after(rank, key):  # noqa: ARG001
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        ranks, said = OnRanks(engine), []
        second = torch.optim.SGD(ranks.tensors_of(lambda name: name.startswith("2.")), lr=0.5)
        engine.backward(loss_of(ranks, 0))
        engine.step()
        second.step()
        for use in (lambda: loss_of(ranks, 1), engine.full_state_dict):
            with pytest.raises(RuntimeError, match=r"SGD.step\(\).*call it before engine.step\(\)") as caught:
                use()
            said.append(str(caught.value))
        engine.step()  # gathers it
        loss_of(ranks, 1)
        return said


@pytest.mark.parametrize("key", STEPPED_IN_PIECES)
def test_a_second_optimizer_that_nobody_gathers_after_is_refused(pools, key):
    assert len({str(said) for said in pools(2).run(second_after, key)}) == 1


def made_before(rank, key):  # noqa: ARG001
    model = cases.build("MLP")
    early = sgd(model.parameters())
    with engine_of(key, current().world_size, model, optimizer_fn=sgd) as engine:
        late = sgd(model.parameters())  # over placeholders, where parameters are sharded
        engine.backward(loss_of(OnRanks(engine), 0))
        for other in (early, late):
            with pytest.raises(RuntimeError, match=r"it steps the module's .*write engine.step\(\)"):
                other.step()
        engine.step()
    early.step()  # the module is plain again
    return True


@pytest.mark.parametrize("key", PIECES)
def test_an_optimizer_over_the_module_s_parameters_is_refused_where_pieces_are_stepped(pools, key):
    assert all(pools(4 if "hybrid" in key else 2).run(made_before, key))


def steps_inside_backward(rank, key):  # noqa: ARG001
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        optimizers = {}

        def step(param):
            optimizers[param].step()
            optimizers[param].zero_grad()

        with engine.full_params() as model:
            for param in model.parameters():
                optimizers[param] = sgd([param])
                param.register_post_accumulate_grad_hook(step)
        with pytest.raises(RuntimeError, match=r"write engine.step\(\)|step with engine.step\(\)"):
            engine.backward(loss_of(OnRanks(engine), 0))
    return True


@pytest.mark.parametrize("key", ENGINES)
def test_a_step_inside_backward_is_refused(pools, key):
    assert all(pools(4 if "hybrid" in key else 2).run(steps_inside_backward, key))


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1", "fsdp"])
def test_an_optimizer_that_needs_a_closure_is_refused(strategy):
    with pytest.raises(ValueError, match=r"^optimizer: LBFGS.step\(\) needs a closure"):
        build_engine(strategy, cases.build("MLP"), torch.optim.LBFGS)


@pytest.mark.parametrize("strategy", ["single", "bucketed", "zero1", "zero3", "fsdp"])
def test_a_model_without_shapes_is_refused(strategy):
    with pytest.raises(ValueError, match=r"^model: 'weight' has no shape yet; run one forward"):
        build_engine(strategy, nn.LazyLinear(3), sgd)


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_a_parameter_that_is_not_here_is_named_where_it_is_an_argument_by_name(strategy):
    with build_engine(strategy, cases.build("MLP"), sgd) as engine:
        engine.zero_grad()
        with pytest.raises(RuntimeError, match=r"'0.weight' is sharded"):
            torch.add(torch.ones(1), other=engine.module[0].weight)


def steps_between(rank, key):  # noqa: ARG001
    """A backward that needs the weights from before another optimizer's step, or from before an assignment."""
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        ranks = OnRanks(engine)
        second = torch.optim.SGD(ranks.tensors_of(lambda name: name.startswith("2.")), lr=0.5)
        train(ranks, 0)
        engine.backward(loss_of(ranks, 1))
        loss = loss_of(ranks, 2)
        second.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(loss)
        engine.zero_grad()
        loss = loss_of(ranks, 3)
        with engine.full_params(keep_changes=True) as model:
            model[2].weight.data = model[2].weight.data * 2
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(loss)
        engine.zero_grad()
        with engine.full_params(), pytest.raises(RuntimeError, match=r"^SGD.step\(\): .* would be stale"):
            second.step()
    return True


@pytest.mark.parametrize("key", [key for key in ENGINES if key.startswith(("zero3", "fsdp"))])
def test_a_backward_that_needs_what_another_optimizer_has_stepped_is_refused(pools, key):
    assert all(pools(4 if "hybrid" in key else 2).run(steps_between, key))


def closed_after(rank, key):  # noqa: ARG001
    model = cases.build("MLP")
    with engine_of(key, current().world_size, model, optimizer_fn=sgd) as engine:
        ranks = OnRanks(engine)
        second = torch.optim.SGD(ranks.tensors_of(lambda name: name.startswith("2.")), lr=0.5)
        engine.backward(loss_of(ranks, 0))
        engine.step()
        second.step()
    return model.state_dict()


@pytest.mark.parametrize("key", ENGINES)
def test_closing_gathers_what_a_second_optimizer_has_stepped(pools, key):
    def story(engine):
        second = torch.optim.SGD(engine.tensors_of(lambda name: name.startswith("2.")), lr=0.5)
        engine.backward(loss_of(engine, 0))
        engine.step()
        second.step()

    num_ranks = 4 if "hybrid" in key else 2
    assert_states(pools(num_ranks).run(closed_after, key), in_one_process(story, num_ranks, cases.build("MLP")))


def loaded_after(rank, key, directory):  # noqa: ARG001
    """The checkpoint, and what is there when it has been loaded over what a second optimizer has stepped."""
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        ranks = OnRanks(engine)
        second = torch.optim.SGD(ranks.tensors_of(lambda name: True), lr=0.5)  # noqa: ARG005
        engine.save(directory)
        saved = engine.full_state_dict()
        train(ranks, 0)
        engine.backward(loss_of(ranks, 1))
        second.step()
        with pytest.raises(ValueError, match="nothing"):
            engine.load(directory / "nothing")
        engine.load(directory)
        return saved, engine.full_state_dict()


@pytest.mark.parametrize("key", ENGINES)
def test_loading_replaces_what_a_second_optimizer_has_stepped(pools, key, tmp_path):
    for saved, found in pools(4 if "hybrid" in key else 2).run(loaded_after, key, tmp_path / "first"):
        assert_states([found], saved)


def taken_over(rank, key, way, precision, directory):  # noqa: ARG001
    """What a second optimizer has assigned, before the engine is asked for something else than its own step."""
    model, options = cases.build("MLP"), {"precision": precision} if precision else {}
    with engine_of(key, current().world_size, model, optimizer_fn=sgd, **options) as engine:
        ranks, saved = OnRanks(engine), engine.full_state_dict()
        engine.save(directory)
        second = Assigns(ranks.tensors_of(lambda name: True), lr=0.5)  # noqa: ARG005
        train(ranks, 0)
        engine.backward(loss_of(ranks, 1))
        second.step()
        if way == "refused":
            with pytest.raises(RuntimeError, match="Missing key"):
                engine.load_full_state_dict({})
        elif way == "load":
            engine.load(directory)
        elif way == "load full":
            engine.load_full_state_dict(saved)
        engine.zero_grad()
        if way.startswith("load"):
            engine.step()  # of nothing
            return saved, engine.full_state_dict()
    return None, model.state_dict()


@pytest.mark.parametrize("way", ["load", "load full", "refused", "close"])
@pytest.mark.parametrize("key", PIECES)
def test_what_a_second_optimizer_has_assigned_is_taken_over_first(pools, key, way, tmp_path):
    def story(engine):
        second = Assigns(engine.tensors_of(lambda name: True), lr=0.5)  # noqa: ARG005
        train(engine, 0)
        engine.backward(loss_of(engine, 1))
        second.step()

    num_ranks = 4 if "hybrid" in key else 2
    expected = in_one_process(story, num_ranks, cases.build("MLP"))
    for number, precision in enumerate((None, Precision(torch.bfloat16))):
        results = pools(num_ranks).run(taken_over, key, way, precision, tmp_path / str(number))
        for saved, found in results:
            if saved is not None:
                assert_states([found], saved)
            elif precision is None:
                assert_states([found], expected)
        assert_states([found for _, found in results], results[0][1])


def closed_before_backward(rank, key):  # noqa: ARG001
    """The gradients of a backward through what an engine has computed before it was closed."""
    model = cases.build("MLP")
    with engine_of(key, current().world_size, model, optimizer_fn=sgd) as engine:
        ranks = OnRanks(engine)
        train(ranks, 0)
        loss = loss_of(ranks, 1)
        engine.close()
        loss.backward()
        loss_of(model_on(ranks, model), 2).backward()
        return engine.data_rank, {name: param.grad for name, param in model.named_parameters()}


def model_on(ranks, model):
    plain = PlainTorch(model, sgd, 0)
    plain.rows = ranks.rows
    return plain


@pytest.mark.parametrize("key", ENGINES)
def test_a_backward_after_closing_is_plain_torchs(pools, key):
    num_ranks = 4 if "hybrid" in key else 2
    for data_rank, found in pools(num_ranks).run(closed_before_backward, key):
        model = cases.build("MLP")
        model.load_state_dict(in_one_process(lambda engine: train(engine, 0), num_ranks, cases.build("MLP")))
        for step in (1, 2):
            x, y = (cases.own_rows(part, data_rank) for part in cases.rows("MLP", step, 0, 4))
            nn.functional.mse_loss(model(x), y).backward()
        assert_states([found], {name: param.grad for name, param in model.named_parameters()})


def converted_after_closing(rank, key, precision):  # noqa: ARG001
    model, options = cases.build("MLP"), {"precision": precision} if precision else {}
    with (
        engine_of(key, current().world_size, model, optimizer_fn=sgd, **options) as engine,
        engine.full_params(keep_changes=True),
    ):
        engine.close()
        model.bfloat16()
        model[0].weight = nn.Parameter(torch.zeros(2, 2))
    return model[0].weight.sum().item() + sum(param.dtype == torch.bfloat16 for param in model.parameters())


@pytest.mark.parametrize("key", ENGINES)
def test_what_is_changed_after_closing_is_nobodys_business(pools, key):
    for precision in [None, Precision(torch.bfloat16)] if key in PIECES else [None]:
        found = pools(4 if "hybrid" in key else 2).run(converted_after_closing, key, precision)
        assert set(found) == {5}


def closed_inside(rank, key, precision, keep_changes):  # noqa: ARG001
    """The module of an engine that was closed inside ``full_params()``, trained on by one process."""
    model = cases.build("MLP")
    options = {"precision": precision} if precision else {}
    with engine_of(key, current().world_size, model, optimizer_fn=sgd, **options) as engine:
        with engine.full_params(keep_changes=keep_changes):
            if keep_changes:
                with torch.no_grad():
                    model[0].weight.mul_(2)
            engine.close()
            inside = {name: param.detach().clone() for name, param in model.named_parameters()}
        x, y = cases.rows("MLP", 0, 0, 1)
        nn.functional.mse_loss(model(x), y).backward()
        assert all(param.grad is not None for param in model.parameters())
    return inside, model.state_dict()


@pytest.mark.parametrize("keep_changes", [False, True])
@pytest.mark.parametrize("key", ENGINES)
def test_closed_inside_full_params_the_module_stays_whole(pools, key, keep_changes):
    expected = cases.build("MLP")
    if keep_changes:
        with torch.no_grad():
            expected[0].weight.mul_(2)
    precisions = [None, Precision(torch.bfloat16)] if key in PIECES else [None]
    for precision in precisions:
        results = pools(4 if "hybrid" in key else 2).run(closed_inside, key, precision, keep_changes)
        for inside, after in results:
            assert_states([inside, after], expected.state_dict())


# What is no backward, and gradients that a hook drops.


class Twice(torch.autograd.Function):
    """Might run a backward of its own, for all that its kind says."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = cases.build("MLP")

    def forward(self, x):
        return Twice.apply(self.body(x))


def looked_at_alone(rank, key):
    """Rank 0 alone asks for the gradient at the output."""
    with engine_of(key, current().world_size, Doubling(), optimizer_fn=sgd) as engine:
        x, y = cases.rows("MLP", 0, 0, 4)
        for _ in range(2):
            output = engine(cases.own_rows(x, engine.data_rank))
            loss = nn.functional.mse_loss(output, cases.own_rows(y, engine.data_rank))
            if rank == 0:
                torch.autograd.grad(loss, output, retain_graph=True)
            engine.backward(loss)
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict(), engine.num_backwards


@pytest.mark.parametrize("key", ENGINES)
def test_a_gradient_at_the_output_is_no_backward(pools, key):
    num_ranks = 4 if "hybrid" in key else 2
    model = Doubling()
    optimizer = sgd(model.parameters())
    x, y = (part[: num_ranks * cases.ROWS_PER_RANK] for part in cases.rows("MLP", 0, 0, 4))
    for _ in range(2):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    states, counts = zip(*pools(num_ranks).run(looked_at_alone, key), strict=True)
    assert_states(states, model.state_dict())
    assert set(counts) == {2}


def dropped(rank, key):
    """Rank 0 drops its own gradient of one weight: it counts as 0 there."""
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:

        def drop(param):
            param.grad = None

        with engine.full_params() as model:
            if rank == 0:
                model[2].weight.register_post_accumulate_grad_hook(drop)
        train(OnRanks(engine), 0)
        return engine.full_state_dict()


@pytest.mark.parametrize("key", ENGINES)
def test_a_gradient_that_one_rank_s_hook_drops_counts_as_unused_there(pools, key):
    num_ranks = 4 if "hybrid" in key else 2
    model = cases.build("MLP")
    optimizer = sgd(model.parameters())
    for rank in range(num_ranks):
        x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", 0, 0, 4))
        before = None if model[2].weight.grad is None else model[2].weight.grad.clone()
        (nn.functional.mse_loss(model(x), y) / num_ranks).backward()
        if rank == 0:
            model[2].weight.grad = before
    optimizer.step()
    assert_states(pools(num_ranks).run(dropped, key), model.state_dict())


class Box:
    """Not looked into for tensors."""

    def __init__(self, y):
        self.y = y


class Boxed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = cases.build("MLP")

    def forward(self, x):
        return Box(self.body(x))


def boxed(rank, key):  # noqa: ARG001
    with engine_of(key, current().world_size, Boxed(), optimizer_fn=sgd) as engine:
        with engine.full_params() as model:
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(halved)
        x, y = cases.rows("MLP", 0, 0, 4)
        nn.functional.mse_loss(
            engine(cases.own_rows(x, engine.data_rank)).y, cases.own_rows(y, engine.data_rank)
        ).backward()
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("key", [key for key in ENGINES if key != "zero3" and not key.startswith("fsdp")])
def test_hooks_see_the_first_gradient_too_where_it_alone_tells_of_a_backward(pools, key):
    model = Boxed()
    x, y = (part[: 2 * cases.ROWS_PER_RANK] for part in cases.rows("MLP", 0, 0, 4))
    (0.5 * nn.functional.mse_loss(model(x).y, y)).backward()
    sgd(model.parameters()).step()
    assert_states(pools(2).run(boxed, key), model.state_dict())


@pytest.mark.parametrize(("strategy", "options"), [("zero3", {}), ("fsdp", {}), ("fsdp", {"sharding": "no_shard"})])
def test_memory_that_was_replaced_is_free(strategy, options):
    with build_engine(strategy, cases.build("MLP"), sgd, **options) as engine:
        held = [bucket.shard for bucket in engine.buckets]
        old = [tensor.untyped_storage()._weak_ref() for tensor in held]
        with engine.full_params(keep_changes=True) as model:
            for param in model.parameters():
                param.data = param.data * 2
        del held
        assert all(torch.UntypedStorage._expired(reference) for reference in old)


# Where the parameters are.


class Masked(nn.Module):
    """Makes a mask on the device of its first parameter, whose unit may not be gathered there."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.layers, self.head = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)]), nn.Linear(6, 9)

    def forward(self, tokens):
        mask = torch.ones(6, 6, device=next(self.layers.parameters()).device, dtype=torch.float64).tril()
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x @ mask))
        return self.head(x)


def masked():
    torch.manual_seed(0)
    return Masked().double()


def tokens_of(num_ranks):
    return torch.arange(cases.ROWS_PER_RANK * num_ranks).remainder(9)


def on_their_device(rank, key):
    with engine_of(key, current().world_size, masked(), optimizer_fn=sgd) as engine:
        param = next(engine.module.parameters())
        device = param.device
        facts = device.type, param.is_cpu, param.is_cuda, param.is_meta, param.get_device()
        for _ in range(2):
            tokens = cases.own_rows(tokens_of(current().world_size).to(device), engine.data_rank)
            engine.backward(nn.functional.cross_entropy(engine(tokens.to(device)), tokens))
            engine.step()
            engine.zero_grad()
        return facts, engine.full_state_dict()


@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_what_is_made_on_the_device_of_a_parameter_has_values(pools, key, num_ranks):
    model, tokens = masked(), tokens_of(num_ranks)
    optimizer = sgd(model.parameters())
    for _ in range(2):
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    facts, states = zip(*pools(num_ranks).run(on_their_device, key), strict=True)
    assert set(facts) == {("cpu", True, False, False, -1)}
    assert_states(states, model.state_dict())


# A backward, and torch.func, inside forward.


class Adversarial(nn.Module):
    """Moves its input along the gradient of a loss of its own, whose backward gives parameters gradients too."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)), nn.Linear(7, 5)
        self.scale = 1  # the number of ranks that one process plays, whose means these are
        self.go_back = Tensor.backward

    def forward(self, x):
        x = x.detach().clone().requires_grad_()
        self.go_back(self.body(x).square().sum() / self.scale)
        return self.head(x + self.scale * x.grad)


class AdversarialByTheEngine(Adversarial):
    """The same with ``engine.backward``."""


class Nested(nn.Module):
    """Its forward runs its own forward on other rows, once without a graph and once with."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 7)), nn.Linear(7, 5)
        vars(self)["again"] = self  # and not as a module of its own

    def forward(self, x, is_inner=False):
        if is_inner:
            return self.head(x)
        with torch.no_grad():
            target = self.again(x + 1, True)
        return self.again(x + self.body(x), True) * (1 + target)


class NestedCall(Nested):
    """The same by ``engine.call``."""


class Tangent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7)), nn.Linear(7, 5)

    def forward(self, x):
        return self.head(torch.func.jvp(self.body, (x,), (torch.ones_like(x),))[1])


def made(kind):
    torch.manual_seed(0)
    return kind().double()


def differentiating(rank, key, kind, wraps):
    options = {"wrap": wraps} if wraps else {}
    with engine_of(key, current().world_size, made(kind), optimizer_fn=sgd, **options) as engine:
        if kind is AdversarialByTheEngine:
            engine.module.go_back = engine.backward
        if kind is Nested:
            vars(engine.module)["again"] = engine
        if kind is NestedCall:
            vars(engine.module)["again"] = functools.partial(engine.call, engine.module.forward)
        for step in range(2):
            x, y = (cases.own_rows(part, engine.data_rank) for part in cases.rows("MLP", step, 0, current().world_size))
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("kind", [Adversarial, AdversarialByTheEngine, Nested, NestedCall, Tangent])
@pytest.mark.parametrize(
    ("key", "wraps"), [*((key, None) for key in ENGINES), *(("fsdp", wraps) for wraps in ("root", [nn.Linear]))]
)
def test_a_forward_may_differentiate(pools, key, wraps, kind):
    num_ranks = 4 if "hybrid" in key else 2
    model = made(kind)
    model.scale = num_ranks
    optimizer = sgd(model.parameters())
    for step in range(2):
        x, y = cases.rows("MLP", step, 0, num_ranks)
        for rank in range(num_ranks):
            own = [cases.own_rows(part, rank) for part in (x, y)]
            (nn.functional.mse_loss(model(own[0]), own[1]) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_states(pools(num_ranks).run(differentiating, key, kind, wraps), model.state_dict())


def dtypes_of(rank, key):
    with engine_of(key, current().world_size, cases.build("MLP").float(), optimizer_fn=sgd, precision="bf16") as engine:
        return {param.dtype for param in engine.module.parameters()}


@pytest.mark.parametrize("key", PIECES)
def test_a_parameter_has_the_dtype_in_which_it_computes(pools, key):
    """As a module asks of its first parameter, whose unit may not be gathered then."""
    assert pools(4 if "hybrid" in key else 2).run(dtypes_of, key)[0] == {torch.bfloat16}
