"""Writing a checkpoint that any strategy at any number of ranks can load: ``engine.save(directory)``.

Each rank writes the pieces it steps and their optimizer state into its own file, by parameter name and element range.
Ranks that hold the same elements divide them, so that every element is written once. The first rank writes what is
replicated (buffers, schedulers).

Bytes on disk for P fp32 parameters with Adam: 12P over all ranks, whatever the strategy, 12P/N per rank. The wire
carries only a few words and the manifest's rows. All ranks share the directory.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardlab.comm.communicator import Communicator
from shardlab.comm.same_on_all_ranks import all_or_none, number_among, share_json, share_texts
from shardlab.engines.any_engine import AnyEngine, Stateful
from shardlab.engines.checkpoint import directory as versions
from shardlab.engines.checkpoint import held_stretches
from shardlab.engines.checkpoint.manifest import FORMAT, Row, encode
from shardlab.engines.checkpoint.optimizer_state import named_groups
from shardlab.engines.checkpoint.rng import rng_state
from shardlab.vocabulary import MeshAxis

_OF_STAGES = ("groups", "parameters", "buffers", "module_state")
"""What in a manifest is of a stage of a pipeline and not of the run."""


def save_checkpoint(engine: AnyEngine, directory: Path, extra: Any, objects: Mapping[str, Stateful]) -> None:
    """See ``Engine.save``."""
    comms, device = comms_of(engine), engine.mesh.device
    is_first = number_among(comms)[0] == 0
    # Everything that can be refused is refused before anything is written.
    head, shards = all_or_none(comms, device, lambda: (_head(engine, extra, objects), _own_shards(engine)))
    _check_options(share_json(comms, device, [_options(group) for group in head["groups"]]))
    head |= _of_all_stages(share_json(stages_of(engine), device, {key: head[key] for key in _OF_STAGES}))
    with ExitStack() as held:
        # The first rank chooses the folder's name and makes it; the others must not write before it exists.
        name = all_or_none(comms, device, lambda: held.enter_context(versions.begun(directory)) if is_first else "")
        version = share_texts(comms, device, name)[0]
        folder = versions.partial_folder(directory, version)
        part = all_or_none(comms, device, lambda: _write_part(engine, folder, shards))
        # Every rank's file is on disk now; only then may the first rank publish the version.
        parts = share_json(comms, device, part)
        all_or_none(comms, device, lambda: _finish(engine, directory, version, head, parts) if is_first else None)


def stages_of(engine: AnyEngine) -> tuple[Communicator, ...]:
    """The axis of a pipeline's stages, each of which is a part of the model; () without one."""
    return (engine.mesh[MeshAxis.PIPE],) if MeshAxis.PIPE in engine.mesh.axes else ()


def comms_of(engine: AnyEngine) -> tuple[Communicator, ...]:
    """All axes whose ranks write a checkpoint together, outer first."""
    return *stages_of(engine), *engine.comms


def check_mesh(engine: AnyEngine) -> None:
    """Refuse a mesh with ranks that do not train this model together."""
    if prod(engine.mesh.axes.values()) != prod(comm.num_ranks for comm in comms_of(engine)):
        raise ValueError(
            f"mesh: {engine.mesh.axes} has an axis 'tensor' over which this model is not cut; leave it out, for a "
            "checkpoint does not know what its ranks hold"
        )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _check_options(of_ranks: Sequence[list[dict[str, Any]]]) -> None:
    """Refuse groups that are not the same on all ranks: a checkpoint keeps the options of one."""
    first = of_ranks[0]
    for groups in of_ranks[1:]:
        if len(groups) != len(first):
            raise ValueError(
                f"param_groups: the optimizer of one rank has {len(first)}, and that of another {len(groups)}; make "
                "the same groups on all ranks and stages, with the parameters that each has"
            )
        for one, other in zip(first, groups, strict=True):
            if unlike := sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key)):
                raise ValueError(
                    f"param_groups: {unlike[0]!r} is {one.get(unlike[0])} in a group of one rank, and "
                    f"{other.get(unlike[0])} in that of another; a group has the same options on all ranks, so make "
                    "the same groups on all, and step a scheduler by what all ranks know"
                )


