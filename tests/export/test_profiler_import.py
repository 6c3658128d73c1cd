"""A person's own trace: real ones of gloo ranks made here, and a CUDA trace made by hand."""

import gzip
import json
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from shardlab.analysis import attribution, bandwidth, overlap, stragglers
from shardlab.experiment.told.step_reasons import reasons, why
from shardlab.export import export_hta, import_profiler_trace, perfetto_trace
from shardlab.export.kineto import NCCL_NAMES, collective_of, dtype_of
from shardlab.plots import collective_timeline, overlap_bars, summary_of, wire_volume
from shardlab.vocabulary import Collective
from tests.export.trace_format import check

NUM_ELEMENTS = 64 * 32 + 32 + 32 * 8 + 8


def train(rank, directory):
    """Two profiled steps of DDP and a collective of each kind."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole, chunk = torch.ones(20), torch.ones(10)

    def keep(profiler):
        profiler.export_chrome_trace(f"{directory}/rank{rank}.json{'.gz' if rank else ''}")

    plan = schedule(wait=0, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan, on_trace_ready=keep) as profiler:
        for _ in range(3):
            model(torch.ones(16, 64)).sum().backward()
            optimizer.step()
            dist.all_gather([torch.empty(10), torch.empty(10)], chunk)
            dist.broadcast(whole, 0)
            dist.barrier()
            dist.all_to_all_single(torch.empty(20), whole)
            dist.reduce_scatter(torch.empty(10), [chunk, chunk])
            dist.reduce(whole, 0)
            dist.gather(chunk, [torch.empty(10), torch.empty(10)] if rank == 0 else None, 0)
            dist.scatter(torch.empty(10), [chunk, chunk] if rank == 0 else None, 0)
            dist.all_reduce(chunk.to_sparse())
            if rank == 0:
                dist.send(chunk, 1)
            else:
                dist.recv(chunk, 0)
            profiler.step()


@pytest.fixture(scope="module")
def imported(pools, tmp_path_factory):
    directory = tmp_path_factory.mktemp("profile")
    pools(2).run(train, str(directory))
    return directory, import_profiler_trace(directory)


def test_collectives_of_gloo_ranks(imported):
    _, records = imported
    assert set(records.collectives["step"]) == {1, 2}
    for rank in (0, 1):
        rows = records.collectives[(records.collectives["rank"] == rank) & (records.collectives["step"] == 2)]
        found = [
            (row.op, row.numel, None if pd.isna(row.bytes) else row.bytes)
            for row in rows.itertuples()
            if row.op != "broadcast"
        ]
        assert found == [
            (Collective.ALL_REDUCE, NUM_ELEMENTS, 4 * NUM_ELEMENTS),
            (Collective.ALL_GATHER, 20, 80),
            (Collective.BARRIER, 0, 0),
            (Collective.ALL_TO_ALL, 20, 80),
            (Collective.REDUCE_SCATTER, 20, 80),
            (Collective.REDUCE, 20, 80),
            (Collective.GATHER, 20, 80),
            (Collective.SCATTER, 20, None if rank else 80),  # its task names the type of elements on the root alone
            (Collective.ALL_REDUCE, 10, 40),  # of a sparse tensor
            (Collective.RECV if rank else Collective.SEND, 10, 40),
        ]
        assert (20, 80) in [(row.numel, row.bytes) for row in rows.itertuples() if row.op == "broadcast"]
        assert set(rows["group_size"]) == {2}
        assert rows["wire_bytes"].iloc[-1] == (0 if rank else 40)
        assert rows["issue_us"].is_monotonic_increasing
        assert (rows["issue_us"] <= rows["start_us"]).all()
        assert (rows["start_us"] <= rows["end_us"]).all()
        assert rows[rows["op"] == "all_reduce"]["phase"].tolist() == ["backward", "forward"]


def test_compute_is_that_of_the_operators(imported):
    _, records = imported
    rows = records.spans[(records.spans["rank"] == 0) & (records.spans["step"] == 2)]
    by_kind = {kind: set(own["unit"]) for kind, own in rows.groupby("kind")}
    assert "aten::linear" in by_kind["forward"]
    assert "aten::mm" in by_kind["backward"]
    assert by_kind["optimizer"]
    assert not any(unit.startswith(("c10d", "autograd", "gloo")) for unit in set(rows["unit"]))
    ordered = rows.sort_values("start_us")
    assert (ordered["start_us"].to_numpy()[1:] >= ordered["end_us"].to_numpy()[:-1]).all()  # outermost ones only


def test_the_ranks_are_on_one_clock(imported):
    """gloo's all-reduce cannot end on one rank before it has begun on the other; and time begins with the trace."""
    _, records = imported
    assert len(stragglers(records.collectives)) >= 1
    assert min(records.spans["start_us"].min(), records.collectives["issue_us"].min()) >= 0


