"""Optimizers that look at whole tensors: exact with whole parameters, refused where they are cut, of any class."""

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.optimizers.sharded_optimizer import ShardedOptimizer
from shardlab.vocabulary import Partition
from tests.dist import whole_optimizers
from tests.dist.every_engine import adamw, assert_states, axes_of, one_step, plain_steps
from tests.dist.test_fsdp import build

WHOLE = [str(partition) for partition in Partition if partition is not Partition.ELEMENTS]
FSDP = {
    "fsdp": {},
    "fsdp-shard_grad_op": {"sharding": "shard_grad_op"},
    "fsdp-hybrid": {"sharding": "hybrid_shard"},
    "fsdp-replicate": {"replicate_below": 10},
    "fsdp-offload": {"offload": "all"},
    "fsdp-offload-parameters": {"offload": "parameters"},
    "fsdp-root": {"wrap": "root"},
}
ENGINES = {"zero1": {}, "zero2": {}, "zero3": {}, **FSDP}
OPTIMIZERS = {
    **whole_optimizers.TENSOR,
    "Adafactor": lambda tensors: torch.optim.Adafactor(tensors, lr=1e-2),
    "Muon": lambda tensors: torch.optim.Muon(matrices(tensors), lr=1e-2),
    "Centred": whole_optimizers.Centred,
}
STEPS = 3


def matrices(tensors):
    if hasattr(tensors, "where"):
        return tensors.where(lambda name: name.endswith("weight"))
    return [tensor for tensor in tensors if tensor.dim() == 2]


def trained(rank, num_ranks, kind, partition):
    """Final states by engine, after some steps; each optimizer meets every second engine."""
    found = {}
    for key in list(ENGINES)[list(OPTIMIZERS).index(kind) % 2 :: 2]:
        if key == "fsdp-hybrid" and num_ranks % 2:
            continue
        options = {**ENGINES[key], "partition": partition}
        with (
            Mesh(axes_of(key, num_ranks)) as mesh,
            build_engine(key.partition("-")[0], build(), OPTIMIZERS[kind], mesh, **options) as engine,
        ):
            for step in range(STEPS):
                one_step(engine, step=step)
                engine.zero_grad()
            found[key] = engine.full_state_dict(), [
                sum(name in division.pieces_of(rank) for rank in range(division.comm.num_ranks))
                for division in engine.divisions() for name in division.layout.names
            ]  # fmt: skip
    return found


@pytest.mark.parametrize(("kind", "num_ranks"), [(kind, 2 + number % 3) for number, kind in enumerate(OPTIMIZERS)])
def test_exact_with_whole_parameters(pools, kind, num_ranks):
    partition = WHOLE[num_ranks % 3]
    expected = plain_steps(build(), OPTIMIZERS[kind], num_ranks, *range(STEPS))
    tolerance = 1e-8 if kind == "Muon" else 1e-10  # it computes in bfloat16, which magnifies the last bit of a sum
    for found in pools(num_ranks).run(trained, num_ranks, kind, partition):
        for key, (state, num_owners) in found.items():
            assert_states([state], expected, tolerance)
            if key != "fsdp-replicate":
                assert set(num_owners) == {1}, key


def refusals(rank, kind):
    """Messages, and that the module then trains under another engine as if nothing had been."""
    messages = []
    with Mesh({"data": 2}) as mesh:
        for strategy, options in list(CUT.values())[list(UNFIT).index(kind) % 2 :: 2]:
            model = build()
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                build_engine(strategy, model, UNFIT[kind], mesh, **options)
            messages.append(str(caught.value))
            for name, value in build().state_dict().items():
                assert torch.equal(model.state_dict()[name], value)
            with build_engine("bucketed", model, adamw, mesh) as engine:
                one_step(engine)
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            ShardedOptimizer(matrices(build().parameters()), KINDS[kind], comm=mesh.data, lr=1e-2)
        messages.append(str(caught.value))
    return messages


CUT = {
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "fsdp": ("fsdp", {}),
    "fsdp-dim0": ("fsdp", {"layout": "dim0"}),
    "fsdp-offload": ("fsdp", {"offload": "parameters"}),
}
UNFIT = {kind: make for kind, make in OPTIMIZERS.items() if kind != "Centred"}
KINDS = {**whole_optimizers.TENSOR, "Adafactor": torch.optim.Adafactor, "Muon": torch.optim.Muon}


@pytest.mark.parametrize("kind", UNFIT)
def test_refused_where_they_are_cut(pools, kind):
    first, second = pools(2).run(refusals, kind)
    assert first == second
    for message in first:
        if kind == "Muon":  # which takes matrices alone, and is not built over other pieces
            assert "or, if it takes whole tensors, use one of round_robin" in message or "partition: Muon" in message
        else:
            assert message.startswith(f"partition: {kind} looks at whole tensors, and 'elements' cuts through them")
            assert message.endswith("round_robin, contiguous, balanced")


def of_the_model(rank):
    messages = []
    with Mesh({"data": 2}) as mesh:
        for strategy in ("zero1", "zero2", "zero3", "fsdp"):
            for partition in Partition:
                model = build()
                with pytest.raises(ValueError) as caught:  # noqa: PT011
                    build_engine(strategy, model, whole_optimizers.Clipped, mesh, partition=partition)
                messages.append(str(caught.value))
        for strategy, options in (("bucketed", {}), ("ddp", {}), ("fsdp", {"sharding": "no_shard"})):
            for make in (whole_optimizers.Clipped, *OPTIMIZERS.values()):
                with build_engine(strategy, build(), make, mesh, **options) as engine:
                    one_step(engine)
    return messages


def test_what_looks_at_the_whole_model_is_never_sharded(pools):
    first, second = pools(2).run(of_the_model)
    assert first == second
    assert set(first) == {
        "optimizer: Clipped looks at the whole model, so it cannot be sharded; use bucketed or ddp, and no pipeline"
    }


def with_frozen_biases(rank):
    """All that trains are matrices, and the optimizer is given the rest too."""
    with Mesh({"data": 2}) as mesh:
        for strategy in ("ddp", "zero1", "zero3", "fsdp"):
            model, options = build(), {} if strategy == "ddp" else {"partition": "balanced"}
            frozen = [name for name, param in model.named_parameters() if param.dim() < 2]
            for name in frozen:
                model.get_parameter(name).requires_grad_(False)
            with pytest.raises(ValueError, match=rf"optimizer_fn: .*frozen.*, such as '{frozen[0]}'.*tensors\.where"):
                build_engine(strategy, model, lambda tensors: torch.optim.Muon(tensors, lr=1e-2), mesh, **options)
            with build_engine(strategy, model, OPTIMIZERS["Muon"], mesh, **options) as engine:
                one_step(engine)


def test_an_optimizer_that_does_not_take_what_is_frozen_is_told_how_to_leave_it_out(pools):
    pools(2).run(with_frozen_biases)


def refused_on_one_rank(rank):
    """A user's class that only rank 1's pieces displease."""

    def make(tensors):
        if rank == 1:
            raise TypeError("not these")
        return adamw(tensors)

    with Mesh({"data": 2}) as mesh:
        for strategy in ("zero1", "zero2", "zero3", "fsdp"):
            model = build()
            with pytest.raises(RuntimeError, match=r"TypeError: not these \(on rank 1\)"):
                build_engine(strategy, model, make, mesh)
            with build_engine(strategy, model, adamw, mesh) as engine:
                one_step(engine)


def test_one_rank_s_refusal_reaches_all(pools):
    pools(2).run(refused_on_one_rank)
