"""A tensor-parallel GPT under every data strategy equals one process, in float64 to 1e-10."""

import copy
import pickle
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import nn

from shardlab import GradScaler
from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.experiment.run.shard_rows import shard_rows
from shardlab.models import GPT, GPTConfig, next_token_loss
from shardlab.tensor_parallel import gpt_plan, parallelize_module, vocab_parallel_cross_entropy
from tests.dist import cases, whole_optimizers

CONFIG = GPTConfig(vocab_size=12, seq_len=6, num_layers=2, num_heads=4, num_kv_heads=2, hidden=8)
FOUR = {"data": 2, "tensor": 2}
ENGINES = {
    "ddp": ("ddp", {}, FOUR),
    "bucketed": ("bucketed", {"bucket_bytes": 512}, FOUR),
    "zero1": ("zero1", {"bucket_bytes": 512}, FOUR),
    "zero1-balanced": ("zero1", {"partition": "balanced"}, FOUR),
    "zero2": ("zero2", {"bucket_bytes": 512}, FOUR),
    "zero3": ("zero3", {"bucket_bytes": 512}, FOUR),
    "fsdp": ("fsdp", {}, FOUR),
    "fsdp-dim0": ("fsdp", {"layout": "dim0", "prefetch": 2}, FOUR),
    "fsdp-shard_grad_op": ("fsdp", {"sharding": "shard_grad_op", "prefetch": 0}, FOUR),
    "fsdp-no_shard": ("fsdp", {"sharding": "no_shard"}, FOUR),
    "fsdp-small": ("fsdp", {"replicate_below": 20}, FOUR),
    "hybrid-shard": ("fsdp", {"sharding": "hybrid_shard"}, {"replica": 1, "shard": 2, "tensor": 2}),
    "hybrid-replica": ("fsdp", {"sharding": "hybrid_shard"}, {"replica": 2, "shard": 1, "tensor": 2}),
    "alone": ("single", {}, {"data": 1, "tensor": 2}),
    "alone-of-four": ("zero2", {}, {"data": 4, "tensor": 1}),
}
PLANS = {
    "whole": {},
    "sequence": {"sequence_parallel": True},
    "regather, logits in parts": {"sequence_parallel": True, "regather": True, "gather_logits": False},
}
OPTIMIZERS = {
    "adamw": lambda tensors: torch.optim.AdamW(tensors, lr=1e-2, eps=1e-3, weight_decay=0.1),
    "sgd": lambda tensors: torch.optim.SGD(tensors, lr=0.1, momentum=0.9),
}
ROWS = 4


def build(seed=0, config=CONFIG):
    return cases.seeded(lambda: GPT(config), seed).double()


def batch(step, micro_batch, rank=0, num_ranks=1):
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    tokens = torch.randint(0, 12, (ROWS, 7), generator=generator)
    tokens = tokens.chunk(num_ranks)[rank]
    return tokens[:, :-1], tokens[:, 1:]


def parallel(rank, mesh, options, seed=None, config=CONFIG):
    comm = mesh["tensor"]
    if comm.num_ranks == 2:
        config = GPTConfig(**{**config.__dict__, "num_kv_heads": 2})
    model = build(rank if seed is None else seed, config)
    return parallelize_module(model, gpt_plan(config, **options), comm)


def loss_of(engine, x, y, comm):
    logits = engine(x)
    if logits.shape[-1] == 12:
        return next_token_loss(logits, y)
    return vocab_parallel_cross_entropy(logits, y, comm)


def train_engine(engine, mesh, steps, micro_batches=1, clip=None, plain_backward=False, norm_type=2.0, gradients=None):
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for micro_batch in range(micro_batches):
            x, y = batch(step, micro_batch, engine.data_rank, engine.num_data_ranks)
            with engine.no_sync() if micro_batch < micro_batches - 1 and not plain_backward else nullcontext():
                loss = loss_of(engine, x, y, mesh["tensor"]) / micro_batches
                loss.backward() if plain_backward else engine.backward(loss)
            total += float(loss.detach())
        if gradients is not None:
            gradients.append(engine.full_gradients())
        if clip is not None:
            norms.append(float(engine.clip_grad_norm_(clip, norm_type)))
        engine.step()
        engine.zero_grad()
        mean = torch.tensor(total, dtype=torch.float64)
        losses.append(float(engine.mean_over_ranks(mean, tag="loss")))
    return losses, norms


def train(rank, key, plan, optimizer, recomputes=False, **how):
    strategy, options, axes = ENGINES[key]
    with Mesh(axes) as mesh:
        model = parallel(rank, mesh, PLANS[plan])
        for block in model.blocks if recomputes else ():
            plain = block.forward
            block.forward = lambda x, plain=plain: torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=False)
        with build_engine(strategy, model, OPTIMIZERS[optimizer], mesh, **options) as engine:
            losses, norms = train_engine(engine, mesh, **{"steps": 2, **how})
            return losses, norms, engine.full_state_dict(), engine.full_optimizer_state_dict()


def train_all(rank, key, todo):
    return [train(rank, key, plan, optimizer, **how) for plan, optimizer, how in todo]


