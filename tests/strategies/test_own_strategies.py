"""A strategy of the reader's own: checked on nasty models, compared with ours, refused by name."""

import contextlib
import re
import textwrap
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardlab.comm import Pending, wait_all
from shardlab.comm.mesh import Mesh
from shardlab.engines import DDP, FSDP, Bucketed, Engine, LaidOut, Strategy, ZeRO1, ZeRO3, strategy
from shardlab.experiment import CompareConfig, compare
from shardlab.launch import RankError
from shardlab.testing import check_strategy
from shardlab.testing.nasty_models import MODELS
from shardlab.vocabulary import FLAG


class SixteenBits(Bucketed):
    """As ``Bucketed``, but gradients travel in 16 bits."""

    name = "sixteen_bits"
    rounds = True

    def reduce(self, bucket):
        half = bucket.buffer.to(torch.bfloat16)
        self.comm.all_reduce(half, tag=f"gradients of bucket {bucket.index}").wait()
        bucket.buffer.copy_(half)
        return Pending()


class MissingMean(Bucketed):
    def lay_out(self, given):
        laid_out = super().lay_out(given)
        for bucket in self.buckets:
            bucket.scale = 1.0
        return laid_out


class LeavesOutTheLast(Strategy):
    """Forgets one parameter: its ranks drift apart."""

    def make_means(self):
        for param in list(self.params.values())[:-1]:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            self.comm.all_reduce(param.grad).wait()
            param.grad /= self.num_ranks


class UnusedIsZero(SixteenBits):
    """Steps a parameter that no rank used as one whose gradient is 0."""

    @contextlib.contextmanager
    def stepping(self, *, loads=False):
        for param in self.params.values():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        yield


class LostTail(Bucketed):
    """Reduces all of a bucket but its last element."""

    def reduce(self, bucket):
        return self.comm.all_reduce(bucket.buffer[:-1], tag=f"gradients of bucket {bucket.index}")


class EverySecondBucket(Bucketed):
    def reduce(self, bucket):
        return Pending() if bucket.index % 2 else super().reduce(bucket)


class NormOfItsOwnRank(ZeRO1):
    """Does not say that pieces are spread: the engine takes each rank's norm for the norm of all."""

    def lay_out(self, given):
        return replace(super().lay_out(given), divisions=[])


class WrongOwner(ZeRO1):
    """Trains right, and says that the ranks have each other's pieces."""

    def lay_out(self, given):
        laid_out = super().lay_out(given)
        # Where the pieces are as large: else the sizes would tell.
        alike = [one for one in laid_out.divisions if len(one.layout.names) == 1 and not one.layout.padding_numel]
        divisions = [one._replace(layout=Reversed(one.layout)) if one in alike else one for one in laid_out.divisions]
        return replace(laid_out, divisions=divisions)


class Reversed:
    def __init__(self, layout):
        self._layout = layout

    def __getattr__(self, name):
        return getattr(self._layout, name)

    def pieces(self, rank):
        return self._layout.pieces(self.num_ranks - 1 - rank)

    def chunk(self, rank):
        return self._layout.chunk(self.num_ranks - 1 - rank)


class StaleGather(ZeRO1):
    """Gathers before the optimizer steps."""

    @contextlib.contextmanager
    def stepping(self, *, loads=False):
        wait_all([bucket.gather_stepped() for bucket in self.buckets])
        yield


class FrozenNotBroadcast(ZeRO1):
    """After a step it gathers what trained when it was built, and nothing that is unfrozen later."""

    def lay_out(self, given):
        laid_out = super().lay_out(given)
        self.trains = [bucket for bucket in self.buckets if next(iter(bucket.params.values())).requires_grad]
        return laid_out

    @contextlib.contextmanager
    def stepping(self, *, loads=False):
        yield
        wait_all([bucket.gather_stepped() for bucket in (self.buckets if loads else self.trains)])


class FrozenForEver(Bucketed):
    """Reduces what trains when it is built, and nothing that is unfrozen later."""

    def lay_out(self, given):
        laid_out = super().lay_out(given)
        self.trains = {param for param in self.params.values() if param.requires_grad}
        return laid_out

    def reduce(self, bucket):
        return super().reduce(bucket) if set(bucket.params.values()) <= self.trains else Pending()