def _of_all_stages(heads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the manifest says of the whole model, from what it says of each stage."""
    whole = heads[0]
    for head in heads[1:]:
        for group, others in zip(whole["groups"], head["groups"], strict=True):
            group["params"] += others["params"]
        for key in ("parameters", "buffers", "module_state"):
            whole[key] |= head[key]
    return whole


def _head(engine: AnyEngine, extra: Any, objects: Mapping[str, Stateful]) -> dict[str, Any]:
    """The encoded ``Manifest``, without what each rank adds."""
    check_mesh(engine)
    _check_objects(engine, objects)
    extra_state = held_stretches.with_extra_state(engine.module)
    head = {
        "format": FORMAT,
        "strategy": engine.name,
        "num_ranks": number_among(comms_of(engine))[1],
        "num_steps": engine.num_steps,
        "optimizer": type(engine.optimizer).__name__,
        "groups": named_groups(engine),
        "parameters": held_stretches.described_parameters(engine),
        "buffers": held_stretches.described_buffers(engine.module),
        "module_state": {name: module.get_extra_state() for name, module in extra_state.items()},
        "objects": {name: thing.state_dict() for name, thing in objects.items()},
        "extra": extra,
    }
    return {key: encode(value, key) for key, value in head.items()}


def _check_objects(engine: AnyEngine, objects: Mapping[str, Stateful]) -> None:
    """Refuse another optimizer over pieces: each rank has the state of its own, and only the first rank's is saved."""
    whole = set(map(id, engine.params.values()))
    pieces = {id(tensor) for tensor in engine.step_tensors()} - whole
    several = engine.sharded_over is not None and engine.sharded_over.num_ranks > 1
    for name, thing in objects.items():
        groups = thing.param_groups if isinstance(thing, torch.optim.Optimizer) and several else []
        if any(id(tensor) in pieces for group in groups for tensor in group["params"]):
            raise ValueError(
                f"objects: {name!r} is an optimizer over pieces of the parameters, of which each rank has its own; "
                "a checkpoint has the state of engine.optimizer; write state_dict() of others yourself, on every rank"
            )


def _own_shards(engine: AnyEngine) -> list[held_stretches.TensorShard]:
    """What this rank writes: its part of what several ranks hold, and on the first rank the buffers."""
    spread = engine.spread_over()
    # Along axes that a parameter is not spread over, ranks have copies of the same piece.
    copies = {
        name: number_among(
            [comm for comm in engine.comms if not any(set(comm.ranks) <= set(axis.ranks) for axis in axes)]
        )
        for name, axes in spread.items()
    }
    held = [*held_stretches.parameter_shards(engine), *held_stretches.state_shards(engine)]
    parts = [part for shard in held if (part := shard.part(*copies[shard.name])) is not None]
    buffers = held_stretches.buffer_shards(engine.module) if number_among(engine.comms)[0] == 0 else ()
    shards = parts + [shard for shard in buffers if shard.stop > shard.start]
    for shard in shards:
        if shard.tensor.dtype == torch.complex128:
            raise ValueError(
                f"{shard.kind}: {shard.key or shard.name!r} of {shard.name!r} is complex128, which the files cannot "
                "hold; keep it as complex64, or as torch.view_as_real() of it"
            )
    return shards


def _write_part(engine: AnyEngine, folder: Path, shards: list[held_stretches.TensorShard]) -> dict[str, Any]:
    """Write this rank's file, and return what it adds to the manifest, encoded."""
    file = f"rank-{number_among(comms_of(engine))[0]:05d}.safetensors"
    rows = [Row.of(shard, file) for shard in shards]
    checksums = {}
    if shards:
        tensors = {row.tensor_name: shard.tensor for row, shard in zip(rows, shards, strict=True)}
        versions.write_tensors(folder / file, tensors)
        # Read back from the file: a checksum of what was written, not of what should have been.
        checksums[file] = versions.checksum(folder / file)
    part = {
        "checksums": checksums,
        "rows": [row.to_json() for row in rows],
        "values": held_stretches.state_values(engine),
        # The ranks of a tensor axis draw the same numbers, so one state is enough for them.
        "rng": rng_state(engine.mesh.device) if engine.tensor_comm is None or engine.tensor_comm.rank == 0 else None,
    }
    encoded: dict[str, Any] = encode(part, "rank")
    return encoded


def _with_counters(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with one row for each counter, whatever it looked like where a piece has one element."""
    states: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == held_stretches.Kind.STATE and row["ranges"] is None:
            states.setdefault((row["name"], row["key"]), []).append(row)
    for same in states.values():
        if held_stretches.is_counter([(row["shape"], row["start"], row["stop"]) for row in same]):
            for row in same:
                row["shape"] = [1]
    # What is one number has one row, that of the first element.
    return [row for row in rows if row["shape"] != [1] or row["start"] == 0]


def _finish(
    engine: AnyEngine, directory: Path, version: str, head: dict[str, Any], parts: list[dict[str, Any]]
) -> None:
    """Write the manifest and publish the version; it replaces those that this engine wrote or loaded."""
    whole = {
        **head,
        "values": {name: values for part in parts for name, values in part["values"].items()},
        "rng": [part["rng"] for part in parts if part["rng"] is not None],
        "rows": _with_counters([row for part in parts for row in part["rows"]]),
        "checksums": {file: found for part in parts for file, found in part["checksums"].items()},
    }
    # The manifest is the last file of a version, so it names only files that are on disk.
    versions.write_json(versions.partial_folder(directory, version) / versions.MANIFEST, whole)
    # Before the version is published: from then on another run may load and replace it.
    written, known = versions.identity(versions.partial_folder(directory, version)), engine.own_checkpoints
    assert written is not None
    versions.publish(directory, version, [folder for folder in known if versions.identity(folder) == known[folder]])
    # Only those that are gone: one that somebody was reading is removed by a later save.
    for folder in [folder for folder in known if not folder.is_dir()]:
        del known[folder]
    known[(directory / version).resolve()] = written