def test_figures_and_exports_take_it(imported):
    _, records = imported
    for figure in (
        collective_timeline(records.collectives, records.spans, step=2),
        overlap_bars(overlap(records.collectives, records.spans)),
        wire_volume(records.collectives),
    ):
        assert figure.data
    assert len(attribution(records.collectives, records.spans)) == len(records.collectives)
    assert bandwidth(records.collectives)["bus_gb_per_s"].max() > 0
    assert check(perfetto_trace(records))["X"]
    assert "of a step" in why(reasons(records))


def test_a_trace_without_communication_has_no_overlap(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("work"):
        torch.ones(100, 100).mm(torch.ones(100, 100))
    profiler.export_chrome_trace(str(tmp_path / "alone.json"))
    records = import_profiler_trace(tmp_path / "alone.json")
    assert len(records.collectives) == 0
    assert "aten::mm" in set(records.spans["unit"])
    row = records.steps.iloc[0]
    assert (row["rank"], row["step"], row["wire_bytes"]) == (0, 0, 0)
    assert np.isnan(row["overlap"])
    assert np.isnan(row["exposed_comm_us"])


STEP, KERNEL = "ProfilerStep#7", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def cuda_trace(rank=0, **changes):
    """A step of 100 us: kernels at [10, 40) and [50, 70), an all-reduce at [30, 60): 20 of 30 us hidden."""

    def event(name, category, tid, ts, dur, **args):
        pid = 0 if category in ("kernel", "gpu_memcpy") else 77
        return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}

    gemm, norm = "ampere_sgemm_128x64_tn", "void at::native::layer_norm<float>(int)"
    comm = {"Collective name": "allreduce", "In msg nelems": 512, "Out msg nelems": 512, "Group size": 2}
    comm |= {"dtype": "BFloat16", "Process Group Name": "0", "Process Group Description": "default_pg"}
    events = [
        event(STEP, "user_annotation", 1, 0, 100),
        event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 2, 4, 20),
        event("Optimizer.step#AdamW.step", "user_annotation", 1, 40, 20),
        event("cudaLaunchKernel", "cuda_runtime", 1, 1, 1, correlation=1),
        event("cudaLaunchKernel", "cuda_runtime", 1, 45, 1, correlation=2),
        event("cudaLaunchKernelExC", "cuda_runtime", 2, 6, 1, correlation=3),
        event(gemm, "kernel", 7, 10, 30, stream=7, device=0, correlation=1),
        event(norm, "kernel", 7, 50, 20, stream=7, device=0, correlation=2),
        event(KERNEL, "kernel", 20, 30, 30, stream=20, device=0, correlation=3, **comm),
        event("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", 7, 80, 5, stream=7, correlation=4),
        {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "pid": 77, "tid": 1, "ts": 3, "s": "t", "args": {}},
    ]
    about = {"backend": "nccl", "rank": rank, "world_size": 2}
    return {
        "schemaVersion": 1,
        "distributedInfo": about,
        "baseTimeNanoseconds": 5_000_000,
        "traceEvents": events,
    } | changes


def written(directory, name, trace):
    path = directory / name
    path.write_text(json.dumps(trace))
    return path


def test_a_cuda_trace(tmp_path):
    records = import_profiler_trace(written(tmp_path, "trace.json", cuda_trace()))
    assert why(reasons(records)) == (
        "40 % of a step is host-bound: 0.04 ms of a step have neither compute nor messages, while the host issues the "
        "next · larger micro-batches or torch.compile, at most, would take 40 µs of 100 µs off"
    )
    (row,) = records.collectives.to_dict("records")
    assert (row["op"], row["tag"], row["axis"], row["transport"]) == ("all_reduce", "allreduce", "data", "nccl")
    assert (row["dtype"], row["numel"], row["bytes"], row["group_size"], row["wire_bytes"]) == (
        "bfloat16", 512, 1024, 2, 1024.0,
    )  # fmt: skip
    assert (row["phase"], row["step"]) == ("backward", 7)
    assert (row["issue_us"], row["start_us"], row["end_us"]) == (6, 30, 60)
    kinds = records.spans.set_index("unit")["kind"].to_dict()
    assert kinds == {"ampere_sgemm_128x64_tn": "forward", "void at::native::layer_norm<float>(int)": "optimizer"}
    assert records.steps["overlap"].tolist() == pytest.approx([20 / 30])
    assert records.steps["step_us"].tolist() == [100]


