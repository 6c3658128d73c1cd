"""What engines share that compute in one dtype and step in another: the casts around forward, and two warnings.

Inputs are cast before the module's forward and outputs after it, buffers once. Each engine decides which tensors hold
the parameters to compute with and which the values to step.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from shardlab.engines.base import Engine
from shardlab.engines.hooks import ModuleHook
from shardlab.engines.precision import Precision, advise, cast_floating


class MixedPrecision(Engine):
    """An engine with a ``precision``, which must be set before ``Engine.__init__``."""

    precision: Precision

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, on inputs and with outputs in the dtypes of ``precision``.

        Raises:
            RuntimeError: inside ``full_params()``, where parameters do not have the dtype to compute in.
        """
        self._refuse_stored_params()
        try:
            inputs, named_inputs = cast_floating((args, kwargs), self.precision.compute)
            return cast_floating(super().__call__(*inputs, **named_inputs), self.precision.output)
        except BaseException as error:
            advise(error, self.precision, self.module)
            raise

    @override
    def step(self) -> None:
        """One optimizer step, in the dtype the parameters are stored in."""
        if self.precision.compute is torch.float16 and not self.loss_is_scaled:
            warnings.warn(
                "precision: float16 without a GradScaler loses gradients below 6e-8; use engine.backward(scaler.scale("
                "loss)) and scaler.step(engine), or precision='bf16'",
                stacklevel=2,
            )
        super().step()

    @property
    def _has_stored_params(self) -> bool:
        """Whether the module's parameters have their stored dtype, inside ``full_params()``, and cannot compute now."""
        return False

    @override
    def _begin_backward(self) -> None:
        self._refuse_stored_params()
        super()._begin_backward()

    def _note_stored_params(self) -> None:
        if self._has_stored_params:
            self._backward_watch.note_other_dtypes()

    def _refuse_stored_params(self) -> None:
        if self._has_stored_params:
            raise RuntimeError(
                f"full_params: inside, parameters have the dtype they are stored in, but precision computes in "
                f"{self.precision.compute}; leave 'with engine.full_params():' before engine(...) and backward"
            )

    def _cast_inputs_of(self, modules: Iterable[nn.Module]) -> list[RemovableHandle]:
        """Cast the inputs of parts too: a float32 buffer, for example, may have promoted them on their way."""
        dtype = self.precision.compute
        if dtype is None:
            return []
        hook = ModuleHook(lambda _, args, kwargs: cast_floating((args, kwargs), dtype))
        return [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]

    def _cast_buffers(self) -> None:
        if self.precision.buffers is not None:
            # By ``.data``, since two modules that share a buffer must go on sharing it.
            for buffer in self.module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.to(self.precision.buffers)
