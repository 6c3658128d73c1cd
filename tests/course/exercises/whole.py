"""Whole strategies: right ones that are written differently from the printed solutions, and wrong ones."""

import contextlib
from functools import partial

import torch

from shardlab.comm import Pending
from shardlab.engines import DDP, FSDP, Bucketed, Strategy, ZeRO1, ZeRO2, ZeRO3
from tests.course.exercises.otherwise import named, printed
from tests.course.exercises.whole_tensor import RIGHT_TENSOR, WRONG_TENSOR


class OneMessage(Strategy):
    name = "one_message"

    def make_means(self):
        due = [param for param in self.params.values() if self.is_due(param)]
        sent = [torch.zeros_like(param) if param.grad is None else param.grad for param in due]
        means = torch.cat([one.flatten() for one in sent]).div_(self.num_ranks)
        self.comm.all_reduce(means, tag="all gradients").wait()
        for param, mean in zip(due, means.split([param.numel() for param in due]), strict=True):
            param.grad = mean.view_as(param)


class SumsOfDDP(DDP):
    def make_means(self):
        super().make_means()
        for param in self.params.values():
            if param.grad is not None:
                param.grad *= self.num_ranks


class SkipsUnused(Strategy):
    name = "skips_unused"

    def make_means(self):
        for name, param in self.params.items():
            if param.grad is not None:
                self.comm.all_reduce(param.grad, tag=name).wait()
                param.grad /= self.num_ranks


class SendsMore(DDP):
    def make_means(self):
        super().make_means()
        self.comm.all_reduce(torch.zeros(1), tag="what for?").wait()


class WaitsAtOnce(Bucketed):
    def reduce(self, bucket):
        super().reduce(bucket).wait()
        return Pending()


class OneBucket(Bucketed):
    def make_buckets(self, given):
        self.bucket_bytes = 2**20
        return super().make_buckets(given)


class SumsOfBuckets(Bucketed):
    def make_buckets(self, given):
        self.num_ranks = 1
        return super().make_buckets(given)


class NobodyGathers(ZeRO1):
    def stepping(self, *, loads=False):
        return contextlib.nullcontext()


class AllReduces(ZeRO1):
    def scatter(self, axis, buffer, chunk, bounds, tag):
        axis.all_reduce(buffer, tag=tag).wait()
        chunk.copy_(buffer[bounds[axis.rank] : bounds[axis.rank + 1]])
        return Pending()


class AfterBackward(ZeRO2):
    def grad_ready(self, param, *, sends):
        """Everything is reduced when backward has ended."""


class AsksOthers(ZeRO3):
    def make_means(self):
        super().make_means()
        self.comm.all_reduce(torch.zeros(1), tag="all well?").wait()


class StaysGathered(ZeRO3):
    """From forward until the gradients have travelled."""

    stays = None

    def in_forward(self):
        if self.stays is None:
            self.stays = contextlib.ExitStack()
            self.stays.enter_context(self.kept_gathered())
        return super().in_forward()

    def make_means(self):
        super().make_means()
        if self.stays is not None:
            self.stays.close()
            self.stays = None


class GathersAgain(ZeRO3):
    def make_means(self):
        super().make_means()
        part = torch.zeros(8)
        self.comm.all_gather(part.new_zeros(8 * self.num_ranks), part, tag="once more").wait()


OneUnit = partial(FSDP, wrap="root")

RIGHT_WHOLE = {
    "whole.ddp": [OneMessage], "whole.bucketed": [Bucketed], "whole.zero1": [ZeRO1], "whole.zero2": [ZeRO2],
    "whole.zero3": [ZeRO3],
    # Ours asks that every rank calls every unit. This one sends gradients where the next message but one is due.
    "whole.fsdp": [printed(named("whole.fsdp"), {"            if sends:\n": "            if False:\n"})],
    "whole.tensor": RIGHT_TENSOR,
}  # fmt: skip
WRONG_WHOLE = {
    "whole.ddp": {
        SumsOfDDP: "^3 ranks, trained on MLP: rank 0: a plain loop: after step 0, parameter",
        SkipsUnused: "^2 ranks, trained on Unused: rank . raised MismatchError",
        SendsMore: "^2 ranks, weighed: rank 0 sent 9 messages where 8 are enough",
    },
    "whole.bucketed": {
        DDP: "^2 ranks, weighed: rank 0 took 778 us on the virtual clock, and 620 are enough",
        WaitsAtOnce: "^2 ranks, weighed: rank 0 took 738 us on the virtual clock",
        OneBucket: "^2 ranks, weighed: rank 0: a message of 1744 B, and 600 B are allowed",
        SumsOfBuckets: "^3 ranks, trained on MLP: rank 0: a plain loop: after step 0, parameter",
    },
    "whole.zero1": {
        DDP: "^2 ranks, weighed: rank 0: optimizer state of 3488 B at rest, and 1744 B are enough",
        NobodyGathers: "^3 ranks, trained on MLP: rank 0: a plain loop: after step",
        AllReduces: "^2 ranks, weighed: rank 0, message 0 is all_reduce",
    },
    "whole.zero2": {
        DDP: "^2 ranks, weighed: rank 0: optimizer state of 3488 B at rest",
        ZeRO1: "^2 ranks, weighed: rank 0: gradient of 1744 B at rest, and 872 B are enough",
        AfterBackward: "^2 ranks, weighed: rank 0 took 778 us on the virtual clock, and 740 are enough",
    },
    "whole.zero3": {
        ZeRO2: "^2 ranks, weighed: rank 0: parameter of 1744 B at rest, and 872 B are enough",
        AsksOthers: "^2 ranks, weighed: rank 0, message .* is all_reduce of .* allowed: all_gather and reduce_scatter",
        GathersAgain: "^2 ranks, weighed: rank 0 sent .* B where 2616 B are enough",
        StaysGathered: "^2 ranks, weighed: all ranks together sent 3488 B, and 5232 B are needed",
    },
    "whole.fsdp": {
        ZeRO2: "^2 ranks, weighed: rank 0: parameter of 1744 B at rest",
        ZeRO3: "^2 ranks, weighed: rank 0: gathered parameter of 1744 B at once, and 1216 B are enough",
        OneUnit: "^2 ranks, weighed: rank 0: a message of 1744 B, and 600 B are allowed",
    },
    "whole.tensor": WRONG_TENSOR,
}
TOLD = {
    "whole.ddp": ("sums", "skips_unused", "sends_more"),
    "whole.bucketed": ("late", "waits_at_once", "one_bucket", "sums"),
    "whole.zero1": ("steps_all", "nobody_gathers", "all_reduces"),
    "whole.zero2": ("steps_all", "keeps_whole_gradients", "after_backward"),
    "whole.zero3": ("stays_whole", "asks_others", "gathers_again", "stays_gathered"),
    "whole.fsdp": ("stays_whole", "all_at_once", "one_unit"),
    "whole.tensor": (
        "others", "views", "terms_of_the_gradient", "bias_on_every_rank", "bias_gradient_summed", "gathers_features",
        "whole_size_between",
    ),
}  # fmt: skip
"""The mistakes of the wrong ones, in their order, by name in ``mistakes.toml``: several are told by one fact."""
