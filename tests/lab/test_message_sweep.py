"""One row per op and size, with the op run on real ranks; and what is refused."""

from pathlib import Path

import pytest
import torch

from shardlab.analysis import with_fit
from shardlab.comm import Communicator
from shardlab.lab.sweeps import message_sweep
from tests.conftest import Pools


def all_reduce(comm: Communicator, x: torch.Tensor) -> None:
    comm.all_reduce(x).wait()


def test_one_row_per_op_and_size_ready_for_a_fit(pools: Pools) -> None:
    ops = {"all_reduce": all_reduce, "broadcast": lambda comm, x: comm.broadcast(x).wait()}
    messages = message_sweep(ops, [1024, 8192], pools(2), repeats=2)
    assert list(messages[["op", "bytes"]].itertuples(index=False, name=None)) == [
        ("all_reduce", 1024), ("all_reduce", 8192), ("broadcast", 1024), ("broadcast", 8192)
    ]  # fmt: skip
    assert set(messages["group_size"]) == {2}
    assert (messages["time_us"] > 0).all()
    assert (with_fit(messages)["fitted_us"] > 0).all()


def test_the_op_gets_every_size_warmed_up_and_repeated(pools: Pools, tmp_path: Path) -> None:
    def note(comm: Communicator, x: torch.Tensor) -> None:
        with (tmp_path / str(comm.rank)).open("a") as file:
            file.write(f"{x.dtype} {x.nbytes}\n")

    message_sweep({"note": note}, [16, 32], pools(2), repeats=3)
    for rank in range(2):
        lines = (tmp_path / str(rank)).read_text().splitlines()
        small, large = "torch.float32 16", "torch.float32 32"
        assert lines == [small, small, large, large] + [small, large] * 3, "warmed up, then in turns"


def test_the_slowest_rank_counts(pools: Pools) -> None:
    def rank_1_is_slow(comm: Communicator, _: torch.Tensor) -> None:
        import time

        time.sleep(0.02 * comm.rank)

    (time_us,) = message_sweep({"slow": rank_1_is_slow}, [16], pools(2), repeats=2)["time_us"]
    assert time_us >= 20_000  # a sleep never ends early


def test_bad_sizes_are_named(pools: Pools) -> None:
    for sizes in ([], [12], [0]):
        with pytest.raises(ValueError, match=r"^num_bytes"):
            message_sweep({"a": all_reduce}, sizes, pools(2))
