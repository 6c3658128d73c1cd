"""What a user puts in the place of what the engine trains: taken over, or refused with the line to write instead."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from shardlab.comm.mesh import Mesh
from shardlab.engines import ShardedOptimizer, build_engine
from shardlab.launch import current
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from tests.dist import cases
from tests.dist.test_habits import backward, engine_of, own, trained_by
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


def other_dtype_of_gradients(rank, dtype):
    with trained_by("bucketed") as engine:
        engine.module.to(dtype)
        said = (
            f"parameter '.*': it was float64 .* is {str(dtype).removeprefix('torch.')} now; convert the module before"
        )
        x, y = (part.to(dtype) for part in own("MLP", 0, 0, engine))
        with pytest.raises(RuntimeError, match=said):
            engine.backward(cases.loss_of(engine(x), y))
            engine.step()
    return True


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
def test_another_dtype_of_bucketed_gradients_is_refused(pools, num_ranks):
    for dtype in (torch.float32, torch.bfloat16):
        assert all(pools(num_ranks).run(other_dtype_of_gradients, dtype))


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
    model[0].weight = nn.Parameter(torch.zeros(model[0].weight.shape).double())


def parametrized(model):
    torch.nn.utils.parametrizations.weight_norm(model[0])


ATTRIBUTES = {"another": other_parameter, "parametrized": parametrized}


def attribute(rank, setup, way, inside):
    with trained_by(setup) as engine:
        backward(engine, 0)
        engine.step()
        with pytest.raises(
            RuntimeError, match="being replaced, and the engine|was replaced, and the engine|is sharded"
        ):
            with engine.full_params(keep_changes=True) if inside else contextlib.nullcontext():
                ATTRIBUTES[way](engine.module)
            backward(engine, 1)
    return True


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("way", ATTRIBUTES)
@pytest.mark.parametrize("setup", GATHERS)
def test_another_parameter_in_its_place_is_refused_where_parameters_are_gathered(pools, setup, way, inside):
    assert all(pools(2).run(attribute, setup, way, inside))


def submodule(rank, setup):
    with trained_by(setup) as engine:
        model = engine.module
        for name, value in (("2", nn.Linear(16, 16)), ("2", None), ("2", nn.Tanh())):
            with pytest.raises(RuntimeError, match=r"^model: '2' of the MLP is being replaced.*engine\.close\(\)"):
                setattr(model, name, value)
        with pytest.raises(RuntimeError, match=r"^model: 'bias' of the Linear is being replaced"):
            model[0].bias = nn.Parameter(torch.zeros(16))
        model[1] = nn.Tanh()  # has no parameters
        model[1].alias = model[0]
        model[1].alias = model[2]  # another name for what stays
        holder = nn.ModuleList([model])
        holder[0] = nn.Tanh()  # is no part of the engine's module
        model[2] = nn.Sequential(model[2])  # has those of before
        backward(engine, 0)
        engine.step()
    model[2] = nn.Linear(16, 16)
    return engine.num_steps


@pytest.mark.parametrize("setup", SETUPS)
def test_another_module_in_the_place_of_parameters_is_refused(pools, setup):
    assert pools(2).run(submodule, setup) == [1, 1]


def over_one_memory(rank, setup, kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    if kind == "parameters":
        model[1].weight.data = model[0].weight.data
    elif kind == "buffer":
        model.register_buffer("kept", model[0].weight.detach())
    elif kind == "attribute":
        model.kept, model[1].own = model[0].weight.t(), torch.ones(3)
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


@pytest.mark.parametrize("kind", ["parameters", "buffer", "buffers", "attribute"])
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


def in_lists(rank, setup):
    refusals = []
    with trained_by(setup) as engine:
        x, _ = (cases.own_rows(part, rank) for part in cases.rows("MLP", 0, 0, 2))
        loss = engine(x).sum()
        for use in (
            lambda params: torch.autograd.grad(loss, params),
            lambda params: torch._foreach_norm(params),
            lambda params: torch.stack([params[0]]),
            lambda params: params[0].T,  # of which torch makes numbers out of no memory
            lambda params: params[0].mT,
            lambda params: params[0].data,
        ):
            with pytest.raises(RuntimeError, match=r"parameter '\d\.\w+' is sharded") as caught:
                use(list(engine.module.parameters()))
            refusals.append(str(caught.value))
    return len(refusals)


@pytest.mark.parametrize("setup", ["zero3", "fsdp"])
def test_sharded_parameters_in_a_list_and_views_of_them_are_refused_by_name(pools, setup):
    assert pools(2).run(in_lists, setup) == [6, 6]


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


# What a refusal leaves behind, and what is no reason for one.


def closed_after_a_refusal(rank, setup):
    with Mesh({"data": 2}) as mesh:
        model = cases.build("MLP")
        engine = engine_of(setup, model, mesh)
        backward(engine, 0)
        engine.step()
        model[0]._parameters["weight"] = new = nn.Parameter(torch.zeros(model[0].weight.shape).double())
        for _ in range(2):
            with pytest.raises(RuntimeError, match="was replaced"):
                backward(engine, 1)
            engine.zero_grad()
        held = bytes_by_role(engine.live_tensors())[Role.GATHERED_PARAMETER]
        engine.close()
        assert model[0].weight is new
        with engine_of(setup, model, mesh) as engine:
            backward(engine, 0)
            engine.step()
            return held, engine.num_steps


@pytest.mark.parametrize("setup", SHARDED)
def test_after_the_refusal_of_another_parameter_the_engine_can_be_closed(pools, setup):
    assert pools(2).run(closed_after_a_refusal, setup) == [(0, 1)] * 2


def cleared_while_local(rank, setup, only):
    """A submodule's gradients, of which one rank, or both, have some that add up in more bits."""
    strategy, _ = SETUPS[setup]
    with Mesh({"data": 2}) as mesh:
        model = cases.build("MLP").float()
        with build_engine(strategy, model, cases.OPTIMIZERS["sgd"], mesh, precision="bf16") as engine:
            x, _ = own("MLP", 0, 0, engine)
            if not only or rank == 1:
                with engine.no_sync():
                    engine.backward(engine(x.float()).sum())
            model[0].zero_grad()
            engine.finish_gradients()
            gradients = engine.full_gradients()
            engine.zero_grad(set_to_none=False)
            return {name: gradient is None for name, gradient in gradients.items()}


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("setup", ["zero1", "zero2"])
def test_local_gradients_in_more_bits_can_be_cleared(pools, setup, only):
    for cleared in pools(2).run(cleared_while_local, setup, only):
        assert cleared == {name: name.startswith("0.") for name in cleared}


