"""Hooks that mark when each unit of a module computes; units are chosen as for FSDP.

What computes beside the units, such as the embedding and the head of a GPT, is marked too, under its own name.
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
from shardlab.units.policy import AUTO, WrapPolicy, wrapped_modules
from shardlab.units.structure import is_called
from shardlab.vocabulary import SpanKind


class SpanSink(Protocol):
    """Takes the beginning and the end of spans."""

    def begin_span(self, unit: str, kind: SpanKind) -> None:
        """A unit starts to compute."""

    def end_span(self, unit: str, kind: SpanKind) -> None:
        """A unit has ended; ignored if it never began."""

    def spent(self, since_ns: int) -> None:
        """Count the time from ``since_ns`` until now as time spent recording."""


def watched_modules(module: nn.Module, wrap: WrapPolicy = AUTO) -> dict[str, nn.Module]:
    """The units of a module and, beside them, the largest modules without a unit inside; by name.

    None is inside another, so that no time counts twice: of nested units only the inner ones are here, and what is
    beside them in the outer one.

    Raises:
        ValueError: see ``wrapped_modules``.
    """
    units = set(wrapped_modules(module, wrap).values())
    innermost = {unit for unit in units if units.isdisjoint(_inside(unit))}
    covered = {inner for unit in innermost for inner in _inside(unit)}
    watched: dict[nn.Module, str] = {}
    for name, child in module.named_modules():  # each once, though it may stand at several places
        is_free = is_called(child) and child not in covered and _inside(child).isdisjoint(innermost | watched.keys())
        if child in innermost or (is_free and child is not module):
            watched[child] = name
            covered |= _inside(child)
    return {name: child for child, name in watched.items()}


def _inside(module: nn.Module) -> set[nn.Module]:
    return set(module.modules()) - {module}


def watch_units(module: nn.Module, sink: SpanSink, wrap: WrapPolicy = AUTO) -> list[RemovableHandle]:
    """Hooks that tell ``sink`` of every unit's forward and backward; remove them to stop.

    Args:
        module: the module whose units are watched.
        sink: is told.
        wrap: which modules are units, as for FSDP.

    Raises:
        ValueError: see ``wrapped_modules``.
    """
    return [hook for name, unit in watched_modules(module, wrap).items() for hook in watch_module(name, unit, sink)]


def watch_module(name: str, unit: nn.Module, sink: SpanSink) -> Iterator[RemovableHandle]:
    """Hooks that tell ``sink`` of the forward and backward of one module, under ``name``."""
    came_with: list[set[Any]] = []  # autograd's nodes of the inputs, for each call that has not ended

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        began_ns = perf_counter_ns()
        inputs = list(tensors_in((args, kwargs)))
        came_with.append({tensor.grad_fn for tensor in inputs})
        for tensor in inputs:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(has_gradient_of_input)
        # Last here and first in ``after``: what the hooks do themselves is not the unit's time.
        sink.begin_span(name, SpanKind.FORWARD)
        sink.spent(began_ns)

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        began_ns = perf_counter_ns()
        sink.end_span(name, SpanKind.FORWARD)
        known = came_with.pop() if came_with else set()  # there is none if the hooks came while it ran
        for tensor in tensors_in(output):
            # Skip inputs that are returned unchanged: their gradients come when an earlier unit runs backward.
            if tensor.grad_fn is not None and tensor.grad_fn not in known:
                tensor.register_hook(has_gradient_of_output)
        sink.spent(began_ns)

    has_gradient_of_output = _mark(sink.begin_span, name, sink)
    has_gradient_of_input = _mark(sink.end_span, name, sink)
    yield unit.register_forward_pre_hook(before, with_kwargs=True)
    yield unit.register_forward_hook(after, always_call=True)


def _mark(tell: Callable[[str, SpanKind], None], name: str, sink: SpanSink) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        began_ns = perf_counter_ns()
        tell(name, SpanKind.BACKWARD)
        sink.spent(began_ns)

    return hook
