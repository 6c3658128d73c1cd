"""Every configuration of an engine that the tests know, by name, and what all of them share.

Stories of what users do are told once for each kind of mechanism (``KINDS``): they ask how the module, its gradients
and its optimizer behave, which depends on where parameters are whole and what is stepped. Numbers are compared on all.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import Engine, OptimizerFn, build_engine
from shardlab.engines.sharded_params import Shards
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
CUT_OTHERWISE = ("zero1-balanced", "zero2-round_robin", "zero3-contiguous")  # of these parity is tested
# The same code, cut in other ways: for parity, nasty modules and checkpoints.
OTHER_CUTS = {
    "bucketed-one": ("bucketed", {}),
    "zero1-one": ("zero1", {}),
    "zero1-round_robin": ("zero1", {"partition": "round_robin"}),
    "zero1-contiguous": ("zero1", {"partition": "contiguous"}),
    "zero2-balanced": ("zero2", {"partition": "balanced", "bucket_bytes": 512}),
    "zero3-one": ("zero3", {}),
    "zero3-balanced": ("zero3", {"partition": "balanced", "bucket_bytes": 512}),
    "fsdp-shard_grad_op-flat": ("fsdp", {"sharding": "shard_grad_op", "prefetch": 0}),
    "fsdp-balanced": ("fsdp", {"partition": "balanced"}),
    "fsdp-no_shard-root": ("fsdp", {"sharding": "no_shard", "wrap": "root"}),
    "fsdp-offload-shard_grad_op": ("fsdp", {"offload": "all", "sharding": "shard_grad_op"}),
    "fsdp-offload-no_shard": ("fsdp", {"offload": "parameters", "sharding": "no_shard"}),
    "fsdp-offload-small": ("fsdp", {"offload": "all", "layout": "dim0", "replicate_below": 20}),
}
PEERS = {name: (name, {}) for name in ("torch_ddp", "torch_zero1", "torch_fsdp2")}
ALL = {"single": ("single", {}), **ENGINES, **OTHER_CUTS, **PEERS, "torch_tp": ("torch_tp", {})}

# One engine of each kind: whole; whole, stepped in pieces; sharded at once; sharded in units.
KINDS = ("bucketed", "zero1", "zero3", "fsdp")
WHOLE, SHARDED = KINDS[:2], KINDS[2:]
PIECES = KINDS[1:]  # the optimizer steps pieces of parameters


def num_ranks_of(key: str) -> int:
    """The fewest on which it is what its name says."""
    return 4 if "hybrid" in key else 2


def options_of(key: str, kind: str) -> dict[str, str]:
    """A unit that only some ranks run cannot be gathered by all."""
    return {"wrap": "root"} if kind == "Unused" and key.startswith("fsdp") else {}


def sgd(tensors: Iterable[Tensor]) -> torch.optim.Optimizer:
    """It forgives no gradient that is off by a factor."""
    return torch.optim.SGD(tensors, lr=0.1)


def momentum(tensors: Iterable[Tensor]) -> torch.optim.Optimizer:
    """It also remembers what should not have been stepped."""
    return torch.optim.SGD(tensors, lr=0.1, momentum=0.9)


def adamw(tensors: Iterable[Tensor]) -> torch.optim.Optimizer:
    """With state of two kinds: of each element, and a counter."""
    return torch.optim.AdamW(tensors, lr=1e-2)


def assert_states(results: Iterable[Mapping[str, Tensor]], expected: Mapping[str, Tensor], atol: float = 1e-10) -> None:
    """Each result has the tensors expected."""
    for found in results:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=atol, rtol=0, msg=lambda m: f"{name}: {m}")  # noqa: B023


def axes_of(key: str, num_ranks: int) -> dict[str, int]:
    """The mesh's."""
    if key == "torch_tp":
        return {"data": 1, "tensor": num_ranks}
    return {"replica": 2, "shard": num_ranks // 2} if "hybrid" in key else {"data": num_ranks}


@contextlib.contextmanager
def engine_of(
    key: str,
    num_ranks: int,
    model: nn.Module,
    optimizer: str = "",
    *,
    mesh: Mesh | None = None,
    optimizer_fn: OptimizerFn | None = None,
    **more: object,
) -> Iterator[Engine]:
    """The engine of ``key`` on the pool that calls it, by default on its own mesh; ``optimizer`` is of ``cases``."""
    strategy, options = ALL[key]
    make = optimizer_fn or cases.OPTIMIZERS[optimizer]
    with (
        Mesh(axes_of(key, num_ranks)) if mesh is None else contextlib.nullcontext(mesh) as mesh,
        build_engine(strategy, model, make, mesh, **{**options, **more}) as engine,
    ):
        yield engine


def shards_of(engine: Engine) -> list[Shards]:
    """All shards of an engine whose parameters are sharded, unit by unit."""
    return [shards for unit in engine.strategy.units for shards in unit.shards]


def own_batch(engine: Engine, kind: str = "MLP", step: int = 0, micro_batch: int = 0) -> tuple[Tensor, ...]:
    """This rank's rows of a global batch."""
    batch = cases.rows(kind, step, micro_batch, engine.num_data_ranks)
    return tuple(cases.own_rows(part, engine.data_rank) for part in batch)


def backward(engine: Engine, kind: str = "MLP", step: int = 0, micro_batch: int = 0) -> Tensor:
    """Forward and backward over this rank's rows."""
    x, y = own_batch(engine, kind, step, micro_batch)
    loss = cases.loss_of(engine(x), y)
    engine.backward(loss)
    return loss.detach()


def step_on(engine: Engine, loss: Tensor) -> None:
    """Backward and step; nothing stays."""
    engine.backward(loss)
    engine.step()
    engine.zero_grad()


def one_step(engine: Engine, kind: str = "MLP", step: int = 0) -> None:
    """Backward and step; gradients stay."""
    backward(engine, kind, step)
    engine.step()


def plain_steps(
    model: nn.Module, optimizer_fn: OptimizerFn, num_ranks: int, *steps: int, kind: str = "MLP"
) -> dict[str, Tensor]:
    """The state of a plain module after plain torch's steps on the rows of all ranks."""
    optimizer = optimizer_fn(list(model.parameters()))
    for step in steps:
        optimizer.zero_grad()
        x, y = cases.rows(kind, step, 0, num_ranks)
        cases.loss_of(model(x), y).backward()
        optimizer.step()
    return model.state_dict()
