"""Text as bytes: any file, the standard library's own source, or the generated grammar. One byte is one token."""

import os
import sysconfig
from functools import lru_cache
from pathlib import Path

import torch

from shardlab.data_sets.grammar import load_grammar

VOCAB_SIZE = 256
GRAMMAR_BYTES = 4_000_000
_OTHERS = frozenset(("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"))


class TextData:
    """A text as byte tokens.

    Attributes:
        tokens: uint8, shape (num_bytes,).
        seq_len: bytes of one training sequence.
        name: where the text came from.
        floor_nats_per_byte: entropy rate of the source where it is known exactly, else None.
    """

    def __init__(
        self,
        data: bytes | bytearray | memoryview,
        seq_len: int,
        name: str = "text",
        floor_nats_per_byte: float | None = None,
    ) -> None:
        """Copy ``data``.

        Raises:
            ValueError: ``seq_len`` is below 1, or the text is empty or shorter than one sequence and its next byte.
        """
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        if len(data) == 0:
            raise ValueError(f"text {name} is empty")
        if len(data) < seq_len + 1:
            raise ValueError(
                f"text {name} has {len(data)} bytes; one sequence of seq_len {seq_len} and its next byte "
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
            everywhere, with its exact entropy), or the path of any file. A file of one of these names is ``./stdlib``.
        seq_len: bytes of one training sequence.

    Raises:
        ValueError: no such file, a file that cannot be read, or one that is empty or shorter than ``seq_len + 1``.
    """
    if source == "stdlib":
        return TextData(_stdlib_source(), seq_len, "stdlib")
    if source == "grammar":
        return TextData(_grammar_text(), seq_len, "grammar", load_grammar().floor_nats_per_byte)
    path = Path(source)
    if path.is_dir():
        raise ValueError(f"text must be stdlib, grammar or the path of a file; {path.absolute()} is a directory")
    if not path.is_file():
        raise ValueError(f"text must be stdlib, grammar or the path of a file; there is no file {path.absolute()}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"text {path.absolute()} cannot be read: {error.strerror}") from error
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
def _grammar_text() -> bytes:
    return load_grammar().text(GRAMMAR_BYTES)
