"""Every strategy with every option that changes where things are, on a mesh of a given number of ranks."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import Engine, build_engine
from shardlab.engines import OptimizerFn
from tests.dist import cases

ENGINES = {
    "ddp": ("ddp", {}),
    "bucketed": ("bucketed", {"bucket_bytes": 256}),
    "zero1": ("zero1", {"bucket_bytes": 256}),
    "zero1-balanced": ("zero1", {"partition": "balanced", "bucket_bytes": 512}),
    "zero2": ("zero2", {"bucket_bytes": 256}),
    "zero2-round_robin": ("zero2", {"partition": "round_robin"}),
    "zero3": ("zero3", {"bucket_bytes": 256}),
    "zero3-contiguous": ("zero3", {"partition": "contiguous"}),
    "fsdp": ("fsdp", {}),
    "fsdp-dim0": ("fsdp", {"layout": "dim0", "prefetch": 2}),
    "fsdp-shard_grad_op": ("fsdp", {"sharding": "shard_grad_op", "layout": "dim0"}),
    "fsdp-no_shard": ("fsdp", {"sharding": "no_shard"}),
    "fsdp-no_shard-dim0": ("fsdp", {"sharding": "no_shard", "layout": "dim0"}),
    "fsdp-offload": ("fsdp", {"offload": "parameters"}),
    "fsdp-offload-all": ("fsdp", {"offload": "all", "layout": "dim0"}),
    "fsdp-small": ("fsdp", {"replicate_below": 20}),
    "fsdp-hybrid": ("fsdp", {"sharding": "hybrid_shard"}),
    "fsdp-hybrid-dim0": ("fsdp", {"sharding": "hybrid_shard", "layout": "dim0", "replicate_below": 20}),
}
PEERS = {
    "torch_ddp": ("torch_ddp", {}),
    "torch_zero1": ("torch_zero1", {}),
    "torch_fsdp2": ("torch_fsdp2", {}),
}
ALL = {"single": ("single", {}), **ENGINES, **PEERS}
PLACES = [
    ("single", 1),
    *((key, size) for key in ENGINES for size in ((4,) if "hybrid" in key else (2, 3))),
    *((key, 2) for key in PEERS),
]


def kinds_of(key: str, num_ranks: int) -> tuple[str, ...]:
    """The models of ``cases`` to try there: each once, and what is used by some ranks only by every engine."""
    if key in PEERS:
        return ("MLP", "SmallGPT")  # torch's engines have limits of their own with the others
    return {1: ("Unused", "Tied"), 2: ("Tied",), 3: ("Uneven", "Unused"), 4: ("SmallGPT", "Unused")}[num_ranks]


def options_of(key: str, kind: str) -> dict[str, str]:
    """A unit that only some ranks run cannot be gathered by all."""
    return {"wrap": "root"} if kind == "Unused" and key.startswith("fsdp") else {}


def assert_states(results: Iterable[Mapping[str, Tensor]], expected: Mapping[str, Tensor]) -> None:
    """Each result has the tensors expected, to 1e-10."""
    for found in results:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-10, rtol=0, msg=lambda m: f"{name}: {m}")  # noqa: B023


def told_of(rank: int) -> str:
    """What the other ranks are told where one has raised before its part of the gradients was sent."""
    return rf"rank {rank} .*engine\.zero_grad\(\)"


@contextlib.contextmanager
def engine_of(
    key: str,
    num_ranks: int,
    model: nn.Module,
    optimizer: str = "",
    *,
    optimizer_fn: OptimizerFn | None = None,
    **more: object,
) -> Iterator[Engine]:
    """The engine of ``key`` over the ranks of the pool it is called in; ``optimizer`` is one of ``cases``."""
    strategy, options = ALL[key]
    axes = {"replica": 2, "shard": 2} if "hybrid" in key else {"data": num_ranks}
    with (
        Mesh(axes) as mesh,
        build_engine(
            strategy, model, optimizer_fn or cases.OPTIMIZERS[optimizer], mesh, **{**options, **more}
        ) as engine,
    ):
        yield engine