class NotWaited(Bucketed):
    def reduce(self, bucket):
        self.comm.all_reduce(bucket.buffer, tag=f"gradients of bucket {bucket.index}")
        return Pending()


class NotWaitedOnItsOwnMesh(Bucketed):
    def lay_out(self, given):
        self.pair = Mesh({"pair": 2}, device=given.device)["pair"]
        return super().lay_out(given)

    def reduce(self, bucket):
        self.pair.all_reduce(bucket.buffer.clone(), tag="a copy")
        return super().reduce(bucket)


class PastAll(Bucketed):
    def reduce(self, bucket):
        torch.distributed.all_reduce(bucket.buffer)
        return Pending()


class Dead(Bucketed):
    """Gives the optimizer nothing: within a large tolerance that would go unseen."""

    def finish(self, bucket):
        """Forget the means."""
        bucket.pending.wait()


class HiddenBucketSize(Bucketed):
    """All in one bucket whatever is asked for, of which the frozen parameters' is the second; it is never reduced."""

    bucket_bytes = property(lambda _: 25 * 2**20, lambda *_: None)

    def reduce(self, bucket):
        return Pending() if bucket.index % 2 else super().reduce(bucket)


class ReducesToNone(Bucketed):
    def reduce(self, bucket):
        self.comm.all_reduce(bucket.buffer, tag="gradients").wait()


class ScattersToNone(ZeRO1):
    def scatter(self, axis, buffer, chunk, bounds, tag):
        axis.reduce_scatter(buffer, chunk, bounds=bounds, tag=tag).wait()


class LaysOutAlone(Strategy):
    def lay_out(self, given):
        return LaidOut(given.params)


class BeginsAlone(Bucketed):
    def __init__(self, every=3):
        self.every = every


class UnitsOfText(Bucketed):
    units = ("blocks.0", "blocks.1")


class SendsOnce(DDP):
    def in_backward(self, *, sends):
        self.begun = getattr(self, "begun", 0) + sends
        return super().in_backward(sends=sends)

    def make_means(self):
        if self.begun == 1:
            super().make_means()

    def drop(self):
        self.begun = 0


class LosesWrites(ZeRO1):
    def full(self, *, keep_changes):
        return super().full(keep_changes=False)


class HoldsNothing(DDP):
    def holdings(self):
        return iter(())


class KeepsMore(Bucketed):
    def lay_out(self, given):
        self.spare = {"one": [torch.zeros(300), torch.zeros(())]}
        return super().lay_out(given)


class LeavesOutABucket(Bucketed):
    def make_buckets(self, given):
        return super().make_buckets(given)[1:]


class StepsAsAGenerator(Bucketed):
    def stepping(self, *, loads=False):
        yield


def test_a_right_strategy_is_equal_and_a_rounded_one_within_its_tolerance():
    assert "equal to one process: 2 models, 5 loops, 2 ranks" in check_strategy(Bucketed, (2,), ("MLP", "Unused"))
    assert "equal to one process" in check_strategy(SixteenBits, (2,), ("MLP",), tolerance=4e-3)


