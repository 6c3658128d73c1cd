"""The engine: what a user calls, the state of the gradients, and when the strategy is told what.

    engine = Engine(model, lambda tensors: torch.optim.AdamW(tensors, lr=3e-4), mesh, ZeRO1())
    loss = engine(x, y)
    engine.backward(loss)              # or loss.backward(), which the engine notices
    engine.clip_grad_norm_(1.0)
    engine.step()
    engine.zero_grad()

The module keeps its class, its parameter names and its buffers. Gradients are means over the ranks of the data axes.

If a backward raises on one rank, that rank sends what is still to be sent in it, so that no other waits; then the flag,
the last message of each reduction and, with guards, the first of each step, tells all ranks, and all raise in the same
verb. So does what guards refuse on one rank alone: the refusal is kept until the next flag, and this rank sends until
then what is due. The flag also says which parameters any rank has used (``flag.py``).
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from shardlab.comm.base_mesh import BaseMesh
from shardlab.comm.coalesced import broadcast_coalesced
from shardlab.comm.modes_in_backward import lone_hooks_out
from shardlab.comm.transports.base import MismatchError
from shardlab.comm.trees import cast_floating, tensors_in
from shardlab.engines.any_engine import AnyEngine, Stateful
from shardlab.engines.autograd_nodes import accumulates, call_at_end, is_in_backward_of, move_last
from shardlab.engines.flag import Flag
from shardlab.engines.holdings import Holding
from shardlab.engines.moments import GradientState, Moment
from shardlab.engines.plain_mode import nothing, unrefused, untraced
from shardlab.engines.step_tensors import OptimizerFn, StepTensors, over_pieces, shown_whole
from shardlab.engines.strategy import Given, LaidOut, Strategy
from shardlab.vocabulary import MeshAxis, Role

_OUTSIDE = -1  # torch's answer while no backward runs


@final
class Engine(AnyEngine):
    """A strategy around a plain module.

    Args:
        model: an ``nn.Module`` on its device. Its parameters and buffers become those of the first data rank.
        optimizer_fn: builds the optimizer from the module's parameters (``StepTensors``), of which it then steps this
            rank's pieces.
        mesh: gradients are averaged over its data axes; None for this process alone. A tensor-parallel model also
            needs the axis ``tensor`` that it was parallelized over.
        strategy: one that no engine has yet.
        guards: what users must not do is refused, on all ranks; False for the bare engine, which trains right programs
            alike.
        broadcast_buffers: after each step send the first data rank's buffers to the others, packed by dtype. Otherwise
            each rank keeps what forward has made of its own rows, such as BatchNorm's statistics.

    Raises:
        ValueError: the module has no parameters, the mesh lacks an axis, or the optimizer does not fit.
    """

    guard_class: ClassVar[type[Any]]
    """``engines.guards.Guards``; set by ``shardlab.engines``, so that an engine can be read and used without."""

    def __init__(
        self, model: nn.Module, optimizer_fn: OptimizerFn, mesh: BaseMesh | None, strategy: Strategy, *, guards: bool =
        True, broadcast_buffers: bool = False,
    ) -> None:  # fmt: skip
        self._guards = self.guard_class(model, mesh, optimizer_fn, strategy) if guards else None
        self.strategy, self.name = strategy, strategy.name
        super().__init__(model, optimizer_fn, mesh, strategy.axes)
        self.broadcasts_buffers = broadcast_buffers
        self.gradient_state = GradientState.NONE
        self._due: set[int] = set()  # ids of those trained in a backward since zero_grad(); may be frozen by now
        self._running = self._sends = False  # a backward, and whether it communicates
        self.num_full_blocks = 0  # full_params() blocks
        self._strategy_backward = contextlib.ExitStack()  # strategy.in_backward(), while one runs
        self._ask(Moment.MODEL)
        # All of its ranks train on the same rows. So the data axes do what they do with a whole model, with smaller
        # parameters; only what concerns the whole model crosses the tensor axis too: norms, full state, checkpoints.
        self.tensor_comm = self.mesh[MeshAxis.TENSOR] if self.slices else None
        self._equalise_all()
        self._cast_buffers()
        params = dict(self.params)  # of these on the meta device others take the place
        laid_out = self._lay_out()
        try:
            self.optimizer = self._build_optimizer(optimizer_fn, params, laid_out.stepped)
        except Exception:
            self._give_back()  # this may gather: with guards all ranks have raised, so all of them join
            raise
        self._last_hooks: list[tuple[dict[int, Any], int]] = []  # for ``move_last``
        for name, param in self.params.items():
            if param.is_floating_point():
                self._watch(name, param)
        self._ask(Moment.BUILT)

    def _lay_out(self) -> LaidOut:
        """Give the model to the strategy."""
        given = Given(
            self.module, self.params, self.data_comms, self.mesh.device, self.mesh, self._is_due, self._note_backward,
            self._equalise,
        )  # fmt: skip
        guards, strategy = self._guards, self.strategy
        laid_out: LaidOut = strategy.lay_out(given) if guards is None else guards.laid_out(strategy, given)
        self._divisions, self._hooks = laid_out.divisions, list(laid_out.hooks)
        self._full_gathers = strategy.full_gathers
        self._step_tensors, self._stepped = StepTensors(laid_out.stepped), tuple(laid_out.stepped.values())
        self._flag = Flag(self.data_comms, self.mesh.device, self.params.values(), self._stepped, self._is_due)
        return laid_out

    def _build_optimizer(
        self, optimizer_fn: OptimizerFn, params: Mapping[str, nn.Parameter], stepped: Mapping[str, Tensor],
    ) -> torch.optim.Optimizer:  # fmt: skip
        """Build the optimizer of the user's parameters; in its groups they are then replaced by what is stepped."""

        def build(check: Callable[[torch.optim.Optimizer], None]) -> torch.optim.Optimizer:
            with shown_whole(params, self.slices):
                optimizer = optimizer_fn(StepTensors(params))
            check(optimizer)
            return over_pieces(optimizer, params, stepped, are_slices=bool(self.slices))

        return build(nothing) if self._guards is None else self._guards.optimizer(build, params, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        self._before_forward()
        args, kwargs = cast_floating((args, kwargs), self.strategy.precision.compute)
        try:
            with self.strategy.in_forward():
                output = self.module(*args, **kwargs)
        except Exception as error:
            if self._guards is not None:
                self._guards.explain(error, self)
            raise
        output = cast_floating(output, self.strategy.precision.output)
        self._after_forward(output)
        return output

    @untraced
    def _before_forward(self) -> None:
        self._check_usable()
        if self.strategy.precision.compute is not None:
            self._refuse_inside_full_params("forward")  # parameters are shown in another dtype than the input will have
        self._ask(Moment.FORWARD)

    @untraced
    def _after_forward(self, output: Any) -> None:
        move_last(self._last_hooks)  # a plain backward may show first by the hook of a parameter
        self._ask(Moment.FORWARDED)  # what the strategy has put in the place of parameters is no user's write
        for tensor in tensors_in(output):
            # A plain backward comes here before it accumulates anything.
            if tensor.grad_fn is not None and not (self._guards is not None and self._guards.looks_once):
                tensor.register_hook(self._output_reached)

    def backward(
        self, loss: Tensor | Sequence[GradientEdge], retain_graph: bool = False,
        gradient: Tensor | Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Gradients of ``loss``, averaged over the data axes unless inside ``no_sync()``.

        Args:
            loss: of this rank's rows; or edges of the graph at which it begins.
            retain_graph: keep the graph, so that another backward through it can add its gradients.
            gradient: with which backward begins, of the shape of ``loss``, or one for each edge; None where that is one
                number.

        Raises:
            RuntimeError: this backward raised on another rank, or guards refuse it; on all ranks. Or the last backward
                failed, and ``zero_grad()`` was not called since.
        """
        self._check_usable()
        try:
            self._begin()
            if isinstance(loss, Tensor):
                loss.backward(cast("Tensor | None", gradient), retain_graph=retain_graph)
            else:
                torch.autograd.backward(loss, gradient, retain_graph=retain_graph)
            self._end()
        except BaseException as error:
            if self._running:  # else the end of the backward has raised, on all ranks
                self._fail(error)
            raise

    @contextlib.contextmanager
    def looked_at_once(self) -> Iterator[None]:
        """Inside, guards look at the first forward and backward, at one that sends, and behind the block.

        Each backward in it is one of ``backward``, and never a plain one, of which hooks of outputs and of parameters
        tell elsewhere.
        """
        # Of a step of small kernels those of parameters are 3 %, though all they find is that a backward runs.
        guards = contextlib.nullcontext() if self._guards is None else self._guards.looking_once(self)
        with lone_hooks_out(self.params.values()), guards:
            yield

    def finish_gradients(self) -> None:
        """Return when the gradients are means over the data axes; collective unless they are means already.

        Raises:
            RuntimeError: a backward has failed on some rank, and ``zero_grad()`` was not called since.
        """
        self._check_usable()
        self._refuse_failed()
        self._read_flag()
        if self.gradient_state is not GradientState.MEANS:
            self._ask(Moment.REDUCE)
            self._make_means()
        else:
            self._ask(Moment.MEANS_ALREADY)

    def _make_means(self) -> None:
        used = self._flag.used_here(or_stepped=self.gradient_state is GradientState.NONE)
        self.strategy.make_means()
        self.gradient_state = GradientState.MEANS
        self._flag.forget()
        self._send_flag(used=used)
        self._ask(Moment.MEANS)

    @untraced
    def step(self) -> None:
        """One optimizer step; afterwards all ranks train on with the same model."""
        self.finish_gradients()
        self._refuse_inside_full_params("step")
        self._ask_all(Moment.STEP)
        self._ask(Moment.UPDATE)
        try:
            with self.strategy.stepping():
                try:
                    self.optimizer.step()
                finally:
                    self._ask(Moment.UPDATED)  # before the strategy sends what was stepped
        finally:  # an optimizer that raised may have stepped first, and other ranks' have not raised
            if self.broadcasts_buffers:
                self._equalise([one for one in self.module.buffers() if not one.is_meta], tag="buffers from rank 0")
            self._ask(Moment.STEPPED)
        self.num_steps += 1

    @untraced
    @unrefused
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients.

        Args:
            set_to_none: False keeps zeros where there were gradients, as in torch: the next step then moves these
                parameters too, by momentum and weight decay. Pending reductions are finished first: collective.
        """
        self._check_usable()
        if not set_to_none and self.gradient_state is not GradientState.FAILED:
            self.finish_gradients()
            for tensor in self._stepped:
                if tensor.grad is not None:
                    tensor.grad.zero_()
            self._ask(Moment.MEANS)
            return
        for tensor in (*self.params.values(), *self._stepped):
            tensor.grad = None
        self.strategy.drop()
        self._due.clear()
        self._flag.forget()
        self.gradient_state = GradientState.NONE
        self._ask(Moment.ZERO_GRAD)  # last, so that no guard remembers, and keeps, what is cleared

    @contextlib.contextmanager
    def full_params(self, *, keep_changes: bool = False) -> Iterator[nn.Module]:
        """Inside, the module has its full parameters on every rank, in the dtype they are stored in; collective.

        Of a tensor-parallel model these are this rank's slices; ``full_state_dict()`` has the whole ones.

        Args:
            keep_changes: where parameters are sharded or rounded, copy changes in place back when the block ends
                without an error; otherwise they are lost. Every rank must write the same values; nothing checks that.
        """
        self._check_usable()
        self._ask_all(Moment.FULL, sends=self.strategy.full_gathers)
        self.num_full_blocks += 1
        try:
            with self.strategy.full(keep_changes=keep_changes):
                yield self.module
        finally:
            self.num_full_blocks -= 1
            self._ask(Moment.FULL_LEFT)

    def load_full_state_dict(self, state: Any) -> None:
        """See ``AnyEngine``; each rank keeps its shards of it. Collective where parameters are sharded or rounded."""
        self._check_usable()
        self._ask(Moment.LOAD)
        try:
            with self.strategy.full(keep_changes=True):
                super().load_full_state_dict(state)
        finally:
            self._ask(Moment.LOADED)

    def save(self, directory: str | Path, *, extra: Any = None, **objects: Stateful) -> None:
        """See ``AnyEngine``; what guards refuse is refused before anything is written."""
        self._check_usable()
        self._ask_all(Moment.SAVE)
        super().save(directory, extra=extra, **objects)

    def load(self, directory: str | Path, **objects: Stateful) -> Any:
        """See ``AnyEngine``; at the end all ranks have the loaded model."""
        self._check_usable()
        self._refuse_inside_full_params("load")
        self._ask_all(Moment.LOAD)
        extra = super().load(directory, **objects)
        with self.strategy.stepping(loads=True):
            pass  # each rank has loaded its own pieces
        self._ask(Moment.LOADED)
        return extra

    def means_changed(self) -> None:
        """See ``AnyEngine``."""
        self._ask(Moment.MEANS)

    def close(self) -> None:
        """Give the module back, so that it trains alone again. A second call does nothing.

        The first call is collective where parameters are sharded or rounded: it gathers. Gradients are dropped.
        """
        if self._is_closed:
            return
        self._refuse_inside_full_params("close")
        self._ask(Moment.CLOSE)
        self.zero_grad()
        self._give_back()
        self._is_closed = True
        self._ask_all(Moment.CLOSED, sends=False)  # what is lost is told when nobody waits for this rank any more

    @unrefused
    def _give_back(self) -> None:
        """Put into the module what plain training needs."""
        if self.strategy.steps_pieces:
            with self.strategy.full(keep_changes=False):
                values = [param.detach().clone() for param in self.params.values()]
            for param, value in zip(self.params.values(), values, strict=True):
                param.data = value  # its own memory: what it was a view of may be freed
        for hook in self._hooks:
            hook.remove()

    # What a backward is, and who raises.

    def _watch(self, name: str, param: nn.Parameter) -> None:
        engine_of = weakref.ref(self)  # torch keeps hooks where no garbage collector looks

        def before(_: Tensor) -> None:
            """Autograd has come to a parameter, perhaps past our outputs, to add to its gradient or to return it."""
            if (engine := engine_of()) is None or engine._running or engine._is_closed:
                return
            if is_in_backward_of(engine.params[name]):
                engine._begin_plain()

        def after(param: nn.Parameter) -> None:
            if (engine := engine_of()) is not None:
                engine._after_gradient(param)

        # A frozen parameter may be unfrozen later, but torch takes the hook only while requires_grad is True.
        trains = param.requires_grad
        param.requires_grad_(True)
        self._hooks.append(param.register_hook(before))
        if type(self.strategy).grad_ready is not Strategy.grad_ready:  # else gradients stay where autograd adds them up
            self._hooks.append(param.register_post_accumulate_grad_hook(after))
            # Private: torch runs them in the order in which they were registered, and has no other.
            self._last_hooks.append((param._post_accumulate_grad_hooks, self._hooks[-1].id))
        param.requires_grad_(trains)

    def _output_reached(self, _: Tensor) -> None:
        self._note_backward()

    def _note_backward(self) -> bool:
        """A hook runs in autograd: begin a plain backward unless one runs; whether one does."""
        if not self._running and not self._is_closed and accumulates(self.params.values()):
            self._begin_plain()
        return self._running

    def _begin_plain(self) -> None:
        call_at_end(self._end)
        self._begin()

    def _after_gradient(self, param: nn.Parameter) -> None:
        """Autograd has added this rank's gradient to ``param.grad``: hand it to the strategy."""
        if not param.requires_grad:  # frozen after its forward: autograd calls the hook, and has accumulated nothing
            return
        if not self._running:
            self._begin_plain()
        has_gradient = param.grad is not None  # else a hook of the user's has dropped it
        try:
            self.strategy.grad_ready(param, sends=self._sync)
        except RuntimeError as error:
            self._fail(error)  # here: of a plain backward the next verb would, and until then the other ranks wait
            raise
        if has_gradient and (self._sync or param.grad is None or self.strategy.sends_in_no_sync):
            # Else it is at the parameter, where the user may clear it.
            self._flag.moved.add(id(param))

    @untraced
    @unrefused  # what refuses takes ten times as long, of each parameter
    def _begin(self) -> None:
        """Begin a backward: autograd has accumulated nothing yet."""
        self._refuse_failed()
        self._refuse_inside_full_params("backward")
        move_last(self._last_hooks)
        self._ask(Moment.BACKWARD)
        self._due |= {id(param) for param in self.params.values() if param.requires_grad}
        self._flag.begin(sends=self._sync)
        self.num_backwards += 1
        self.gradient_state, self._running, self._sends = self.gradient_state.with_local, True, self._sync
        self._strategy_backward.enter_context(self.strategy.in_backward(sends=self._sync))

    @untraced
    def _end(self) -> None:
        """End a backward: autograd has brought all that this rank has. If it communicates, its means are made here."""
        try:
            # Leaves strategy.in_backward(), which may do a part of its work only now (FSDP: the rest of its program).
            self._strategy_backward.close()
        finally:
            self._running = False
        self._ask(Moment.BACKWARD_SENDS if self._sync else Moment.BACKWARD_ENDED)
        if self._sync:
            self._read_flag()
            self._make_means()

    def _fail(self, error: BaseException) -> None:
        """The backward that runs has raised here: join what the other ranks wait in, and tell them."""
        self._running, self.gradient_state = False, GradientState.FAILED
        if isinstance(error, MismatchError):  # ranks are in different collectives: nothing that is sent would match
            return
        self._strategy_backward.__exit__(type(error), error, error.__traceback__)
        if self._sends:
            used = self._flag.used_here(or_stepped=False)
            self.strategy.make_means()
            with contextlib.suppress(RuntimeError):
                self._send_flag(RuntimeError(f"{type(error).__name__}: {error}"), used=used)
        self._ask(Moment.FAILED)  # what the strategy has resharded is no user's change

    def _check_usable(self) -> None:
        """At each verb: refuse a closed engine; and end a plain ``loss.backward()`` that has raised.

        Such a one is still open, and autograd does not run.
        """
        self._refuse_closed()
        if self._running and torch._C._current_graph_task_id() == _OUTSIDE:
            self._fail(RuntimeError("loss.backward() raised"))

    def _refuse_inside_full_params(self, verb: str) -> None:
        if self.num_full_blocks and (verb in ("load", "close") or self.strategy.full_gathers):
            raise RuntimeError(f"{verb}: it was called inside 'with engine.full_params():'; leave the block first")

    def _refuse_failed(self) -> None:
        if self.gradient_state is GradientState.FAILED:
            raise RuntimeError(
                "gradients: the last backward raised, here or on another rank; call engine.zero_grad() on all ranks"
            )

    def _send_flag(self, raised: Exception | None = None, *, used: Sequence[bool] = ()) -> None:
        """Send the flag, with what this rank raises, or what a guard has refused here since the last one, if anything.

        Args:
            raised: what this rank raises.
            used: behind a reduction, ``Flag.used_here()`` of before it.
        """
        # Told once, also where something else is raised.
        refused = None if self._guards is None else self._guards.refused()
        if self._flag.send(raised or refused, used):
            self._read_flag()

    def _read_flag(self) -> None:
        """Wait for the flag that was sent, if it was not read yet; raise what it says."""
        try:
            self._flag.read()
        except Exception:
            self.gradient_state = GradientState.FAILED
            raise

    def _ask(self, moment: Moment) -> None:
        """Let guards look; they keep what they refuse, and it is raised where all ranks meet next.

        Where means are at pieces, they also put placeholders at ``param.grad`` (``MEANS``), and take them away before
        autograd adds to it (``BACKWARD``) and before gradients are reduced or cleared.
        """
        if self._guards is not None and moment not in self._guards.quiet:
            self._guards.ask(moment, self)

    def _ask_all(self, moment: Moment, *, sends: bool = True) -> None:
        """Ask, and raise what is refused: on all ranks, or here alone where others may not be (``sends``)."""
        self._read_flag()
        self._ask(moment)
        if self._guards is None:
            return
        if sends:
            self._send_flag()
            self._read_flag()
        elif (refused := self._guards.refused()) is not None:
            raise refused

    def _is_due(self, param: nn.Parameter) -> bool:
        return param.requires_grad or id(param) in self._due

    # What the base asks for.

    def holdings(self) -> Iterator[Holding]:
        """Every long-lived tensor of the engine; a storage that comes in several roles counts in the first."""
        for one in self.strategy.holdings():
            if one.name or one.tensor.untyped_storage().nbytes():  # guards leave at .grad what has no memory
                yield one
        for state in super()._state_holdings():
            if state.role is Role.OPTIMIZER_STATE and self.strategy.state_role is not Role.OPTIMIZER_STATE:
                yield Holding(self.strategy.state_role, state.tensor)  # first, so that its bytes count there
            yield state
        yield from (Holding(Role.OTHER, buffer) for buffer in self.module.buffers())

    def install_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load a state dict of the optimizer over this rank's ``step_tensors()``."""
        self._ask(Moment.INSTALL)
        try:
            # Torch moves the state to the device of the tensors; inside, those are where they are stepped.
            with self.strategy.visiting():
                self.optimizer.load_state_dict(state)
        finally:
            self._ask(Moment.INSTALLED)

    def _cast_buffers(self) -> None:
        if (dtype := self.strategy.precision.buffers) is not None:
            # By ``.data``, since two modules that share a buffer must go on sharing it.
            for buffer in self.module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.to(dtype)

    def _equalise_all(self) -> None:
        """Give all data ranks the model of the first; what is no slice, that of the first tensor rank."""
        # Before anything is laid out, since all ranks must cut their shards from the same model.
        named = self._named_tensors()
        self._equalise([tensor for _, tensor in named])
        if self.tensor_comm is not None:
            whole = [tensor for name, tensor in named if name not in self.slices]
            broadcast_coalesced(self.tensor_comm, whole, tag="whole parameters and buffers from tensor rank 0")
