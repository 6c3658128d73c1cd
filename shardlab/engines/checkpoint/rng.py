"""The random generators a training run draws from: torch's on the CPU and on this rank's GPU, Python's, numpy's."""

import random
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


def check_rng_state(state: dict[str, Any]) -> None:
    """Refuse what ``set_rng_state`` could not set; no generator changes.

    Raises:
        ValueError: it is no state of these generators.
    """
    try:
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(state["python"])
        kind, keys, place, has_gauss, cached = state["numpy"]
        np.random.RandomState().set_state((kind, keys.numpy().astype(np.uint32), place, has_gauss, cached))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"rng: the states of the random generators are damaged: {error}") from None


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Set every generator to what ``rng_state`` gave; a generator that is not in it keeps its state."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), place, has_gauss, cached))
    # A checkpoint written on CPU ranks has no state of a GPU.
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
