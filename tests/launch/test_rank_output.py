"""What ranks print reaches the caller's stdout, line by line, with its rank."""

# ruff: noqa: T201

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from multiprocessing import Pipe

import pytest

from shardlab.launch import RankError, current
from shardlab.launch.processes import RankOutput


def lines_of(capsys, rank):
    prefix = f"[rank {rank}] "
    return [line.removeprefix(prefix) for line in capsys.readouterr().out.splitlines() if line.startswith(prefix)]


def test_print_stderr_and_raw_writes_keep_their_order(pools, capsys):
    def speak(rank):
        print("one")
        print("two", file=sys.stderr)
        os.write(1, b"three\n")
        print("four", flush=True)

    pools(2).run(speak)
    captured = capsys.readouterr()
    assert captured.err == ""
    for rank in range(2):
        mine = [line for line in captured.out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] {word}" for word in ("one", "two", "three", "four")]


def test_c_level_output_and_output_of_child_processes(pools, capsys):
    def speak(rank):
        ctypes.CDLL(None).printf(b"from C\n")
        subprocess.run(["echo", "from a child"], check=True)

    pools(2).run(speak)
    assert sorted(lines_of(capsys, 1)) == ["from C", "from a child"]


def test_last_line_without_an_end(pools, capsys):
    pools(2).run(lambda rank: print("no end", end=""))
    assert lines_of(capsys, 0) == ["no end"]


def test_progress_bar_leaves_its_last_state(pools, capsys):
    pools(1).run(lambda rank: print("10 %\r50 %\r100 %\r"))
    assert lines_of(capsys, 0) == ["100 %"]


def test_bytes_that_are_no_text_and_lone_surrogates(pools, capsys):
    def speak(rank):
        os.write(1, b"\xff\xfe bytes\n")
        print("\udcff surrogate", file=sys.stderr)

    pools(1).run(speak)
    first, second = lines_of(capsys, 0)
    assert first.endswith(" bytes")
    assert second.endswith(" surrogate")


def test_more_than_a_pipe_holds(pools, capsys):
    pools(2).run(lambda rank: print("\n".join(str(i) for i in range(100_000))))
    assert lines_of(capsys, 1) == [str(i) for i in range(100_000)]


def test_a_line_that_comes_in_many_parts_is_copied_once(capsys, monkeypatch):
    copied_bytes = []

    class Part(bytes):
        def __radd__(self, before):
            copied_bytes.append(len(before))
            return Part(bytes(before) + bytes(self))

    parts = [Part(b"first\nx"), *[Part(b"x" * 999)] * 100, Part(b"x\n\nlast")]
    ours, theirs = Pipe(duplex=False)
    with contextlib.closing(theirs), contextlib.closing(RankOutput(0, ours)) as output:
        monkeypatch.setattr(output, "_read", lambda: parts.pop(0))
        while parts:
            output.pump()
        assert sum(copied_bytes) == 0
        monkeypatch.undo()
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