def renamed(kernel, category="kernel", stream=20, **args):
    """The trace with another kernel in the place of the communicating one."""
    trace = cuda_trace()
    for event in trace["traceEvents"]:
        if event["name"] == KERNEL:
            event |= {"name": kernel, "cat": category, "tid": stream, "args": {"correlation": 3, **args}}
    return trace


KERNELS = (
    ("ncclDevKernel_Reduce_Sum_f32_RING_LL(x)", {"Collective name": "reduce"}, "reduce", "nccl"),
    ("ncclDevKernel_SendRecv(x)", {"Collective name": "gather"}, "gather", "nccl"),
    ("ncclDevKernel_Generic_4(x)", {"Collective name": "scatter"}, "scatter", "nccl"),
    ("ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(x)", {}, "all_reduce", "nccl"),
    ("ncclSymkDevKernel_ReduceScatter_LDMC_sum_bf16(x)", {}, "reduce_scatter", "nccl"),
    ("ncclAllGatherRingLLKernel_copy_i8(ncclColl)", {}, "all_gather", "nccl"),
    ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)", {}, "all_reduce",
     "device"),
    ("<unnamed>::two_shot_all_reduce_kernel_inplace<float, (int)16>(float*)", {}, "all_reduce", "device"),
    ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)", {}, "all_reduce", "device"),
    ("kuserbuffers_pushrecv(int, int, int, int, int*)", {}, "recv", "device"),
    ("another_vendors_kernel", {"Collective name": "_allgather_base"}, "all_gather", "device"),
    ("barrier_kernel(unsigned int**, unsigned long, int, int)", {}, "barrier", "device"),
    ("hcom_allReduce__123_1", {}, "all_reduce", "device"),
    ("void quickreduce::allreduce_prototype_twoshot<x>(y)", {}, "all_reduce", "device"),
)  # fmt: skip


def test_whoever_communicates_by_a_name_that_tells_how(tmp_path):
    for kernel, args, op, transport in KERNELS:
        records = import_profiler_trace(written(tmp_path, "trace.json", renamed(kernel, **args)))
        (row,) = records.collectives.to_dict("records")
        assert (row["op"], row["transport"]) == (op, transport)
        assert records.steps["exposed_comm_us"].tolist() == [10]
        assert len(records.spans) == 2
    # Without arguments a kernel has no size.
    assert all(pd.isna(row[name]) for name in ("wire_bytes", "bytes", "group_size"))


UNEXPLAINED = {
    "ncclDevKernel_Generic_4(x)": "kernel",
    "ncclSomethingNew": "kernel",
    "void c10d::symmetric_memory::put_signal_kernel(unsigned int**)": "kernel",
    "void userbuffers_fp16_sum_inplace_gpu_rr<2>(int)": "kernel",
    "void deep_ep::internode_ll::dispatch<true, 7168>(void*)": "kernel",
    "void dpsk::ep::internode::cached_notify<false>(int)": "kernel",
    "void hybrid_ep::dispatch_kernel<x>(y)": "kernel",
    "rocshmem_putmem_nbi_wg": "kernel",
    "void mori::moe::EpDispatchIntraNodeKernel<bf16>(x)": "kernel",
    "void moeA2ACombineKernel<x>(y)": "kernel",
    "CopyPeerToPeer": "gpu_memcpy",
    "Memcpy PtoP (Device -> Device)": "gpu_memcpy",
}


def test_communication_that_no_name_explains_counts_and_is_said(tmp_path):
    about = {"Collective name": "coalesced", "In msg nelems": 512, "Out msg nelems": 512, "Group size": 2}
    said = r"count as unknown communication, and their bytes as not known: \w.* \(1\)$"
    for (kernel, category), args in product(UNEXPLAINED.items(), (about, {})):  # those without any have the name alone
        path = written(tmp_path, "trace.json", renamed(kernel, category, **args))
        with pytest.warns(UserWarning, match=said):
            records = import_profiler_trace(path)
        (row,) = records.collectives.to_dict("records")
        assert row["op"] == "unknown communication"
        assert pd.isna(row["bytes"])
        assert records.steps["overlap"].tolist() == pytest.approx([20 / 30])
        assert records.steps["wire_bytes"].isna().all()
    moved = records.collectives
    assert "(without 1 whose bytes are not known)" in summary_of(wire_volume(moved))
    assert "1 collective a rank sends –" in summary_of(collective_timeline(moved, records.spans, step=7))
    export_hta(records, tmp_path / "hta")
    with pytest.warns(UserWarning, match="unknown communication"):
        assert import_profiler_trace(tmp_path / "hta").collectives["op"].tolist() == ["unknown communication"]


