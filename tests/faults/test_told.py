"""What is told of a broken program names rank, collective and line, and is the same text on every machine."""

import os
import signal
from pathlib import Path

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.faults import outcome, told
from shardlab.launch import RankPool


def line_of(program, words):
    source = Path(__file__).read_text().splitlines()
    return next(
        number for number, text in enumerate(source, 1) if number > program.__code__.co_firstlineno and words in text
    )


def skips(rank):
    with Mesh({"data": 3}) as mesh:
        if rank != 2:
            mesh.data.all_reduce(torch.ones(4), tag="loss").wait()


def raises(rank):
    if rank == 1:
        raise ValueError("no data")


def dies(rank):
    with Mesh({"data": 3}) as mesh:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        mesh.data.barrier().wait()


@pytest.fixture(scope="module")
def pool():
    with RankPool(3, device="cpu", timeout_s=1.0, notice_s=None, threads_per_rank=1) as made:
        yield made


def test_a_hang_is_told_without_times_and_folders(pool, capsys):
    line = line_of(skips, "all_reduce")
    told(pool, skips, rank=2, collective="all_gather", line=line)
    assert capsys.readouterr().out.splitlines() == [
        "Ranks wait in a collective that is never completed.",
        "rank  process   seq  collective         tag   state              elements   source line",
        *(
            f"{rank}     running   0    all_reduce (data)  loss  waiting            4 float32  line {line}: "
            "mesh.data.all_reduce(torch.ones(4),"
            for rank in (0, 1)
        ),
        "2     returned  -    -                  -     no collective yet  -          -",
        "Your answer: rank 2 is right; collective all_gather is not what is told, which is all_reduce; "
        f"line {line} is right.",
    ]


def test_errors_and_deaths_are_told(pool):
    found = outcome(pool, raises)
    line = line_of(raises, "raise ValueError")
    assert found.text == f'rank 1 raised ValueError: no data\n  line {line}: raise ValueError("no data")'
    assert (found.rank, found.collective, found.lines) == (1, "", (line,))
    found = outcome(pool, dies)
    assert found.text.startswith("Rank 1 died.\nrank  process")
    assert found.rank == 1


def test_a_program_that_ends_is_told_by_what_it_returns(pool, capsys):
    assert outcome(pool, abs).text == "No error. All ranks return; in their order: [0, 1, 2]."
    assert outcome(pool, lambda rank: "x").text == "No error. All ranks return 'x'."
    told(pool, lambda rank: None, rank=1)
    assert capsys.readouterr().out == "No error. All ranks return.\n", "there is nothing to compare an answer with"
