"""Continuing from a checkpoint, whatever strategy and number of ranks wrote it: ``engine.load(directory)``.

A rank reads the element ranges it needs and nothing else (``reading`` recuts what was saved). Before the first
tensor changes, all ranks have checked what the checkpoint must have in common with the engine (names, shapes, dtypes,
the class of optimizer), and that its files are as they were written; the error names the first difference. For that,
one rank reads each file: CRC-32 runs at 1.5 GB/s of a core, and the page cache has the file when it is read again.

Bytes read per rank for P fp32 parameters with Adam: ZeRO-3 and FSDP 12P/N, ZeRO-1 and ZeRO-2 4P + 8P/N, the others 12P;
before that 12P/N for the checksums. At another tensor-parallel size a rank reads what is sliced whole. The wire carries
only a few words.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlab.comm.same_on_all_ranks import all_or_none, number_among, share_json, share_texts
from shardlab.engines.any_engine import AnyEngine, Stateful
from shardlab.engines.checkpoint import held_stretches
from shardlab.engines.checkpoint.directory import MANIFEST, checksum, identity, reading, replaced_by
from shardlab.engines.checkpoint.manifest import Manifest, read_manifest
from shardlab.engines.checkpoint.optimizer_state import check_state, install_state, named_groups
from shardlab.engines.checkpoint.reading import ShardFiles
from shardlab.engines.checkpoint.rng import restore_rng
from shardlab.engines.checkpoint.save import check_mesh, comms_of, stages_of


def load_checkpoint(engine: AnyEngine, directory: Path, objects: Mapping[str, Stateful]) -> Any:
    """See ``Engine.load``."""
    comms, device = comms_of(engine), engine.mesh.device
    number, num_ranks = number_among(comms)
    stages = share_json(stages_of(engine), device, _names(engine))
    with ExitStack() as held:
        # The first rank looks which version is the current one: another run may save meanwhile, and all must read the
        # same. It holds that version until all have read.
        chosen = all_or_none(comms, device, lambda: str(held.enter_context(reading(directory))) if number == 0 else "")
        folder = Path(share_texts(comms, device, chosen)[0])
        manifest = all_or_none(comms, device, lambda: _fitting(engine, folder, objects, stages))
        # Every rank has checked everything before the first tensor changes on any rank. The user's own code comes
        # before the tensors, since nobody else can tell what it refuses.
        all_or_none(comms, device, lambda: _check_files(folder, manifest, number, num_ranks))
        all_or_none(comms, device, lambda: _restore_objects(engine, folder, manifest, objects))
        all_or_none(comms, device, lambda: _restore(engine, folder, manifest))
    return manifest.extra


def _names(engine: AnyEngine) -> dict[str, list[str]]:
    """What this engine's part of a checkpoint has, by field of a manifest: all of it, or that of a pipeline's stage."""
    module = engine.module
    return {
        "parameters": list(engine.params), "buffers": list(held_stretches.persistent_buffers(module)),
        "module_state": list(held_stretches.with_extra_state(module)),
    }  # fmt: skip


def _fitting(
    engine: AnyEngine, folder: Path, objects: Mapping[str, Stateful], stages: Sequence[Mapping[str, list[str]]]
) -> Manifest:
    """The manifest, if this engine can load it."""
    check_mesh(engine)
    manifest = read_manifest(folder)
    try:
        _check_model(engine, manifest, stages)
        _check_optimizer(engine, manifest)
        _check_objects(objects, manifest)
    except ValueError as error:
        raise ValueError(f"{error} (in {folder / MANIFEST})") from error
    if missing := [file for file in sorted(manifest.checksums) if not (folder / file).is_file()]:
        raise ValueError(f"file: {folder / missing[0]} is missing")
    return manifest


def _check_files(folder: Path, manifest: Manifest, number: int, num_ranks: int) -> None:
    """Check the checksum of every ``num_ranks``-th file, from file ``number`` on."""
    for file in sorted(manifest.checksums)[number::num_ranks]:
        if (found := checksum(folder / file)) != (written := manifest.checksums[file]):
            raise ValueError(
                f"file: {folder / file} is damaged: its checksum is {found}, and was {written} when it was written; "
                "load another version, or a copy"
            )


def _restore_objects(engine: AnyEngine, folder: Path, manifest: Manifest, objects: Mapping[str, Stateful]) -> None:
    for name, module in held_stretches.with_extra_state(engine.module).items():
        module.set_extra_state(manifest.module_state[name])
    for name, thing in objects.items():
        try:
            thing.load_state_dict(manifest.objects[name])
        except Exception as error:
            raise RuntimeError(f"objects: {name!r} cannot load what {folder / MANIFEST} has: {error!r}") from error


def _restore(engine: AnyEngine, folder: Path, manifest: Manifest) -> None:
    files = ShardFiles(folder)
    with torch.no_grad():
        for name, (tensor, start, stop) in engine.resident_params().items():
            if start < stop:
                rows = manifest.tensors_of(held_stretches.Kind.PARAMETER, name).get("", [])
                read = files.read(rows, start, stop, engine.slices.get(name))
                tensor.detach().copy_(read.view(tensor.shape))
        for name, buffer in held_stretches.persistent_buffers(engine.module).items():
            if buffer.numel():
                rows = manifest.tensors_of(held_stretches.Kind.BUFFER, name).get("", [])
                buffer.copy_(files.read(rows, 0, buffer.numel()).view(buffer.shape))
        _restore_optimizer(engine, files, manifest)
    engine.num_steps = manifest.num_steps
    # Only a version that was loaded to the end counts as this engine's, which its next save may replace.
    if (loaded := identity(folder)) is not None:
        engine.own_checkpoints.update({**replaced_by(folder), folder.resolve(): loaded})
    # Last: the load_state_dict() of a user's optimizer may draw numbers, which would advance the generators.
    restore_rng(manifest.rng, number_among((*stages_of(engine), *engine.data_comms))[0], engine.mesh.device)


def _restore_optimizer(engine: AnyEngine, files: ShardFiles, manifest: Manifest) -> None:
    def state_of(name: str, piece: Tensor, start: int, stop: int) -> dict[str, Any]:
        state = dict(manifest.values.get(name, {}))
        for key, rows in manifest.tensors_of(held_stretches.Kind.STATE, name).items():
            shape = tuple(rows[0].shape)
            if shape == held_stretches.whole_shape_of(engine, name):
                state[key] = files.read(rows, start, stop, engine.slices.get(name)).view(piece.shape)
            else:
                state[key] = files.read(rows, 0, prod(shape)).view(shape)
        return state

    own = named_groups(engine)
    # The order within a group is this model's, the options are the checkpoint's, as far as it has them.
    groups = [{**group, **saved, "params": group["params"]} for saved, group in zip(manifest.groups, own, strict=True)]
    install_state(engine, groups, state_of)


def _check_model(engine: AnyEngine, manifest: Manifest, stages: Sequence[Mapping[str, list[str]]]) -> None:
    """Check that parameters and buffers have the same names and shapes, and parameters the same dtypes."""
    for field in stages[0]:
        own_names = [name for stage in stages for name in stage[field]]
        _check_names(field.replace("_", " "), getattr(manifest, field), own_names)
    for name, own in held_stretches.described_parameters(engine).items():
        _check_same(f"parameters: {name!r}", manifest.parameters[name], own)
    for name, own in held_stretches.described_buffers(engine.module).items():
        del own["dtype"]  # of which they may have another: mixed precision may keep them in fewer bits
        _check_same(f"buffers: {name!r}", manifest.buffers[name], own)


def _check_optimizer(engine: AnyEngine, manifest: Manifest) -> None:
    """Check the optimizer's class, the parameters in each group, and that this engine can cut the state."""
    kind = type(engine.optimizer).__name__
    if manifest.optimizer != kind:
        raise ValueError(f"optimizer: the checkpoint is of {manifest.optimizer}, the engine has {kind}")
    own = named_groups(engine)
    if len(own) != len(manifest.groups):
        raise ValueError(f"param_groups: the checkpoint has {len(manifest.groups)}, the engine's optimizer {len(own)}")
    for number, (saved, group) in enumerate(zip(manifest.groups, own, strict=True)):
        held = {name for name in saved["params"] if name in engine.params}  # of this stage
        differing = sorted(held ^ set(group["params"]))
        options = {key: value for key, value in group.items() if key != "params"}
        differing += [
            f"{key}={saved[key]}" for key in options if _kind(saved.get(key, group[key])) != _kind(group[key])
        ]
        if differing:
            raise ValueError(
                f"param_groups: group {number} of the checkpoint and of the engine's optimizer differ in "
                f"{_listed(differing)}"
            )
    for name in engine.params:
        saved_as = manifest.tensors_of(held_stretches.Kind.STATE, name).items()
        tensors = {key: torch.empty(rows[0].shape, device="meta") for key, rows in saved_as}
        check_state(engine, name, {**tensors, **manifest.values.get(name, {})})


def _kind(value: Any) -> Any:
    """What can stand for an option's value: a number for a number, two betas for two."""
    return tuple(map(_kind, value)) if isinstance(value, list | tuple) else isinstance(value, str)


def _check_objects(wanted: Iterable[str], manifest: Manifest) -> None:
    """Check that every object to load was saved."""
    if missing := [name for name in wanted if name not in manifest.objects]:
        known = _listed(list(manifest.objects)) or "none"
        raise ValueError(f"objects: the checkpoint has {known}, and no {_listed(missing)}")


def _check_names(what: str, saved: Mapping[str, Any], own: Sequence[str]) -> None:
    if missing := [name for name in own if name not in saved]:
        raise ValueError(f"{what}: the checkpoint, of another model, has no {_listed(missing)}")
    if unknown := [name for name in saved if name not in own]:
        raise ValueError(f"{what}: the checkpoint, of another model, has {_listed(unknown)}, which this model has not")


def _check_same(what: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for field, value in own.items():
        if saved[field] != value:
            raise ValueError(f"{what} has {field} {saved[field]} in the checkpoint and {value} in the model")


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
