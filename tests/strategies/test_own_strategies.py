"""A strategy of the reader's own: checked on nasty models, compared with ours, refused by name."""

import pytest
import torch

from shardlab.comm import Pending
from shardlab.engines import Bucketed, Strategy
from shardlab.experiment import CompareConfig, compare
from shardlab.testing import check_strategy


class SixteenBits(Bucketed):
    """As ``Bucketed``, but gradients travel in 16 bits."""

    name = "sixteen_bits"

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


def test_a_right_strategy_is_equal_and_a_rounded_one_within_its_tolerance():
    assert "equal to one process: 2 models, 3 loops, 2 ranks" in check_strategy(Bucketed, (2,), ("MLP", "Unused"))
    assert "equal to one process" in check_strategy(SixteenBits, (2,), ("MLP",), tolerance=2e-2)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (SixteenBits, r"after step 0, parameter '0.weight' differs from one process by \d"),
        (SumsInsteadOfMeans, r"at 2 ranks, model 'MLP', a plain loop, rank 0: after step 0"),
        (LeavesOutTheLast, r"parameter '4.bias' differs"),
    ],
)
def test_what_differs_first_is_told(make, told):
    with pytest.raises(AssertionError, match=told):
        check_strategy(make, (2,), ("MLP",))


def test_compare_takes_it_beside_ours(tmp_path):
    config = CompareConfig(strategies=("single", "bucketed", SixteenBits()), model="mlp", ranks=2, steps=3)
    comparison = compare(config, tmp_path / "run")
    rows = comparison.summary.set_index("strategy")
    assert rows.losses_equal["bucketed"]
    assert 0 < rows.max_loss_difference["sixteen_bits"] < 0.1
    assert rows.gradient_bytes["sixteen_bits"] == rows.gradient_bytes["bucketed"]
    # Half the bytes, besides the two flags by which ranks raise together, at the end of backward and before the step.
    flags = 2 * 4
    assert rows.wire_bytes_per_step["sixteen_bits"] - flags == (rows.wire_bytes_per_step["bucketed"] - flags) / 2
    sent = comparison.records.collectives.query("run == 'sixteen_bits' and step == 2")
    assert set(sent["dtype"]) >= {"bfloat16"}


def test_a_name_of_ours_is_refused():
    with pytest.raises(ValueError, match="a strategy of your own is named 'bucketed', as one of ours"):
        CompareConfig(strategies=("single", Bucketed()), ranks=2)
