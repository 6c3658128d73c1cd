"""Optimizers as users write them: they assign, keep what they were given, raise, look, and go on after their base."""

import torch


class Assigns(torch.optim.SGD):
    """Puts new tensors in the place of what it steps."""

    shardlab_looks_at = "element"

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad.data


class Steps(torch.optim.Optimizer):
    """Plain descent, in a class that calls no other's step."""

    shardlab_looks_at = "element"

    after = None

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])
        if self.after is not None:
            self.after(self)


class StepsAndMore(Steps):
    """Goes on after its base class's step; torch runs hooks at the end of both, if there has been a plain one."""

    def step(self, closure=None):
        after, self.after = self.after, None
        super().step(closure)
        self.after = after
        if after is not None:
            after(self)


def steps_and_more(tensors):
    Steps([torch.zeros(1)])  # from here on torch runs the hooks of this class
    return StepsAndMore(tensors)


class RaisesAfter:
    """Raises after the update, and before hooks that follow it."""

    shardlab_looks_at = "element"
    fails = False

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise KeyError("after the update")


class Raises(RaisesAfter, torch.optim.SGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)


class FusedAndRaises(RaisesAfter, torch.optim.AdamW):
    """Its kernels write without raising autograd's version counters."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr, fused=True)


class Clears(torch.optim.SGD):
    """Clears its gradients itself."""

    shardlab_looks_at = "element"

    def __init__(self, params):
        super().__init__(params, lr=0.1)

    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


class Forgetful(torch.optim.SGD):
    """Passes on only what it knows of a state dict."""

    shardlab_looks_at = "element"

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)

    def load_state_dict(self, state_dict):
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