def test_the_example_of_the_docstring_is_right():
    code = strategy.__doc__.split("is:\n\n")[1].split("\n\n(What")[0]
    names = {"Strategy": Strategy, "torch": torch}
    exec(textwrap.dedent(code), names)
    assert "equal to one process" in check_strategy(names["OneMessage"], (2,), ("MLP", "Unused", "FewElements"))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (SixteenBits, r"after step 0, parameter '0.weight' differs from one process by \d"),
        (MissingMean, r"at 2 ranks, model 'MLP', a plain loop, rank 0: after step 0"),
        (LeavesOutTheLast, r"parameter '4.bias' differs"),
        (SendsOnce, "two backwards that send, weights written by hand, rank 0: after step 0, parameter '0.weight'"),
        (LosesWrites, "two backwards that send, weights written by hand, rank 0: after step 0, parameter '0.weight'"),
        (LostTail, r"a plain loop, rank 0: after step 0, parameter '\d.\w+' differs"),
        (EverySecondBucket, r"a plain loop, rank 0: after step 0, parameter '0.weight' differs"),
        (NormOfItsOwnRank, "lets this rank step 56 elements of '0.weight', and its divisions say 112"),
        (WrongOwner, r"saved, loaded .*, rank 0: after step 0, parameter '\S+' of a checkpoint that one of ours loads"),
        (StaleGather, r"a plain loop, rank 0: after step 0, parameter '0.weight' differs"),
        (FrozenNotBroadcast, r"saved, loaded .*, rank 0: after step 2, parameter '\S+' differs"),
        (FrozenForEver, r"saved, loaded .*, rank 0: after step 2, parameter '\S+' differs"),
        (HiddenBucketSize, r"saved, loaded .*, rank 0: after step 2, parameter '\S+' differs"),
        (NotWaited, r"all_reduce 'gradients of bucket 0', sent at .*py:\d+: nobody has waited for it, and nobody can"),
        (NotWaitedOnItsOwnMesh, "never waited for, first the all_reduce 'a copy'"),
        (PastAll, "it sends by torch.distributed itself, which nobody counts"),
        (Dead, "nothing is trained: '0.weight' and all other parameters stay what they were"),
        (ReducesToNone, r"reduce\(\) returned a NoneType; return the Pending"),
        (ScattersToNone, r"scatter\(\) returned a NoneType; return the Pending"),
        (LaysOutAlone, r"'strategy' has no 'num_ranks'; in its own lay_out\(\), call super\(\).lay_out\(given\)"),
        (BeginsAlone, r"'bucketed' has no 'bucket_bytes'; .* in its own __init__\(\), super\(\).__init__\(\)"),
        (UnitsOfText, "units of 'bucketed' has 'blocks.0'; a unit is a unit.Unit"),
        (HoldsNothing, r"holdings\(\): the parameter of '0.weight' is in none"),
        (
            KeepsMore,
            r"holdings\(\): 300 elements that self.spare keeps from step to step are in none, .* yield Holding",
        ),
        (LeavesOutABucket, r"make_buckets\(\) of 'bucketed' leaves out '2.bias'; each parameter is in one bucket"),
        (StepsAsAGenerator, r"stepping\(\) returned a generator; return a context manager"),
        (Strategy, r"nothing travelled over axis 'data', .* as in local SGD, set ranks_differ = True"),
        (type("Not", (Strategy,), {"lay_out": lambda *_: None}), r"lay_out\(\) of 'strategy' must return a LaidOut"),
    ],
)
def test_what_differs_first_is_told(make, told):
    with pytest.raises((AssertionError, RankError), match=told):
        check_strategy(make, (2,), ("MLP",))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_several_buckets(model):
    """As many as it has two parameters, and at least two, whatever the strategy's default."""
    with pytest.raises(AssertionError, match="differs from one process"):
        check_strategy(EverySecondBucket, (2,), (model,))


