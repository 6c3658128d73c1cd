"""A strategy of the reader's own: checked on nasty models, compared with ours, refused by name."""

import textwrap

import pytest
import torch

from shardlab.comm import Pending
from shardlab.engines import DDP, Bucketed, Strategy, ZeRO1, nobody_used, strategy
from shardlab.experiment import CompareConfig, compare
from shardlab.launch import RankError
from shardlab.testing import check_strategy


class SixteenBits(Bucketed):
    """As ``Bucketed``, but gradients travel in 16 bits."""

    name = "sixteen_bits"
    rounds = True

    def reduce(self, bucket):
        half = bucket.buffer.to(torch.bfloat16)
        self.comm.all_reduce(half, tag=f"gradients of bucket {bucket.index}").wait()
        bucket.buffer.copy_(half)
        return Pending()


class SumsInsteadOfMeans(Bucketed):
    def lay_out(self, given):
        laid_out = super().lay_out(given)
        self.scale = 1.0
        return laid_out


class LeavesOutTheLast(Strategy):
    """Forgets one parameter: its ranks drift apart."""

    def reduce_rest(self):
        for param in list(self.params.values())[:-1]:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            self.comm.all_reduce(param.grad).wait()
            param.grad /= self.num_ranks


class UnusedIsZero(Strategy):
    """Takes a parameter that no rank used for one whose gradient is 0, and rounds."""

    def reduce_rest(self):
        for param in self.params.values():
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            half = gradient.to(torch.bfloat16)
            self.comm.all_reduce(half).wait()
            param.grad = half.to(param.dtype) / self.num_ranks


class SendsOnce(DDP):
    def backward(self, *, sends):
        self.begun = getattr(self, "begun", 0) + sends
        return super().backward(sends=sends)

    def reduce_rest(self):
        if self.begun == 1:
            super().reduce_rest()

    def drop(self):
        self.begun = 0


class LosesWrites(ZeRO1):
    def full(self, *, keep_changes):
        return super().full(keep_changes=False)


class HoldsNothing(DDP):
    def holdings(self):
        return iter(())


def test_a_right_strategy_is_equal_and_a_rounded_one_within_its_tolerance():
    assert "equal to one process: 2 models, 4 loops, 2 ranks" in check_strategy(Bucketed, (2,), ("MLP", "Unused"))
    assert "equal to one process" in check_strategy(SixteenBits, (2,), ("MLP",), tolerance=4e-3)


def test_the_example_of_the_docstring_is_right():
    code = strategy.__doc__.split("is:\n\n")[1].split("\n\n(-0")[0]
    names = {"Strategy": Strategy, "torch": torch, "nobody_used": nobody_used}
    exec(textwrap.dedent(code), names)
    assert "equal to one process" in check_strategy(names["OneMessage"], (2,), ("MLP", "Unused", "FewElements"))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (SixteenBits, r"after step 0, parameter '0.weight' differs from one process by \d"),
        (SumsInsteadOfMeans, r"at 2 ranks, model 'MLP', a plain loop, rank 0: after step 0"),
        (LeavesOutTheLast, r"parameter '4.bias' differs"),
        (SendsOnce, "two backwards that send, weights written by hand, rank 0: after step 0, parameter '0.weight'"),
        (LosesWrites, "two backwards that send, weights written by hand, rank 0: after step 0, parameter '0.weight'"),
        (HoldsNothing, r"holdings\(\) of 'ddp': the parameter of '0.weight' is in none"),
        (type("Not", (Strategy,), {"lay_out": lambda *_: None}), r"lay_out\(\) of 'strategy' must return a LaidOut"),
    ],
)
def test_what_differs_first_is_told(make, told):
    with pytest.raises((AssertionError, RankError), match=told):
        check_strategy(make, (2,), ("MLP",))


def test_what_no_rank_used_is_left_alone_whatever_the_tolerance():
    with pytest.raises(AssertionError, match=r"'spare.weight' is what it was in one process"):
        check_strategy(UnusedIsZero, (2,), ("Unused",), tolerance=0.1)


def test_what_was_given_wrong_is_named():
    with pytest.raises(ValueError, match="make: a strategy was given; give its class DDP"):
        check_strategy(DDP())
    with pytest.raises(ValueError, match="models: 'mlp' is not one of MLP, SmallGPT"):
        check_strategy(DDP, models=("mlp",))
    with pytest.raises(ValueError, match=r"the class SixteenBits was given; give one of it, SixteenBits\(\)"):
        CompareConfig(strategies=("single", SixteenBits))


def test_compare_takes_it_beside_ours(tmp_path):
    config = CompareConfig(strategies=("single", "bucketed", SixteenBits()), model="mlp", ranks=2, steps=3)
    comparison = compare(config, tmp_path / "run")
    rows = comparison.summary.set_index("strategy")
    assert rows.losses_equal["bucketed"]
    assert 0 < rows.max_loss_difference["sixteen_bits"] < 0.1
    assert rows.losses_equal["sixteen_bits"]  # within the rounding that it declares
    assert rows.gradient_bytes["sixteen_bits"] == rows.gradient_bytes["bucketed"]
    # Half the bytes, besides the two flags by which ranks raise together, at the end of backward and before the step.
    flags = 2 * 4
    assert rows.wire_bytes_per_step["sixteen_bits"] - flags == (rows.wire_bytes_per_step["bucketed"] - flags) / 2
    sent = comparison.records.collectives.query("run == 'sixteen_bits' and step == 2")
    assert set(sent["dtype"]) >= {"bfloat16"}


def test_a_name_of_ours_is_refused():
    with pytest.raises(ValueError, match="a strategy of your own is named 'bucketed', as one of ours"):
        CompareConfig(strategies=("single", Bucketed()), ranks=2)
