"""Bytes across hosts, by the papers' figures; ``test_replay`` compares rows with the engine."""

import pytest

from shardlab.planner.formulas import over_hosts


def test_seven_billion_on_eight_hosts_of_eight():
    rows = {row.strategy: row for row in over_hosts(7 * 10**9, 64, 8, "mixed")}
    assert rows["ddp"].across_bytes == 2 * 2 * 7e9 * 63 / 64
    assert rows["fsdp"].across_bytes == 3 * 2 * 7e9 * 63 / 64
    assert rows["zero_0x3"].across_bytes == rows["zero_1x3"].across_bytes == 2 * 2 * 7e9 * 7 / 8
    assert rows["hpz"].across_bytes == 2 * 2 * 7e9 * 63 / 64
    assert rows["zero_1x3"].rest_bytes == 7e9 * (2 / 8 + 2 / 8 + 12 / 64)
    assert rows["zero_3x3"].rest_bytes == rows["fsdp"].rest_bytes == 7e9 * 16 / 64


def test_where_each_rank_is_a_host_nothing_is_sent_inside():
    assert {row.inside_bytes for row in over_hosts(7 * 10**9, 4, 1, "mixed")} == {0}
    assert {row.across_bytes for row in over_hosts(7 * 10**9, 4, 4, "mixed")} == {0}


def test_hosts_have_equally_many_ranks():
    with pytest.raises(ValueError, match="per-host: 6 ranks a host do not divide 64 ranks"):
        over_hosts(10, 64, 6, "mixed")
