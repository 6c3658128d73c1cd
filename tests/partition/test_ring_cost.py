import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.partition import Link, chunk_sizes, ring_wire_bytes
from shardlab.vocabulary import Collective

SHARED = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_TO_ALL)


def test_formulas_by_hand():
    assert ring_wire_bytes(Collective.ALL_REDUCE, 1000, 4) == 1500
    assert [ring_wire_bytes(op, 1000, 4) for op in (*SHARED, Collective.BROADCAST)] == [750] * 4
    assert ring_wire_bytes(Collective.REDUCE, 1000, 4) == 750
    assert [ring_wire_bytes(op, 1000, 4) for op in (Collective.GATHER, Collective.SCATTER)] == [187.5] * 2
    assert ring_wire_bytes(Collective.SEND, 1000, 4) == 1000
    assert ring_wire_bytes(Collective.RECV, 1000, 4) == 0
    assert ring_wire_bytes(Collective.BARRIER, 0, 4) == 0
    assert ring_wire_bytes(Collective.REDUCE_SCATTER, 1000, 4, own_chunk_bytes=100) == 900
    assert ring_wire_bytes(Collective.ALL_GATHER, 1000, 4, own_chunk_bytes=100) == 300


def test_a_group_of_one_moves_nothing_and_takes_no_time():
    for op in Collective:
        assert ring_wire_bytes(op, 1000, 1) == 0
        assert Link(50, 10).ring_time_us(op, 1000, 1) == 0


@given(st.integers(0, 10**9), st.integers(2, 16), st.sampled_from(SHARED))
def test_uneven_chunks_send_the_same_in_total(num_bytes, group_size, op):
    per_rank = [ring_wire_bytes(op, num_bytes, group_size, own) for own in chunk_sizes(num_bytes, group_size)]
    assert sum(per_rank) == num_bytes * (group_size - 1)


@given(st.integers(0, 10**9), st.integers(1, 16))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(num_bytes, group_size):
    parts = [ring_wire_bytes(op, num_bytes, group_size) for op in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)]
    assert ring_wire_bytes(Collective.ALL_REDUCE, num_bytes, group_size) == pytest.approx(sum(parts))


def test_link_times_by_hand():
    link = Link(latency_us=50, bandwidth_gbps=8)  # 8 Gbit/s are 1000 bytes per microsecond
    assert link.ring_time_us(Collective.ALL_REDUCE, 1_000_000, 4) == 6 * 50 + 1500
    for op in (*SHARED, Collective.GATHER, Collective.SCATTER):
        assert link.ring_time_us(op, 1_000_000, 4) == 3 * 50 + 750
    for op, hops in {Collective.BROADCAST: 3, Collective.REDUCE: 3, Collective.SEND: 1, Collective.RECV: 1}.items():
        assert link.ring_time_us(op, 1_000_000, 4) == hops * 50 + 1000
    assert link.ring_time_us(Collective.BARRIER, 0, 5) == 2 * 3 * 50


PARSED = {
    "10Gbps,50us": (50, 10),
    " 100 mbps , 2ms ": (2000, 0.1),
    "1.5GB/s,0.5us": (0.5, 12),
    "900MB/s,300ns": (0.3, 7.2),
    "1Tbps,1s": (1e6, 1000),
    "10 Gbit/s,50US": (50, 10),
    "10gB/s,50us": (50, 80),
    "1E3kbps,1us": (1, 1e-3),
}


def test_parse():
    for text, (latency_us, bandwidth_gbps) in PARSED.items():
        link = Link.parse(text)
        assert (link.latency_us, link.bandwidth_gbps) == pytest.approx((latency_us, bandwidth_gbps)), text
    assert str(Link.parse("100KB/S,50us")) == "0.0008Gbps,50us"
    assert str(Link.parse("0.3Mbps,0.7ns")) == "0.0003Gbps,0.0007us"


@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9))
def test_text_and_link_convert_both_ways_exactly(latency_us, bandwidth_gbps):
    link = Link(latency_us, bandwidth_gbps)
    assert Link.parse(str(link)) == link


REFUSED = {
    r"is not understood; write bandwidth,latency such as 10Gbps,50us": (
        "", "10Gbps", "50us,10Gbps", "10,50", "10Gbps,50us,3", "xGbps,1us", "10Gb,50us", "10GBps,5us",
    ),
    r"may be bits or bytes; write Gbps or Gb/s for bits, GB/s for": ("10gb/s,50us", "10kb/s,50us"),
    r"is given as (latency_us|bandwidth_gbps); it must be a finite": ("0Gbps,50us", "10Gbps,0us", "1e400Gbps,1us"),
}  # fmt: skip


def test_what_is_wrong_is_refused_by_name():
    for words, texts in REFUSED.items():
        for text in texts:
            with pytest.raises(ValueError, match=rf"^link: .* {words}"):
                Link.parse(text)
    for call, words in (
        (lambda: ring_wire_bytes(Collective.ALL_REDUCE, -1, 2), "num_bytes"),
        (lambda: ring_wire_bytes(Collective.ALL_REDUCE, 1, 0), "group_size"),
        (lambda: ring_wire_bytes(Collective.ALL_GATHER, 1, 2, own_chunk_bytes=2), r"own_chunk_bytes: .* must be 0 to"),
        (lambda: Link(math.nan, 1), "latency_us"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
