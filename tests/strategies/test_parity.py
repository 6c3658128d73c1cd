"""Every strategy equals one process, in float64 to 1e-10, at 2, 3 and 4 ranks, with and without guards."""

import contextlib

import pytest
import torch

from shardlab import engines
from shardlab.comm.mesh import Mesh
from shardlab.engines import Engine
from tests.dist import cases, every_engine, nasty

SMALL = {"bucket_bytes": 256}
STRATEGIES = {
    "ddp": ("DDP", {}),
    "bucketed": ("Bucketed", SMALL),
    "bucketed-one": ("Bucketed", {}),
    "zero1": ("ZeRO1", SMALL),
    "zero1-balanced": ("ZeRO1", {"partition": "balanced", "bucket_bytes": 512}),
    "zero2": ("ZeRO2", SMALL),
    "zero2-round_robin": ("ZeRO2", {"partition": "round_robin"}),
    "zero3": ("ZeRO3", SMALL),
    "zero3-balanced": ("ZeRO3", {"partition": "balanced", "bucket_bytes": 512}),
    "fsdp": ("FSDP", {}),
    "fsdp-dim0": ("FSDP", {"layout": "dim0", "prefetch": 2}),
    "fsdp-0": ("FSDP", {"prefetch": 0, "replicate_below": 20}),
    "fsdp-shard_grad_op": ("FSDP", {"sharding": "shard_grad_op"}),
    "fsdp-no_shard": ("FSDP", {"sharding": "no_shard"}),
    "fsdp-balanced": ("FSDP", {"partition": "balanced"}),
    "fsdp-offload": ("FSDP", {"offload": "parameters"}),
    "fsdp-offload-all": ("FSDP", {"offload": "all", "layout": "dim0"}),
    "fsdp-hybrid": ("FSDP", {"sharding": "hybrid_shard"}),
    "fsdp-hybrid-dim0": ("FSDP", {"sharding": "hybrid_shard", "layout": "dim0", "replicate_below": 20}),
}
# (optimizer, micro-batches, clip, plain backward, evaluations between backward and step)
LOOPS = [
    ("adamw", 1, None, False, False),
    ("sgd", 3, 0.05, False, False),
    ("adam_large_eps", 2, 0.05, True, False),
    ("sgd", 3, 0.05, False, True),
    ("adamw", 2, 0.05, True, True),
]


def strategy_of(key, kind):
    name, options = STRATEGIES[key]
    if name == "FSDP" and kind == "Unused":
        options = {**options, "wrap": "root"}  # a unit that only some ranks run cannot be gathered by all
    return getattr(engines, name)(**options)


def train(rank, key, kind, loop, guarded):
    optimizer, micro_batches, clip, plain, evaluates = loop
    num_ranks = torch.distributed.get_world_size()
    result = cases.Result()
    axes = {"replica": 2, "shard": num_ranks // 2} if "hybrid" in key else {"data": num_ranks}
    with Mesh(axes) as mesh:
        model = cases.build(kind, seed=rank)  # ranks that start different must end equal
        engine = Engine(model, cases.OPTIMIZERS[optimizer], mesh, strategy_of(key, kind), guards=guarded)
        for step in range(4):
            total = 0.0
            for micro_batch in range(micro_batches):
                x, y = (cases.own_rows(part, rank) for part in cases.rows(kind, step, micro_batch, num_ranks))
                with contextlib.nullcontext() if micro_batch == micro_batches - 1 else engine.no_sync():
                    loss = cases.loss_of(engine(x), y) / micro_batches
                    loss.backward() if plain else engine.backward(loss)
                total += float(loss.detach())
                if evaluates:
                    with torch.no_grad() if micro_batch % 2 else contextlib.nullcontext():
                        engine(x)
            if clip:
                result.norms.append(float(engine.clip_grad_norm_(clip)))
            if evaluates:
                with torch.no_grad():
                    engine(x)
            engine.step()
            engine.zero_grad()
            mean = torch.tensor(total, dtype=torch.float64)
            engine.mean_over_ranks(mean, tag="loss")
            result.losses.append(float(mean))
        result.state = engine.full_state_dict()
        engine.close()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, result.state[name], atol=0, rtol=0)
        cases.loss_of(model(x), y).backward()  # alone again
    return result


def assert_equal(results, expected):
    for rank, result in enumerate(results):
        assert result.losses == pytest.approx(expected.losses, abs=1e-10), f"losses of rank {rank}"
        assert result.norms == pytest.approx(expected.norms, abs=1e-10), f"norms of rank {rank}"
        assert result.state.keys() == expected.state.keys()
        for name, value in expected.state.items():
            torch.testing.assert_close(result.state[name], value, atol=1e-10, rtol=0, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("key", STRATEGIES)
def test_equals_one_process(pools, key):
    """Each model by two of the loops, one of them with guards and one without."""
    num_ranks = 4 if "hybrid" in key else 3
    for place, kind in enumerate(cases.MODELS):
        for guarded, loop in enumerate((LOOPS[place % len(LOOPS)], LOOPS[(place + 2) % len(LOOPS)])):
            optimizer, micro_batches, clip, *_ = loop
            expected = cases.reference(kind, optimizer, num_ranks, 4, micro_batches, clip)
            assert_equal(pools(num_ranks).run(train, key, kind, loop, bool(guarded)), expected)


def train_nasty(rank, key, name, guarded):
    case = nasty.CASES[name]
    with Mesh({"data": torch.distributed.get_world_size()}) as mesh:
        strategy = strategy_of(key, "Unused" if name == "unused" else "")
        return nasty.train(case, Engine(case.build(seed=rank), nasty.optimizer, mesh, strategy, guards=guarded))


@pytest.mark.parametrize("key", ["bucketed", "zero1", "zero2", "zero3", "fsdp", "fsdp-dim0", "fsdp-shard_grad_op"])
def test_nasty_cases_equal_one_process(pools, key):
    for place, name in enumerate(nasty.CASES):
        results = pools(2).run(train_nasty, key, name, bool(place % 2))
        every_engine.assert_states(results, nasty.reference(name, 2))
