"""Checkpoints that any strategy at any number of ranks can load: ``engine.save(directory)``, ``engine.load(...)``.

Sharded: each rank writes the pieces it steps and their optimizer state into a file of its own, by parameter name and
element range; what several ranks hold alike they divide among themselves, so every element is written once. Replicated
things (buffers, schedulers) are written by the first rank. Loading reads the ranges a rank needs and nothing else.

Bytes on disk for P fp32 parameters with Adam: 12P over all ranks, whatever the strategy, 12P/N per rank. Bytes read per
rank: ZeRO-3 and FSDP 12P/N, ZeRO-1 and ZeRO-2 4P + 8P/N, else 12P. On the wire only a few words and the manifest.
The directory is shared by all ranks. Read next: checkpoints/shards, manifest, directory, together.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from shardlab.comm import Communicator
from shardlab.engines.checkpoints.check import check_files, check_mesh, check_model, check_objects, check_optimizer
from shardlab.engines.checkpoints.codec import encode
from shardlab.engines.checkpoints.directory import (
    begin,
    latest,
    partial_folder,
    publish,
    write_json,
    write_tensors,
)
from shardlab.engines.checkpoints.files import ShardFiles
from shardlab.engines.checkpoints.manifest import MANIFEST, Manifest, Row, read_manifest
from shardlab.engines.checkpoints.optimizer_state import install_state, named_groups
from shardlab.engines.checkpoints.rng import rng_state, set_rng_state
from shardlab.engines.checkpoints.shards import (
    Kind,
    TensorShard,
    buffer_shards,
    described,
    parameter_shards,
    persistent_buffers,
    state_shards,
    state_values,
    whole_shape_of,
    with_extra_state,
)
from shardlab.engines.checkpoints.together import share_json, share_texts, together

if TYPE_CHECKING:
    from shardlab.engines.base import Engine


class Stateful(Protocol):
    """What can be saved beside an engine: a scheduler, a scaler; anything with these two methods."""

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...  # noqa: D102


def save_checkpoint(engine: "Engine", directory: Path, extra: Any, objects: Mapping[str, Stateful]) -> None:
    """See ``Engine.save``."""
    comms, device, is_first = engine.comms, engine.mesh.device, _copy(engine.comms)[0] == 0
    # What can be refused is refused before anything is written.
    head, shards = together(comms, device, lambda: (_head(engine, extra, objects), _own_shards(engine)))
    begun = together(comms, device, lambda: begin(directory) if is_first else "")
    version = share_texts(comms, device, begun)[0]
    folder = partial_folder(directory, version)
    part = together(comms, device, lambda: _write_part(engine, folder, shards))
    parts = share_json(comms, device, part)
    together(comms, device, lambda: _finish(directory, version, head, parts) if is_first else None)


def load_checkpoint(engine: "Engine", directory: Path, objects: Mapping[str, Stateful]) -> Any:
    """See ``Engine.load``."""
    comms, device = engine.comms, engine.mesh.device
    # All is checked before the first tensor changes.
    folder, manifest = together(comms, device, lambda: _found(engine, directory, objects))
    together(comms, device, lambda: _restore(engine, folder, manifest, objects))
    return manifest.extra


def _head(engine: "Engine", extra: Any, objects: Mapping[str, Stateful]) -> dict[str, Any]:
    """The manifest without what each rank adds, encoded."""
    check_mesh(engine)
    tensors = engine.step_tensors()
    parameters = {name: described(whole_shape_of(engine, name), tensors.by_name(name)) for name in engine.params}
    buffers = {name: described(value.shape, value) for name, value in persistent_buffers(engine.module).items()}
    return Manifest(
        strategy=engine.name,
        num_ranks=prod(comm.num_ranks for comm in engine.comms),
        num_steps=engine.num_steps,
        optimizer=type(engine.optimizer).__name__,
        groups=named_groups(engine),
        parameters=parameters,
        buffers=buffers,
        values={},
        module_state={name: module.get_extra_state() for name, module in with_extra_state(engine.module).items()},
        objects={name: thing.state_dict() for name, thing in objects.items()},
        rng=[],
        extra=extra,
        rows=[],
    ).to_json()


def _own_shards(engine: "Engine") -> list[TensorShard]:
    """What this rank writes: its part of what several ranks hold alike, and on the first rank the buffers."""
    spread = engine.spread_over()
    copies = {name: _copy([comm for comm in engine.comms if comm not in axes]) for name, axes in spread.items()}
    held = [*parameter_shards(engine), *state_shards(engine)]
    parts = [part for shard in held if (part := shard.part(*copies[shard.name])) is not None]
    buffers = buffer_shards(engine.module) if _copy(engine.comms)[0] == 0 else ()
    return parts + [shard for shard in buffers if shard.stop > shard.start]


def _copy(comms: Sequence[Communicator]) -> tuple[int, int]:
    """Which copy this rank has, and of how many, of what the ranks of these axes hold alike."""
    copy = 0
    for comm in comms:
        copy = copy * comm.num_ranks + comm.rank
    return copy, prod(comm.num_ranks for comm in comms)


def _write_part(engine: "Engine", folder: Path, shards: list[TensorShard]) -> dict[str, Any]:
    """Write this rank's file; what it adds to the manifest, encoded."""
    file = f"rank-{_copy(engine.comms)[0]:05d}.safetensors"
    rows = [Row.of(shard, file) for shard in shards]
    if shards:
        tensors = {row.tensor_name: shard.tensor for row, shard in zip(rows, shards, strict=True)}
        write_tensors(folder / file, tensors)
    part = {
        "rows": [row.to_json() for row in rows],
        "values": state_values(engine),
        # The ranks of a tensor axis draw alike, so theirs count once.
        "rng": rng_state(engine.mesh.device) if engine.tensor_comm is None or engine.tensor_comm.rank == 0 else None,
    }
    encoded: dict[str, Any] = encode(part, "rank")
    return encoded