@cache
def reference(optimizer, steps=2, micro_batches=1, clip=None, norm_type=2.0):
    """Losses, norms, both states, and the gradients of every step."""
    model = build()
    optim = OPTIMIZERS[optimizer](list(model.parameters()))
    losses, norms, gradients = [], [], []
    for step in range(steps):
        total = 0.0
        for micro_batch in range(micro_batches):
            x, y = batch(step, micro_batch)
            loss = next_token_loss(model(x), y) / micro_batches
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip, norm_type)))
        optim.step()
        optim.zero_grad()
    return losses, norms, model.state_dict(), optim.state_dict(), gradients


def num_ranks_of(key):
    sizes = ENGINES[key][2].values()
    return 4 if 4 in sizes or len(sizes) == 3 or list(sizes) == [2, 2] else 2


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def assert_same(results, expected):
    losses, norms, state, optimizer_state, _ = expected
    for found_losses, found_norms, found_state, found_optimizer in results:
        assert found_losses == pytest.approx(losses, abs=1e-10)
        assert found_norms == pytest.approx(norms, abs=1e-10)
        close(found_state, dict(state))
        close(found_optimizer["state"], optimizer_state["state"])


ACCUMULATED = {"micro_batches": 2, "clip": 0.05}
TODO = (("whole", "adamw", {}), ("regather, logits in parts", "sgd", {}), ("sequence", "sgd", ACCUMULATED))
# Backward without the engine, other norms, and activations that are computed again.
OTHER_WAYS = (
    ("sequence", "sgd", {"micro_batches": 2, "plain_backward": True}),
    ("whole", "sgd", {"clip": 0.05, "norm_type": 1.0}),
    ("whole", "sgd", {"clip": 0.05, "norm_type": float("inf")}),
    ("regather, logits in parts", "sgd", {"recomputes": True}),
)


@pytest.mark.parametrize("key", ENGINES)
def test_equals_one_process(pools, key):
    assert max(reference("sgd", **ACCUMULATED)[1]) > 0.05
    # All of one engine whose parameters are whole and of one that shards them; one of the others, by turns.
    main, place = key in ("zero2", "fsdp"), list(ENGINES).index(key)
    todo = (*TODO, *OTHER_WAYS) if main else (TODO[place % 3],)
    for (_, optimizer, how), *results in zip(todo, *pools(num_ranks_of(key)).run(train_all, key, todo), strict=True):
        plain = {name: value for name, value in how.items() if name not in ("plain_backward", "recomputes")}
        assert_same(results, reference(optimizer, **plain))


def gathered(rank, key, plan):
    strategy, options, axes = ENGINES[key]
    with Mesh(axes) as mesh:
        model, gradients = parallel(rank, mesh, PLANS[plan]), []
        with build_engine(strategy, model, OPTIMIZERS["adamw"], mesh, **options) as engine:
            losses, norms = train_engine(engine, mesh, 2, gradients=gradients)
            state, full = engine.named_optimizer_state(), engine.full_optimizer_state_dict()
            trained = losses, norms, engine.full_state_dict(), full
            engine.load_named_optimizer_state(state)
            again = [engine.named_optimizer_state()]
            engine.load_full_optimizer_state_dict(full)
            again.append(engine.named_optimizer_state())
            engine.load_full_state_dict(other := build(1).state_dict())
            loaded = engine.full_state_dict()
            return trained, gradients, state, again, [torch.equal(loaded[name], other[name]) for name in other]


def test_gradients_and_states_are_those_of_the_whole_model(pools):
    expected = reference("adamw")
    expected_gradients = expected[4]
    for key, plan in (
        ("zero1-balanced", "sequence"), ("zero3", "whole"), ("fsdp-dim0", "regather, logits in parts"),
    ):  # fmt: skip
        for trained, gradients, state, again, is_loaded in pools(num_ranks_of(key)).run(gathered, key, plan):
            assert_same([trained], expected)
            assert all(is_loaded)
            for own, plain in zip(gradients, expected_gradients, strict=True):
                assert list(own) == list(plain)
                close(own, plain)
            assert list(state) == list(expected_gradients[0])
            close(dict(enumerate(state.values())), expected[3]["state"])
            for loaded in again:
                torch.testing.assert_close(loaded, state, atol=0, rtol=0)


def replicated(rank, key):
    strategy, options, axes = ENGINES[key]
    with Mesh(axes) as mesh:
        model = parallel(rank, mesh, {"sequence_parallel": True})
        with build_engine(strategy, model, OPTIMIZERS["adamw"], mesh, **options) as engine:
            train_engine(engine, mesh, 8, clip=1.0)
        return {name: param.detach() for name, param in model.named_parameters() if name not in engine.slices}


def test_replicated_parameters_stay_bitwise_equal_over_8_steps(pools):
    for key in ("bucketed", "fsdp"):
        results = pools(4).run(replicated, key)
        assert results[0].keys() >= {"final_norm.weight", "blocks.0.mlp.fc2.bias", "position_embedding.weight"}
        for found in results:
            for name, value in found.items():
                assert torch.equal(value, results[0][name]), name


