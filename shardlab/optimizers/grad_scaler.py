"""Loss scaling for float16: gradients below 6e-8 would become zero, so the loss is scaled up before backward.

    scaler = GradScaler()
    engine.backward(scaler.scale(loss))
    scaler.unscale_(engine)               # before clipping
    stepped = scaler.step(engine)

Takes what ``torch.amp.GradScaler`` takes, with an engine in the place of an optimizer. The scale doubles after 2000
good steps and halves after an overflow. An overflow may show only in one rank's pieces, or in one stage of a pipeline,
so the ranks agree: if any has an inf or a nan, every rank skips the step. ``step()`` changes the scale at once, so each
engine has a scaler of its own, and ``update()`` may follow or not.
Source: Micikevicius et al., arXiv 1710.03740, section 3.2.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from shardlab.engines.any_engine import AnyEngine
from shardlab.vocabulary import MeshAxis


class GradScaler:
    """A dynamic loss scale, the same on every rank.

    Args:
        device: as torch's takes it; gradients are looked at where they are.
        init_scale: the first scale, greater than 0.
        growth_factor: factor after ``growth_interval`` good steps, greater than 1.
        backoff_factor: factor after an overflow, between 0 and 1.
        growth_interval: good steps in a row before the scale grows, at least 1.
        enabled: False scales nothing and steps always.
    """

    def __init__(
        self, device: str = "cuda", init_scale: float = 65536.0, growth_factor: float = 2.0,
        backoff_factor: float = 0.5, growth_interval: int = 2000, enabled: bool = True,
    ) -> None:  # fmt: skip
        for field, value, right in (
            ("device", device, isinstance(device, str | torch.device)),
            ("init_scale", init_scale, init_scale > 0),
            ("growth_factor", growth_factor, growth_factor > 1),
            ("backoff_factor", backoff_factor, 0 < backoff_factor < 1),
            ("growth_interval", growth_interval, growth_interval >= 1),
        ):
            if not right:
                raise ValueError(
                    f"{field}: {value!r} is out of range; write, for example, GradScaler(init_scale=1024.0)"
                )
        self.current_scale, self.enabled = init_scale if enabled else 1.0, enabled
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.num_good_steps = 0  # in a row, since the scale has grown
        self._overflow: bool | None = None  # in the gradients that have been unscaled
        self._engine: weakref.ref[AnyEngine] | None = None  # whose gradients these are
        self._num_backwards = 0  # of the engine, when they were unscaled

    def scale(self, outputs: Any) -> Any:
        """The scaled loss, to call backward on; or several, in a list or tuple."""
        if isinstance(outputs, list | tuple):
            return type(outputs)(self.scale(output) for output in outputs)
        return outputs * self.current_scale if self.enabled else outputs

    def get_scale(self) -> float:
        """The scale of now."""
        return self.current_scale

    def is_enabled(self) -> bool:
        """Whether it scales."""
        return self.enabled

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Set another scale; without one nothing is left to do, since ``step()`` has changed it."""
        if new_scale is not None and self.enabled:
            self.current_scale = float(new_scale)

    def unscale_(self, engine: AnyEngine) -> bool:
        """Divide the gradients by the scale, and find out over all ranks whether any is inf or nan.

        Call it after the last backward of a step. Another optimizer over the engine's tensors steps only if all are
        finite.

        Returns:
            Whether all are finite, the same on every rank.

        Raises:
            ValueError: the scaler has unscaled gradients of another engine.
            RuntimeError: these gradients are unscaled already.
        """
        if not self.enabled:
            return True
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
        engine.means_changed()  # as they are now
        # Every rank joins, whatever it found itself: a rank that skipped this alone would leave the others waiting.
        stages = (engine.mesh[MeshAxis.PIPE],) if MeshAxis.PIPE in engine.mesh.axes else ()
        for comm in (*engine.comms, *stages):
            comm.all_reduce(flag, reduction="max", tag="overflow").wait()
        self._overflow, self._num_backwards = bool(flag.item()), engine.num_backwards
        return not self._overflow

    def step(self, engine: AnyEngine) -> bool:
        """Step the engine unless a gradient overflowed; return whether it stepped, the same on every rank.

        Raises:
            ValueError: the scaler has unscaled gradients of another engine.
        """
        if not self.enabled:
            engine.step()
            return True
        if not self._is_unscaled(engine):
            self.unscale_(engine)
        # Forgotten at once, or the next step would take this answer for its own and leave its gradients scaled.
        overflow, self._overflow = bool(self._overflow), None
        if overflow:
            self.current_scale *= self.backoff_factor
            self.num_good_steps = 0
            return False
        engine.step()
        self.num_good_steps += 1
        if self.num_good_steps >= self.growth_interval:
            self.current_scale, self.num_good_steps = self.current_scale * self.growth_factor, 0
        return True

    def _is_unscaled(self, engine: AnyEngine) -> bool:
        # What was unscaled before another backward has been cleared, by a loop that skipped the step itself.
        return self._overflow is not None and engine.num_backwards == self._num_backwards

    def _check(self, engine: AnyEngine) -> None:
        known = None if self._engine is None else self._engine()
        if known is not None and known is not engine and not known._is_closed:
            raise ValueError(
                "scaler: it scales the loss of another engine, and one scale cannot fit both; make a GradScaler for "
                "each engine"
            )
        self._engine = weakref.ref(engine)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint saves: torch's own keys; nothing if it is not enabled."""
        if not self.enabled:
            return {}
        return {
            "scale": self.current_scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.num_good_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, or from the state of a scaler of torch's.

        Raises:
            RuntimeError: the state is empty, as that of one that was not enabled.
        """
        if not self.enabled:
            return
        if not state:
            raise RuntimeError(
                "scaler: the state is empty, as that of one with enabled=False; leave it out of the load"
            )
        self.current_scale = float(state["scale"])
        self.growth_factor = float(state.get("growth_factor", self.growth_factor))
        self.backoff_factor = float(state.get("backoff_factor", self.backoff_factor))
        self.growth_interval = int(state.get("growth_interval", self.growth_interval))
        # Older checkpoints have the number of good steps since the last overflow.
        self.num_good_steps = int(state.get("_growth_tracker", state.get("num_good_steps", 0) % self.growth_interval))
