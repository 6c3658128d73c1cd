"""Which modules are units, and hooks that mark when each computes.

A unit is a child of the root module; lists of modules are opened, so the blocks of a GPT are units of their own.
Backward of a unit lasts from the gradient of its output to the gradient of its input. Both are seen by tensor hooks,
which change nothing in the graph; module backward hooks would insert a node and refuse in-place operations.
Recomputation (activation checkpointing) leaves a forward as soon as it has what backward needs, by an exception: the
hook at the end of forward is therefore called in any case.
"""

from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardlab.comm.trees import tensors_in
from shardlab.vocabulary import SpanKind


class SpanSink(Protocol):
    """Takes the beginning and the end of spans."""

    def begin_span(self, unit: str, kind: SpanKind) -> None:
        """A unit starts to compute."""

    def end_span(self, unit: str, kind: SpanKind) -> None:
        """A unit has ended; ignored if it never began."""

    def spent(self, since_ns: int) -> None:
        """Count the time from ``since_ns`` until now as time spent recording."""


def units(module: nn.Module) -> dict[str, nn.Module]:
    """The units of a module by name."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            found |= {f"{name}.{index}": entry for index, entry in child.named_children()}
        else:
            found[name] = child
    return found


def watch_units(module: nn.Module, sink: SpanSink) -> list[RemovableHandle]:
    """Hooks that tell ``sink`` of every unit's forward and backward; remove them to stop."""
    return [hook for name, unit in units(module).items() for hook in _watch(name, unit, sink)]


def _watch(name: str, unit: nn.Module, sink: SpanSink) -> Iterator[RemovableHandle]:
    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        began_ns = perf_counter_ns()
        for tensor in tensors_in(args):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(has_gradient_of_input)
        sink.begin_span(name, SpanKind.FORWARD)
        sink.spent(began_ns)

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        began_ns = perf_counter_ns()
        sink.end_span(name, SpanKind.FORWARD)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(has_gradient_of_output)
        sink.spent(began_ns)

    has_gradient_of_output = _mark(sink.begin_span, name, sink)
    has_gradient_of_input = _mark(sink.end_span, name, sink)
    yield unit.register_forward_pre_hook(before)
    yield unit.register_forward_hook(after, always_call=True)


def _mark(tell: Callable[[str, SpanKind], None], name: str, sink: SpanSink) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        began_ns = perf_counter_ns()
        tell(name, SpanKind.BACKWARD)
        sink.spent(began_ns)

    return hook