def test_a_kernel_of_one_device_is_compute(tmp_path):
    for kernel in (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(x)",
        "void deep_ep::layout::get_layout(x)",
        "void hybrid_ep::permute_kernel<x>(y)",
        "void at::native::index_put_with_sort_kernel<float>(x)",
        "void flash::flash_fwd_splitkv_combine_kernel<x>(y)",
        "histogram_shmem_kernel(int)",
        "triton_poi_fused_all_gather_into_tensor_wait_tensor_3",
        "void indexSelectScatterGather<float>(x)",
    ):
        records = import_profiler_trace(written(tmp_path, "trace.json", renamed(kernel, stream=7)))
        assert len(records.collectives) == 0
        assert kernel in set(records.spans["unit"])
        assert records.manifests["profiler"]["uncertain_kernels"] == {}


def test_a_kernel_that_looks_like_communication_is_named_as_uncertain(tmp_path):
    """By a word in its name; or by a stream on which nothing runs that is known to compute."""
    for kernel, stream in (("void acme::MoeDispatchKernel<float>(x)", 7), ("void acme::shuffle_tokens(x)", 20)):
        name = kernel.removeprefix("void ").split("<")[0].split("(")[0]
        with pytest.warns(UserWarning, match=rf"look like communication.*uncertain: {name} \(1\)"):
            records = import_profiler_trace(written(tmp_path, "trace.json", renamed(kernel, stream=stream)))
        assert len(records.collectives) == 0
        assert why(reasons(records)).endswith(f" · uncertain: {name} may communicate, and counts as compute")


def test_a_kernel_belongs_to_the_step_that_launched_it(tmp_path):
    """One from before the trace meets the first step's time, which is shorter than what both would expose."""
    trace = cuda_trace()
    (own,) = (event for event in trace["traceEvents"] if event["name"] == KERNEL)
    before = own | {"ts": 70, "dur": 95, "args": own["args"] | {"correlation": 99}}
    work = before | {"name": "ampere_sgemm_64x64_nn", "tid": 7, "args": {"correlation": 98}}
    records = import_profiler_trace(written(tmp_path, "trace.json", {
        **trace, "traceEvents": [*trace["traceEvents"], before, work | {"ts": -30, "dur": 20}],
    }))  # fmt: skip
    assert records.collectives["step"].tolist() == [7, -1]
    assert records.spans["step"].value_counts().to_dict() == {7: 2, -1: 1}
    assert records.steps["exposed_comm_us"].tolist() == [10]
    # The host ran ahead: nobody knows how long the device took for this step.
    own["dur"] = 300
    records = import_profiler_trace(written(tmp_path, "trace.json", trace))
    assert records.steps["exposed_comm_us"].isna().all()
    assert why(reasons(records)).startswith("cannot be said: when the device took a step is missing")


def test_what_the_host_did_is_no_compute_of_a_device_without_kernels(tmp_path):
    work = {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 77, "tid": 1, "ts": 6, "dur": 30, "args": {}}
    moved = {"name": "thread_name", "pid": 77, "tid": 9, "ph": "M", "args": {"name": "pt_gloo_runner"}}
    task = work | {"name": "gloo:all_reduce", "tid": 9}
    host = [event for event in cuda_trace()["traceEvents"] if event["cat"] in ("user_annotation", "cpu_op")]
    about = {"rank": 0, "world_size": 2}
    with_device = {"deviceProperties": [{"id": 0}]}, {"distributedInfo": about | {"backend": "nccl"}}
    for changes, computes in (({}, True), *((one, False) for one in with_device)):
        trace = {"distributedInfo": about, "traceEvents": [*host, work, task, moved], **changes}
        path = written(tmp_path, "trace.json", trace)
        if computes:
            assert import_profiler_trace(path).steps["overlap"].tolist() == [1.0]
            continue
        with pytest.warns(UserWarning, match=r"ranks \[0\] had a device, but the trace lacks its kernels"):
            records = import_profiler_trace(path)
        assert len(records.spans) == 0
        assert records.steps[["overlap", "exposed_comm_us"]].isna().all(axis=None)


