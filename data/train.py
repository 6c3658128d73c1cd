"""A workload to begin with: change the model, the data and the loss to yours.

shardlab compare --workload train.py:workload --ranks 2
shardlab plan --workload train.py:workload --ranks 8
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from shardlab import Workload

# from shardlab.tensor_parallel import Column, Row  # for the tp_plan below

CLASSES = 10


class Residual(nn.Sequential):
    """Adds to x what its layers make of it."""

    def forward(self, x: Tensor) -> Tensor:
        """As the base, plus x."""
        added: Tensor = super().forward(x)
        return x + added


class Classifier(nn.Module):
    """Any module will do. Repeated blocks become the units of FSDP and of the timelines."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(32, width)
        self.blocks = nn.ModuleList(
            Residual(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.leave = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (rows, classes) for x of shape (rows, 32)."""
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.leave(x)
        return logits

    def parts(self) -> dict[str, tuple[str, ...]]:
        """For --pipe, which cuts between them: what forward calls in turn, and the modules that each uses."""
        names = ["enter", *(f"blocks.{place}" for place in range(len(self.blocks))), "leave"]
        return {name: (name,) for name in names}


class Points(Dataset[dict[str, Tensor]]):
    """Any map-style Dataset: shardlab shuffles, collates and divides it. A DataLoader will do as well."""

    def __init__(self, num_samples: int = 4096) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num_samples, 32, generator=generator)
        self.y = (self.x @ torch.randn(32, CLASSES, generator=generator)).argmax(-1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"x": self.x[place], "y": self.y[place]}


def loss(model: Classifier, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the rows of the batch. ``model`` is called as usual."""
    return functional.cross_entropy(model(batch["x"]), batch["y"])


workload = Workload(
    model=Classifier,  # a function that makes the module; each rank calls it, with the same seed
    data=Points(),
    loss=loss,
    optimizer=lambda tensors: torch.optim.AdamW(tensors, lr=1e-3),  # the default; any torch optimizer will do
    # scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=10),
    # tp_plan={"blocks.*.1": Column(), "blocks.*.3": Row()},  # for --tp, in place of the plan that is suggested
)
