"""Every engine equals one process on the concatenated batch, in float64 to 1e-10, at 1, 2, 3 and 4 ranks."""

from math import inf

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from tests.dist import cases

# Every model at every world size.
MAIN = {
    "ddp": ("ddp", {}),
    "bucketed": ("bucketed", {"bucket_bytes": 256}),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {"bucket_bytes": 256}),
    "zero3": ("zero3", {}),
    "fsdp": ("fsdp", {}),
    "fsdp-dim0": ("fsdp", {"layout": "dim0", "prefetch": 2}),
}
# The same code with other options: the nastier models, at 3 ranks.
MORE = {
    "bucketed-one": ("bucketed", {}),
    "zero1-small": ("zero1", {"bucket_bytes": 256}),
    "zero1-balanced": ("zero1", {"partition": "balanced", "bucket_bytes": 512}),
    "zero1-round_robin": ("zero1", {"partition": "round_robin"}),
    "zero1-contiguous": ("zero1", {"partition": "contiguous"}),
    "zero2-balanced": ("zero2", {"partition": "balanced", "bucket_bytes": 512}),
    "zero3-small": ("zero3", {"bucket_bytes": 256}),
    "zero3-balanced": ("zero3", {"partition": "balanced", "bucket_bytes": 512}),
    "fsdp-shard_grad_op": ("fsdp", {"sharding": "shard_grad_op", "prefetch": 0}),
    "fsdp-balanced": ("fsdp", {"partition": "balanced"}),
    "fsdp-no_shard": ("fsdp", {"sharding": "no_shard", "wrap": "root"}),
}
ENGINES = {**MAIN, **MORE}
WORLD_SIZES = (2, 3, 4)


def train(rank, engine_key, kind, optimizer, steps=5, micro_batches=1, clip=None, norm_type=2.0, plain_backward=False):
    strategy, options = ENGINES[engine_key]
    if strategy == "fsdp" and kind == "Unused":
        options = {**options, "wrap": "root"}  # a unit that only some ranks run cannot be gathered by all
    num_ranks = torch.distributed.get_world_size()
    result = cases.Result()
    with Mesh({"data": num_ranks}) as mesh:
        # Ranks that start different must end equal.
        model = cases.build(kind, seed=rank)
        with build_engine(strategy, model, cases.OPTIMIZERS[optimizer], mesh, **options) as engine:
            for step in range(steps):
                total = 0.0
                for micro_batch in range(micro_batches):
                    x, y = (cases.own_rows(part, rank) for part in cases.rows(kind, step, micro_batch, num_ranks))
                    last = micro_batch == micro_batches - 1
                    if last or plain_backward:
                        loss = cases.loss_of(engine(x), y) / micro_batches
                        loss.backward() if plain_backward else engine.backward(loss)
                    else:
                        with engine.no_sync():
                            loss = cases.loss_of(engine(x), y) / micro_batches
                            engine.backward(loss)
                    total += float(loss.detach())
                if clip is not None:
                    result.norms.append(float(engine.clip_grad_norm_(clip, norm_type)))
                engine.step()
                engine.zero_grad()
                mean = torch.tensor(total, dtype=torch.float64)
                mesh.data.all_reduce(mean).wait()
                result.losses.append(float(mean) / num_ranks)
            assert engine.num_steps == steps
            result.state = engine.full_state_dict()
    return result


