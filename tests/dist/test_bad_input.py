"""What a user can get wrong: a clear error on every rank, no hang, and the ranks can go on.

Optimizers are in test_whole_tensor and test_choosing_tensors, checkpoints in
test_checkpoint, and what is done wrong later in the stories.
"""

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import DDP, FSDP, STRATEGIES, Bucketed, ZeRO1, ZeRO3, build_engine
from shardlab.optimizers import GradScaler
from tests.dist import cases

from tests.dist.every_engine import (  # isort: skip
    KINDS, PIECES, SHARDED, WHOLE, adamw, assert_states, engine_of, one_step, plain_steps, sgd,
)  # fmt: skip


def rewriting_embedding():
    return nn.Sequential(nn.Embedding(11, 4, max_norm=0.1), nn.Linear(4, 5)).double()


def two_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()


def shared():
    model = two_layers()
    model[1].weight.data = model[0].weight.data
    return model


def of_a_buffer():
    model = two_layers()
    model.register_buffer("kept", model[0].weight.detach())
    return model


def of_an_attribute():
    model = two_layers()
    model.kept, model[1].own = model[0].weight.t(), torch.ones(3)
    return model


def expanded_buffer():
    model = two_layers()
    model.register_buffer("mask", torch.ones(1).expand(3))
    return model


def sparse_buffer():
    model = two_layers()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    return model


def scripted():
    return nn.Sequential(torch.jit.script(nn.Linear(5, 7)), nn.Linear(7, 5))


# By model: words, and who refuses.
MODELS = {
    rewriting_embedding: (r"model: '0' has max_norm=0\.1", KINDS),
    lambda: nn.Embedding(5, 3, sparse=True): "model: '' has sparse gradients, .*; build it with sparse=False",
    expanded_buffer: ("model: elements of buffer 'mask' share their memory", KINDS),
    sparse_buffer: "model: buffer 'graph' is sparse, .*; register its indices and its values as buffers",
    lambda: nn.LazyLinear(3): "model: 'weight' has no shape yet; run one forward",
    nn.Tanh: "model: it has no parameters",
    **dict.fromkeys(
        (shared, of_a_buffer, of_an_attribute),
        ("^model: .*two tensors over the same memory; tie them", (*PIECES, "fsdp-no_shard")),
    ),
    scripted: ("'0' is TorchScript", SHARDED),
}


def refused_models(rank, key):
    said = []
    for make, told in MODELS.items():
        words, keys = told if isinstance(told, tuple) else (told, KINDS)
        if key not in keys:
            continue
        with pytest.raises(ValueError, match=words) as caught, engine_of(key, 2, make(), optimizer_fn=sgd):
            pass
        said.append(str(caught.value))
    if key in WHOLE:
        with engine_of(key, 2, scripted(), optimizer_fn=sgd):
            pass
    return said


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("key", [*KINDS, "fsdp-no_shard"])
def test_models_that_no_engine_can_train_alike(pools, key):
    first, second = pools(2).run(refused_models, key)
    assert first == second


def other_states(rank, key):
    other = cases.build("Uneven").state_dict()
    shape = {**cases.build("MLP", seed=3).state_dict(), "0.weight": torch.zeros(3, 3)}
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=adamw) as engine:
        before = engine.full_state_dict()
        for state, words in (
            (other, r'Missing key\(s\) in state_dict: "0\.weight"'),
            (shape, r"size mismatch for 0\.weight"),
        ):
            with pytest.raises(RuntimeError, match=words):
                engine.load_full_state_dict(state)
            assert_states([engine.full_state_dict()], before)
        engine.load_full_state_dict(cases.build("MLP", seed=5).state_dict())
        one_step(engine)
        return engine.full_state_dict()


