"""What a checkpoint must have in common with the engine that loads it; each difference is an error that names it."""

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.engines.checkpoints.manifest import Manifest
from shardlab.engines.checkpoints.optimizer_state import check_state_shape, named_groups
from shardlab.engines.checkpoints.shards import Kind, described, persistent_buffers, whole_shape_of, with_extra_state

if TYPE_CHECKING:
    from shardlab.engines.base import Engine


def check_mesh(engine: "Engine") -> None:
    """Refuse a mesh with ranks that do not train this model together."""
    if prod(engine.mesh.axes.values()) != prod(comm.num_ranks for comm in engine.comms):
        raise ValueError(
            f"mesh: a checkpoint is written over the data axes and the tensor axis, and {engine.mesh.axes} has others, "
            "of which nobody says what their ranks hold"
        )


def check_files(folder: Path, manifest: Manifest) -> None:
    """Every file the manifest names is there."""
    for file in manifest.files:
        if not (folder / file).is_file():
            raise ValueError(f"file: {folder / file} is missing")


def check_model(engine: "Engine", manifest: Manifest) -> None:
    """Parameters and buffers have the same names and shapes, parameters the same dtypes."""
    tensors = engine.step_tensors()
    _check_names("parameters", manifest.parameters, engine.params)
    for name, saved in manifest.parameters.items():
        _check_same(f"parameters: {name!r}", saved, described(whole_shape_of(engine, name), tensors.by_name(name)))
    buffers = persistent_buffers(engine.module)
    _check_names("buffers", manifest.buffers, buffers)
    for name, saved in manifest.buffers.items():
        # Another dtype is fine: mixed precision keeps buffers in fewer bits.
        _check_same(f"buffers: {name!r}", saved, {"shape": list(buffers[name].shape), "dtype": saved["dtype"]})
    _check_names("module state", manifest.module_state, with_extra_state(engine.module))


def check_optimizer(engine: "Engine", manifest: Manifest) -> None:
    """The same class of optimizer, the same parameters in each group, and state this engine can cut."""
    kind = type(engine.optimizer).__name__
    if manifest.optimizer != kind:
        raise ValueError(f"optimizer: the checkpoint is of {manifest.optimizer}, the engine has {kind}")
    groups = named_groups(engine)
    if len(groups) != len(manifest.groups):
        raise ValueError(
            f"param_groups: the checkpoint has {len(manifest.groups)}, the engine's optimizer {len(groups)}"
        )
    for number, (saved, own) in enumerate(zip(manifest.groups, groups, strict=True)):
        if differing := set(saved["params"]) ^ set(own["params"]):
            raise ValueError(
                f"param_groups: group {number} of the checkpoint and of the engine's optimizer differ in "
                f"{_listed(sorted(differing))}"
            )
    for name in engine.params:
        for key, rows in manifest.tensors_of(Kind.STATE, name).items():
            check_state_shape(engine, name, key, tuple(rows[0].shape))


def check_objects(wanted: Iterable[str], manifest: Manifest) -> None:
    """What is to be loaded was saved."""
    if missing := [name for name in wanted if name not in manifest.objects]:
        known = _listed(list(manifest.objects)) or "none"
        raise ValueError(f"objects: the checkpoint has {known}, and no {_listed(missing)}")


def _check_names(what: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if missing := [name for name in own if name not in saved]:
        raise ValueError(f"{what}: the checkpoint, of another model, has no {_listed(missing)}")
    if unknown := [name for name in saved if name not in own]:
        raise ValueError(f"{what}: the checkpoint, of another model, has {_listed(unknown)}, and this model has not")


def _check_same(what: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for field in ("shape", "dtype"):
        if saved[field] != own[field]:
            raise ValueError(f"{what} has {field} {saved[field]} in the checkpoint and {own[field]} in the model")


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
