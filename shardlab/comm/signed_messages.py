"""What ranks tell each other in words, signed, since other users of a machine may pass for a rank.

gloo and torchrun's store take any client that reaches their ports. So what such a socket brings is a message of a rank
only if its signature says so, made with a secret that other users do not have: of the ranks of a pool, drawn by their
parent; under torchrun, and in a group that a script makes, the user's own, in a file that nobody else may read. Hosts
without a common home directory are told one in ``SHARDLAB_SECRET``. Numbers that collectives carry are not signed.
"""

import hmac
import os
import secrets
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

SECRET = "SHARDLAB_SECRET"
_SIZE = 32  # bytes, of a signature and of a secret


def signature(words: str, message: bytes = b"") -> bytes:
    """32 bytes that only ranks of this run, or of this user, can make.

    Args:
        words: what the message is, and whose: a signature of one cannot be shown for another.
        message: what is signed.

    Raises:
        RuntimeError: there is no secret, and none can be kept for this user.
    """
    told = os.environ.get(SECRET)
    return hmac.digest(told.encode() if told else _of_user(), words.encode() + b"\0" + message, "sha256")


def signed(words: str, message: bytes) -> bytes:
    """The message behind its signature."""
    return signature(words, message) + message


def checked(words: str, told: bytes) -> bytes:
    """The message that ``signed`` was given.

    Raises:
        RuntimeError: its signature is not of this secret, or not of these words.
    """
    message = told[_SIZE:]
    if not hmac.compare_digest(told[:_SIZE], signature(words, message)):
        raise RuntimeError(
            f"{words}: a message came without the signature of a rank, so another process may have sent it; where "
            f"hosts have no common home directory, set {SECRET} to one long random text on all of them"
        )
    return message


def all_gather_bytes(message: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Every rank's message, in rank order, on every rank of the group; each has to call it.

    Communicates about (N - 1) times the largest message per rank; on NCCL through the current CUDA device.

    Args:
        message: of any length.
        group: None for the default group.

    Raises:
        RuntimeError: one was not sent by a rank.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    own = torch.frombuffer(bytearray(signed(f"rank {rank}", message)), dtype=torch.uint8)
    size = torch.tensor([own.numel()], device=device)
    sizes = [torch.empty_like(size) for _ in range(num_ranks)]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(each) for each in sizes]
    # Of one length, as gloo needs it.
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: own.numel()] = own.to(device)
    parts = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(parts, padded, group=group)
    told = [part[:length].cpu().numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]
    return [checked(f"rank {other}", each) for other, each in enumerate(told)]


@cache
def _of_user() -> bytes:
    """The secret in the user's home directory, made by whoever needs it first.

    Raises:
        RuntimeError: there is no home directory to keep it in, or others can read it.
    """
    try:
        path = Path.home() / ".cache" / "shardlab" / "secret"
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent) as new:
                new.write(secrets.token_bytes(_SIZE))
                new.flush()
                # Whole from the beginning; of ranks that come at the same time the first one's stays.
                with suppress(FileExistsError):
                    os.link(new.name, path)
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} belongs to another user, or others may read it")
        return path.read_bytes()
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            f"{SECRET}: ranks sign what they tell each other with a secret of their user, and the home directory "
            f"cannot keep one ({error}); set {SECRET} to one long random text for all ranks"
        ) from error
