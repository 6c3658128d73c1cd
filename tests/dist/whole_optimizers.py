"""Optimizers that look at more than one element at a time, of classes that the library has never seen."""

import torch


class Plain(torch.optim.Optimizer):
    """Steps each tensor by ``update``; the others are what differs."""

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


class Careful(Plain):
    """Raises where a gradient is not finite."""

    def update(self, param, state):
        if not param.grad.isfinite().all():
            raise FloatingPointError("a gradient is not finite")
        return param.grad


class Multiplicative(Plain):
    """Multiplies each weight by a power of e, which is infinite at large gradients."""

    def update(self, param, state):
        return -param * torch.exp(-param.grad)


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


class DecaysMatrices(Plain):
    """Weight decay for what has two dims: element by element, but a flat piece of a matrix has one."""

    def update(self, param, state):
        return param.grad + 0.1 * param if param.dim() > 1 else param.grad


class Projects(Plain):
    """Projects its update where the gradient is nearly at right angles to the weight, as SGDP does."""

    def update(self, param, state):
        along = param / param.norm().clamp(min=1e-12)
        if torch.nn.functional.cosine_similarity(param.grad.flatten(), param.flatten(), 0).abs() >= 1e-3:
            return param.grad
        return 2 * param.grad - along * (along * param.grad).sum()


class Clipped(Plain):
    """Clips the norm of all gradients within its step, unless ``max_norm`` is None."""

    def __init__(self, params, lr=1e-2, max_norm=50.0):
        super().__init__(params, lr)
        self.max_norm = max_norm  # no option of the groups

    def step(self):
        params = [param for group in self.param_groups for param in group["params"]]
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, self.max_norm)
        super().step()


class Lookahead(torch.optim.Optimizer):
    """Holds another optimizer, and goes half-way with it every second step (Zhang et al., arXiv 1907.08610)."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.num_calls = 0

    @torch.no_grad()
    def step(self):
        self.num_calls += 1
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            self.state[param].setdefault("slow", param.clone())
        self.inner.step()
        for param in params if self.num_calls % 2 == 0 else ():
            self.state[param]["slow"].lerp_(param, 0.5)
            param.copy_(self.state[param]["slow"])


class Backup(Plain):
    """Keeps copies of the parameters that its constructor has made."""

    def __init__(self, params):
        super().__init__(params)
        self.backup = {param: param.detach().clone() for group in self.param_groups for param in group["params"]}

    def update(self, param, state):
        return param.grad + 0.1 * self.backup[param]


TENSOR = {kind.__name__: kind for kind in (Normalised, TrustRatio, Factored)}
