"""Ranks that do a schedule: one loop over a rank's actions, messages between stages, an engine inside each stage.

    with Mesh({"pipe": 2, "data": 2}) as mesh:
        pipeline = Pipeline(model, make_schedule("1f1b", 2, 8), mesh)
        engine = Engine(pipeline.module, lambda params: AdamW(params), mesh, ZeRO1())
        loss = pipeline.run(engine, loss_fn, inputs, targets)
        engine.clip_grad_norm_(1.0)                           # of all stages
        engine.step()

Tensor parallelism comes first: ``parallelize_module(model, plan, mesh["tensor"])``, then ``Pipeline``. Each tensor rank
sends what it has of an output to the same tensor rank of the next stage.

``messages.py`` lists what travels between stages. A receive is posted one ahead of the action that needs it, so that
the message moves while this rank computes. Over NCCL, where a message keeps those behind it waiting, each rank sends
and receives in one order of all messages, that in which a clock would bring them (``clock.in_time``).
Gradients add up over micro-batches inside ``no_sync()``; the last backward of a rank sends them over the data axis, as
that engine does.

A rank holds, for each micro-batch under way in each of its stages, the input and what autograd saves: as many as
``Schedule.in_flight`` says. What it has sent it holds until another message says that it has arrived.
Source: Narayanan et al., arXiv 2104.04473, section 2.2.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from shardlab.comm.base_mesh import BaseMesh
from shardlab.comm.callers import from_one_line
from shardlab.comm.events import Pending, wait_all
from shardlab.comm.transports.nccl import NcclTransport
from shardlab.engines.autograd_nodes import gradient_node
from shardlab.engines.engine import Engine
from shardlab.pipeline.late_weights import Late, edges_and_gradients, late_weights
from shardlab.pipeline.messages import TIED, Like, loans_of
from shardlab.pipeline.stages import Cut, cut, lend, module_of
from shardlab.schedules.actions import LAST, Action, Kind, Schedule, W
from shardlab.schedules.clock import in_time
from shardlab.vocabulary import MeshAxis, class_of

_DTYPES, _MAX_DIMS = (torch.float32, torch.float64, torch.bfloat16, torch.float16), 8
Loss = Callable[[Tensor, Any], Tensor]
Watch = Callable[[Action], contextlib.AbstractContextManager[Any]]


class Pipeline:
    """A model cut over the ranks of the axis ``pipe``.

    Args:
        model: the whole model, the same on all ranks; see ``stages``.
        schedule: a list of actions for each rank of the axis.
        mesh: with the axis ``pipe``; a stage's engine averages over its data axes.
        begins: see ``stages.cut``.

    Attributes:
        cut: the names of the parts of each stage.
        loans: parameters that stages of several ranks use.
        module: this rank's stages, for the engine.
        has_loss: whether the last stage is one of them.

    Raises:
        ValueError: the mesh has no such axis, or not as many ranks as the schedule; an impossible cut, or one that
            leaves a rank without parameters; a schedule in which ranks wait for each other without end.
    """

    def __init__(self, model: nn.Module, schedule: Schedule, mesh: BaseMesh, begins: tuple[str, ...] = ()) -> None:
        self._comm, self.schedule = mesh[MeshAxis.PIPE], schedule
        if (size := self._comm.num_ranks) != len(schedule.ranks):
            raise ValueError(f"schedule: it is for {len(schedule.ranks)} ranks, and axis 'pipe' has {size}")
        self.cut: Cut = cut(model, schedule.num_stages, begins)
        self._actions, self._device, rank_of = schedule.ranks[self._comm.rank], mesh.device, schedule.rank_of
        self.has_loss = rank_of[schedule.num_stages - 1] == self._comm.rank
        self.loans = loans_of(model, self.cut, rank_of)
        modules = [self._module(model, rank) for rank in range(size)]
        if idle := [rank for rank, module in enumerate(modules) if not list(module.parameters())]:
            raise ValueError(f"stages: {self.cut}: those of rank {idle[0]} have no parameters; name others in 'begins'")
        self.module = modules[self._comm.rank]
        # Written in forward they would differ by rank, or be written in another order than by one process.
        stages = [set(module_of(model, {0: names}).buffers()) for names in self.cut]
        self._read_only = {n: one for n, one in self.module.named_buffers() if sum(one in own for own in stages) > 1}
        self._needs = {action: schedule.needs(action) for action in self._actions}
        own = [one for one, way in in_time(schedule).items() if self._comm.rank in way]
        self._received = [one for one in own if one not in self._actions]
        # Over NCCL a message keeps those behind it waiting; elsewhere a receive need not wait for what this rank sends.
        self._order = own if self._comm.transport == NcclTransport.name else self._received
        self._confirmed_by = schedule.confirmed_by(self._comm.rank)
        self._like: dict[tuple[int, tuple[int, ...]], Like] = {}  # of a stage's output, by a micro-batch's shape

    def expect(self, shape: tuple[int, ...], outputs: Sequence[Like]) -> None:
        """Say what stages but the last give for micro-batches of a shape, so that ranks need not tell each other."""
        self._like |= {(stage, tuple(shape)): like for stage, like in enumerate(outputs)}

    def _module(self, model: nn.Module, rank: int) -> nn.Module:
        stages = {stage: names for stage, names in enumerate(self.cut) if self.schedule.rank_of[stage] == rank}
        return module_of(model, stages, [name for loan in self.loans if loan.to == rank for name in loan.used_as])

    def run(
        self, engine: Engine, loss_fn: Loss, inputs: Tensor | Sequence[Tensor], targets: Any, *,
        keeps_gathered: bool = False, watch: Watch = contextlib.nullcontext, waits: Watch = contextlib.nullcontext,
    ) -> Tensor | None:  # fmt: skip
        """Forward and backward of all micro-batches; afterwards gradients are means, ready for ``engine.step()``.

        Args:
            engine: around ``module``.
            loss_fn: of the last stage's output and a micro-batch's targets, a mean over its rows.
            inputs: this data rank's rows, [rows, ...], the same on all ranks of the axis ``pipe``; or a sequence of
                them by micro-batch, which may have different numbers of rows.
            targets: likewise; a sequence may have anything in it.
            keeps_gathered: sharded parameters are gathered once and kept until the end, instead of gathered for each
                forward and each backward.
            watch: called with each action, and entered while this rank computes it and hands on what it brings.
            waits: likewise, and entered before, while this rank waits for what the action needs; with the first one,
                also while ranks lend each other parameters.

        Returns:
            The mean loss over micro-batches, on the rank of the last stage; None on the others.

        Raises:
            ValueError: the engine is around another module; the micro-batches do not divide the rows, or are not as
                many as the schedule's; forward has written a buffer that several stages use.
        """
        if engine.module is not self.module:
            raise ValueError(f"engine: it is around {class_of(engine.module)}; build it around pipeline.module")
        number = self.schedule.num_micro_batches
        if isinstance(inputs, Tensor):
            if not isinstance(targets, Tensor) or len(inputs) != len(targets) or len(inputs) % number:
                found = f"{len(inputs)} rows, targets: {getattr(targets, 'shape', class_of(targets))}"
                raise ValueError(f"inputs: {found}; give tensors, whose rows {number} divides, or both by micro-batch")
            inputs, targets = inputs.chunk(number), targets.chunk(number)
        elif not len(inputs) == len(targets) == number:
            raise ValueError(f"inputs: {len(inputs)} micro-batches, targets of {len(targets)}; schedule of {number}")
        before = {name: buffer._version for name, buffer in self._read_only.items()}
        step = _Step(self, engine, loss_fn, inputs, targets, watch, waits)
        # The action whose backward sends gradients over the data axes. Where this rank lends a parameter it is none of
        # them: the last gradient comes in _lent(), behind all actions.
        sends = max(place for place, action in enumerate(self._actions) if action.kind in LAST)
        sends += any(loan.owner == self._comm.rank for loan in self.loans)
        kept = engine.strategy.kept_gathered() if keeps_gathered else contextlib.nullcontext()
        with from_one_line(self._comm), self._lent(engine, step.sent, waits), kept, engine.looked_at_once():
            with engine.no_sync():
                for action in self._actions[:sends]:
                    step.do(action)
            for action in self._actions[sends:]:
                step.do(action)
        if torch.is_grad_enabled():  # else nothing has come that means could be made of
            engine.finish_gradients()  # where the last action has brought none
        wait_all([*step.sent, *step.unconfirmed.values()])
        if wrong := [name for name, buffer in self._read_only.items() if buffer._version != before[name]]:
            raise ValueError(f"buffers: forward writes {wrong[0]!r}, which several stages use; give each one its own")
        return torch.stack(step.losses).sum() if step.losses else None

    @contextlib.contextmanager
    def _lent(self, engine: Engine, sent: list[Pending], waits: Watch) -> Iterator[None]:
        """Inside, this rank has the values of parameters that others own; at the end their owners get gradients."""
        comm, device = self._comm, self._device
        own = [loan for loan in self.loans if loan.owner == comm.rank]
        borrowed = [(loan, torch.empty_like(loan.param, device=device)) for loan in self.loans if loan.to == comm.rank]
        if self.loans and engine.strategy.precision.compute is not None:  # on all ranks, or others would wait
            raise ValueError(TIED.format(self.loans[0].name))
        with waits(self._actions[0]):
            with engine.full_params() if own else contextlib.nullcontext():
                values = [engine.params[loan.name].detach().clone() for loan in own]
            sent += [comm.send(value, loan.to, tag=loan.tag) for loan, value in zip(own, values, strict=True)]
            for loan, value in borrowed:
                comm.recv(value, loan.owner, tag=loan.tag).wait()
                lend(self.module, loan.used_as, value.requires_grad_(loan.param.requires_grad))
        yield
        for loan, value in borrowed:
            gradient = torch.zeros_like(value) if value.grad is None else value.grad
            use = value.requires_grad + (value.grad is not None)  # 0 frozen, 1 not used, 2 used
            gradient = torch.cat([gradient.flatten(), gradient.new_tensor([use])])
            sent.append(comm.send(gradient, loan.owner, tag=f"gradient of {loan.tag}"))
            lend(self.module, loan.used_as, None)
        told = [torch.empty(value.numel() + 1, dtype=value.dtype, device=device) for value in values]
        for loan, gradient in zip(own, told, strict=True):
            comm.recv(gradient, loan.to, tag=f"gradient of {loan.tag}").wait()
        trained = [one for one in zip(own, values, told, strict=True) if engine.params[one[0].name].requires_grad]
        if frozen := [loan.name for loan, _, gradient in trained if not gradient[-1]]:
            raise ValueError(f"model: {frozen[0]!r} trains on one rank alone; thaw it in the whole model")
        # What nobody used has no gradient, as in one process, and no zeros, by which an optimizer would step it.
        due = [one for one in trained if one[-1][-1] > 1]
        edges = [GradientEdge(gradient_node(engine.params[loan.name]), 0) for loan, *_ in due]
        if due:
            torch.autograd.backward(edges, [gradient[:-1].view_as(value) for _, value, gradient in due])


class _Step:
    """One run of a rank's actions.

    Attributes:
        sent: messages beside them, until the end of the step: shapes, and what is lent.
        unconfirmed: messages with what actions have brought, until another one says that they have arrived.
        losses: of the micro-batches of the last stage, each over the number of them.
    """

    def __init__(
        self, pipeline: Pipeline, engine: Engine, loss_fn: Loss, inputs: Sequence[Tensor], targets: Sequence[Any],
        watch: Watch, waits: Watch,
    ) -> None:  # fmt: skip
        self.sent, self.losses, self.unconfirmed = list[Pending](), list[Tensor](), dict[Action, Pending]()
        self._pipeline, self._engine, self._loss_fn, self._watch, self._waits = pipeline, engine, loss_fn, watch, waits
        self._inputs, self._targets, self._shapes = inputs, targets, [tuple(one.shape) for one in inputs]
        self._rank_of, self._last = pipeline.schedule.rank_of, pipeline.schedule.num_stages - 1
        # From another stage of this rank; receives that are posted.
        self._mail, self._posted = dict[Action, Tensor](), dict[Action, tuple[Tensor, Pending]]()
        self._due = list(pipeline._order)  # messages that this rank still has to post
        self._held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # input and output, until its backward
        # Until the backward of weights.
        self._late: dict[tuple[int, int], Late] = {one[1:]: [] for one in pipeline._actions if one.kind is W}

    def do(self, action: Action) -> None:
        """Wait for what the action needs, do it, and send what it brings."""
        need = self._pipeline._needs[action]
        with self._waits(action):
            received = None if need is None else self._take(need)
        with self._watch(action):
            if action.kind is Kind.BACKWARD_OF_WEIGHTS:
                edges, gradients = edges_and_gradients(self._late.pop(action[1:]))
                if edges:
                    self._engine.backward(edges, gradient=gradients)
                return
            compute = self._forward if action.kind is Kind.FORWARD else self._backward
            if (brings := compute(action, received)) is not None:
                self._send(action, brings)

    def _forward(self, action: Action, received: Tensor | None) -> Tensor | None:
        _, stage, number = action
        given = self._inputs[number] if received is None else received.requires_grad_()
        with contextlib.nullcontext() if (late := self._late.get((stage, number))) is None else late_weights(late):
            output = self._engine(stage, given)
        if not isinstance(output, Tensor):
            raise ValueError(f"stages: stage {stage} gives {type(output).__name__}; cut where one tensor goes on")
        if stage == self._last:
            output = self._loss_fn(output, self._targets[number]) / len(self._targets)
            self.losses.append(output.detach())
        self._held[stage, number] = given, output
        return None if stage == self._last else output.detach()

    def _backward(self, action: Action, received: Tensor | None) -> Tensor | None:
        _, stage, number = action
        given, output = self._held.pop((stage, number))
        if stage:
            # Sent from inside autograd: what the engine does at the end of a backward, the next rank need not wait for.
            given.register_post_accumulate_grad_hook(lambda one: self._send(action, cast("Tensor", one.grad)))
        late = self._late.get((stage, number))  # also of a checkpoint, which runs forward again
        if output.requires_grad:  # else nothing that led to it trains
            with contextlib.nullcontext() if late is None else late_weights(late):
                self._engine.backward(output, gradient=received)
        return torch.zeros_like(given) if stage and given.grad is None else None

    def _send(self, action: Action, tensor: Tensor) -> None:
        peer = self._rank_of[action.stage + (1 if action.kind is Kind.FORWARD else -1)]
        if peer == self._pipeline._comm.rank:
            self._mail[action] = tensor
            return
        self._post_to(action)
        if action.kind is Kind.FORWARD:
            self._tell_like(action, tensor, peer)
        self.unconfirmed[action] = self._pipeline._comm.send(tensor.contiguous(), peer, tag=action.tag, in_order=True)

    def _take(self, need: Action) -> Tensor:
        if need in self._mail:
            return self._mail.pop(need)
        self._post_to(need)
        tensor, pending = self._posted.pop(need)
        if self._due and self._due[0] in self._pipeline._received and self._like_of(self._due[0]) is not None:
            self._post_to(self._due[0])
        pending.wait()
        for action in self._pipeline._confirmed_by[need]:
            self.unconfirmed.pop(action).wait()  # at once, and the memory is free
        return tensor

    def _post_to(self, action: Action) -> None:
        """Post the receives up to a message in the rank's order."""
        while action in self._due:
            if (one := self._due.pop(0)) in self._pipeline._received:
                self._posted[one] = self._post(one)

    def _post(self, need: Action) -> tuple[Tensor, Pending]:
        """Begin to receive; what a stage's output is like comes before the first of its shape."""
        comm, peer = self._pipeline._comm, self._rank_of[need.stage]
        if (like := self._like_of(need)) is None:
            header = torch.empty(2 + _MAX_DIMS, dtype=torch.int64, device=self._pipeline._device)
            comm.recv(header, peer, tag=f"shape of stage {need.stage}", in_order=True).wait()
            which, num_dims, *dims = header.tolist()
            like = Like(tuple(dims[:num_dims]), _DTYPES[which])
            self._pipeline._like[need.stage, self._shapes[need.micro_batch]] = like
        tensor = torch.empty(like.shape, dtype=like.dtype, device=self._pipeline._device)
        return tensor, comm.recv(tensor, peer, tag=need.tag, in_order=True)

    def _like_of(self, need: Action) -> Like | None:
        """What a message is like: the output of a stage, or the gradient of that of the one before."""
        return self._pipeline._like.get((need.stage - (need.kind is not Kind.FORWARD), self._shapes[need.micro_batch]))

    def _tell_like(self, action: Action, output: Tensor, peer: int) -> None:
        """Tell the next stage's rank what outputs are like, the first time."""
        stage, like = action.stage, Like(tuple(output.shape), output.dtype)
        known = self._pipeline._like.setdefault((stage, self._shapes[action.micro_batch]), like)
        if known != like:  # the next rank would wait for another message
            now, before = (f"{one.shape} of {one.dtype}" for one in (like, known))
            raise ValueError(f"stages: stage {stage} gives {now}, and {before} before, of inputs of one shape")
        if known is not like:
            return
        if output.dtype not in _DTYPES or output.ndim > _MAX_DIMS:
            raise ValueError(f"stages: stage {stage} gives {output.dtype}, {output.ndim} dims; cut elsewhere")
        header = [_DTYPES.index(output.dtype), output.ndim, *output.shape, *[0] * (_MAX_DIMS - output.ndim)]
        told = torch.tensor(header, device=self._pipeline._device)
        self.sent.append(self._pipeline._comm.send(told, peer, tag=f"shape of stage {stage}", in_order=True))
