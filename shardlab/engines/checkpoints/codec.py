"""Python values as JSON and back: what a scheduler, a random generator or a parameter group is made of.

JSON has no tuple, no key but text, no infinity and no tensor. Each is written as an object with one key that begins
with '!', so that the manifest stays a file a person can read and a program can trust: reading it runs no code.
"""

import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardlab.vocabulary import dtype_name

_MARK = "!"


def encode(value: Any, where: str) -> Any:
    """``value`` as something ``json.dumps`` takes.

    Args:
        value: None, numbers, text, tensors, and lists, tuples and mappings of them.
        where: begins the error's text, for example 'scheduler'.

    Raises:
        ValueError: it holds anything else; the message says where and what.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"!float": str(float(value))}
    if isinstance(value, list):
        return [encode(entry, f"{where}[{place}]") for place, entry in enumerate(value)]
    if isinstance(value, tuple):
        return {"!tuple": encode(list(value), where)}
    if isinstance(value, Tensor):
        return _encode_tensor(value)
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    raise ValueError(
        f"{where}: a checkpoint holds numbers, text, tensors, lists, tuples and dicts, not {type(value).__name__}"
    )


def decode(value: Any) -> Any:
    """What ``encode`` was given."""
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if "!float" in value:
        return float(value["!float"])
    if "!tuple" in value:
        return tuple(decode(value["!tuple"]))
    if "!tensor" in value:
        return _decode_tensor(value)
    if "!dict" in value:
        return {decode(key): decode(entry) for key, entry in value["!dict"]}
    if "!counter" in value:  # what MultiStepLR keeps its milestones in
        return Counter({decode(key): count for key, count in value["!counter"]})
    return {key: decode(entry) for key, entry in value.items()}


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Any:
    if isinstance(value, Counter):
        return {"!counter": [[encode(key, where), count] for key, count in value.items()]}
    if all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
        return {key: encode(entry, f"{where}.{key}") for key, entry in value.items()}
    return {"!dict": [[encode(key, where), encode(entry, f"{where}[{key!r}]")] for key, entry in value.items()]}


def _encode_tensor(tensor: Tensor) -> dict[str, Any]:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"!tensor": base64.b64encode(raw).decode(), "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}


def _decode_tensor(value: dict[str, Any]) -> Tensor:
    dtype: torch.dtype = getattr(torch, value["dtype"])
    raw = bytearray(base64.b64decode(value["!tensor"]))
    # frombuffer refuses an empty buffer.
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])
