"""As torch's example 'tensor_parallel_example.py' has it: DTensor, an MLP divided by columns, then by rows."""
# ruff: noqa: T201

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(32, 5)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


def main():
    dist.init_process_group("gloo")
    device_mesh = init_device_mesh("cpu", mesh_shape=(dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    tp_model = parallelize_module(
        ToyModel(), device_mesh, parallelize_plan={"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
    )
    optimizer = torch.optim.AdamW(tp_model.parameters(), lr=0.25, foreach=True)
    for i in range(4):
        torch.manual_seed(i)
        optimizer.zero_grad()
        output = tp_model(torch.rand(20, 10))
        loss = output.sum()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item().hex()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
