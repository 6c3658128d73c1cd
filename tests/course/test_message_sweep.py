"""One row per op and size, with the op run on real ranks; and what is refused."""

import pytest
import torch

from shardlab.analysis import with_fit
from shardlab.comm import Communicator
from shardlab.course.small_records import message_sweep
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
