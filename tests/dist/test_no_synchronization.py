"""Between the first forward and the end of a step nothing lets the host wait for a device.

On a GPU these operations do: reading a number, counting what a mask selects, and copying a list of Python's to the
device. On the CPU they are as easily counted, by torch's dispatcher. The flag by which ranks raise together is left
out: on a GPU it is read by the next verb that needs the means.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab.engines import engine as engine_file
from tests.dist import cases
from tests.dist.every_engine import KINDS, engine_of

WAITS = frozenset(
    {
        "_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "repeat_interleave", "unique_dim",
        "_unique2",
        "lift_fresh",  # torch.tensor([...]), which is copied to the device from memory that is not pinned
    }
)  # fmt: skip


class Waits(TorchDispatchMode):
    """Counts the operations for which the host would wait."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        selects = name in ("index", "index_put_", "index_put") and any(
            mask is not None and mask.dtype in (torch.bool, torch.uint8) for mask in args[1]
        )
        if name in WAITS or selects:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def waits_of(rank, key, num_ranks):
    """What each of two steps of two micro-batches would wait for."""
    found = []
    with pytest.MonkeyPatch.context() as patch, engine_of(key, num_ranks, cases.build("SmallGPT"), "sgd") as engine:
        patch.setattr(engine_file.Engine, "_read_flag", lambda _: None)
        for step in range(2):
            batches = [cases.rows("SmallGPT", step, micro_batch, num_ranks) for micro_batch in range(2)]
            own = [[cases.own_rows(part, rank) for part in batch] for batch in batches]
            with Waits() as waits:
                with engine.no_sync():
                    engine.backward(cases.loss_of(engine(own[0][0]), own[0][1]))
                engine.backward(cases.loss_of(engine(own[1][0]), own[1][1]))
                engine.clip_grad_norm_(1.0)
                engine.step()
                engine.zero_grad()
            found.append(dict(waits.counts))
    return found


@pytest.mark.parametrize("key", ["ddp", *KINDS, "zero2-round_robin", "fsdp-dim0", "fsdp-no_shard", "fsdp-hybrid"])
def test_nothing_lets_the_host_wait(pools, key):
    num_ranks = 4 if "hybrid" in key else 2
    for found in pools(num_ranks).run(waits_of, key, num_ranks):
        assert found == [{}, {}]


def test_the_counting_sees_what_waits():
    with Waits() as waits:
        tensor = torch.tensor([1.0, -1.0])
        float(tensor[0])
        tensor[tensor > 0]
        tensor[tensor < 2] = tensor.sum()
        tensor.nonzero()
    assert waits.counts == {"lift_fresh": 1, "_local_scalar_dense": 1, "index": 1, "index_put_": 1, "nonzero": 1}