def rounded_elsewhere(rank, setup, directory):
    strategy, _ = SETUPS[setup]
    with Mesh({"data": 2}) as mesh:
        model = cases.build("MLP").float()
        with build_engine(strategy, model, cases.OPTIMIZERS["sgd"], mesh, precision="bf16") as engine:
            engine.save(directory)
            model[0].bias.data = torch.full_like(model[0].bias, 7.0)
            for use in (engine.full_state_dict, engine.step, lambda: engine.save(directory)):
                with pytest.raises(RuntimeError, match="written into in place or replaced"):
                    use()
            engine.load(directory)
            return engine.full_state_dict()["0.bias"]


@pytest.mark.parametrize("setup", ["zero1", "zero2"])
def test_a_rounded_copy_that_is_replaced_is_refused_until_it_is_loaded(pools, setup, tmp_path):
    for bias in pools(2).run(rounded_elsewhere, setup, tmp_path / "saved"):
        assert torch.equal(bias, cases.build("MLP").float()[0].bias)


def other_shape(rank, setup, shape):
    with trained_by(setup) as engine:
        name = "2.weight"
        with pytest.raises(RuntimeError, match=rf"parameter '{name}': its data was replaced by"):
            with engine.full_params(keep_changes=True) as model:
                model[0].bias.data = torch.full_like(model[0].bias, 9.0)
                model.get_parameter(name).data = torch.zeros(shape, dtype=torch.float64)
            engine.step()
        return float(engine.full_state_dict()["0.bias"].max()) if setup in SHARDED else 0.0


@pytest.mark.parametrize("shape", [(16, 5), (3, 3), (0,)])
@pytest.mark.parametrize("setup", [*SHARDED, "zero1", "zero2"])
def test_another_shape_is_refused_and_nothing_is_kept_by_half(pools, setup, shape):
    assert all(largest < 9.0 for largest in pools(2).run(other_shape, setup, shape))


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4).double()

    def forward(self, x):
        return self.one(x)


def transposed(rank, setup):
    torch.manual_seed(0)
    with Mesh({"data": 2}) as mesh, engine_of(setup, Square(), mesh) as engine:
        with engine.full_params(keep_changes=True) as model:
            model.one.weight.data = model.one.weight.data.t()
        engine.backward(engine(torch.ones(2, 4).double()).square().mean())
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("setup", SETUPS)
def test_a_transposed_weight_trains(pools, setup):
    torch.manual_seed(0)
    model = Square()
    model.one.weight.data = model.one.weight.data.t()
    model(torch.ones(2, 4).double()).square().mean().backward()
    cases.OPTIMIZERS["sgd"](list(model.parameters())).step()
    for state in pools(2).run(transposed, setup):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def disjoint(rank, setup):
    model = nn.Module()
    whole = torch.randn(8, 16).double()
    model.q, model.k = nn.Parameter(whole[:, :8]), nn.Parameter(whole[:, 8:])
    model.register_buffer("mask", torch.zeros(3, 3))
    with Mesh({"data": 2}) as mesh, engine_of(setup, model, mesh) as engine:
        return engine.name


@pytest.mark.parametrize("setup", ["zero1", "fsdp"])
def test_columns_of_one_tensor_are_separate(pools, setup):
    assert len(pools(2).run(disjoint, setup)) == 2


def test_one_process_may_clip_what_no_sync_has_left():
    with build_engine("single", cases.build("MLP"), cases.OPTIMIZERS["sgd"]) as engine:
        with engine.no_sync():
            backward(engine, 0)
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)
        engine.step()
        assert engine.num_steps == 1


def allocating_optimizer(rank):
    sizes = []

    def optimizer_fn(tensors):
        groups = [{"params": [one for one in tensors if (one.dim() > 1) is wanted]} for wanted in (True, False)]
        made = torch.optim.Adagrad(groups, lr=0.1)
        state = [value for each in made.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
        sizes.append(sum(value.nbytes for value in state if not value.is_meta))
        return made

    options = {"partition": "balanced"}
    with Mesh({"data": 2}) as mesh, build_engine("fsdp", two_large_layers(), optimizer_fn, mesh, **options):
        return sizes


def two_large_layers():
    return nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))


def test_the_trial_of_groups_makes_no_state_of_the_whole_model(pools):
    num_bytes = sum(param.nbytes for param in two_large_layers().parameters())
    for sizes in pools(2).run(allocating_optimizer):
        assert len(sizes) == 1  # the trial has ended before the constructor's rest
        assert sizes[0] < num_bytes