@pytest.mark.parametrize("key", [*KINDS, "fsdp-no_shard"])
def test_a_state_dict_of_another_model_is_named_and_the_right_one_loads_after_it(pools, key):
    assert_states(pools(2).run(other_states, key), plain_steps(cases.build("MLP", seed=5), adamw, 2, 0))


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_what_makes_no_right_optimizer_is_refused(strategy):
    for make, words in (
        (lambda model: adamw(list(model.parameters())), "optimizer_fn: a function of the tensors to step is needed"),
        (lambda _: lambda tensors: len(tensors), "optimizer_fn: it returned an int"),
        (lambda _: lambda _: adamw([nn.Parameter(torch.ones(2))]), "optimizer_fn: its optimizer steps 1 tensors"),
        (lambda _: torch.optim.LBFGS, r"^optimizer: LBFGS.step\(\) needs a closure"),
    ):
        model = cases.build("MLP")
        with pytest.raises(ValueError, match=words):
            build_engine(strategy, model, make(model), None)


def test_what_is_no_model_and_no_mesh_is_refused_by_name():
    for strategy in STRATEGIES:
        for model, mesh, words in (
            (None, None, "model: None was given; give an nn.Module"),
            (nn.Linear(2, 2), "x", "mesh: 'x' was given; give a Mesh"),
            (nn.Linear(2, 2), {"data": 1}, "mesh: {'data': 1} was given"),
        ):
            with pytest.raises(ValueError, match=words):
                build_engine(strategy, model, adamw, mesh)
    for axes, words in (("x", "axes: 'x' was given"), ({"data": 1.5}, "axes: .* whole number of ranks")):
        with pytest.raises(ValueError, match=words):
            Mesh(axes)


WRONG = (  # strategy, options, and the field that is named
    ("zero7", {}, "strategy"),
    ("ddp", {"bucket_bytes": 1}, "options"),
    ("bucketed", {"bucket_bytes": 0}, "bucket_bytes"),
    ("zero1", {"partition": "thirds"}, "partition"),
    ("single", {}, "mesh"),
    ("bucketed", {"precision": "bf16"}, "options"),
    ("zero3", {"precision": "int8"}, "precision"),
    *(("fsdp", {field: value}, field) for field, value in (("sharding", "half"), ("layout", "dim1"), ("prefetch", -1))),
    *(
        ("fsdp", {field: value}, field)
        for field, value in (("wrap", "x"), ("offload", "disk"), ("replicate_below", -1))
    ),
    ("fsdp", {"sharding": "hybrid_shard"}, "axis"),
    ("fsdp", {"partition": "balanced", "layout": "dim0"}, "partition"),
    ("fsdp", {"partition": "balanced", "sharding": "no_shard"}, "partition"),
    ("fsdp", {"replicate_below": 5, "sharding": "no_shard"}, "replicate_below"),
)


def misuse(rank):
    fields = []
    with Mesh({"data": 2}) as mesh, build_engine("bucketed", cases.build("MLP"), adamw, mesh) as engine:
        for strategy, options, _ in WRONG:
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                build_engine(strategy, cases.build("MLP"), adamw, mesh, **options)
            fields.append(str(caught.value).partition(":")[0])
        with pytest.raises(ValueError, match="norm_type: "):
            engine.clip_grad_norm_(1.0, norm_type=3.0)
        with pytest.raises(ValueError, match="max_norm: "):
            engine.clip_grad_norm_(0.0)
    return fields


def test_misuse_names_the_field(pools):
    assert pools(2).run(misuse) == [[field for *_, field in WRONG]] * 2


def test_options_beside_a_strategy_that_is_made_already_are_refused():
    for strategy, options, words in (
        (ZeRO1(), {"bucket_bytes": 64, "nonsense": 3}, r"bucket_bytes, nonsense beside a ZeRO1.* takes .*bucket_bytes"),
        (DDP(), {"precision": "bf16"}, r"precision beside a DDP.* takes \(\)"),
    ):
        with pytest.raises(ValueError, match=f"^options: {words}"):
            build_engine(strategy, cases.build("MLP"), adamw, **options)


