"""Peers trained inside ranks, and the same training in one process; float64, so that a lost part cannot hide."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.comm import CollectiveEvent
from shardlab.comm.mesh import Mesh
from shardlab.engines import Engine, build_engine
from shardlab.models import GPT, GPTConfig
from tests.dist import cases


class WideGPT(GPT):
    """Twelve heads, which 2, 3 and 4 ranks divide."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(vocab_size=11, seq_len=6, num_layers=2, num_heads=12, hidden=24))


@dataclass(frozen=True)
class Setting:
    """What to train and how."""

    strategy: str
    kind: str
    options: dict = field(default_factory=dict)
    optimizer: str = "sgd"
    steps: int = 4
    micro_batches: int = 1
    clip: float | None = None
    plain_backward: bool = False


def build(kind: str, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return WideGPT().double() if kind == "WideGPT" else cases.build(kind, seed)


def rows(kind: str, step: int, micro_batch: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    return cases.rows("SmallGPT" if kind == "WideGPT" else kind, step, micro_batch, num_ranks)


def mesh_axes(strategy: str) -> dict[str, int]:
    world_size = dist.get_world_size()
    return {"data": 1, "tensor": world_size} if strategy == "torch_tp" else {"data": world_size}


def train(rank: int, setting: Setting, at_end: Callable[[Engine], object] | None = None) -> tuple[cases.Result, object]:
    result = cases.Result()
    num_ranks = dist.get_world_size()
    optimizer = cases.OPTIMIZERS[setting.optimizer]
    with (
        Mesh(mesh_axes(setting.strategy)) as mesh,
        # Ranks that start different must end equal.
        build_engine(setting.strategy, build(setting.kind, seed=rank), optimizer, mesh, **setting.options) as engine,
    ):
        for step in range(setting.steps):
            total = torch.zeros((), dtype=torch.float64)
            for micro_batch in range(setting.micro_batches):
                x, y = rows(setting.kind, step, micro_batch, num_ranks)
                if engine.num_data_ranks > 1:
                    x, y = cases.own_rows(x, rank), cases.own_rows(y, rank)
                total += micro_step(engine, setting, x, y, last=micro_batch == setting.micro_batches - 1)
            if setting.clip is not None:
                result.norms.append(float(engine.clip_grad_norm_(setting.clip)))
            engine.step()
            engine.zero_grad()
            result.losses.append(float(engine.mean_over_ranks(total, tag="loss")))
        result.state = engine.full_state_dict()
        extra = None if at_end is None else at_end(engine)
    return result, extra


def micro_step(engine: Engine, setting: Setting, x: Tensor, y: Tensor, *, last: bool) -> Tensor:
    if not last:
        with engine.no_sync():
            loss = cases.loss_of(engine(x), y) / setting.micro_batches
            engine.backward(loss)
        return loss.detach()
    loss = cases.loss_of(engine(x), y) / setting.micro_batches
    if setting.plain_backward:
        loss.backward()
    else:
        engine.backward(loss)
    return loss.detach()


def reference(setting: Setting, num_ranks: int) -> cases.Result:
    """Plain torch on the concatenated batch."""
    model = build(setting.kind, seed=0)
    optimizer = cases.OPTIMIZERS[setting.optimizer](list(model.parameters()))
    result = cases.Result()
    for step in range(setting.steps):
        total = 0.0
        for micro_batch in range(setting.micro_batches):
            x, y = rows(setting.kind, step, micro_batch, num_ranks)
            loss = cases.loss_of(model(x), y) / setting.micro_batches
            loss.backward()
            total += float(loss.detach())
        result.losses.append(total)
        if setting.clip is not None:
            result.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), setting.clip)))
        optimizer.step()
        optimizer.zero_grad()
    result.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return result


class Observer:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[CollectiveEvent] = []
        self.calls: list[str] = []

    def issued(self, event: CollectiveEvent) -> None:
        self.events.append(event)
        self.calls.append("issued")

    def started(self, event: CollectiveEvent) -> None:
        self.calls.append("started")

    def completed(self, event: CollectiveEvent) -> None:
        self.calls.append("completed")

    def waited(self, event: CollectiveEvent) -> None:
        self.calls.append("waited")


NAMES = {
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
}


class CallsOfTorch(TorchDispatchMode):
    """Counts torch's own collective operations where they enter c10d, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: the plain tensors inside come again
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.counts[NAMES.get(name, name)] += 1
        return func(*args, **(kwargs or {}))
