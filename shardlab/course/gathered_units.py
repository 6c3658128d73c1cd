"""Which units are gathered, moment by moment.

with watch_gathered(engine) as samples:
    engine.backward(loss_of(engine(x)))
show(gathered_over_a_step(pd.DataFrame(samples), limit_bytes, "Gathered"))
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardlab.engines import Engine
from shardlab.engines.sharded_strategy import Sharded
from shardlab.engines.unit import Unit
from shardlab.plots.text import byte_scale, format_bytes
from shardlab.plots.theme import INK, UNITS, finish, new_figure
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role


@contextmanager
def watch_gathered(engine: Engine) -> Iterator[list[dict[str, Any]]]:
    """Sample the gathered parameters of each unit inside the ``with`` block.

    A sample is taken when the forward or the backward of a unit begins (its own and prefetched parameters are gathered
    by then) and when it ends, and once at the end. The hooks run after those of the engine, because they are added
    later; those of gradients are added in each backward, since the engine puts its own behind what it finds there.

    Yields:
        The rows of a table, one per sample and unit: ``sample`` (its number), ``moment`` ('blocks.0 forward'),
        ``unit``, ``bytes`` (0 for a unit without any).
    """
    rows: list[dict[str, Any]] = []
    numbers = count()

    def sample(moment: str) -> None:
        row = {"sample": next(numbers), "moment": moment}
        rows.extend({**row, "unit": unit, "bytes": held} for unit, held in gathered_by_unit(engine).items())

    with ExitStack() as hooks:  # removed after an error too: one would hold the rows and run in every later step
        for unit in units_in(engine):
            _watch(unit, sample, hooks)
        yield rows
    sample("end")


def gathered_by_unit(engine: Engine) -> dict[str, int]:
    """Bytes of gathered parameters that each unit holds now, each storage counted once; 0 for a unit without any."""
    found = {}
    for unit in units_in(engine):
        held = (held for shards in unit.shards for held in shards.holdings())
        gathered = [tensor for role, tensor, *_ in held if role is Role.GATHERED_PARAMETER]
        found[unit.name] = sum(bytes_by_role({Role.GATHERED_PARAMETER: gathered}).values())
    return found


def unit_bytes(engine: Engine) -> dict[str, int]:
    """Bytes of each unit when it is gathered, including padding."""
    return {
        unit.name: sum(
            shards.layout.padded_numel * (engine.strategy.precision.compute or shards.at_rest.dtype).itemsize
            for shards in unit.shards
        )
        for unit in units_in(engine)
    }


def units_in(engine: Engine) -> Sequence[Unit]:
    """The units of FSDP, or the buckets of ZeRO-3.

    Raises:
        ValueError: parameters are not sharded.
    """
    if not isinstance(engine.strategy, Sharded):
        raise ValueError(f"engine: {engine.name!r} gathers no units; give an engine of 'fsdp' or 'zero3'")
    return engine.strategy.units


def _watch(unit: Unit, sample: Any, hooks: ExitStack) -> None:
    owed: dict[nn.Parameter, RemovableHandle] = {}

    def after_forward(_: nn.Module, __: Any, output: Any) -> None:
        sample(f"{unit.name} forward done")
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(before_backward)

    def before_backward(_: Tensor) -> None:
        sample(f"{unit.name} backward")
        for param in unit.params:
            if param.requires_grad and param not in owed:
                owed[param] = param.register_post_accumulate_grad_hook(after_gradient)
                hooks.callback(owed[param].remove)

    def after_gradient(param: nn.Parameter) -> None:
        owed.pop(param).remove()
        if not owed:
            sample(f"{unit.name} backward done")

    assert unit.module is not None
    hooks.callback(unit.module.register_forward_pre_hook(lambda *_: sample(f"{unit.name} forward")).remove)
    hooks.callback(unit.module.register_forward_hook(after_forward).remove)


def gathered_over_a_step(
    table: pd.DataFrame, limit_bytes: float, title: str, limit_name: str = "predicted"
) -> go.Figure:
    """Bytes of gathered parameters as stacked bars: one bar per moment, one colour per unit; and a limit as a line.

    Args:
        table: the rows of ``watch_gathered``, of one rank.
        limit_bytes: where the line is.
        title: of the figure.
        limit_name: label of the line.
    """
    totals = table.groupby("sample")["bytes"].sum()
    divisor, name = byte_scale(max(float(totals.max()), limit_bytes))
    figure = new_figure(title, "a bar is a moment at which a unit begins (labelled) or has ended; a colour is a unit")
    for place, (unit, rows) in enumerate(table.groupby("unit", sort=False)):
        figure.add_bar(
            x=rows["sample"].to_numpy(), y=(rows["bytes"] / divisor).to_numpy(), name=str(unit),
            marker={"color": UNITS[place % len(UNITS)], "line": {"width": 0}}, customdata=rows["moment"].tolist(),
            hovertemplate=f"<b>{unit}</b><br>at: %{{customdata}}<br>%{{y:.3g}} {name}<extra></extra>",
        )  # fmt: skip
    figure.add_hline(
        y=limit_bytes / divisor, line={"color": INK, "width": 2, "dash": "dash"},
        annotation_text=f"{limit_name}: {format_bytes(limit_bytes)}", annotation_position="top left",
    )  # fmt: skip
    moments = table.drop_duplicates("sample").set_index("sample")["moment"]
    units, phases = (moments.str.rpartition(" ")[part] for part in (0, 2))
    begins = phases.isin(["forward", "backward"])
    figure.add_vline(
        x=float(phases.index[phases == "backward"].min()) - 0.5, line={"color": INK, "width": 1, "dash": "dot"},
        annotation_text="backward", annotation_position="top right",
    )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.06, legend_traceorder="normal")
    figure.update_xaxes(
        title_text="moment: forward, then backward", tickvals=moments.index[begins].to_numpy(), showgrid=False,
        ticktext=units[begins].str.rpartition(".")[2].tolist(), range=[-0.6, len(moments) - 0.4], tickangle=0,
    )  # fmt: skip
    figure.update_yaxes(title_text=f"gathered ({name})", rangemode="tozero")
    most = int((table["bytes"] > 0).groupby(table["sample"]).sum().max())
    return finish(
        figure,
        f"Gathered parameters over a step of {table['unit'].nunique()} units: at most "
        f"{format_bytes(int(totals.max()))} in {most} units at once, predicted {format_bytes(limit_bytes)}.",
    )