def strategy_in_two_engines(rank, kind):
    """The second is refused; the first trains on, and hands the strategy over when it is closed."""
    strategy = kind()
    with Mesh({"data": 2}) as mesh:
        with build_engine(strategy, cases.build("MLP"), sgd, mesh) as engine:
            with pytest.raises(ValueError, match=rf"^strategy: this {kind.__name__} is another engine's.*make one for"):
                build_engine(strategy, cases.build("MLP"), sgd, mesh)
            one_step(engine)
            first = engine.full_state_dict()
        with build_engine(strategy, cases.build("MLP"), sgd, mesh) as engine:
            one_step(engine)
            return first, engine.full_state_dict()


@pytest.mark.parametrize("kind", [DDP, Bucketed, ZeRO1, ZeRO3, FSDP])
def test_a_strategy_is_of_one_engine(pools, kind):
    for states in pools(2).run(strategy_in_two_engines, kind):
        assert_states(states, plain_steps(cases.build("MLP"), sgd, 2, 0))


def other_module(rank, strategy):
    """Rank 1 alone has a wider layer, rank 2 another dtype in a buffer behind it; then they freeze other parts."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3 if rank == 1 else 2))
    model.register_buffer("seen", torch.zeros(1, dtype=torch.int32 if rank == 2 else torch.int64))
    frozen = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
    frozen[1 + rank].requires_grad_(False)
    said = []
    with Mesh({"data": 3}) as mesh:
        for made in (model, frozen):
            with pytest.raises(ValueError, match="model: ") as caught:
                build_engine(strategy, made, adamw, mesh)
            said.append(str(caught.value))
    return said


def test_another_module_on_a_rank_is_named_on_all(pools):
    for strategy in KINDS:
        for other, frozen in pools(3).run(other_module, strategy):
            assert other.startswith(
                "model: where rank 0 has 1.weight [2, 4] float32, rank 1 has 1.weight [3, 4] float32; build the same"
            )
            assert "1.weight [3, 3] float32 frozen, rank 1 has 1.w" in frozen


def scaled(rank):
    with Mesh({"data": 2}) as mesh:
        one, two = (build_engine("zero1", cases.build("MLP"), adamw, mesh) for _ in range(2))
        scaler, x = GradScaler(init_scale=4.0), cases.own_rows(cases.rows("MLP", 0, 0, 2)[0], rank)
        one.backward(scaler.scale(one(x).sum()))
        assert scaler.unscale_(one)
        with pytest.raises(RuntimeError, match="call it once a step"):
            scaler.unscale_(one)
        for use in (scaler.unscale_, scaler.step):
            with pytest.raises(ValueError, match="make a GradScaler for each engine"):
                use(two)
        assert scaler.step(one)
        one.zero_grad()
        # A loop that looks itself and goes on: the next step is unscaled anew.
        one.backward(scaler.scale(one(x).sum()) * torch.inf)
        assert not scaler.unscale_(one)
        one.zero_grad()
        one.backward(scaler.scale(one(x).sum()))
        return scaler.step(one)


def test_a_scaler_belongs_to_one_engine_and_unscales_once(pools):
    assert pools(2).run(scaled) == [True, True]


def norm_with_a_nan(rank, transport):
    with (
        Mesh({"data": 2}, transport=transport) as mesh,
        build_engine("zero1", cases.build("MLP"), adamw, mesh) as engine,
    ):
        engine.backward(engine(cases.own_rows(cases.rows("MLP", 0, 0, 2)[0], rank)).sum())
        if rank == 1:
            next(tensor for tensor in engine.step_tensors() if tensor.grad is not None).grad.view(-1)[0] = torch.nan
        return float(engine.clip_grad_norm_(1.0, torch.inf))


def test_the_largest_element_of_a_gradient_with_nan_is_nan(pools):
    for transport in ("gloo", "shared_memory"):
        assert all(norm != norm for norm in pools(2).run(norm_with_a_nan, transport))
