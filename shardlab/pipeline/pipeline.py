"""Ranks that do a schedule: one loop over a rank's actions, messages between stages, an engine inside each stage.

    with Mesh({"pipe": 2, "data": 2}) as mesh:
        pipeline = Pipeline(model, make_schedule("1f1b", 2, 8), mesh)
        engine = Engine(pipeline.module, lambda params: AdamW(params), mesh, ZeRO1())
        loss = pipeline.run(engine, loss_fn, inputs, targets)
        engine.clip_grad_norm_(1.0)                           # of all stages
        engine.step()

Between stages travel a micro-batch's output, forward, and its gradient, backward: for p ranks with v stages each and m
micro-batches (pv - 1) m messages each way, less those between stages of one rank. A receive is posted one ahead of the
action that needs it, so that the message moves while this rank computes. Gradients add up over micro-batches inside
``no_sync()``; the last backward of a rank sends them over the data axis, as that engine does.

A rank holds, for each micro-batch under way in each of its stages, the input and what autograd saves: as many as
``Schedule.in_flight`` says.
Source: Narayanan et al., arXiv 2104.04473, section 2.2.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardlab.comm.base_mesh import BaseMesh
from shardlab.comm.events import Pending, wait_all
from shardlab.engines.any_engine import AnyEngine
from shardlab.pipeline.stages import Cut, cut, module_of
from shardlab.schedules.actions import Action, Kind, Schedule
from shardlab.vocabulary import MeshAxis

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MAX_DIMS = 8
Loss = Callable[[Tensor, Tensor], Tensor]


class _Like(NamedTuple):
    """What a stage's output is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Pipeline:
    """A model cut over the ranks of the axis ``pipe``.

    Args:
        model: the whole model, the same on all ranks; see ``stages``.
        schedule: a list of actions for each rank of the axis.
        mesh: with the axis ``pipe``; a stage's engine averages over its data axes.
        begins: see ``stages.cut``.

    Attributes:
        cut: the names of the parts of each stage.
        module: this rank's stages, for the engine.

    Raises:
        ValueError: the mesh has no such axis, or not as many ranks as the schedule; a cut that cannot be; a schedule
            with backward in two halves, or in which a rank needs messages in another order than they are sent.
    """

    def __init__(self, model: nn.Module, schedule: Schedule, mesh: BaseMesh, begins: tuple[str, ...] = ()) -> None:
        self._comm, self.schedule = mesh[MeshAxis.PIPE], schedule
        if self._comm.num_ranks != len(schedule.ranks):
            raise ValueError(
                f"schedule: it is for {len(schedule.ranks)} ranks, and axis 'pipe' has {self._comm.num_ranks}"
            )
        self.cut: Cut = cut(model, schedule.num_stages, begins)
        self._actions, self._device = schedule.ranks[self._comm.rank], mesh.device
        if any(action.kind in (Kind.BACKWARD_OF_INPUT, Kind.BACKWARD_OF_WEIGHTS) for action in self._actions):
            raise ValueError("schedule: I and W, backward in two halves, are played and not run; use B")
        rank_of = schedule.rank_of
        self.module = module_of(
            model, {stage: names for stage, names in enumerate(self.cut) if rank_of[stage] == self._comm.rank}
        )
        needs = [(action, schedule.needs(action)) for action in self._actions]
        self._remote = [need for _, need in needs if need is not None and rank_of[need.stage] != self._comm.rank]
        self._check_order()
        self._like: dict[tuple[int, tuple[int, ...]], _Like] = {}  # of a stage's output, by a micro-batch's shape

    def run(self, engine: AnyEngine, loss_fn: Loss, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Forward and backward of all micro-batches; afterwards gradients are means, ready for ``engine.step()``.

        Args:
            engine: around ``module``.
            loss_fn: of the last stage's output and a micro-batch's targets, a mean over its rows.
            inputs: this data rank's rows, [rows, ...], the same on all ranks of the axis ``pipe``.
            targets: likewise.

        Returns:
            The mean loss, on the rank of the last stage; None on the others.

        Raises:
            ValueError: the micro-batches do not divide the rows.
        """
        number = self.schedule.num_micro_batches
        if len(inputs) != len(targets) or len(inputs) % number:
            raise ValueError(f"inputs: {len(inputs)} rows and {len(targets)} targets; {number} must divide both")
        step = _Step(self, engine, loss_fn, inputs.chunk(number), targets.chunk(number))
        last = max(place for place, action in enumerate(self._actions) if action.kind is Kind.BACKWARD)
        for place, action in enumerate(self._actions):
            with contextlib.nullcontext() if place >= last else engine.no_sync():
                step.do(action)
        wait_all(step.sent)
        return torch.stack(step.losses).sum() if step.losses else None

    def _check_order(self) -> None:
        """Messages from one rank to another have no names: they come as they are sent."""
        for peer, actions in enumerate(self.schedule.ranks):
            needed = [need for need in self._remote if self.schedule.rank_of[need.stage] == peer]
            sent = [action for action in actions if action in set(needed)]
            if needed != sent:
                one, other = next(pair for pair in zip(needed, sent, strict=True) if pair[0] != pair[1])
                raise ValueError(f"schedule: rank {self._comm.rank} needs {one} first, and rank {peer} sends {other}")


class _Step:
    """One run of a rank's actions.

    Attributes:
        sent: messages on their way.
        losses: of the micro-batches of the last stage, each over the number of them.
    """

    def __init__(
        self, pipeline: Pipeline, engine: AnyEngine, loss_fn: Loss, inputs: tuple[Tensor, ...], targets:
        tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        self.sent: list[Pending] = []
        self.losses: list[Tensor] = []
        self._of, self._engine, self._loss_fn = pipeline, engine, loss_fn
        self._inputs, self._targets = inputs, targets
        self._rank_of, self._last = pipeline.schedule.rank_of, pipeline.schedule.num_stages - 1
        self._mail: dict[Action, Tensor] = {}  # from another stage of this rank
        self._posted: dict[Action, tuple[Tensor, Pending]] = {}
        self._held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # input and output, until its backward

    def do(self, action: Action) -> None:
        """Wait for what the action needs, do it, and send what it brings."""
        need = self._of.schedule.needs(action)
        received = None if need is None else self._take(need)
        if action.kind is Kind.FORWARD:
            self._forward(action, received)
        else:
            self._backward(action, received)

    def _forward(self, action: Action, received: Tensor | None) -> None:
        _, stage, number = action
        given = self._inputs[number] if received is None else received.requires_grad_()
        output = self._engine(stage, given)
        if not isinstance(output, Tensor):
            raise ValueError(f"stages: stage {stage} gives {type(output).__name__}; cut where one tensor goes on")
        if stage == self._last:
            output = self._loss_fn(output, self._targets[number]) / len(self._targets)
            self.losses.append(output.detach())
        else:
            self._note(stage, output)
            self._send(action, output.detach(), stage + 1)
        self._held[stage, number] = given, output

    def _backward(self, action: Action, received: Tensor | None) -> None:
        _, stage, number = action
        given, output = self._held.pop((stage, number))
        # A sum with the gradient as weights: its backward begins with just that gradient.
        self._engine.backward(output if received is None else (output * received).sum())
        if stage:
            assert given.grad is not None
            self._send(action, given.grad, stage - 1)

    def _send(self, action: Action, tensor: Tensor, to: int) -> None:
        if (peer := self._rank_of[to]) == self._of._comm.rank:
            self._mail[action] = tensor
        else:
            self.sent.append(self._of._comm.send(tensor.contiguous(), peer, tag=_tag(action)))

    def _take(self, need: Action) -> Tensor:
        if need in self._mail:
            return self._mail.pop(need)
        self._post(need)
        tensor, pending = self._posted.pop(need)
        remote = self._of._remote
        for ahead in remote[remote.index(need) + 1 :][:1]:
            if self._like_of(ahead) is not None:
                self._post(ahead)
        pending.wait()
        return tensor

    def _post(self, need: Action) -> None:
        """Begin to receive; what a stage's output is like comes before the first of its shape."""
        if need in self._posted:
            return
        comm, peer = self._of._comm, self._rank_of[need.stage]
        like = self._like_of(need)
        if like is None:
            header = torch.empty(2 + _MAX_DIMS, dtype=torch.int64, device=self._of._device)
            comm.recv(header, peer, tag=f"shape of stage {need.stage}").wait()
            which, num_dims, *dims = header.tolist()
            like = self._of._like[need.stage, self._shape] = _Like(tuple(dims[:num_dims]), _DTYPES[which])
        tensor = torch.empty(like.shape, dtype=like.dtype, device=self._of._device)
        self._posted[need] = tensor, comm.recv(tensor, peer, tag=_tag(need))

    def _like_of(self, need: Action) -> _Like | None:
        """What a message is like: the output of a stage, or the gradient of that of the one before."""
        return self._of._like.get((need.stage - (need.kind is not Kind.FORWARD), self._shape))

    def _note(self, stage: int, output: Tensor) -> None:
        """Tell the next stage's rank what outputs are like, the first time."""
        if (stage, self._shape) in self._of._like:
            return
        if output.dtype not in _DTYPES or output.ndim > _MAX_DIMS:
            raise ValueError(f"stages: stage {stage} gives {output.dtype}, {output.ndim} dims; cut elsewhere")
        self._of._like[stage, self._shape] = _Like(tuple(output.shape), output.dtype)
        peer = self._rank_of[stage + 1]
        if peer != self._of._comm.rank:
            header = [_DTYPES.index(output.dtype), output.ndim, *output.shape, *[0] * (_MAX_DIMS - output.ndim)]
            told = torch.tensor(header, device=self._of._device)
            self.sent.append(self._of._comm.send(told, peer, tag=f"shape of stage {stage}"))

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(self._inputs[0].shape)


def _tag(action: Action) -> str:
    what = "activations" if action.kind is Kind.FORWARD else "gradients"
    return f"{what} of stage {action.stage}, micro-batch {action.micro_batch}"