def elements_held(rank):
    """Elements of the whole parameters, by role and parameter, of the slices that ZeRO-2 shards; and the slices."""
    with Mesh(FOUR) as mesh, build_engine("zero2", parallel(rank, mesh, {}), OPTIMIZERS["adamw"], mesh) as engine:
        x, y = batch(0, 0, engine.data_rank, engine.num_data_ranks)
        engine.backward(next_token_loss(engine(x), y))
        engine.step()
        found = {}
        for row in shard_rows(engine):
            key = str(row["role"]), row["parameter"], row["shape"]
            found.setdefault(key, []).extend(range(row["start"], row["stop"]))
        return found, set(engine.slices)


def test_the_shard_map_counts_in_whole_parameters(pools):
    """A slice's elements are held once where the data axis shards it, and what is whole on each tensor rank twice."""
    results = pools(4).run(elements_held)
    for role, times in (("parameter", 2), ("gradient", 1), ("optimizer_state", 1)):
        for name, param in build().named_parameters():
            held = [at for found, _ in results for at in found.get((role, name, "x".join(map(str, param.shape))), [])]
            copies = times * (1 if name in results[0][1] else 2)
            assert sorted(held) == sorted(list(range(param.numel())) * copies), (role, name)


class Silent(torch.optim.SGD):
    """Does not say what it looks at."""


def refused(rank):
    with Mesh({"data": 1, "tensor": 2}) as mesh, Mesh({"data": 2}) as data_only:
        with pytest.raises(ValueError, match="model: the mesh has 2 tensor-parallel ranks, and the model is whole"):
            build_engine("bucketed", build(), OPTIMIZERS["sgd"], mesh)
        with pytest.raises(ValueError, match="mesh: the model is sliced over 2 ranks of an axis 'tensor'"):
            build_engine("bucketed", parallel(rank, mesh, {}), OPTIMIZERS["sgd"], data_only)
        for kind in (torch.optim.Adafactor, whole_optimizers.TrustRatio, whole_optimizers.Clipped, Silent):
            told = "looks at more than one element|looks at the whole model|is none of torch's own"
            with pytest.raises(ValueError, match=f"optimizer: {kind.__name__} ({told})"):
                build_engine("bucketed", parallel(rank, mesh, {}), lambda tensors, kind=kind: kind(list(tensors)), mesh)


def test_what_does_not_fit_is_refused(pools):
    pools(2).run(refused)


def across(rank):
    with Mesh(FOUR) as mesh, Mesh(FOUR) as equal:
        model = parallelize_module(build(), gpt_plan(CONFIG), mesh["data"])
        with pytest.raises(ValueError, match=r"sliced over 2 ranks of an axis 'data', \[.*the axis 'tensor' of"):
            build_engine("bucketed", model, OPTIMIZERS["sgd"], mesh)
        build_engine("ddp", parallel(rank, mesh, {}), OPTIMIZERS["sgd"], equal).close()


def test_slices_of_another_axis_of_a_square_mesh_are_refused(pools):
    pools(4).run(across)


def scaled(rank):
    """An overflow in one rank's slice makes every rank skip the step."""
    with Mesh(FOUR) as mesh, build_engine("zero2", parallel(rank, mesh, {}), OPTIMIZERS["sgd"], mesh) as engine:
        scaler = GradScaler()
        x, y = batch(0, 0, engine.data_rank, 2)
        engine.backward(scaler.scale(next_token_loss(engine(x), y)))
        engine.finish_gradients()
        if rank == 3:
            next(t.grad for t in engine.step_tensors() if t.grad is not None).fill_(float("inf"))
        return scaler.step(engine), scaler.current_scale


def test_ranks_agree_on_an_overflow(pools):
    assert pools(4).run(scaled) == [(False, 32768.0)] * 4


def copied(rank, plan):
    with Mesh({"data": 1, "tensor": 2}) as mesh, Mesh({"data": 2, "tensor": 1}) as undivided:
        model, average = parallel(rank, mesh, PLANS[plan]), build()
        x, y = batch(0, 0)
        with build_engine("ddp", model, OPTIMIZERS["sgd"], mesh) as engine:
            for part in (model, engine.module):
                for way in (copy.deepcopy, pickle.dumps):
                    with pytest.raises(TypeError, match=r"axis 'tensor'.*before parallelize_module"):
                        way(part)
            engine.backward(loss_of(engine, x, y, mesh["tensor"]))
            engine.step()
            average.load_state_dict(engine.full_state_dict())  # what the refusal says to do
            output = average(x)
        model = parallel(0, undivided, {})
        return output, bool((copy.deepcopy(model)(x) == model(x)).all())


def test_a_copy_is_refused_and_the_whole_model_is_to_be_had(pools):
    """A copy would lack the hooks on parameters that are whole."""
    model, (x, y) = build(), batch(0, 0)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    loss_of(model, x, y, None).backward()
    optimizer.step()
    for plan in ("whole", "sequence"):
        for output, is_alike_on_one_rank in pools(2).run(copied, plan):
            close(output, model(x))
            assert is_alike_on_one_rank
