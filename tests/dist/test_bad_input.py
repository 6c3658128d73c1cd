"""What a user can get wrong: a clear error on every rank, no hang, and the ranks can go on.

Partitions and options are in test_engines and test_fsdp, checkpoints in test_checkpoint.
"""

import warnings

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import STRATEGIES, GradScaler, ShardedOptimizer, build_engine
from shardlab.launch import RankError
from tests.dist import cases
from tests.dist.test_engines import adamw, one_step
from tests.dist.test_in_flight import SETUPS

RELEASED = ("zero3", "fsdp", "fsdp-dim0")


def engine_of(setup, model, mesh, optimizer_fn=adamw):
    strategy, options = SETUPS[setup]
    return build_engine(strategy, model, optimizer_fn, mesh, **options)


def wrap_twice(rank, setup):
    with Mesh({"data": 2}) as mesh:
        model = cases.build("MLP")
        with engine_of(setup, model, mesh) as engine:
            with pytest.raises(ValueError, match="model: it is wrapped by an engine already") as caught:
                engine_of("bucketed", model, mesh)
            one_step(engine, rank)
        with engine_of("bucketed", model, mesh) as engine:
            one_step(engine, rank)
    return str(caught.value)


@pytest.mark.parametrize("setup", SETUPS)
def test_wrapping_twice_is_refused_and_after_close_it_is_not(pools, setup):
    first, second = pools(2).run(wrap_twice, setup)
    assert first == second


def rewriting_embedding(rank, setup):
    model = torch.nn.Sequential(torch.nn.Embedding(11, 4, max_norm=0.1), torch.nn.Linear(4, 5)).double()
    with Mesh({"data": 2}) as mesh:
        with pytest.raises(ValueError, match=r"model: '0' has max_norm=0\.1") as caught:
            engine_of(setup, model, mesh)
    return str(caught.value)


@pytest.mark.parametrize("setup", SETUPS)
def test_an_embedding_that_each_rank_would_rewrite_otherwise_is_refused(pools, setup):
    first, second = pools(2).run(rewriting_embedding, setup)
    assert first == second


def other_states(rank, setup):
    other = cases.build("Uneven").state_dict()
    shape = {**cases.build("MLP", seed=3).state_dict(), "0.weight": torch.zeros(3, 3)}
    with Mesh({"data": 2}) as mesh, engine_of(setup, cases.build("MLP"), mesh) as engine:
        before = engine.full_state_dict()
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0\.weight"'):
            engine.load_full_state_dict(other)
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
            engine.load_full_state_dict(shape)
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
        engine.load_full_state_dict(cases.build("MLP", seed=5).state_dict())
        one_step(engine, rank)
        return engine.full_state_dict()


@pytest.mark.parametrize("setup", SETUPS)
def test_a_state_dict_of_another_model_is_named_and_the_right_one_loads_after_it(pools, setup):
    model = cases.build("MLP", seed=5)
    optimizer = adamw(list(model.parameters()))
    x, y = cases.rows("MLP", 0, 0, 2)
    cases.loss_of(model(x), y).backward()
    optimizer.step()
    for state in pools(2).run(other_states, setup):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def never_gathered(rank, setup):
    """A penalty on the weights outside forward, and a gradient set by hand, where the parameters are not there."""
    with Mesh({"data": 2}) as mesh:
        model = cases.build("MLP")
        with engine_of(setup, model, mesh) as engine:
            x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", 0, 0, 2))
            loss = cases.loss_of(engine(x), y)
            with pytest.raises(RuntimeError, match=r"parameter '0\.weight' is sharded.*engine\.full_params\(\)"):
                loss + sum(param.square().sum() for param in model.parameters())
            with pytest.raises(RuntimeError, match=r"gradient of '0\.weight'.*engine\.step_tensors\(\)"):
                model[0].weight.grad = torch.zeros(16, 7).double()
            engine.backward(loss)
            engine.step()
            return engine.num_steps


@pytest.mark.parametrize("setup", RELEASED)
def test_parameters_that_are_not_gathered_are_named(pools, setup):
    assert pools(2).run(never_gathered, setup) == [1, 1]


def bad_mesh(rank):
    with Mesh({"replica": 2, "shard": 2}):
        return rank


