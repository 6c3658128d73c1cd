"""A plain model made tensor parallel by a plan of name patterns: the model's own code stays as it is.

    plan = {
        "embedding": Vocabulary(),
        "layers.*.attention.[qkv]": Column(head_dim=64),
        "layers.*.attention.out": Row(),
        "layers.*.mlp.up": Column(),
        "layers.*.mlp.down": Row(),
    }
    model = parallelize_module(model, plan, mesh["tensor"])

Linear layers and embeddings are replaced by parallel ones in their places; the model keeps its class, its code and the
names of its parameters, of which each rank has slices, so any engine trains it on the data axes of the same mesh. A
loss with a norm of the parameters themselves sees those slices, and has to sum their squares over the tensor axis.
Whatever the seeds were, the weights are slices of the first rank's. A pattern is compared part by part between the
dots: ``*`` and ``[qkv]`` stand for text within one part. Columns of one parent share their input.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardlab.comm import Communicator, broadcast_coalesced
from shardlab.comm.observed_group import Process
from shardlab.comm.slices import cut_state, merge_state
from shardlab.meta_device import InitFn, reset_parameters
from shardlab.partition.slices import slices_of
from shardlab.tensor_parallel import sources
from shardlab.tensor_parallel.linear import ColumnParallelLinear
from shardlab.tensor_parallel.places import Places
from shardlab.tensor_parallel.rng import equalise_rng
from shardlab.tensor_parallel.sequence import SEQUENCE_DIM
from shardlab.tensor_parallel.shared_input import caller_around
from shardlab.tensor_parallel.styles import Column, OnSequence, OwnDropout, Row, Scatter, Style, Vocabulary

Plan = Mapping[str, Style]


def parallelize_module(
    model: nn.Module, plan: Plan, comm: Communicator, *, init_fn: InitFn = reset_parameters
) -> nn.Module:
    """Make ``model`` tensor parallel, in place; collective. Call it before an engine is built.

    Torch's random generators become those of the first rank too (``rng``). Whether the divided model computes what the
    whole one does is not tried here, but by ``check_tp_plan``. The first forward with gradients refuses what is whole
    where a divided layer needs parts, and the other way round (``sources``).

    Args:
        model: on its device, or on the meta device: then it is made on this rank's own module after module, so that no
            rank ever holds all of it.
        plan: style of every module that a pattern matches.
        comm: the tensor axis of the mesh, ``mesh["tensor"]``.
        init_fn: for parameters on the meta device: called as (name, module) for each module that holds some itself, to
            fill them; by default ``module.reset_parameters()``.

    Returns:
        ``model``.

    Raises:
        ValueError: before anything is changed: a pattern that matches nothing, a module that two patterns match, a
            style that does not fit its module, sizes that the ranks do not divide, a weight tied to one without style,
            a layer with a forward, hooks or parameters of its own, or one that is also held in a plain list.
            At the end only: tied weights whose styles slice them differently.
    """
    if not isinstance(comm, Communicator):
        raise ValueError(
            f"comm: a {type(comm).__name__} was given; give the tensor axis of the mesh, as in "
            "parallelize_module(model, plan, mesh['tensor'])"
        )
    styles = checked(plan, model, comm.num_ranks)
    # Before any module is made: what init_fn draws must be equal on all ranks.
    equalise_rng(comm, next((param.device for param in model.parameters() if not param.is_meta), Process.device))
    divide(model, styles, comm, init_fn, Process.device)
    return model


def merge_state_dict(model: nn.Module, comm: Communicator) -> dict[str, Any]:
    """A copy of the whole state, the same on every rank, which the plain model loads with strict=True; collective."""
    return merge_state(model.state_dict(), slices_of(model), comm)


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the plain model's state: each rank copies its slices. Nothing is sent.

    Raises:
        RuntimeError: names differ, or shapes of what is no slice; torch names them.
        ValueError: a parameter has another shape than the full one.
    """
    model.load_state_dict(cut_state(state, slices_of(model)), strict=True)


