"""Optimizers that look at more than one element at a time, and say so."""

import torch


class Plain(torch.optim.Optimizer):
    """Steps each tensor by ``update``; the others are what differs."""

    shardlab_looks_at = "tensor"

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * self.update(param, self.state[param]))

    def update(self, param, state):
        return param.grad


class Normalised(Plain):
    """Each gradient divided by its norm."""

    def update(self, param, state):
        return param.grad / param.grad.norm().clamp_min(1e-12)


class TrustRatio(Plain):
    """Momentum, scaled by the norm of the weight over that of the update (LARS)."""

    def update(self, param, state):
        momentum = state.setdefault("momentum", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
        return momentum * param.norm() / momentum.norm().clamp_min(1e-12)


class Factored(Plain):
    """A second moment of rows and columns for matrices (Adafactor); of elements for the others."""

    def update(self, param, state):
        square = param.grad.square() + 1e-6
        if param.dim() < 2:
            return param.grad / state.setdefault("moment", torch.zeros_like(param)).lerp_(square, 0.1).sqrt()
        rows = state.setdefault("rows", square.new_zeros(square.shape[:1])).lerp_(square.flatten(1).mean(1), 0.1)
        columns = state.setdefault("columns", square.new_zeros(square[0].numel()))
        columns.lerp_(square.flatten(1).mean(0), 0.1)
        return param.grad / (rows[:, None] * columns / rows.mean()).sqrt().view_as(param)


class Centred(Plain):
    """Gradients of which the mean of each row is taken away (gradient centralisation): rows are enough for it."""

    def update(self, param, state):
        return param.grad - param.grad.mean(dim=-1, keepdim=True) if param.dim() > 1 else param.grad


class Clipped(Plain):
    """Clips the norm of all gradients within its step."""

    shardlab_looks_at = "model"

    def step(self):
        torch.nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 50.0)
        super().step()


TENSOR = {kind.__name__: kind for kind in (Normalised, TrustRatio, Factored)}
