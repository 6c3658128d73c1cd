"""When a backward begins and ends and a gradient is there, whoever started it: the engine, or ``loss.backward()``.

Autograd has no hook for the beginning or the end. A backward that the engine did not start is noticed by a hook on the
output of the module's forward, which runs before any gradient below it is accumulated, or else by the first gradient.

A parameter may get its gradient in parts, so that what has arrived may be incomplete:

* reentrant activation checkpointing runs a backward inside the backward, and each inner one brings a part;
* if a parameter had another dtype for a while between two forwards, autograd takes it for another parameter in the
  second one, and a backward through both brings a part from each.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from shardlab.comm.trees import tensors_in
from shardlab.engines.hooks import gradient_node, unrefused, untraced

_OUTSIDE = -1  # torch's answer while no backward runs


class BackwardWatch:
    """Calls ``began`` once for each backward that accumulates gradients, and ``ended`` after a plain one.

    Args:
        params: the engine's parameters.
        began: called with None before the first gradient is accumulated; if the output hides its tensors in custom
            objects, right after it, with the parameter that has it.
        entered: called by the first hook of the backward, while autograd runs; ``unreached`` can be asked from there.
        came: called with each parameter when a gradient has been accumulated into its ``.grad``.
        ended: called at the end of a backward that does not run inside ``expected()``, unless it raised.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        began: Callable[[nn.Parameter | None], None],
        entered: Callable[[], None],
        came: Callable[[nn.Parameter], None],
        ended: Callable[[], None],
    ) -> None:
        self._params, self._began, self._entered, self._came, self._ended = params, began, entered, came, ended
        self._gradient_hook = _weakly(self)
        self._hooks: list[RemovableHandle] = []
        self._expected = False
        self._task: int | None = None  # autograd's number of the outermost backward
        self._to_run: weakref.WeakSet[_Graph] = weakref.WeakSet()  # those of outputs that no backward has reached
        self._through: _Graph | None = None  # by whose output a plain backward was noticed
        self._num_ended = 0  # backwards so far
        self._retains_graph = False  # the current backward
        self._may_have_two_dtypes = False  # some parameter, in graphs that are still to run
        self._has_two_dtypes = False  # in the current backward: its gradient comes in parts
        self._is_closed = False

    def watch_params(self) -> None:
        """Put the hooks on the parameters."""
        for param in self._params.values():
            if not param.is_floating_point():
                continue
            # A frozen parameter may be unfrozen later, but torch takes the hook only while requires_grad is True.
            frozen = not param.requires_grad
            param.requires_grad_(True)
            self._hooks.append(param.register_post_accumulate_grad_hook(self._gradient_hook))
            param.requires_grad_(not frozen)

    @untraced
    @unrefused
    def run_hooks_last(self) -> None:
        """Let the user's hooks see gradients first: ours may send them, or put them elsewhere."""
        for param in self._params.values():
            # Private: there is no public way to ask for them.
            hooks = param._post_accumulate_grad_hooks
            if hooks is None or len(hooks) < 2:
                continue
            ours = [number for number, hook in hooks.items() if hook is self._gradient_hook]
            if ours and next(reversed(hooks)) not in ours:
                hooks[ours[0]] = hooks.pop(ours[0])

    @untraced
    def follow(self, output: Any) -> None:
        """Notice a backward through any tensor of ``output``."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # a hook on a leaf would outlive the graph
                graph = _Graph(tensor, self._num_ended)
                self._to_run.add(graph)
                tensor.register_hook(functools.partial(self._reached, graph))  # lives as long as the graph

    @contextlib.contextmanager
    def expected(self, loss: Tensor, *, retain_graph: bool) -> Iterator[None]:
        """Wraps a backward of ``loss`` whose end the caller sees itself."""
        # First: it may refuse the backward, and then nothing has been set that would have to be undone.
        self._began(None)
        self._expected, self._retains_graph = True, retain_graph
        # On the loss, since the first gradient may come from a backward nested in this one, with a number of its own.
        hook = loss.register_hook(lambda _: self.enter()) if loss.grad_fn is not None else None
        try:
            yield
        finally:
            self._expected = False
            self._forget()
            if hook is not None:
                # Or it would run again in a later backward through a retained graph.
                hook.remove()

    def enter(self, param: nn.Parameter | None = None) -> None:
        """Note that a backward runs; called by every hook that autograd calls, with the parameter if it is one's."""
        if self._task is not None:
            return
        self._task = _current_task()
        if not self._expected:
            # Private: there is no public way to be called at the end of a backward.
            torch.autograd.Variable._execution_engine.queue_callback(self._leave)
            self._began(param)
        # Asked of the graph of this backward: which others are alive may differ by rank, and with it what is sent when.
        self._has_two_dtypes = self._may_have_two_dtypes and self._reaches_one_twice()
        self._entered()

    @property
    def has_begun(self) -> bool:
        """Whether a backward has been noticed that has not ended yet."""
        return self._expected or self._task is not None

    @property
    def is_inside(self) -> bool:
        """Whether autograd calls from inside some backward, as for a forward that checkpointing computes again."""
        return _current_task() != _OUTSIDE

    @property
    def brings_parts(self) -> bool:
        """Whether more may be added to the gradient that has just arrived, before the backward ends."""
        return self._has_two_dtypes or _current_task() != self._task

    def note_other_dtypes(self) -> None:
        """Parameters have another dtype for a while."""
        # Only if an earlier graph is alive: to look for such parameters in each backward takes time.
        self._may_have_two_dtypes = self._may_have_two_dtypes or len(self._to_run) > 0

    @unrefused
    def unreached(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of ``params`` that the current backward gives no gradient, as this rank's graph says.

        None of them where this cannot be told: where a backward may run inside it, as under reentrant checkpointing,
        whose graph is not made yet; where nobody saw the backward before its first gradient; and where a plain
        ``loss.backward()`` may go through another output, which nothing but a loss holds.
        """
        if not (entries := self._entries()):
            return []
        # Private: there is no public way to ask which nodes a backward will run.
        missing = [
            param
            for param in params
            if param.requires_grad and not torch._C._will_engine_execute_node(gradient_node(param))
        ]
        if not missing:  # as a rule; the walk below takes time
            return []
        below = set().union(*map(nodes_below, entries))
        if any(may_nest(node) for node in below):
            return []
        # A parameter that had another dtype since the forward, inside full_params(), has another node by now.
        reached = {node.variable for node in below if hasattr(node, "variable")}
        return [param for param in missing if below and param not in reached]

    def _reaches_one_twice(self) -> bool:
        """Whether some parameter has two nodes in this backward, from before and after it had another dtype."""
        if not (entries := self._entries()):
            return True  # as far as can be told
        below = set().union(*map(nodes_below, entries))
        # A graph that is not made yet, as under reentrant checkpointing, brings its parts under another number.
        known = [id(node.variable) for node in below if hasattr(node, "variable")]
        return len(known) > len(set(known))

    def _entries(self) -> list[Any]:
        """The nodes by which the current backward comes into the module's graphs; none where this cannot be told."""
        entries = [torch._C._current_autograd_node()]
        if self._expected:
            return entries  # the loss's own
        if self._through is None:
            return []
        for graph in self._to_run:
            # Those from before the last backward are left aside. What that has not run will hardly run now; but after
            # an error it may still be in memory, on some ranks and not on others.
            if graph is self._through or graph.num_ended != self._num_ended:
                continue
            if (output := graph.output()) is None:
                return []
            if output.grad_fn is not None and torch._C._will_engine_execute_node(output.grad_fn):
                entries.append(output.grad_fn)
        return entries

    def close(self) -> None:
        """Let backwards through the outputs that were followed so far be plain torch's."""
        self._is_closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def take_unended(self) -> bool:
        """Whether a backward began and never ended because it raised; True only once for each."""
        # Inside a backward there is no answer yet: a forward that checkpointing computes again asks from there.
        if self._task is None or self.is_inside:
            return False
        self._forget()
        return True

    def _reached(self, graph: "_Graph", _: Tensor) -> None:
        if self._is_closed:
            return
        if self._task is None and self._accumulates():
            self._through = graph
            self.enter()
        # After ``enter()``, which counts the outputs that are still to run, this one among them.
        if self._task is not None and not self._retains_graph:
            self._to_run.discard(graph)

    def _accumulated(self, param: nn.Parameter) -> None:
        # First: this may be the first sign of a plain backward, whose beginning resets queues and placeholders.
        self.enter(param)
        self._came(param)

    def _accumulates(self) -> bool:
        """Whether parameters will get gradients: ``torch.autograd.grad`` calls the same hooks and gives them none.

        One that only a backward inside this one reaches counts too: else the first gradient would come under the inner
        one's number, and that would be taken for the outermost.
        """
        trainable = [param for param in self._params.values() if param.requires_grad]
        # Private: there is no public way to ask which nodes a backward will run.
        try:
            if any(torch._C._will_engine_execute_node(gradient_node(param)) for param in trainable):
                return True
            node = torch._C._current_autograd_node()
            # No in torch.autograd.grad, also where it was asked for the tensor with the hook and runs nothing below it.
            goes_on = torch.autograd._is_checkpoint_valid() and any(
                below is not None and torch._C._will_engine_execute_node(below) for below, _ in node.next_functions
            )
        # Torch does not answer if torch.autograd.grad was called for this very parameter, nor in a transform of
        # torch.func, where a parameter has no node; neither gives parameters gradients.
        except (RuntimeError, AttributeError):
            return False
        return bool(trainable) and goes_on and any(may_nest(below) for below in nodes_below(node))

    def _leave(self) -> None:
        # First: if the end raises, this must not look like a backward that never came to its end.
        self._forget()
        self._ended()

    def _forget(self) -> None:
        self._task, self._through, self._retains_graph = None, None, False
        self._num_ended += 1
        self._has_two_dtypes = False
        self._may_have_two_dtypes = self._may_have_two_dtypes and len(self._to_run) > 0


def _weakly(watch: BackwardWatch) -> Callable[[nn.Parameter], None]:
    """A hook that does not keep its engine alive: torch holds hooks in C++, where Python's collector sees no cycles.

    The engine lives as long as the module it wraps. A parameter that outlives both is plain, as after ``close()``.
    """
    reference = weakref.ref(watch)

    def on_gradient(param: nn.Parameter) -> None:
        # One that was frozen after the forward has been given no gradient, though autograd calls its hook all the same.
        if (known := reference()) is not None and param.requires_grad:
            known._accumulated(param)

    return on_gradient


class _Graph:
    """Lives as long as the graph of an output, whose hook alone refers to it: a weak set of these knows which are left.

    Args:
        output: is not kept alive.
        num_ended: how many backwards had ended when it was made.
    """

    def __init__(self, output: Tensor, num_ended: int) -> None:
        self.output, self.num_ended = TensorWeakRef(output), num_ended


def nodes_below(node: Any) -> set[Any]:
    """The node and all that a backward reaches from it; nothing without a node, or if it is a parameter's own."""
    seen: set[Any] = set()
    ahead = [node] if node is not None and node.next_functions else []
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions]
    return seen


def may_nest(node: Any) -> bool:
    """Whether it may run a backward of its own, as reentrant checkpointing does: any function in Python may."""
    if not isinstance(node, BackwardCFunction):
        return False
    function: Any = node._forward_cls  # type: ignore[attr-defined]
    return not getattr(function, "runs_no_backward", False)


def _current_task() -> int:
    """Autograd's number of the innermost backward running in this thread."""
    # Private: there is no public way to tell a nested backward from the one around it.
    return int(torch._C._current_graph_task_id())