def _finish(directory: Path, version: str, head: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """Every rank's file is on the disk: write the manifest and let the new version count."""
    whole = {
        **head,
        "values": {name: values for part in parts for name, values in part["values"].items()},
        "rng": [part["rng"] for part in parts if part["rng"] is not None],
        "rows": [row for part in parts for row in part["rows"]],
    }
    write_json(partial_folder(directory, version) / MANIFEST, whole)
    publish(directory, version)


def _found(engine: "Engine", directory: Path, objects: Mapping[str, Stateful]) -> tuple[Path, Manifest]:
    check_mesh(engine)
    folder = latest(directory)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    check_model(engine, manifest)
    check_optimizer(engine, manifest)
    check_objects(objects, manifest)
    return folder, manifest


def _restore(engine: "Engine", folder: Path, manifest: Manifest, objects: Mapping[str, Stateful]) -> None:
    with ShardFiles(folder) as files, torch.no_grad():
        for name, (tensor, start, stop) in engine.resident_params().items():
            if start < stop:
                rows = manifest.tensors_of(Kind.PARAMETER, name).get("", [])
                read = files.read(rows, start, stop, engine.slices.get(name))
                tensor.detach().copy_(read.view(tensor.shape))
        for name, buffer in persistent_buffers(engine.module).items():
            if buffer.numel():
                rows = manifest.tensors_of(Kind.BUFFER, name).get("", [])
                buffer.copy_(files.read(rows, 0, buffer.numel()).view(buffer.shape))
        _restore_optimizer(engine, files, manifest)
    for name, module in with_extra_state(engine.module).items():
        module.set_extra_state(manifest.module_state[name])
    for name, thing in objects.items():
        thing.load_state_dict(manifest.objects[name])
    engine.num_steps = manifest.num_steps
    if engine.data_rank < len(manifest.rng):
        set_rng_state(manifest.rng[engine.data_rank], engine.mesh.device)


def _restore_optimizer(engine: "Engine", files: ShardFiles, manifest: Manifest) -> None:
    def state_of(name: str, piece: Tensor, start: int, stop: int) -> dict[str, Any]:
        state = dict(manifest.values.get(name, {}))
        for key, rows in manifest.tensors_of(Kind.STATE, name).items():
            shape = tuple(rows[0].shape)
            if shape == whole_shape_of(engine, name):
                state[key] = files.read(rows, start, stop, engine.slices.get(name)).view(piece.shape)
            else:
                state[key] = files.read(rows, 0, prod(shape)).view(shape)
        return state

    own = named_groups(engine)
    # The order within a group is this model's; the options are the checkpoint's.
    groups = [{**saved, "params": group["params"]} for saved, group in zip(manifest.groups, own, strict=True)]
    install_state(engine, groups, state_of)
