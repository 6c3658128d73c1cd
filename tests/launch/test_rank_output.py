"""What ranks print reaches the caller's stdout, line by line, with its rank."""

# ruff: noqa: T201

import ctypes
import os
import subprocess
import sys
import time
from multiprocessing import Pipe

import pytest
import torch

from shardlab.launch import RankError, RankPool, current
from shardlab.launch.processes import RankOutput


def lines_of(capsys, rank):
    prefix = f"[rank {rank}] "
    return [line.removeprefix(prefix) for line in capsys.readouterr().out.splitlines() if line.startswith(prefix)]


def test_print_stderr_raw_writes_and_children_keep_their_order(pools, capsys):
    def speak(rank):
        print("one")
        print("two", file=sys.stderr)
        os.write(1, b"three\n")
        print("10 %\r50 %\r100 %\r")  # a progress bar leaves its last state
        os.write(1, b"\xff\xfe bytes\n")
        print("\udcff surrogate", file=sys.stderr)
        subprocess.run(["echo", "from a child"], check=True)
        ctypes.CDLL(None).printf(b"from C\n")
        ctypes.CDLL(None).fflush(None)
        print("no end", end="")

    pools(2).run(speak)
    captured = capsys.readouterr()
    assert captured.err == ""
    words = ("one", "two", "three", "100 %", "bytes", "surrogate", "from a child", "from C", "no end")
    for rank in range(2):
        mine = [line for line in captured.out.splitlines() if line.startswith(f"[rank {rank}] ")]
        for line, word in zip(mine, words, strict=True):
            assert line.endswith(f" {word}")


def test_more_than_a_pipe_holds(pools, capsys):
    pools(2).run(lambda rank: print("\n".join(str(i) for i in range(100_000))))
    assert lines_of(capsys, 1) == [str(i) for i in range(100_000)]


def test_a_function_that_closes_its_output_still_answers():
    def end(rank):
        sys.stdout.close()
        sys.stderr = None
        return rank

    with RankPool(2, device="cpu") as pool:
        assert pool.run(end) == pool.run(lambda rank: rank) == [0, 1]


class SpeaksWhenFreed:
    def __init__(self):
        self.itself = self  # a cycle, which a rank looks for after its call

    def __del__(self):
        print("x" * 300_000)


def test_more_than_a_pipe_holds_between_two_calls_does_not_block_a_large_argument(pools):
    pools(2).run(lambda rank: SpeaksWhenFreed() and None)
    assert pools(2).run(lambda rank, tensor: tensor.numel(), torch.ones(1_000_000)) == [1_000_000] * 2


def test_a_line_that_comes_in_many_parts_is_copied_once(capsys, monkeypatch):
    class Part(bytes):
        def __radd__(self, before):
            pytest.fail("what has come before is copied")

    parts = [Part(b"first\nx"), *[Part(b"x" * 999)] * 100, Part(b"x\n\nlast"), b""]
    output = RankOutput(0, Pipe(duplex=False)[0])
    monkeypatch.setattr(output, "_read", lambda: parts.pop(0))
    while parts[1:]:
        output.pump()
    output.finish()
    assert lines_of(capsys, 0) == ["first", "x" * 99_902, "", "last"]


def test_output_is_live(pools, capsys):
    seen_while_running = []

    def speak(rank):
        print("early")
        time.sleep(0.3)
        current().emit("now")

    pools(1).run(speak, on_message=lambda rank, message: seen_while_running.append(capsys.readouterr().out))
    assert seen_while_running == ["[rank 0] early\n"]


def test_output_before_an_error_is_printed(pools, capsys):
    def fail(rank):
        print("last words")
        os.write(2, b"half a line")
        raise ValueError("x")

    with pytest.raises(RankError):
        pools(1).run(fail)
    assert lines_of(capsys, 0) == ["last words", "half a line"]
