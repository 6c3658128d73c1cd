"""A rank keeps what a step frees, until its call has ended."""

import ctypes
import os
import resource

import psutil
import pytest
import torch

BLOCKS, BLOCK_BYTES = 32, 4 * 1024**2
PAGES = BLOCKS * BLOCK_BYTES // resource.getpagesize()

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")


def pages_cleared(rank):
    """By the kernel, when the same blocks have been taken and freed a few times; and the resident bytes at the end."""
    for _ in range(4):  # pieces of blocks find their places
        _take()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _take()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, resident_bytes(rank)


def _take():
    return len([torch.ones(BLOCK_BYTES // 4) for _ in range(BLOCKS)])


def resident_bytes(rank):
    return psutil.Process(os.getpid()).memory_info().rss


def test_what_is_freed_is_kept_for_the_next_step_and_given_back_after_the_call(pools):
    for (pages, held), after in zip(pools(2).run(pages_cleared), pools(2).run(resident_bytes), strict=True):
        assert pages < PAGES / 20
        assert held - after > BLOCKS * BLOCK_BYTES * 3 / 4
