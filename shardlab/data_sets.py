"""Text as bytes, one byte a token: any file, the standard library's source or the generated grammar; and its batches.

Which sequences a step trains on is decided by seed, step and micro-batch alone, never by the number of ranks: the
global batch of a micro-batch is ``batch_size`` sequences, and rank r of N takes its rows of it. One process that takes
all rows sees exactly what N ranks see together, which is what every parity test compares.
"""

import json
import os
import random
import sysconfig
from bisect import bisect
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from shardlab.installed import data_path

GRAMMAR_BYTES = 4_000_000
_OTHERS = frozenset(("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"))


class TextData:
    """A text as byte tokens.

    Attributes:
        tokens: uint8, shape (num_bytes,).
        seq_len: bytes of one training sequence.
        name: source of the text.
        floor_nats_per_byte: entropy rate of the source if it is known exactly, else None.
    """

    def __init__(
        self, data: bytes | bytearray | memoryview, seq_len: int, name: str = "text",
        floor_nats_per_byte: float | None = None,
    ) -> None:  # fmt: skip
        """Copy ``data``.

        Raises:
            ValueError: ``seq_len`` is below 1, or the text is shorter than one sequence and its next byte.
        """
        if seq_len < 1:
            raise ValueError(f"seq_len: {seq_len} is below 1")
        if len(data) < seq_len + 1:
            raise ValueError(
                f"text: {name} has {len(data)} bytes; one sequence of seq_len={seq_len} and its next byte "
                f"need {seq_len + 1}"
            )
        self.tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.seq_len = seq_len
        self.name = name
        self.floor_nats_per_byte = floor_nats_per_byte

    def __len__(self) -> int:
        """Bytes of the text."""
        return self.tokens.numel()


def load_text(source: str | Path = "stdlib", seq_len: int = 128) -> TextData:
    """The text of ``source``.

    Args:
        source: ``stdlib`` (Python source of the standard library of this interpreter, without its tests: 11 to 12 MB of
            real text, a little different in each Python version), ``grammar`` (4 MB of the generated grammar, the same
            everywhere, with its exact entropy), or the path of any file. A file with one of these names is
            ``./stdlib``.
        seq_len: bytes of one training sequence.

    Raises:
        ValueError: the file cannot be read, or is shorter than ``seq_len + 1``.
    """
    if source == "stdlib":
        return TextData(_stdlib_source(), seq_len, "stdlib")
    if source == "grammar":
        return TextData(grammar_text(GRAMMAR_BYTES), seq_len, "grammar", _grammar()["floor_nats_per_byte"])
    path = Path(source)
    try:
        data = path.read_bytes()
    except OSError as error:
        why = f"cannot be read: {error.strerror}; give stdlib, grammar or the path of a file"
        raise ValueError(f"text: {path.absolute()} {why}") from error
    return TextData(data, seq_len, str(path.absolute()))


@lru_cache(maxsize=1)
def _stdlib_source() -> bytes:
    # os.walk and not Path.rglob: it prunes folders before it enters them, and takes 5 ms instead of 300.
    paths = []
    for folder, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in _OTHERS]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    return b"".join(path.read_bytes() for path in sorted(paths))


@lru_cache(maxsize=1)
def _grammar() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data_path("grammar.json").read_text(encoding="utf-8"))
    return found


@lru_cache(maxsize=4)
def grammar_text(num_bytes: int, seed: int = 0) -> bytes:
    """The first bytes of a text drawn from a probabilistic grammar whose entropy is known exactly.

    In each state one word is drawn, and the word determines the next state; no word of a state is a prefix of another
    word of that state. From a known first state, the bytes therefore determine all words and states, and the text has
    exactly the entropy of the draws. No model's loss on it can go below

        floor = sum_s pi(s) H(s) / sum_s pi(s) L(s)      nats per byte

    with pi(s) the share of draws made in state s (the stationary distribution), H(s) = -sum_w p(w|s) ln p(w|s) the
    entropy of one draw, L(s) = sum_w p(w|s) bytes(w) its mean length. The numerator is the entropy rate per word of a
    unifilar source (Shannon, "A mathematical theory of communication", 1948, section 7); the ratio of the two means is
    the rate per byte, since both averages are over the same draws. A model that sees windows from anywhere in the text
    does not know the state at first. That costs at most the entropy of its place in the grammar given the first byte,
    once per window.

    It is the same on every machine: only ``random.Random.random`` is used, whose sequence Python guarantees.

    Args:
        num_bytes: of the text; the last word may be cut.
        seed: of the draws.
    """
    draw_uniform = random.Random(seed).random
    states = _grammar()["states"]
    # Of each state where its draws begin, but for the first; and its draws: word, probability, next state.
    begins = {name: list(accumulate(share for _, share, _ in draws))[:-1] for name, draws in states.items()}
    state, words, length = _grammar()["start"], [], 0
    while length < num_bytes:
        word, _, state = states[state][bisect(begins[state], draw_uniform())]
        words.append(word)
        length += len(word)
    return "".join(words).encode()[:num_bytes]


def batch(
    data: TextData, step: int, micro_batch: int, rows: range | slice, batch_size: int, seq_len: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the global batch of one micro-batch.

    Args:
        data: the text.
        step: training step, from 0.
        micro_batch: micro-batch within the step, from 0.
        rows: which of the ``batch_size`` rows to return.
        batch_size: sequences of the global batch.
        seq_len: bytes of one sequence.
        seed: seed of the choice of sequences.

    Returns:
        Inputs and targets, int64, each of shape (number of rows, seq_len); the target is the byte that follows.

    Raises:
        ValueError: a size is below 1, rows are outside the batch, or the text is shorter than ``seq_len + 1`` bytes.
    """
    if batch_size < 1 or seq_len < 1:
        raise ValueError(f"batch_size, seq_len: {batch_size} and {seq_len}; both must be at least 1")
    if len(data) < seq_len + 1:
        raise ValueError(f"seq_len: {seq_len} is above {len(data) - 1}, the longest sequence in text {data.name}")
    wanted = rows if isinstance(rows, range) else range(batch_size)[rows]
    if any(not 0 <= row < batch_size for row in wanted):
        raise ValueError(f"rows: {rows} are not all within 0 to {batch_size - 1}")
    # A str seed goes through SHA-512: neighbouring steps are independent, and PYTHONHASHSEED has no effect.
    draw = random.Random(f"{seed}/{step}/{micro_batch}")
    starts = [draw.randrange(len(data) - seq_len) for _ in range(batch_size)]
    offsets = torch.tensor([starts[row] for row in wanted], dtype=torch.int64)
    windows = data.tokens[offsets[:, None] + torch.arange(seq_len + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
