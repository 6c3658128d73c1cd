"""What a user puts in the place of what the engine trains: taken over, or refused with the line to write instead."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from shardlab.comm.mesh import Mesh
from shardlab.engines import ShardedOptimizer, build_engine
from shardlab.launch import current
from tests.dist import cases
from tests.dist.test_habits import backward, engine_of, trained_by
from tests.dist.test_in_flight import SETUPS, SHARDED

WORLD_SIZES = (2, 3)
GATHERS = (*SHARDED, "fsdp-no_shard")
WHOLE = tuple(setup for setup in SETUPS if setup not in GATHERS)
PLACEHOLDERS = ("zero1", "zero2")
OF_PIECES = tuple(setup for setup in SETUPS if setup not in ("ddp", "bucketed", "fsdp-no_shard"))


def by_data(model):
    model[0].bias.data = torch.ones(model[0].bias.shape, dtype=torch.float64)


def clamped(model):
    for param in model.parameters():
        param.data = param.data.clamp(-0.05, 0.05)


def there_and_back(model):
    model.float()
    model.double()


def as_vector(model):
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() / 2, model.parameters())


def swapped(model):
    """Of one shape; the values of each are still those of before when the first is put."""
    model[0].bias.data, model[2].bias.data = model[2].bias.data, model[0].bias.data


REPLACEMENTS = {replace.__name__: replace for replace in (by_data, clamped, there_and_back, as_vector, swapped)}


def expected(way, num_ranks, steps=2):
    model = cases.build("MLP")
    optimizer = cases.OPTIMIZERS["sgd"](list(model.parameters()))
    for step in range(steps + 1):
        x, y = cases.rows("MLP", step, 0, num_ranks)
        optimizer.zero_grad()
        cases.loss_of(model(x), y).backward()
        optimizer.step()
        if step == 0:
            with torch.no_grad():
                REPLACEMENTS[way](model)
    return model.state_dict()


def replaced(rank, setup, way, inside, directory):
    with trained_by(setup) as engine:
        for step in range(3):
            engine.zero_grad()
            backward(engine, step)
            engine.step()
            if step == 0:
                if setup in PLACEHOLDERS:
                    engine.zero_grad()  # module.to() converts gradients too, and theirs refuse that
                with engine.full_params(keep_changes=True) if inside else contextlib.nullcontext():
                    REPLACEMENTS[way](engine.module)
                if directory is not None:
                    engine.save(directory)
                    engine.load(directory)
        return engine.full_state_dict()


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("way", REPLACEMENTS)
@pytest.mark.parametrize("setup", SETUPS)
def test_data_that_is_replaced_inside_full_params_trains(pools, setup, way, num_ranks):
    wanted = expected(way, num_ranks)
    for state in pools(num_ranks).run(replaced, setup, way, True, None):
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


@pytest.mark.parametrize("saves", [False, True], ids=["", "saved and loaded"])
@pytest.mark.parametrize("way", REPLACEMENTS)
@pytest.mark.parametrize("setup", WHOLE)
def test_data_that_is_replaced_trains_where_parameters_are_whole(pools, setup, way, saves, tmp_path):
    wanted = expected(way, 2)
    for state in pools(2).run(replaced, setup, way, False, tmp_path / "saved" if saves else None):
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def other_dtype(rank, setup):
    with trained_by(setup) as engine:
        with pytest.raises(RuntimeError, match="its data was replaced by .* convert the module before"):
            with engine.full_params(keep_changes=True) as model:
                model.float()
            engine.step()
    return True


@pytest.mark.parametrize("setup", [*GATHERS, "zero1", "zero2"])
def test_another_dtype_is_refused(pools, setup):
    assert all(pools(2).run(other_dtype, setup))


def rounded(rank, setup, inside):
    strategy, options = SETUPS[setup]
    model = cases.build("MLP").float()
    with (
        Mesh({"data": 2}) as mesh,
        build_engine(strategy, model, cases.OPTIMIZERS["sgd"], mesh, precision="bf16", **options) as engine,
    ):
        if not inside:
            with pytest.raises(RuntimeError, match="rounded copy|is sharded"):
                clamped(engine.module)
                engine.step()
            return {}
        with engine.full_params(keep_changes=True):
            clamped(engine.module)
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("setup", ["zero1", "zero2", "zero3", "fsdp"])
def test_with_fewer_bits_data_is_replaced_inside_full_params_alone(pools, setup, inside):
    model = cases.build("MLP").float()
    clamped(model)
    for state in pools(2).run(rounded, setup, inside):
        for name, value in state.items():
            assert torch.equal(value, model.state_dict()[name])


def in_forward(rank, setup):
    def halve(module, _):
        module.weight.data = module.weight.data / 2

    with trained_by(setup) as engine:
        engine.module[2].register_forward_pre_hook(halve)
        with pytest.raises(RuntimeError, match="was written to while it was gathered"):
            backward(engine, 0)
    return True


@pytest.mark.parametrize("setup", GATHERS)
def test_data_that_is_replaced_while_it_is_gathered_is_refused(pools, setup):
    assert all(pools(2).run(in_forward, setup))


def other_parameter(model):
    model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight, device="cpu"))



def parametrized(model):
    torch.nn.utils.parametrizations.weight_norm(model[0])


ATTRIBUTES = {"another": other_parameter, "parametrized": parametrized}


def attribute(rank, setup, way, inside):
    with trained_by(setup) as engine:
        backward(engine, 0)
        engine.step()
        with pytest.raises(RuntimeError, match="was replaced, and the engine trains the one|is sharded"):
            with engine.full_params(keep_changes=True) if inside else contextlib.nullcontext():
                ATTRIBUTES[way](engine.module)
            backward(engine, 1)
    return True


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("way", ATTRIBUTES)
@pytest.mark.parametrize("setup", GATHERS)
def test_another_parameter_in_its_place_is_refused_where_parameters_are_gathered(pools, setup, way, inside):
    assert all(pools(2).run(attribute, setup, way, inside))


def over_one_memory(rank, setup, kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    if kind == "parameters":
        model[1].weight.data = model[0].weight.data
    elif kind == "buffer":
        model.register_buffer("kept", model[0].weight.detach())
    else:
        base = torch.ones(4, 4)
        model.register_buffer("mask", base[:2])
        model.register_buffer("same", base[:3])
    with Mesh({"data": 2}) as mesh:
        if kind == "buffers":
            engine_of(setup, model, mesh).close()
            return True
        with pytest.raises(ValueError, match=r"^model: .* are two tensors over the same memory; tie them"):
            engine_of(setup, model, mesh)
    return True


@pytest.mark.parametrize("kind", ["parameters", "buffer", "buffers"])
@pytest.mark.parametrize("setup", [*GATHERS, "zero1", "zero2"])
def test_a_parameter_over_the_memory_of_another_tensor_is_refused(pools, setup, kind):
    assert all(pools(2).run(over_one_memory, setup, kind))


def grouped(rank, setup, how, options):
    strategy, known = SETUPS[setup]
    made = []

    def optimizer_fn(tensors):
        if how == "dim":
            chosen = [[t for t in tensors if t.dim() > 1], [t for t in tensors if t.dim() <= 1]]
        elif how == "numel":
            chosen = [[t for t in tensors if t.numel() > 20], [t for t in tensors if t.numel() <= 20]]
        else:
            chosen = [tensors.where(lambda name: "weight" in name), tensors.where(lambda name: "bias" in name)]
        decays = (0.5, 0.0)
        groups = [{"params": some, "weight_decay": decay} for some, decay in zip(chosen, decays, strict=True)]
        made.append(torch.optim.SGD(groups, lr=0.1, fused=True))
        return made[-1]

    with Mesh({"data": current().world_size}) as mesh:
        model = cases.build("MLP")
        try:
            engine = build_engine(strategy, model, optimizer_fn, mesh, **known, **options)
        except ValueError as error:
            return str(error)
        with engine:
            assert engine.optimizer is made[-1]
            backward(engine, 0)
            engine.step()
            return engine.full_state_dict()


def one_process_grouped(num_ranks):
    model = cases.build("MLP")
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) is matrix], "weight_decay": decay}
        for matrix, decay in ((True, 0.5), (False, 0.0))
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    x, y = cases.rows("MLP", 0, 0, num_ranks)
    cases.loss_of(model(x), y).backward()
    optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("setup", SETUPS)
def test_groups_by_shape_are_right_or_refused(pools, setup, num_ranks):
    wanted = one_process_grouped(num_ranks)
    for how in ("dim", "name"):
        for answer in pools(num_ranks).run(grouped, setup, how, {}):
            if isinstance(answer, str):
                assert how == "dim"
                assert setup in OF_PIECES
                assert "optimizer_fn: it groups tensors by their shape or size" in answer
                assert "tensors.where" in answer
                continue
            for name, value in wanted.items():
                torch.testing.assert_close(answer[name], value, atol=1e-10, rtol=0)


@pytest.mark.parametrize("setup", ["zero1", "zero2", "zero3", "fsdp"])
def test_groups_by_dims_are_right_and_groups_by_size_refused_with_whole_parameters(pools, setup):
    wanted = one_process_grouped(2)
    for state in pools(2).run(grouped, setup, "dim", {"partition": "balanced"}):
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)
    for answer in pools(2).run(grouped, setup, "numel", {"partition": "balanced"}):
        assert "optimizer_fn: it groups tensors by their shape or size" in answer


def with_a_new_parameter(rank, setup):
    with trained_by(setup) as engine:
        backward(engine, 0)
        engine.module.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        engine.optimizer.add_param_group({"params": [engine.module.scale]})
        with pytest.raises(ValueError, match="steps 1 tensors that it was not given.*needs another engine"):
            engine.step()
        engine.optimizer.param_groups.pop()
        engine.step()
        return engine.num_steps


@pytest.mark.parametrize("setup", SETUPS)
def test_a_parameter_of_after_the_engine_is_refused(pools, setup):
    assert pools(2).run(with_a_new_parameter, setup) == [1, 1]


def kept_from_before(rank, setup):
    model = cases.build("MLP")
    kept = list(model.parameters())
    with Mesh({"data": 2}) as mesh, engine_of(setup, model, mesh) as engine:
        backward(engine, 0)
        return [float(param.detach().square().sum()) for param in kept]


@pytest.mark.parametrize("setup", GATHERS)
def test_a_penalty_on_parameters_kept_from_before_is_nan_and_not_zero(pools, setup):
    for sums in pools(2).run(kept_from_before, setup):
        assert all(value != value for value in sums)


def in_lists(rank, setup):
    refusals = []
    with trained_by(setup) as engine:
        x, _ = (cases.own_rows(part, rank) for part in cases.rows("MLP", 0, 0, 2))
        loss = engine(x).sum()
        for use in (
            lambda params: torch.autograd.grad(loss, params),
            lambda params: torch._foreach_norm(params),
            lambda params: torch.stack([params[0]]),
        ):
            with pytest.raises(RuntimeError, match=r"parameter '\d\.\w+' is sharded") as caught:
                use(list(engine.module.parameters()))
            refusals.append(str(caught.value))
    return len(refusals)


@pytest.mark.parametrize("setup", ["zero3", "fsdp"])
def test_sharded_parameters_in_a_list_are_refused_by_name(pools, setup):
    assert pools(2).run(in_lists, setup) == [3, 3]


def sharded_optimizer(rank, way):
    with Mesh({"data": 2}) as mesh:
        model = cases.build("MLP")
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, comm=mesh.data, lr=0.1, momentum=0.9)
        for step in range(3):
            x, y = cases.rows("MLP", step, 0, 2)  # all rows on every rank: the gradients are the means
            optimizer.zero_grad()
            cases.loss_of(model(x), y).backward()
            optimizer.step()
            if step == 0:
                REPLACEMENTS[way](model)
        return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("way", REPLACEMENTS)
def test_the_sharded_optimizer_steps_what_was_replaced(pools, way):
    model = cases.build("MLP")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x, y = cases.rows("MLP", step, 0, 2)
        optimizer.zero_grad()
        cases.loss_of(model(x), y).backward()
        optimizer.step()
        if step == 0:
            REPLACEMENTS[way](model)
    for state in pools(2).run(sharded_optimizer, way):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)
