"""The random generators a training run draws from: torch's on the CPU and on this rank's GPU, Python's, numpy's."""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator, in numbers, text and tensors."""
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), place, has_gauss, cached],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(states: Sequence[dict[str, Any]], rank: int, device: torch.device) -> None:
    """Set every generator to what ``rng_state`` gave on the rank of this number.

    A rank that the checkpoint does not have is seeded with its number and the first rank's state: else new ranks that
    were all seeded alike, as is usual, would draw the same numbers. A generator that a state lacks keeps its own.
    """
    if rank >= len(states):
        drawn = hashlib.sha256(f"{rank} ".encode() + states[0]["torch"].numpy().tobytes()).digest()
        torch.manual_seed(int.from_bytes(drawn[:7]))  # CUDA's generators too
        random.seed(drawn)
        np.random.seed(np.frombuffer(drawn, dtype=np.uint32))
        return
    state = states[rank]
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), place, has_gauss, cached))
    # A checkpoint written on CPU ranks has no state of a GPU.
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
