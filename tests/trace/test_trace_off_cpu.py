"""Compute, waiting and off the CPU are three things: in what is written, and in every percentage."""

import time
from time import perf_counter_ns, thread_time_ns

import torch

from shardlab.analysis import attribution, overlap, stragglers
from shardlab.comm.mesh import Mesh
from shardlab.partition.ring_cost import Link
from shardlab.records.entries import off_cpu
from shardlab.records.store import RunWriter, load_run, write_manifest
from shardlab.trace.clock import HostClock
from shardlab.trace.recorder import Recorder
from shardlab.vocabulary import Phase, SpanKind
from shardlab.why import critical_path, recorded_step
from tests.trace.training import CPU

BESIDE_S = 0.2  # what a rank does while a collective is under way
LATE_S = 0.3  # by how much rank 1 begins later
LINK = "10Gbps,150ms"  # a message takes twice the latency, whatever the machine does


def test_what_neither_ran_nor_waited_was_off_the_cpu():
    def away(readings, waits=()):
        found = list(off_cpu([(*one, 0.0) if len(one) == 2 else one for one in readings], waits))
        return [piece for pieces, _ in found for piece in pieces], [queued for _, queued in found]

    readings = [(0, 0), (100, 100), (400, 150), (500, 240)]
    assert away(readings)[0] == [(150, 400)]  # the 10 of the last stretch are less than can be told
    assert away(readings, [(200, 380)])[0] == [(150, 200), (380, 400)]  # 120 did not wait, 50 of them ran
    assert away(readings, [(150, 400)])[0] == []
    assert away(readings[:1])[0] == away([])[0] == []
    assert away([(0, 0), (100, 60)], [(10, 100)])[0] == []  # computed inside a wait: no time is negative
    # Queued for a core: all of the first stretch, and none of the second, which slept.
    assert away([(0, 0, 5), (100, 50, 55), (200, 60, 55)]) == ([(50, 100), (110, 200)], [50, 0])


def sleeps_ns(seconds):
    used_ns = thread_time_ns()
    time.sleep(seconds)
    return thread_time_ns() - used_ns


def step_beside_a_message(rank, directory, meanwhile):
    """One step: rank 1 is late, then an all-reduce is under way while the ranks do something.

    Returns:
        The share of the time beside it in which this rank's thread ran, by the system's own clock.
    """
    with Mesh({"data": 2}, link=Link.parse(LINK)) as mesh:
        writer = RunWriter(directory, rank, "run", "measured")
        recorder = Recorder(writer, HostClock(), perf_counter_ns(), device=CPU)
        mesh.data.barrier().wait()
        with mesh.observed_by(recorder):
            with recorder.step(0):
                with recorder.phase(Phase.FORWARD, SpanKind.FORWARD):
                    meanwhile(rank * LATE_S)
                with recorder.phase(Phase.BACKWARD, SpanKind.BACKWARD):
                    pending = mesh.data.all_reduce(torch.ones(8), tag="gradients")
                    used_ns = meanwhile(BESIDE_S)
                    pending.wait()
                recorder.at_rest()
            recorder.finish_step(1.0, 1.0, 1e-3, 4)
        writer.close()
        return used_ns / (1e9 * BESIDE_S)


def recorded(pool, tmp_path, meanwhile):
    write_manifest(tmp_path, {"run": "run"})
    ran = pool.run(step_beside_a_message, tmp_path, meanwhile)
    return load_run(tmp_path), ran


def lengths_us(records, kind):
    spans = records.spans[records.spans["kind"] == kind]
    return (spans["end_us"] - spans["start_us"]).groupby(spans["rank"]).sum()


def test_a_sleep_hides_nothing_and_a_sleeping_straggler_does_not_compute(pools, tmp_path):
    records, _ = recorded(pools(2), tmp_path, sleeps_ns)
    moved, spans = records.collectives, records.spans
    assert overlap(moved, spans)["overlap"].max() < 0.05
    assert records.steps["overlap"].max() < 0.05
    assert attribution(moved, spans)["hidden"].max() < 0.05
    assert lengths_us(records, "off_cpu")[1] > 0.9e6 * (LATE_S + BESIDE_S)
    assert lengths_us(records, "forward").get(1, 0.0) < 0.1e6 * LATE_S
    waited = stragglers(moved, spans=spans).set_index(["rank", "last_rank"]).loc[(0, 1)]
    assert waited["last_off_cpu_us"] > 0.8 * waited["straggler_us"] > 0.5e6 * LATE_S
    assert waited["last_computed_us"] < 0.1 * waited["straggler_us"]
    path = critical_path(recorded_step(moved, spans, records.steps)).groupby(["rank", "kind"])["duration_us"].sum()
    assert path[1, "off_cpu"] > 0.9e6 * LATE_S