def checked(plan: Plan, model: nn.Module, num_ranks: int) -> dict[str, Style]:
    """The style of each module by name; nothing is changed and nothing sent.

    Raises:
        ValueError: see ``parallelize_module``.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {model!r:.60} was given; give an nn.Module")
    if not isinstance(plan, Mapping):
        raise ValueError(
            f"plan: {plan!r:.60} was given; give a mapping from names of modules to styles, as {{'up': Column()}}"
        )
    if slices_of(model):
        raise ValueError("model: it is tensor parallel already; call parallelize_module once, on the plain model")
    if getattr(getattr(model, "_shardlab_engine", None), "engine", None) is not None:
        raise ValueError("model: it is wrapped by an engine; call parallelize_module first, then build the engine")
    styles = matched(plan, model)
    for name, style in styles.items():
        style.check(name, model.get_submodule(name), num_ranks)
    Places(model).check(styles)
    return styles


def divide(
    model: nn.Module, styles: Mapping[str, Style], comm: Communicator, init_fn: InitFn, home: torch.device
) -> None:
    """Replace modules by their parallel forms, in place; collective.

    Args:
        model: whole; what is on the meta device is made on ``home`` by ``init_fn``.
        styles: by name of the module, checked.
        comm: the tensor axis.
        init_fn: see ``parallelize_module``.
        home: a device.
    """
    places = Places(model)
    # By name: a list of the modules would keep each full layer alive until the last one is divided.
    for name in [name for name, _ in model.named_modules()]:
        module = model.get_submodule(name)
        # With all that it holds, if it has a style: OnSequence is to find the parameters of its inner modules too.
        for inner, held in module.named_modules(prefix=name) if name in styles else ((name, module),):
            places.make(inner, held, home, init_fn)
        if name in styles:
            places.replace(module, styles[name].apply(name, module, comm))
    # After all are sliced: until then a tied weight has a slice of its own in each of its places.
    places.tie()
    # Only now is it known what has no slice; together it travels in few messages.
    slices = slices_of(model)
    rest: dict[str, Tensor] = {name: param for name, param in model.named_parameters() if name not in slices}
    for name, param in rest.items():
        setattr(param, sources.NAME, name)
    broadcast_coalesced(comm, [*rest.values(), *model.buffers()], tag="replicated parameters and buffers from rank 0")
    _share_inputs(model)


def matched(plan: Plan, model: nn.Module) -> dict[str, Style]:
    """The style of each module by name, in the module's order.

    Raises:
        ValueError: a pattern matches nothing, or two patterns match one module.
    """
    names = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    first_name = {id(module): name for name, module in reversed(names.items())}
    found: dict[str, tuple[str, Style]] = {}
    for pattern, style in plan.items():
        if isinstance(style, type) or not callable(getattr(style, "check", None)):
            raise ValueError(f"plan: {pattern!r} has {style!r:.60}; give a style, such as Column() or Row()")
        # A name without wildcards is looked up: a plan with a name for each layer of a large model has hundreds.
        hits = [pattern] if pattern in names else [name for name in names if _fits(name, pattern)]
        if not hits:
            near = get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(f"plan: {pattern!r} matches no module; the model has, for example, {', '.join(near)}")
        for name in hits:
            first = first_name[id(names[name])]
            if first in found and found[first][0] != pattern:
                raise ValueError(
                    f"plan: {found[first][0]!r} and {pattern!r} both match module {name!r}; one pattern per module "
                    "is allowed"
                )
            found[first] = (pattern, style)
    return {name: found[name][1] for name in names if name in found}


def matched_names(pattern: str, model: nn.Module) -> list[str]:
    """Names of the modules that a pattern matches, each part of a name by itself."""
    return [name for name, _ in model.named_modules(remove_duplicate=False) if name and _fits(name, pattern)]


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _share_inputs(model: nn.Module) -> None:
    """Give the columns of one parent, if they read the same dim in parts, one shared input."""
    for name, parent in model.named_modules():
        columns = [child for child in parent.children() if isinstance(child, ColumnParallelLinear)]
        for dim in {column.shared_input.sequence_dim for column in columns}:
            alike = [column for column in columns if column.shared_input.sequence_dim == dim]
            if len(alike) > 1:
                alike[0].shared_input.name = name or alike[0].name
                if (caller := caller_around(name, model)) is not None:
                    alike[0].shared_input.share(caller)
            for column in alike[1:]:
                column.shared_input = alike[0].shared_input


class GPTSizes(Protocol):
    """The part of ``GPTConfig`` that is used here."""

    @property
    def head_dim(self) -> int: ...  # noqa: D102


def gpt_plan(
    sizes: GPTSizes, *, sequence_parallel: bool = False, regather: bool = False, gather_logits: bool = True
) -> Plan:
    """The plan for a ``shardlab.models.GPT``.

    Per block 2 all-reduces of b*s*h elements (micro-batch, sequence, hidden) forward and 2 backward: behind and before
    the attention, whose heads are divided, and the MLP. The embedding adds one forward, the head one backward, and
    gathered logits an all-gather. With sequence parallelism each all-reduce is a reduce-scatter and an all-gather,
    which send as much together; then dropout, LayerNorm and the residual are in parts too.
    Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.

    Args:
        sizes: its config.
        sequence_parallel: divide the sequence where the model treats each token by itself; the ranks must divide its
            length.
        regather: with ``sequence_parallel``: keep the inputs of attention and MLP in parts for backward.
        gather_logits: give every rank all logits; False leaves them in parts along the vocabulary, for
            ``vocab_parallel_cross_entropy``.

    Raises:
        ValueError: ``regather`` without ``sequence_parallel``.
    """
    if regather and not sequence_parallel:
        raise ValueError(
            "regather: True is given without sequence_parallel; set sequence_parallel=True, or leave it out"
        )
    along = SEQUENCE_DIM if sequence_parallel else None
    column, row = Column(sequence_dim=along, regather=regather), Row(sequence_dim=along)
    plan: dict[str, Style] = {
        "token_embedding": Vocabulary(along),
        "blocks.*.attention.[qkv]_proj": Column(head_dim=sizes.head_dim, sequence_dim=along, regather=regather),
        "blocks.*.attention.out_proj": row,
        "blocks.*.mlp.fc1": column,
        "blocks.*.mlp.fc2": row,
        "head": Column(gather_output=gather_logits, sequence_dim=along, regather=regather),
    }
    if sequence_parallel:
        plan |= {
            "position_embedding": Scatter(SEQUENCE_DIM), "dropout": OwnDropout(), "blocks.*.dropout": OwnDropout(),
            "blocks.*.*_norm": OnSequence(), "final_norm": OnSequence(),
        }  # fmt: skip
    return plan
