"""Steps on a virtual clock: the engine itself runs, and takes the time that a machine with round numbers needs.

    records = virtual_steps({"naive": replace(base, strategies=("ddp",)), "bucketed": base})

No values are computed and nothing is measured (``experiment.planned.dry_run``). So what a lesson shows this way is the
same on every machine, however busy it is; what ranks take here and now stands after it. A product of matrices takes its
FLOPs over ``FLOPS_PER_S``, any other operation its bytes over ``BYTES_PER_S``, each ``OPERATION_S`` more; a message
takes what its link says for a ring, one after another, and slows nobody. The lessons and the capstone share these.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
from torch.utils.flop_counter import flop_registry

from shardlab.comm.events import CollectiveEvent
from shardlab.comm.foretold import Costs, ToldClock, Wire
from shardlab.comm.trees import tensors_in
from shardlab.experiment.config import CompareConfig
from shardlab.experiment.planned.dry_run import dry_run, refuse_stages
from shardlab.launch.cell_bar import cell_bar
from shardlab.partition.ring_cost import Link
from shardlab.records.store import Records
from shardlab.records.tables import TABLES

FLOPS_PER_S = 100e9  # of a matrix product
BYTES_PER_S = 50e9  # that any other operation reads and writes
OPERATION_S = 20e-6  # at least, on top
STEP = 1  # the first one makes the optimizer's state


def virtual_steps(variants: Mapping[str, CompareConfig]) -> Records:
    """The second step of each variant, with source 'predicted'. Ranks are alike, and memory is not sampled.

    Args:
        variants: configurations by the name of their run; each has one strategy and a link.

    Raises:
        ValueError: a variant has several strategies or no link.
    """
    found = []
    with cell_bar("on the virtual clock", len(variants)) as advance:
        for name, config in variants.items():
            if len(config.strategies) != 1 or config.link is None:
                raise ValueError(f"variants: {name!r} needs one strategy and a link, as in link='1Gbps,500us'")
            over_it = partial(lambda link, _: link, Link.parse(config.link))
            ran = two_steps(replace(config, steps=2), config.strategies[0], over_it)
            found.append((name, config.ranks, ran))
            advance(name)
    tables = {table: pd.concat([_one_step(table, *one) for one in found], ignore_index=True) for table in TABLES}
    known = {
        name: {"run": name, "source": "predicted", "ranks": one.ranks, "config": one.as_dict(one.strategies[0])}
        for name, one in variants.items()
    }
    return Records(**tables, manifests=known)


def two_steps(config: CompareConfig, strategy: Any, link_of: Callable[[CollectiveEvent], Link]) -> Records:
    """Steps of one rank; memory is not sampled.

    Args:
        config: what is trained, and how.
        strategy: one of its strategies.
        link_of: over which link a message goes.
    """

    def costs(event: CollectiveEvent) -> Costs:
        return Costs(link_of(event).ring_time_us(event.op, event.num_bytes, event.group_size) / 1e6)

    refuse_stages(config, strategy)
    clock = ToldClock(Wire(costs, transport="virtual clock"))
    return dry_run(config, strategy, clock, _seconds, traces_memory=False)


def _one_step(table: str, name: str, ranks: int, records: Records) -> pd.DataFrame:
    rows: pd.DataFrame = getattr(records, table).assign(run=name)
    rows = rows[rows["step"] == STEP] if "step" in rows else rows
    return pd.concat([rows.assign(rank=rank) for rank in range(ranks)])


def _seconds(func: Any, args: tuple[Any, ...], result: Any) -> float:
    packet = func.overloadpacket
    if packet in flop_registry:
        return OPERATION_S + float(flop_registry[packet](*args, out_val=result)) / FLOPS_PER_S
    sizes = {id(tensor): tensor.nbytes for tensor in tensors_in((args, result))}  # in place: once
    return OPERATION_S + sum(sizes.values()) / BYTES_PER_S
