"""An emulated link delays, says so, and changes no value."""

from time import perf_counter, sleep

import torch

from shardlab.comm.mesh import Mesh
from shardlab.partition.ring_cost import Link
from tests.comm.test_communicator import Log

LINK = Link(latency_us=20_000.0, bandwidth_gbps=1.0)
SLOW = Link(latency_us=100_000.0, bandwidth_gbps=1.0)  # a busy machine holds nobody up for half of a message's 0.2 s


def slow_all_reduce(rank):
    log = Log()
    with Mesh({"data": 2}, link=SLOW) as mesh, mesh.observed_by(log):
        value = torch.full((1000,), float(rank + 1))
        pending = mesh.data.all_reduce(value)
        issued_in_s = perf_counter() - log.events[0].issue_ns / 1e9
        sleep(0.5)  # compute that covers it
        pending.wait()
    event = log.events[0]
    waited_s = (event.wait_end_ns - event.wait_start_ns) / 1e9
    return (
        float(value.sum()),
        (event.end_ns - event.start_ns) / 1e3,
        issued_in_s,
        waited_s,
        event.transport,
        event.emulated,
    )


def test_the_link_delays_without_blocking_the_caller(pools):
    least_us = SLOW.ring_time_us("all_reduce", 4000, 2)
    for total, duration_us, issued_in_s, waited_s, transport, emulated in pools(2).run(slow_all_reduce):
        assert total == 3000.0
        assert duration_us >= least_us >= 200_000
        assert issued_in_s < 0.1, "issuing must not wait for the link"
        assert waited_s < 0.1, "compute of 500 ms covers a link of 200 ms"
        assert transport == "shared_memory as 1Gbps,100000us"
        assert emulated


def received_early(rank):
    """When rank 0 begins to send, and when the receive ends that rank 1 has posted long before."""
    with Mesh({"data": 2}, link=LINK) as mesh:
        value = torch.full((1000,), float(rank))
        mesh.data.barrier().wait()
        if rank == 1:
            mesh.data.recv(value, 0).wait()
        else:
            sleep(0.1)
            sent = perf_counter()
            mesh.data.send(value, 1).wait()
            return float(value.sum()), sent
        return float(value.sum()), perf_counter()


def test_a_message_takes_its_time_after_it_was_sent(pools):
    (_, sent), (total, received) = pools(2).run(received_early)
    assert total == 0
    # However slow the ranks are, it cannot be there earlier; counted from the receive, the time would be over.
    assert received >= sent + LINK.latency_us / 1e6
