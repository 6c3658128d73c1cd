"""Checkpoints and full state dicts, as functions over an ``AnyEngine``.

Read held_stretches, directory, manifest, rng, save, reading, load; then gather, module_state, optimizer_state.
No engine imports this package; ``shardlab.engines`` gives it to them.
"""

from shardlab.engines.checkpoint.directory import latest
from shardlab.engines.checkpoint.gather import full_gradients
from shardlab.engines.checkpoint.load import load_checkpoint
from shardlab.engines.checkpoint.manifest import read_manifest
from shardlab.engines.checkpoint.module_state import first_ranks_own, full_state_dict, load_full_state_dict
from shardlab.engines.checkpoint.optimizer_state import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
    load_named_optimizer_state,
    named_optimizer_state,
)
from shardlab.engines.checkpoint.save import save_checkpoint

__all__ = [
    "first_ranks_own",
    "full_gradients",
    "full_optimizer_state_dict",
    "full_state_dict",
    "latest",
    "load_checkpoint",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_named_optimizer_state",
    "named_optimizer_state",
    "read_manifest",
    "save_checkpoint",
]