def test_a_hybrid_group_that_does_not_divide_the_ranks(pools):
    with pytest.raises(RankError, match=r"axes: .*'shard': 2.* hold 4 ranks, but there are 3; start as many: RankPool"):
        pools(3).run(bad_mesh)
    assert pools(4).run(bad_mesh) == [0, 1, 2, 3]


def muon(tensors):
    weights = tensors.where(lambda name: name.endswith("weight"))
    return torch.optim.Muon(weights, lr=1e-2)


def with_frozen_biases(rank, strategy, options):
    """Muon takes matrices alone, and all that trains are matrices."""
    model = cases.build("MLP")
    for layer in (model[0], model[2], model[4]):
        layer.bias.requires_grad_(False)
    with Mesh({"data": 2}) as mesh:
        with pytest.raises(
            ValueError, match=r"optimizer_fn: .*frozen parameters too, such as '0\.bias'.*tensors\.where"
        ):
            build_engine(strategy, model, lambda tensors: torch.optim.Muon(tensors, lr=1e-2), mesh, **options)

        def trainable(tensors):
            return torch.optim.Muon(tensors.where(lambda name: model.get_parameter(name).requires_grad), lr=1e-2)

        with build_engine(strategy, model, trainable, mesh, **options) as engine:
            before = engine.full_state_dict()
            x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", 0, 0, 2))
            engine.backward(cases.loss_of(engine(x), y))
            engine.step()
            after = engine.full_state_dict()
    return {name: not torch.equal(value, before[name]) for name, value in after.items()}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp"])
def test_an_optimizer_that_does_not_take_what_is_frozen_is_told_how_to_leave_it_out(pools, strategy):
    options = {} if strategy == "ddp" else {"partition": "balanced"}
    for changed in pools(2).run(with_frozen_biases, strategy, options):
        assert all(trains == name.endswith("weight") for name, trains in changed.items())


