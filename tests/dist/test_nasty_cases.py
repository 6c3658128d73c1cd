"""Every strategy, layout and partition with every nasty module equals one process, in float64 to 1e-10.

One call of a pool trains all cases of a strategy, so that the matrix stays quick; each case that fails is named.
"""

import pytest

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.units import wrapped_modules
from shardlab.units.structure import called_modules
from tests.dist import nasty

SETUPS = {
    "ddp": ("ddp", {}),
    "bucketed": ("bucketed", {"bucket_bytes": 256}),
    "zero1": ("zero1", {"bucket_bytes": 256}),
    "zero1-round_robin": ("zero1", {"partition": "round_robin"}),
    "zero1-contiguous": ("zero1", {"partition": "contiguous"}),
    "zero1-balanced": ("zero1", {"partition": "balanced", "bucket_bytes": 512}),
    "zero2": ("zero2", {"bucket_bytes": 256}),
    "zero2-balanced": ("zero2", {"partition": "balanced", "bucket_bytes": 512}),
    "zero3": ("zero3", {"bucket_bytes": 512}),
    "zero3-balanced": ("zero3", {"partition": "balanced"}),
    "fsdp": ("fsdp", {"prefetch": 2}),
    "fsdp-dim0": ("fsdp", {"layout": "dim0"}),
    "fsdp-by-size": ("fsdp", {"wrap": 50, "prefetch": 0}),
    "fsdp-shard_grad_op": ("fsdp", {"sharding": "shard_grad_op"}),
    "fsdp-no_shard": ("fsdp", {"sharding": "no_shard"}),
    "fsdp-small-replicated": ("fsdp", {"replicate_below": 20}),
    "fsdp-offload": ("fsdp", {"offload": "all", "layout": "dim0"}),
    "fsdp-hybrid": ("fsdp", {"sharding": "hybrid_shard"}),
    "fsdp-hybrid-dim0": ("fsdp", {"sharding": "hybrid_shard", "layout": "dim0"}),
}


def axes_of(setup, num_ranks):
    replicas = 2 if num_ranks % 2 == 0 else 1
    return {"replica": replicas, "shard": num_ranks // replicas} if "hybrid" in setup else {"data": num_ranks}


def is_too_small(module, options):
    """Whether no part of it is of the size that a unit shall have."""
    sizes = [sum(param.numel() for param in part.parameters()) for part in called_modules(module).values()]
    return max(sizes, default=0) < options.get("wrap", 0)


def train_all(rank, setup, num_ranks, names):
    strategy, options = SETUPS[setup]
    states = {}
    with Mesh(axes_of(setup, num_ranks)) as mesh:
        for name in names:
            case = nasty.CASES[name]
            # A unit that only some ranks run cannot be gathered by all.
            is_one = strategy == "fsdp" and (name == "unused" or is_too_small(case.build(), options))
            chosen = {**options, "wrap": "root"} if is_one else options
            try:
                # Ranks that start different must end equal.
                with build_engine(strategy, case.build(seed=rank), nasty.optimizer, mesh, **chosen) as engine:
                    states[name] = nasty.train(case, engine)
            except Exception as error:
                error.add_note(f"in the case {name!r}")
                raise
    return states


def difference(state, expected):
    """The largest over all tensors."""
    assert state.keys() == expected.keys()
    return max(float((state[name] - value).abs().max()) for name, value in expected.items() if value.numel())


PLACES = [(setup, size) for setup in SETUPS for size in ((2, 4) if "hybrid" in setup else (2, 3))]


@pytest.mark.parametrize(("setup", "num_ranks"), PLACES)
def test_every_case_equals_one_process(pools, setup, num_ranks):
    for rank, states in enumerate(pools(num_ranks).run(train_all, setup, num_ranks, list(nasty.CASES))):
        found = {name: difference(state, nasty.reference(name, num_ranks)) for name, state in states.items()}
        assert found.keys() == nasty.CASES.keys()
        assert not {name: by for name, by in found.items() if not by <= 1e-10}, f"rank {rank}"


def test_containers_are_never_units():
    """A list of modules or parameters is not called, so no hook would gather for it."""
    for policy in ("auto", 1, 72, lambda name, module: True):
        assert "blocks" not in wrapped_modules(nasty.CASES["used twice"].build(), policy)
    assert wrapped_modules(nasty.CASES["parameters in containers"].build()) == {}