def assert_equal(results, expected):
    for rank, result in enumerate(results):
        assert result.losses == pytest.approx(expected.losses, abs=1e-10), f"losses of rank {rank}"
        assert result.norms == pytest.approx(expected.norms, abs=1e-10), f"norms of rank {rank}"
        assert result.state.keys() == expected.state.keys()
        for name, value in expected.state.items():
            torch.testing.assert_close(result.state[name], value, atol=1e-10, rtol=0, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("engine", MAIN)
def test_equals_one_process(pools, engine, num_ranks):
    for kind, optimizer in [*((kind, "adamw") for kind in cases.MODELS), ("Tied", "sgd"), ("Unused", "sgd")]:
        expected = cases.reference(kind, optimizer, num_ranks)
        assert_equal(pools(num_ranks).run(train, engine, kind, optimizer), expected)


@pytest.mark.parametrize("engine", MORE)
def test_other_options_equal_one_process(pools, engine):
    for kind, optimizer in (("Uneven", "adamw"), ("Unused", "adamw"), ("Tied", "sgd")):
        assert_equal(pools(3).run(train, engine, kind, optimizer), cases.reference(kind, optimizer, 3))


@pytest.mark.parametrize(
    ("engine", "num_ranks"),
    [*((engine, size) for engine in MAIN for size in (2, 4)), *((engine, 3) for engine in MORE)],
)
def test_accumulation_and_clipping_equal_one_process(pools, engine, num_ranks):
    for kind in ("Unused", "SmallGPT"):
        expected = cases.reference(kind, "adam_large_eps", num_ranks, steps=3, micro_batches=3, clip=0.05)
        assert max(expected.norms) > 0.05, "the clip must bite, or the test shows nothing"
        results = pools(num_ranks).run(train, engine, kind, "adam_large_eps", steps=3, micro_batches=3, clip=0.05)
        assert_equal(results, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_plain_backward_and_communicating_micro_batches(pools, engine):
    """``loss.backward()`` for every micro-batch, each outside ``no_sync``: what is pending is finished in between."""
    for kind in ("Unused", "SmallGPT"):
        expected = cases.reference(kind, "sgd", 3, steps=3, micro_batches=2)
        results = pools(3).run(train, engine, kind, "sgd", steps=3, micro_batches=2, plain_backward=True)
        assert_equal(results, expected)


@pytest.mark.parametrize("engine", MAIN)
def test_norm_types(pools, engine):
    for norm_type in (1.0, 2.0, inf):
        expected = cases.reference("Unused", "sgd", 3, steps=3, clip=0.05, norm_type=norm_type)
        results = pools(3).run(train, engine, "Unused", "sgd", steps=3, clip=0.05, norm_type=norm_type)
        assert max(expected.norms) > 0.05
        assert_equal(results, expected)


class WithoutElements(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return super().forward(x) + self.nothing.sum()


def largest_beside_nothing(rank):
    norms = []
    with Mesh({"data": 2}) as mesh:
        for strategy, options in [*MAIN.values(), ("torch_ddp", {}), ("torch_zero1", {})]:
            torch.manual_seed(0)
            with build_engine(strategy, WithoutElements(), torch.optim.Adam, mesh, **options) as engine:
                engine.backward(engine(torch.ones(2, 3)).square().mean())
                norms.append(float(engine.clip_grad_norm_(1.0, inf)))
    return norms


def test_the_largest_gradient_beside_a_parameter_without_elements_is_equal(pools):
    for norms in pools(2).run(largest_beside_nothing):
        assert norms == pytest.approx([norms[0]] * len(norms))


@pytest.mark.parametrize("engine", ["single", *ENGINES])
def test_one_rank_is_plain_torch_bit_for_bit(engine):
    strategy, options = ENGINES.get(engine, (engine, {}))
    for kind in cases.MODELS:
        if kind == "NonContiguous" and strategy.startswith(("zero", "fsdp")):
            continue  # its parameters become contiguous, for which the matrix product sums in another order
        expected = cases.reference(kind, "adamw", 1, clip=0.05)
        model = cases.build(kind)
        result = cases.Result()
        with build_engine(strategy, model, cases.OPTIMIZERS["adamw"], **options) as built:
            for step in range(5):
                x, y = cases.rows(kind, step, 0, 1)
                loss = cases.loss_of(built(x), y)
                built.backward(loss)
                result.losses.append(float(loss.detach()))
                result.norms.append(float(built.clip_grad_norm_(0.05)))
                built.step()
                built.zero_grad()
            result.state = built.full_state_dict()
        assert result.losses == expected.losses
        assert result.norms == expected.norms
        for name, value in expected.state.items():
            assert torch.equal(result.state[name], value), (kind, name)