class Lamb(torch.optim.Optimizer):
    """Layer-wise scaling of Adam's step by the norm of the whole weight: You et al., arXiv 1904.00962, algorithm 2."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None or param.numel() == 0:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                state["exp_avg"].lerp_(param.grad, 0.1)
                state["exp_avg_sq"].lerp_(param.grad.square(), 0.01)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6)
                param.sub_(update, alpha=float(group["lr"] * param.norm() / update.norm().clamp_min(1e-12)))


WHOLE_TENSOR = {"Lamb": lambda tensors: Lamb(tensors, lr=1e-2), "Muon": muon}
SLICED = {
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "fsdp": ("fsdp", {}),
    "fsdp-dim0": ("fsdp", {"layout": "dim0"}),
}


def refused(rank, kind):
    messages = []
    with Mesh({"data": 2}) as mesh:
        for strategy, options in SLICED.values():
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                build_engine(strategy, cases.build("MLP"), WHOLE_TENSOR[kind], mesh, **options)
            messages.append(str(caught.value))
        weights = [(name, param) for name, param in cases.build("MLP").named_parameters() if name.endswith("weight")]
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            ShardedOptimizer(weights, {"Lamb": Lamb, "Muon": torch.optim.Muon}[kind], comm=mesh.data, lr=1e-2)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("kind", WHOLE_TENSOR)
def test_slices_refuse_optimizers_of_whole_tensors_and_name_the_partition(pools, kind):
    first, second = pools(2).run(refused, kind)
    assert first == second
    for message in first:
        assert message.startswith(f"partition: {kind} looks at whole tensors"), message
        assert "balanced" in message


def without_sharding(rank, kind):
    options = {"sharding": "no_shard"}
    with (
        Mesh({"data": 2}) as mesh,
        build_engine("fsdp", cases.build("MLP"), WHOLE_TENSOR[kind], mesh, **options) as engine,
    ):
        one_step(engine, rank)
        return engine.full_state_dict()


@pytest.mark.parametrize("kind", WHOLE_TENSOR)
def test_no_shard_takes_whole_tensor_optimizers(pools, kind):
    model = cases.build("MLP")
    names = [name for name, _ in model.named_parameters() if kind == "Lamb" or name.endswith("weight")]
    kinds = {"Lamb": Lamb, "Muon": torch.optim.Muon}
    optimizer = kinds[kind]([model.get_parameter(name) for name in names], lr=1e-2)
    x, y = cases.rows("MLP", 0, 0, 2)
    cases.loss_of(model(x), y).backward()
    optimizer.step()
    for state in pools(2).run(without_sharding, kind):
        for name, value in model.state_dict().items():
            # Muon computes in bfloat16, which magnifies the last bit of a sum.
            torch.testing.assert_close(state[name], value, atol=1e-8 if kind == "Muon" else 1e-10, rtol=0)


def with_lamb(rank, strategy, partition, num_ranks):
    with (
        Mesh({"data": num_ranks}) as mesh,
        build_engine(strategy, cases.build("MLP"), WHOLE_TENSOR["Lamb"], mesh, partition=partition) as engine,
    ):
        for step in range(4):
            one_step(engine, rank, step=step)
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize("partition", ["round_robin", "contiguous", "balanced"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_lamb_is_exact_with_whole_parameters(pools, strategy, partition):
    model = cases.build("MLP")
    optimizer = Lamb(list(model.parameters()), lr=1e-2)
    for step in range(4):
        x, y = cases.rows("MLP", step, 0, 3)
        cases.loss_of(model(x), y).backward()
        optimizer.step()
        model.zero_grad()
    for state in pools(3).run(with_lamb, strategy, partition, 3):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def step_in_float16(rank, scaled):
    with (
        Mesh({"data": 2}) as mesh,
        build_engine("fsdp", cases.build("MLP").float(), adamw, mesh, precision="fp16") as engine,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        x, y = (cases.own_rows(part, rank).float() for part in cases.rows("MLP", 0, 0, 2))
        loss = cases.loss_of(engine(x), y)
        if scaled:
            scaler = GradScaler(init_scale=8.0)
            engine.backward(scaler.scale(loss))
            scaler.step(engine)
        else:
            engine.backward(loss)
            engine.step()
        return [(warning.category.__name__, str(warning.message), warning.filename) for warning in caught]


def test_float16_warns_at_the_user_s_line_unless_a_scaler_is_used(pools):
    for warned in pools(2).run(step_in_float16, False):
        ((kind, text, file),) = warned
        assert kind == "UserWarning"
        assert text.startswith("precision: float16 without a GradScaler")
        assert file == __file__, "it points at the user's line"
    assert pools(2).run(step_in_float16, True) == [[], []]


@pytest.mark.parametrize(
    ("optimizer_fn", "words"),
    [
        (lambda model: adamw(list(model.parameters())), "optimizer_fn: a function of the tensors to step is needed"),
        (lambda _: lambda tensors: len(tensors), "optimizer_fn: it returned an int"),
        (lambda model: lambda _: adamw(list(model.parameters())), "optimizer_fn: its optimizer steps 6 tensors"),
    ],
    ids=["an optimizer", "a number", "other tensors"],
)
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_what_makes_no_right_optimizer_is_refused(strategy, optimizer_fn, words):
    model = cases.build("MLP")
    with pytest.raises(ValueError, match=words):
        build_engine(strategy, model, optimizer_fn(model), None)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_no_model_and_no_mesh_is_refused_by_name(strategy):
    for model, mesh, words in (
        (None, None, "model: None was given; give an nn.Module"),
        (torch.nn.Linear(2, 2), "x", "mesh: 'x' was given; give a Mesh"),
        (torch.nn.Linear(2, 2), {"data": 1}, "mesh: {'data': 1} was given"),
    ):
        with pytest.raises(ValueError, match=words):
            build_engine(strategy, model, adamw, mesh)


def test_sizes_of_axes_are_whole_numbers_by_name():
    for axes, words in (("x", "axes: 'x' was given"), ({"data": 1.5}, "axes: .* whole number of ranks")):
        with pytest.raises(ValueError, match=words):
            Mesh(axes)


def other_module(rank, strategy, transport):
    """Rank 1 alone has a wider layer, rank 2 another dtype in a buffer behind it."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3 if rank == 1 else 2))
    model.register_buffer("seen", torch.zeros(1, dtype=torch.int32 if rank == 2 else torch.int64))
    with Mesh({"data": 3}, transport=transport) as mesh:
        try:
            build_engine(strategy, model, adamw, mesh)
        except ValueError as error:
            return str(error)
    return "built"


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize("strategy", ["ddp", "bucketed", "zero3", "fsdp"])
def test_another_module_on_a_rank_is_named_on_all(pools, strategy, transport):
    expected = "model: where rank 0 has 1.weight [2, 4] float32, rank 1 has 1.weight [3, 4] float32; build the same"
    for said in pools(3).run(other_module, strategy, transport):
        assert said.startswith(expected)
