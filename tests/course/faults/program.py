"""What is broken: a training loop as users write it, and the same training as a workload for ``compare``."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlab.comm.mesh import Mesh
from shardlab.course import Fault, faulty, inject
from shardlab.engines import build_engine, engine_options
from shardlab.experiment import Workload
from shardlab.models import MLP
from shardlab.testing import check_agreement

STEPS = 4
_SIZE = 8
_BUCKET_BYTES = 512  # so that there are several


def train(rank: int, strategy: str, transport: str | None, faults: Sequence[Fault]) -> list[float]:
    """Train for some steps on this rank; the losses."""
    num_ranks = torch.distributed.get_world_size()
    with (
        # Left in reverse order: faults are removed from the engine before it closes, and its mesh goes last.
        Mesh({"data": num_ranks}, transport=transport) as mesh,
        build_engine(strategy, _model().to(mesh.device), _optimizer, mesh, **_options(strategy)) as engine,
        inject(engine, *faults),
    ):
        losses = []
        for rows in batches(rank, num_ranks):
            loss = _loss(engine, rows.to(mesh.device))
            engine.backward(loss)
            engine.step()
            engine.zero_grad()
            check_agreement(engine)
            losses.append(float(engine.mean_over_ranks(loss.detach().clone(), tag="loss")))
        return losses


def workload(faults: Sequence[Fault]) -> Workload:
    """The same, for ``compare``."""
    return Workload(faulty(_model, *faults), lambda rank, ranks, _: batches(rank, ranks), _loss, _optimizer)


def batches(rank: int, num_ranks: int) -> Iterator[Tensor]:
    """A rank's rows of each step."""
    for step in range(STEPS):
        rows = torch.randn(2 * num_ranks, _SIZE, generator=torch.Generator().manual_seed(step))
        yield rows.chunk(num_ranks)[rank]


def _model() -> MLP:
    torch.manual_seed(0)
    return MLP(_SIZE, 2 * _SIZE, 4, _SIZE)


def _optimizer(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.1, momentum=0.9)


def _loss(model: Any, rows: Tensor) -> Tensor:
    loss: Tensor = (model(rows) - rows).square().mean()
    return loss


def _options(strategy: str) -> dict[str, Any]:
    return {"bucket_bytes": _BUCKET_BYTES} if "bucket_bytes" in engine_options(strategy) else {}
