"""Loss scaling for float16: gradients below 6e-8 would become zero, so the loss is scaled up before backward.

    scaler = GradScaler()
    engine.backward(scaler.scale(loss))
    scaler.unscale_(engine)               # before clipping
    stepped = scaler.step(engine)

The scale doubles after 2000 good steps and halves after an overflow. An overflow may show only in one rank's pieces, so
the ranks agree: if any has an inf or a nan, every rank skips the step. ``step()`` changes the scale at once, as torch's
``update()`` does, so each engine has a scaler of its own.
Source: Micikevicius et al., arXiv 1710.03740, section 3.2.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from shardlab.engines.base import Engine


class GradScaler:
    """A dynamic loss scale, the same on every rank.

    Args:
        scale: the first scale, greater than 0.
        growth: factor after ``interval`` good steps, greater than 1.
        backoff: factor after an overflow, between 0 and 1.
        interval: good steps before the scale grows, at least 1.
    """

    def __init__(self, scale: float = 65536.0, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> None:
        for field, value, right in (
            ("scale", scale, scale > 0),
            ("growth", growth, growth > 1),
            ("backoff", backoff, 0 < backoff < 1),
            ("interval", interval, interval >= 1),
        ):
            if not right:
                raise ValueError(f"{field}: {value} is out of range")
        self.current_scale, self.growth, self.backoff, self.interval = scale, growth, backoff, interval
        self.num_good_steps = 0
        self._overflow: bool | None = None  # in the gradients that have been unscaled
        self._engine: weakref.ref[Engine] | None = None  # whose gradients these are
        self._num_backwards = 0  # of the engine, when they were unscaled

    def scale(self, loss: Tensor) -> Tensor:
        """The scaled loss, to call backward on."""
        return loss * self.current_scale

    def unscale_(self, engine: Engine) -> bool:
        """Divide the gradients by the scale, and find out over all ranks whether any is inf or nan.

        Call it after the last backward of a step. Another optimizer over the engine's tensors steps only if all are
        finite.

        Returns:
            Whether all are finite, the same on every rank.

        Raises:
            ValueError: the scaler has unscaled gradients of another engine.
            RuntimeError: these gradients are unscaled already.
        """
        self._check(engine)
        if self._is_unscaled(engine):
            raise RuntimeError(
                "unscale_: no backward has come since the last call; call it once a step, before clipping"
            )
        # First: what ``no_sync()`` has left may not be in the step tensors yet, and would stay scaled.
        engine.finish_gradients()
        engine.loss_is_scaled = True
        flag = torch.zeros(1, device=engine.mesh.device)
        for tensor in engine.step_tensors():
            if tensor.grad is not None:
                tensor.grad.div_(self.current_scale)
                flag = torch.maximum(flag, (~torch.isfinite(tensor.grad)).any().to(flag))
        engine.guard_slices()  # as they are now
        # Every rank joins, whatever it found itself: a rank that skipped this alone would leave the others waiting.
        for comm in engine.comms:
            comm.all_reduce(flag, reduction="max", tag="overflow").wait()
        self._overflow, self._num_backwards = bool(flag.item()), engine.num_backwards
        return not self._overflow

    def step(self, engine: Engine) -> bool:
        """Step the engine unless a gradient overflowed; return whether it stepped, the same on every rank.

        Raises:
            ValueError: the scaler has unscaled gradients of another engine.
        """
        if not self._is_unscaled(engine):
            self.unscale_(engine)
        # Forgotten at once, or the next step would take this answer for its own and leave its gradients scaled.
        overflow, self._overflow = bool(self._overflow), None
        if overflow:
            self.current_scale *= self.backoff
            self.num_good_steps = 0
            return False
        engine.step()
        self.num_good_steps += 1
        if self.num_good_steps % self.interval == 0:
            self.current_scale *= self.growth
        return True

    def _is_unscaled(self, engine: Engine) -> bool:
        # What was unscaled before another backward has been cleared, by a loop that skipped the step itself.
        return self._overflow is not None and engine.num_backwards == self._num_backwards

    def _check(self, engine: Engine) -> None:
        known = None if self._engine is None else self._engine()
        if known is not None and known is not engine and not known._is_closed:
            raise ValueError(
                "scaler: it scales the loss of another engine, and one scale cannot fit both; make a GradScaler for "
                "each engine"
            )
        self._engine = weakref.ref(engine)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint saves."""
        return {"scale": self.current_scale, "num_good_steps": self.num_good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.current_scale, self.num_good_steps = float(state["scale"]), int(state["num_good_steps"])