# Models by turns: the tests of parity train all of them, and these loops, saving and loading above all, two.
UNITS = {
    "fsdp": (FSDP, 2, ("MLP", "Frozen")), "zero3": (ZeRO3, 2, ("SmallGPT", "Unused")),
    "fsdp-root": (lambda: FSDP(wrap="root"), 2, ("Tied",)),
    "fsdp-hybrid": (lambda: FSDP(sharding="hybrid_shard"), 4, ("Uneven",)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNITS)
def test_ours_with_units_are_equal(name):
    make, num_ranks, models = UNITS[name]
    assert f"equal to one process: {len(models)} model" in check_strategy(make, (num_ranks,), models)


def test_two_axes_need_ranks_that_divide():
    with pytest.raises(ValueError, match="ranks: 2 do not divide into the axes replica and shard"):
        check_strategy(lambda: FSDP(sharding="hybrid_shard"))


def test_ranks_that_differ_by_design_are_not_checked():
    with pytest.raises(ValueError, match=r"ranks of 'local' differ by design \(ranks_differ\)"):
        check_strategy(type("Local", (DDP,), {"name": "local", "ranks_differ": True}))


def test_what_no_rank_used_is_left_alone_whatever_the_tolerance():
    with pytest.raises(
        AssertionError, match=r"'spare.weight' has changed, which one .* neither momentum nor weight decay moves it"
    ):
        check_strategy(UnusedIsZero, (2,), ("Unused",), tolerance=0.1)


def test_what_was_given_wrong_is_named():
    with pytest.raises(ValueError, match="make: a strategy was given; give its class DDP"):
        check_strategy(DDP())
    with pytest.raises(ValueError, match="models: 'mlp' is not one of MLP, SmallGPT"):
        check_strategy(DDP, models=("mlp",))
    with pytest.raises(ValueError, match=r"the class SixteenBits was given; give one of it, SixteenBits\(\)"):
        CompareConfig(strategies=("single", SixteenBits))


def test_compare_takes_it_beside_ours(pools, tmp_path):
    small = {"model": "mlp", "text": "grammar", "seq_len": 8, "ranks": 2, "steps": 3}
    config = CompareConfig(strategies=("single", "bucketed", SixteenBits()), **small)
    comparison = compare(config, tmp_path / "run", pool=pools(2))
    rows = comparison.summary.set_index("strategy")
    assert rows.losses_equal["bucketed"]
    assert 0 < rows.max_loss_difference["sixteen_bits"] < 0.1
    assert rows.losses_equal["sixteen_bits"]  # within the rounding that it declares
    assert rows.gradient_bytes["sixteen_bits"] == rows.gradient_bytes["bucketed"]
    # Half the bytes, besides the two flags by which ranks raise together.
    sent = comparison.records.collectives.query("step == 2 and rank == 0 and run == 'bucketed'")
    flags = sent.loc[sent["tag"] == FLAG, "wire_bytes"].sum()
    assert rows.wire_bytes_per_step["sixteen_bits"] - flags == (rows.wire_bytes_per_step["bucketed"] - flags) / 2
    sent = comparison.records.collectives.query("run == 'sixteen_bits' and step == 2")
    assert set(sent["dtype"]) >= {"bfloat16"}


class StepsInBackward(Strategy):
    """Each parameter as soon as its mean is there, and no gradient stays."""

    name = "steps_in_backward"

    def grad_ready(self, param, *, sends):
        self.comm.all_reduce(param.grad, tag="gradient").wait()
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1 / self.num_ranks)
        param.grad = None


def weights_stepped_in_backward(rank):
    model = nn.Linear(3, 1, bias=False)
    with Mesh({"data": 2}) as mesh, Engine(model, torch.optim.SGD, mesh, StepsInBackward()) as engine:
        before = model.weight.detach().clone()
        engine.backward(engine(torch.full((2, 3), 1.0 + rank)).mean())
        engine.step()
        return (before - model.weight.detach()).flatten().tolist()


def test_it_may_step_in_backward(pools):
    assert pools(2).run(weights_stepped_in_backward) == [pytest.approx([0.15] * 3)] * 2


def test_a_name_of_ours_is_refused():
    with pytest.raises(ValueError, match="a strategy of your own is named 'bucketed', as one of ours"):
        CompareConfig(strategies=("single", Bucketed()), ranks=2)


class DropsItsGather(Bucketed):
    """The one of ``reduce`` is waited for; what it sends after the step is not."""

    @contextlib.contextmanager
    def stepping(self, *, loads=False):
        with super().stepping(loads=loads):
            yield
        self.comm.all_gather(torch.zeros(4), tag="stepped pieces")


def _steps_of(rank, make, *, guards):
    """What three steps raise, on this rank."""
    with Mesh({"data": 2}) as mesh:
        engine = Engine(nn.Linear(4, 1), lambda tensors: torch.optim.SGD(tensors, lr=0.1), mesh, make(), guards=guards)
        for _ in range(3):
            try:
                engine.backward(engine(torch.ones(2, 4)).sum())
                engine.step()
            except RuntimeError as error:
                return engine.num_steps, str(error)
            engine.zero_grad()
        return engine.num_steps, ""


@pytest.mark.parametrize(
    ("make", "num_steps", "told"),
    [
        (NotWaited, 0, r"all_reduce 'gradients of bucket 0', sent at \S+py:\d+: nobody has waited for it, .* keep"),
        (DropsItsGather, 1, "all_gather 'stepped pieces', sent at .*: nobody has waited for it"),
        (Bucketed, 3, "^$"),
    ],
)
def test_a_message_that_nobody_can_wait_for_is_refused_on_all_ranks(make, num_steps, told, pools):
    for steps, error in pools(2).run(_steps_of, make, guards=True):
        assert steps == num_steps
        assert re.search(told, error)
    assert pools(2).run(_steps_of, make, guards=False) == [(3, ""), (3, "")]
