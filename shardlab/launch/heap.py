"""The C library's heap in a rank: what a step frees is kept for the next step, until the call that runs has ended.

A training step frees its gradients, activations and temporaries, and soon wants them again. By default glibc hands
large freed blocks to the kernel at once, which then clears every page anew when it is first touched: on CPU ranks up to
a tenth of a step, and by chance more in one run than in another. Kept, they cost nothing but resident memory; live
bytes, which the memory tables count, are the same.
"""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = 2**31 - 1
_LARGEST = 32 * 1024**2  # glibc takes no more: a larger block comes from the kernel each time
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed() -> None:
    """From now on keep what is freed, unless the user's environment says how the heap should be."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not any(name in os.environ for name in _SET_BY_USER):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def give_back() -> None:
    """Hand what is free to the kernel."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
