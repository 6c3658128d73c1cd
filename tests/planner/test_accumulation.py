"""What micro-batches hold and send, in each of the ways of a search, against engines that do it."""

from contextlib import nullcontext

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.forecast.job import Job
from shardlab.forecast.peak import peak_bytes
from shardlab.forecast.step_model import Factors, Step
from shardlab.models import build_model
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Collective, Role
from tests.comm.test_communicator import Log

STRATEGIES = ("zero1", "zero2", "zero3", "fsdp")
WAYS = [(count, no_sync) for count in (1, 2, 3, 4) for no_sync in (False, True)]
VERBS = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
JOB = {  # with as many rows as make activations more than gradients, which zero3 has whole at the end of a backward
    "hidden": 256, "layers": 4, "heads": 4, "kv_heads": 4, "ffn": 1024, "vocab": 256, "seq_len": 16, "micro_batch": 512,
    "data": 2,
}  # fmt: skip


def steps(rank, strategy):
    """Of each way: gradients that lie between the last two micro-batches, and what each verb carries; in models."""
    found = []
    with Mesh({"data": 2}) as mesh:
        for count, no_sync in WAYS:
            model, log = build_model("gpt-1m"), Log()
            whole = sum(param.nbytes for param in model.parameters())
            with build_engine(strategy, model, torch.optim.AdamW, mesh) as engine, mesh.observed_by(log):
                for number in range(count):
                    held = bytes_by_role(engine.live_tensors())[Role.GRADIENT]
                    tokens = torch.randint(0, 256, (2, 17))
                    with engine.no_sync() if no_sync and number < count - 1 else nullcontext():
                        logits = engine(tokens[:, :-1]).flatten(0, 1)
                        engine.backward(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))
                engine.step()
            sent = [sum(event.num_bytes for event in log.events if event.op == verb) for verb in VERBS]
            found.append([num_bytes / whole for num_bytes in (held, *sent)])
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_way_of_accumulating_holds_and_sends_what_the_engine_does(pools, strategy):
    for (count, no_sync), (held, *sent) in zip(WAYS, pools(2).run(steps, strategy)[0], strict=True):
        job = Job(**JOB, strategy=strategy, accumulation=count, no_sync=no_sync)
        sent_by = Step(job, Factors()).replayed(count).host.transfers
        carried = [sum(one.num_bytes for one in sent_by if one.op == verb) for verb in VERBS]
        assert sent == pytest.approx([num_bytes / job.num_params / 2 for num_bytes in carried], rel=1e-3)
        # At rest a rank has its shard of the gradients; between two micro-batches it may have all.
        sharded = Job(**JOB, strategy=strategy)
        more = (peak_bytes(job) - peak_bytes(sharded)) / job.num_params / 2
        shard = 1.0 if strategy == "zero1" else 0.5
        assert held == pytest.approx(shard + more if count > 1 else 0, rel=1e-3)