def test_a_trace_that_has_calls_and_not_what_ran_says_so(tmp_path):
    trace = cuda_trace()
    call = {"ph": "X", "name": "c10d::allreduce_", "cat": "cpu_op", "pid": 77, "tid": 1, "ts": 6, "dur": 1, "args": {}}
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event["cat"] != "kernel"] + [call]
    with (
        pytest.warns(UserWarning, match=r"ranks \[0\] issued collectives.*profile with ProfilerActivity.CUDA too"),
        pytest.warns(UserWarning, match=r"ranks \[0\] had a device"),
    ):
        records = import_profiler_trace(written(tmp_path, "trace.json", trace))
    assert records.steps["overlap"].isna().all()


DAMAGED = {
    "{": "is damaged or not JSON",
    "[]": "it has no list 'traceEvents'",
    '{"traceEvents": [{"ph": "X", "name": "a", "ts": 1}]}': r"is not as torch\.profiler writes it: KeyError",
    '{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": -2}]}': "lasts -2.0 us; the clock ran backwards",
    '{"traceEvents": [{"ph": "X", "name": "a", "ts": 1e999, "dur": 1}]}': "'a' begins at inf us",
    '{"traceEvents": ' + "[" * 100_000 + "]" * 100_000 + "}": "is damaged or not JSON .*recursion",
    '{"traceEvents": [3]}': r"is not as torch\.profiler writes it: Attribute",
    '{"traceEvents": [], "distributedInfo": {"rank": "first"}}': "trace.json: invalid literal for int.*'first'",
}
CHANGED = (
    (STEP, {"name": "ProfilerStep#warm"}, r"invalid literal for int.*'warm'"),
    (STEP, {"name": f"ProfilerStep#{10**30}"}, "Overflow"),
    (KERNEL, {"args": {"Group size": 10**30}}, "is not as torch.profiler writes it: Overflow"),
    (KERNEL, {"args": {"Group size": 0}}, "group_size"),
    (KERNEL, {"args": {"Group size": [2]}}, "is not as torch.profiler writes it: TypeError"),
    (KERNEL, {"args": {"correlation": {}}}, "is not as torch.profiler writes it: TypeError"),
)


def test_damaged_traces_are_named(tmp_path):
    path = tmp_path / "trace.json"
    for content, message in DAMAGED.items():
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            import_profiler_trace(path)
    for what, changes, message in CHANGED:
        trace = cuda_trace()
        event = next(one for one in trace["traceEvents"] if one["name"] == what)
        event |= {**changes, "args": event["args"] | changes.get("args", {})}
        with pytest.raises(ValueError, match=rf"trace.*trace\.json.*{message}"):
            import_profiler_trace(written(tmp_path, "trace.json", trace))


def test_what_is_no_trace_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no \*\.json"):
        import_profiler_trace(tmp_path)
    with pytest.raises(ValueError, match=r"nowhere\.json cannot be read"):
        import_profiler_trace(tmp_path / "nowhere.json")
    (tmp_path / "half.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}' * 50)[:-20])
    with pytest.raises(ValueError, match="is damaged"):
        import_profiler_trace(tmp_path / "half.json.gz")
    (tmp_path / "half.json.gz").unlink()
    for name in ("a.json", "b.json"):
        written(tmp_path, name, cuda_trace())
    with pytest.raises(ValueError, match=r"a\.json and .*b\.json are both of rank 0"):
        import_profiler_trace(tmp_path)


NAMES = {
    "c10d::_allgather_base_": "all_gather", "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter", "c10d::alltoall_base_": "all_to_all",
    "gloo:all_reduce": "all_reduce", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)": "reduce_scatter",
    "ncclKernel_AllGather_RING_LL_Sum_int8_t": "all_gather", "_reduce_scatter_base": "reduce_scatter",
    "ncclDevKernel_SendRecv(x)": "send", "c10d::recv_": "recv", "aten::mm": None, "c10d::reduce_": "reduce",
    "gloo:gather": "gather", "c10d::scatter_": "scatter", "gloo:sparse_all_reduce": "all_reduce",
    "gloo:recvAnySource": "recv",
}  # fmt: skip


def test_names_of_collectives_and_types():
    assert {name: collective_of(name) for name in NAMES} == NAMES
    assert {op: collective_of(f"ncclDevKernel_{name}") for op, name in NCCL_NAMES.items()} == {
        op: None if op is Collective.UNKNOWN else op for op in Collective
    }
    assert dtype_of("c10::BFloat16") == ("bfloat16", 2)
    assert dtype_of("long int") == dtype_of("Long") == ("int64", 8)
    assert dtype_of("Float8_e4m3fn") == ("Float8_e4m3fn", None)
