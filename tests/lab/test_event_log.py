"""The log's rows are the table ``collectives``, in order of issue, with the bytes of the formulas."""

import torch

from shardlab.comm.mesh import Mesh
from shardlab.lab.small_records import Row, collectives_table, log_collectives
from shardlab.partition.ring_cost import ring_wire_bytes
from tests.conftest import Pools


def some_collectives(rank: int, num_ranks: int) -> list[Row]:
    with Mesh({"data": num_ranks}) as mesh:
        mesh.data.barrier(tag="before").wait()
        with log_collectives(mesh, rank, "mine") as log:
            mesh.data.all_reduce(torch.ones(6), tag="first").wait()
            pending = mesh.data.broadcast(torch.ones(6, dtype=torch.float64), tag="second")
            pending.wait()
        mesh.data.barrier(tag="after").wait()
        return log.rows()


def test_rows_are_those_inside_the_block_and_times_do_not_run_backwards(pools: Pools) -> None:
    table = collectives_table(pools(3).run(some_collectives, 3))
    assert table.groupby("rank")["tag"].agg(list).to_dict() == {rank: ["first", "second"] for rank in range(3)}
    assert table["seq"].tolist() == [0, 1] * 3
    assert set(table["run"]) == {"mine"}
    assert set(table["source"]) == {"measured"}
    first = table[table["tag"] == "first"].iloc[0]
    assert (first["bytes"], first["wire_bytes"]) == (24, ring_wire_bytes("all_reduce", 24, 3))
    assert table["issue_us"].min() == 0
    times = table[["issue_us", "start_us", "end_us", "wait_end_us"]]
    assert (times.diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)
    assert collectives_table([[], []]).empty
