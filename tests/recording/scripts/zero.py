"""As torch's recipe 'Shard Optimizer States with ZeroRedundancyOptimizer' has it."""
# ruff: noqa: T201

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer


def example():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    loss_fn = nn.MSELoss()
    optimizer = ZeroRedundancyOptimizer(ddp_model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    for _ in range(4):
        outputs = ddp_model(torch.randn(20, 64))
        labels = torch.randn(20, 64)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item().hex()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    example()
