"""What users do between the planned moments of a step: evaluation, plain backwards, errors. Each equals one process.

Legend: R ranks, two rows each; the reference is plain torch on the rows of all ranks.
"""

import contextlib
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.launch import RankError
from shardlab.vocabulary import Collective
from tests.comm.test_communicator import Log
from tests.dist.every_engine import told_of
from tests.dist.nasty import Block

FSDP = {
    "full_shard": ("fsdp", {}),
    "full_shard-dim0": ("fsdp", {"layout": "dim0", "prefetch": 2}),
    "shard_grad_op": ("fsdp", {"sharding": "shard_grad_op"}),
    "no_shard": ("fsdp", {"sharding": "no_shard"}),
    "hybrid_shard": ("fsdp", {"sharding": "hybrid_shard"}),
    "small-replicated": ("fsdp", {"replicate_below": 20}),
}
BUCKETS = {name: (name, {"bucket_bytes": 256}) for name in ("bucketed", "zero1", "zero2")}
SETUPS = {"ddp": ("ddp", {}), **BUCKETS, "zero3": ("zero3", {"bucket_bytes": 256}), **FSDP}


class Deep(nn.Module):
    """Blocks, of which a forward may use fewer."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.leave = nn.Linear(8, 5)

    def forward(self, x, depth=None, **_):
        x = self.enter(x)
        for block in list(self.blocks)[:depth]:
            x = block(x)
        return self.leave(x)


def build(kind=Deep, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind().double()


def rows(number, num_ranks):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2 * num_ranks, 7, generator=generator, dtype=torch.float64)


def loss_of(output):
    return output.square().mean()


def sgd(tensors):
    return torch.optim.SGD(tensors, lr=0.1, momentum=0.9)


class Alone:
    """One process behind the names of an engine."""

    def __init__(self, model, num_ranks, setup):
        self.module, self.num_ranks, self.optimizer = model, num_ranks, sgd(list(model.parameters()))
        self.no_sync = contextlib.nullcontext
        self.step, self.zero_grad = self.optimizer.step, self.optimizer.zero_grad

    def rows(self, number):
        return rows(number, self.num_ranks)

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss):
        loss.backward()

    def state(self):
        return {name: value.clone() for name, value in self.module.state_dict().items()}


class OnRank:
    """An engine with the rows of its rank."""

    def __init__(self, engine, rank):
        self.engine, self.rank = engine, rank
        self.module, self.backward, self.step, self.zero_grad = (
            engine.module,
            engine.backward,
            engine.step,
            engine.zero_grad,
        )
        self.no_sync, self.state = engine.no_sync, engine.full_state_dict

    def rows(self, number):
        return rows(number, self.engine.num_data_ranks)[2 * self.rank : 2 * self.rank + 2]

    def __call__(self, *args, **kwargs):
        return self.engine(*args, **kwargs)


def axes_of(setup, num_ranks):
    return {"replica": 2, "shard": num_ranks // 2} if setup == "hybrid_shard" else {"data": num_ranks}


def on_rank(rank, setup, num_ranks, story, kind):
    strategy, options = SETUPS[setup]
    with (
        Mesh(axes_of(setup, num_ranks)) as mesh,
        build_engine(strategy, build(kind, rank), sgd, mesh, **options) as engine,
    ):
        told = OnRank(engine, rank)
        outputs = story(told)
        return outputs, told.state()


def assert_story_equals_one_process(pools, setup, num_ranks, story, kind=Deep):
    """``story(trainer)`` returns outputs by step: [rows, ...] each."""
    if setup == "hybrid_shard" and num_ranks % 2:
        pytest.skip("two replicas need an even number of ranks")
    alone = Alone(build(kind), num_ranks, setup)
    expected = story(alone)
    for rank, (outputs, state) in enumerate(pools(num_ranks).run(on_rank, setup, num_ranks, story, kind)):
        assert len(outputs) == len(expected)
        for number, (output, whole) in enumerate(zip(outputs, expected, strict=True)):
            own = whole[2 * rank : 2 * rank + 2]
            torch.testing.assert_close(output, own, atol=1e-10, rtol=0, msg=lambda m: f"output {number}: {m}")  # noqa: B023
        for name, value in alone.state().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0, msg=lambda m: f"{name}: {m}")  # noqa: B023


EVERY_SETUP = pytest.mark.parametrize("setup", SETUPS)
RANKS = pytest.mark.parametrize("num_ranks", [2, 3, 4])
# Where a fourth rank adds nothing but time: an even and an odd number. Parity and the first stories have it.
FEW_RANKS = pytest.mark.parametrize("num_ranks", [2, 3])


def evaluate_before_step(trainer):
    """Evaluation, an early exit and a forward that no backward follows, between backward and step."""
    outputs = []
    for step in range(3):
        trainer.backward(loss_of(trainer(trainer.rows(step))))
        with torch.no_grad():
            outputs.append(trainer(trainer.rows(10 + step)))
            outputs.append(trainer(trainer.rows(10 + step), depth=1))
        trainer(trainer.rows(20 + step), depth=2)
        trainer.step()
        trainer.zero_grad()
        with torch.no_grad():
            outputs.append(trainer(trainer.rows(30 + step)))
    return outputs


def change_depth(trainer):
    """Forwards of other depths, also before the backward of an earlier one."""
    for step, depth in enumerate([3, 1, 2, 0, 3]):
        loss = loss_of(trainer(trainer.rows(step), depth=depth))
        with torch.no_grad():
            trainer(trainer.rows(step), depth=3 - depth)
        trainer.backward(loss)
        trainer.step()
        trainer.zero_grad()
    return []


def unused_in_no_sync(trainer):
    """A block that the first micro-batch leaves out and the last uses, and the other way round."""
    for step in range(2):
        with trainer.no_sync():
            trainer.backward(loss_of(trainer(trainer.rows(step), depth=1 + step)))
        trainer.backward(loss_of(trainer(trainer.rows(step), depth=3 - step)))
        trainer.step()
        trainer.zero_grad()
    return []


def thaw_between_steps(trainer):
    """Frozen, thawed and frozen again, in every moment of a step."""
    block = trainer.module.blocks[1]
    for step in range(4):
        block.requires_grad_(step % 2 == 1)
        loss = loss_of(trainer(trainer.rows(step)))
        trainer.backward(loss)
        if step == 1:
            block.requires_grad_(False)  # its gradient is there, and is stepped
        trainer.step()
        trainer.zero_grad()
    block.requires_grad_(True)
    return []


def freeze_between_micro_batches(trainer):
    """What has accumulated a gradient is stepped, though it is frozen when the gradients are reduced."""
    with trainer.no_sync():
        trainer.backward(loss_of(trainer(trainer.rows(0))))
    trainer.module.blocks[0].requires_grad_(False)
    trainer.module.leave.requires_grad_(False)
    trainer.backward(loss_of(trainer(trainer.rows(1))))
    trainer.step()
    trainer.zero_grad()
    return []


def freeze_between_forward_and_backward(trainer):
    """Autograd calls the hooks of what was frozen meanwhile, and accumulates nothing."""
    for step, names in enumerate((["blocks.1"], ["leave", "enter"], [])):
        loss = loss_of(trainer(trainer.rows(step)))
        for name in names:
            trainer.module.get_submodule(name).requires_grad_(False)
        trainer.backward(loss)
        trainer.step()
        trainer.zero_grad()
        trainer.module.requires_grad_(True)
    return []


def plain_backwards(trainer):
    """``loss.backward()`` of two forwards, of their sum, and one more before ``zero_grad()``."""
    first, second = loss_of(trainer(trainer.rows(0))), loss_of(trainer(trainer.rows(1), depth=2))
    first.backward()
    second.backward()
    trainer.step()
    (loss_of(trainer(trainer.rows(2))) + loss_of(trainer(trainer.rows(3), depth=1))).backward()
    trainer.step()
    trainer.zero_grad()
    loss_of(trainer(trainer.rows(4))).backward()
    trainer.zero_grad()
    loss_of(trainer(trainer.rows(5))).backward()
    trainer.step()
    return []


def freeze_between_forwards_of_one_backward(trainer):
    """The first gradient may then come from a backward inside the plain one."""
    for step in range(2):
        first = loss_of(trainer(trainer.rows(2 * step)))
        trainer.module.enter.requires_grad_(False)
        (first + loss_of(trainer(trainer.rows(2 * step + 1).requires_grad_()))).backward()
        trainer.step()
        trainer.zero_grad()
        trainer.module.requires_grad_(True)
    return []


def penalise_the_gradient(trainer):
    """``torch.autograd.grad`` passes through the module and leaves no gradients in it."""
    x = trainer.rows(0).requires_grad_()
    output = trainer(x)
    torch.autograd.grad(output.square().sum(), x, retain_graph=True)
    with torch.no_grad():
        evaluated = trainer(trainer.rows(1))
    trainer.backward(loss_of(output))
    trainer.step()
    return [evaluated]


@EVERY_SETUP
@RANKS
def test_interleaved_stories_equal_one_process(pools, setup, num_ranks):
    for story in (
        evaluate_before_step,
        change_depth,
        unused_in_no_sync,
        thaw_between_steps,
        freeze_between_micro_batches,
        freeze_between_forward_and_backward,
        plain_backwards,
        penalise_the_gradient,
    ):
        assert_story_equals_one_process(pools, setup, num_ranks, story)


class CheckpointedBlock(Block):
    """Reentrant checkpointing of a part of it, and of the same part once more."""

    def forward(self, x):
        for _ in range(2):
            x = x + checkpoint(self.inner, torch.tanh(x), use_reentrant=True)
        return x


class Reentrant(Deep):
    """Such blocks, one of them used twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([CheckpointedBlock() for _ in range(3)])

    def forward(self, x, depth=None, **_):
        x = self.enter(x)
        for block in [*list(self.blocks)[:depth], self.blocks[0]]:
            x = block(x)
        return self.leave(x)


def two_forwards_one_backward(trainer):
    for step in range(2):
        losses = [loss_of(trainer(trainer.rows(2 * step + number))) for number in range(2)]
        trainer.backward(sum(losses))
        trainer.step()
        trainer.zero_grad()
    return []


@EVERY_SETUP
@FEW_RANKS
def test_gradients_that_come_in_parts_from_reentrant_checkpointing_add_up(pools, setup, num_ranks):
    for story in (two_forwards_one_backward, plain_backwards, freeze_between_forwards_of_one_backward):
        assert_story_equals_one_process(pools, setup, num_ranks, story, Reentrant)


class TiedReentrant(Deep):
    """A weight that belongs to the root, and that reentrant checkpointing inside one of the blocks uses too."""

    checkpointed = -1

    def __init__(self) -> None:
        super().__init__()
        self.enter.requires_grad_(False)
        self.blocks[self.checkpointed] = CheckpointedBlock()
        for block in self.blocks:
            block.inner.weight = self.blocks[0].inner.weight


@EVERY_SETUP
@FEW_RANKS
def test_a_unit_whose_gradients_come_in_parts_stays_for_all_of_them(pools, setup, num_ranks):
    assert_story_equals_one_process(pools, setup, num_ranks, two_forwards_one_backward, TiedReentrant)


class TiedReentrantFirst(TiedReentrant):
    """All gradients of the root have come before the block is computed again."""

    checkpointed = 1

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Block()  # with a weight of its own


@EVERY_SETUP
@FEW_RANKS
def test_a_unit_that_is_partly_frozen_stays_to_be_computed_again(pools, setup, num_ranks):
    assert_story_equals_one_process(pools, setup, num_ranks, two_forwards_one_backward, TiedReentrantFirst)


def released(rank, sharding):
    """Nothing is frozen, and the root has the tied weight alone, whose first part is there before the recomputation."""

    def wrap(name, module):
        return isinstance(module, Block | CheckpointedBlock) or name in ("enter", "leave")

    model = build(TiedReentrantFirst)
    model.requires_grad_(True)
    with Mesh({"data": 2}) as mesh, build_engine("fsdp", model, sgd, mesh, sharding=sharding, wrap=wrap) as engine:
        own = slice(2 * rank, 2 * rank + 2)
        with pytest.raises(RuntimeError, match=r"inner\.weight' is sharded: .*use_reentrant=False"):
            engine.backward(loss_of(engine(rows(0, 2)[own])))
        engine.zero_grad()
        with torch.no_grad():
            engine(rows(1, 2)[own])


@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_unit_that_is_computed_again_when_it_has_been_let_go_is_refused(pools, sharding):
    pools(2).run(released, sharding)


class InsideAndOutside(Deep):
    """A weight inside reentrant checkpointing and, later in forward, outside of it."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)

    def forward(self, x, depth=None, **_):
        x = self.enter(x)
        inner = self.blocks[0].inner
        return self.leave(inner(checkpoint(inner, torch.tanh(x), use_reentrant=True)))


def refused(rank, setup):
    strategy, options = SETUPS[setup]
    with Mesh({"data": 2}) as mesh, build_engine(strategy, build(InsideAndOutside), sgd, mesh, **options) as engine:
        loss = loss_of(engine(rows(0, 2)[2 * rank : 2 * rank + 2]))
        with pytest.raises(RuntimeError, match=r"gradient of .*: it comes in parts.*use_reentrant=False"):
            engine.backward(loss)
        engine.zero_grad()
        engine.backward(loss_of(engine.module.enter(rows(0, 2)[2 * rank : 2 * rank + 2])))
        engine.step()


@pytest.mark.parametrize("setup", BUCKETS)
def test_a_part_of_a_gradient_that_comes_after_the_rest_was_sent_is_refused(pools, setup):
    pools(2).run(refused, setup)


def gathers(rank, num_ranks):
    log = Log()
    with Mesh({"data": num_ranks}) as mesh, build_engine("fsdp", build(), sgd, mesh) as engine:
        found = []
        for step in range(3):
            with mesh.observed_by(log):
                engine.backward(loss_of(engine(rows(step, num_ranks)[2 * rank : 2 * rank + 2])))
            found.append(Counter(event.op for event in log.events))
            log.events.clear()
            engine.step()
            engine.zero_grad()
            with torch.no_grad():
                for depth in (3, 1, 2):
                    engine(rows(step, num_ranks)[:2], depth=depth)
        return [counts[Collective.ALL_GATHER] for counts in found]


def test_evaluations_leave_the_gathers_of_a_training_step_as_they_are(pools):
    for counts in pools(2).run(gathers, 2):
        assert len(set(counts)) == 1


class Branches(nn.Module):
    """Blocks of one size, each a unit; a rank uses the one it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 8)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x, order):
        x = self.enter(x)
        for number in order:
            x = self.blocks[number](x)
        return x


ORDERS = [(0, 1), (1, 0), (2,), (0, 2, 1)]


def other_units(rank, num_ranks, sharding, transport):
    with Mesh({"data": num_ranks}, transport=transport) as mesh:
        engine = build_engine("fsdp", build(Branches), sgd, mesh, sharding=sharding)
        for step in range(3):
            x = rows(step, num_ranks)[2 * rank : 2 * rank + 2]
            engine.backward(loss_of(engine(x, ORDERS[(rank + step) % len(ORDERS)])))
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


@FEW_RANKS
def test_replicated_units_may_be_other_ones_on_each_rank(pools, num_ranks):
    model = build(Branches)
    optimizer = sgd(list(model.parameters()))
    for step in range(3):
        for rank in range(num_ranks):
            x = rows(step, num_ranks)[2 * rank : 2 * rank + 2]
            (loss_of(model(x, ORDERS[(rank + step) % len(ORDERS)])) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in pools(num_ranks).run(other_units, num_ranks, "no_shard", None):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op"])
def test_ranks_that_gather_other_units_of_one_size_are_told(pools, sharding):
    with pytest.raises(RankError, match=r"parameters of blocks\.\d.* meets .*parameters of blocks\.\d") as caught:
        pools(3).run(other_units, 3, sharding, "shared_memory")
    assert str(caught.value).count("make one unit of the module that chooses: wrap='root'") == 1


def other_order(rank, transport):
    """Units that both ranks gather, ahead of time, and use in different orders."""
    with Mesh({"data": 2}, transport=transport) as mesh:
        engine = build_engine("fsdp", build(Branches), sgd, mesh, sharding="shard_grad_op", prefetch=3)
        engine.backward(loss_of(engine(rows(0, 2)[2 * rank : 2 * rank + 2], ORDERS[rank])))
        engine.step()
        return engine.full_state_dict()


def test_units_that_are_gathered_alike_may_be_used_in_another_order(pools):
    model = build(Branches)
    for rank in range(2):
        (loss_of(model(rows(0, 2)[2 * rank : 2 * rank + 2], ORDERS[rank])) / 2).backward()
    sgd(list(model.parameters())).step()
    for transport in ("shared_memory", "gloo"):
        for state in pools(2).run(other_order, transport):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("in backward")


class FailsSomewhere(Deep):
    """A backward that stops below the given block, where one is given."""

    def forward(self, x, fail_at=None, **_):
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == fail_at:
                x = Fails.apply(x)
        return self.leave(x)


def fail_and_go_on(rank, setup, num_ranks, plain, everywhere):
    strategy, options = SETUPS[setup]
    with (
        Mesh({"data": num_ranks}) as mesh,
        build_engine(strategy, build(FailsSomewhere), sgd, mesh, **options) as engine,
    ):
        x = rows(0, num_ranks)[2 * rank : 2 * rank + 2]
        loss = loss_of(engine(x, fail_at=rank % 3 if everywhere or rank == 0 else None))
        # Where one rank's alone has raised, the others learn of it in the same backward.
        failing = ArithmeticError if everywhere or rank == 0 else RuntimeError
        with pytest.raises(failing, match="" if failing is ArithmeticError else told_of(0)):
            loss.backward() if plain else engine.backward(loss)
        if everywhere:
            with pytest.raises(RuntimeError, match=r"call engine\.zero_grad\(\)"):
                engine.step()
        engine.zero_grad()
        engine.backward(loss_of(engine(x)))
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("setup", ["ddp", *BUCKETS, "zero3"])
@FEW_RANKS
def test_a_backward_that_raises_at_another_place_on_each_rank_is_forgotten(pools, num_ranks, setup, plain):
    model = build(FailsSomewhere)
    optimizer = sgd(list(model.parameters()))
    loss_of(model(rows(0, num_ranks))).backward()
    optimizer.step()
    for everywhere in (True, False):
        for state in pools(num_ranks).run(fail_and_go_on, setup, num_ranks, plain, everywhere):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def fail_quietly_and_go_on(rank, setup, num_ranks, plain, everywhere, leave_first):
    strategy, options = SETUPS[setup]
    with (
        Mesh({"data": num_ranks}) as mesh,
        build_engine(strategy, build(FailsSomewhere), sgd, mesh, **options) as engine,
    ):
        x = rows(0, num_ranks)[2 * rank : 2 * rank + 2]
        failing = pytest.raises(ArithmeticError) if everywhere or rank == 0 else contextlib.nullcontext()
        outside, inside = (failing, contextlib.nullcontext()) if leave_first else (contextlib.nullcontext(), failing)
        with outside, engine.no_sync(), inside:
            loss = loss_of(engine(x, fail_at=1 if everywhere or rank == 0 else None))
            loss.backward() if plain else engine.backward(loss)
        engine.zero_grad()
        engine.backward(loss_of(engine(x)))
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("setup", ["ddp", *BUCKETS, "zero3"])
@FEW_RANKS
def test_a_backward_that_raises_inside_no_sync_has_nothing_to_complete(pools, num_ranks, setup, plain):
    model = build(FailsSomewhere)
    optimizer = sgd(list(model.parameters()))
    loss_of(model(rows(0, num_ranks))).backward()
    optimizer.step()
    for everywhere, leave_first in ((True, True), (False, True), (False, False)):
        states = pools(num_ranks).run(fail_quietly_and_go_on, setup, num_ranks, plain, everywhere, leave_first)
        for state in states:
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def frozen_after_a_failure(rank, setup, looks):
    """Means are there, a backward raises, parameters are looked at, one is frozen, and gradients are cleared."""
    strategy, options = SETUPS[setup]
    with Mesh({"data": 2}) as mesh, build_engine(strategy, build(FailsSomewhere), sgd, mesh, **options) as engine:
        x = rows(0, 2)[2 * rank : 2 * rank + 2]
        engine.backward(loss_of(engine(x)))
        engine.step()
        with pytest.raises(ArithmeticError):
            engine.backward(loss_of(engine(x, fail_at=1)))
        if looks == "evaluation":
            with torch.no_grad():
                engine(x)
        else:
            with engine.full_params():
                pass
        engine.module.blocks[0].requires_grad_(False)
        engine.zero_grad()
        engine.module.blocks[0].requires_grad_(True)
        engine.backward(loss_of(engine(x)))
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("looks", ["evaluation", "full_params"])
@pytest.mark.parametrize("setup", ["bucketed", "zero1", "zero2", "zero3", "full_shard", "shard_grad_op"])
def test_what_is_frozen_after_a_backward_that_raised_is_cleared_too(pools, setup, looks):
    model = build(FailsSomewhere)
    optimizer = sgd(list(model.parameters()))
    for _ in range(2):
        loss_of(model(rows(0, 2))).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in pools(2).run(frozen_after_a_failure, setup, looks):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def turned_while_others_send(rank, setup, trained, tries_again):
    """Rank 0's backward raises; all ranks freeze or thaw a block; what rank 1 has for it, and the end."""
    strategy, options = SETUPS[setup]
    model = build(FailsSomewhere)
    model.blocks[0].requires_grad_(trained)
    with Mesh({"data": 2}) as mesh, build_engine(strategy, model, sgd, mesh, **options) as engine:
        x = rows(0, 2)[2 * rank : 2 * rank + 2]
        loss = loss_of(engine(x, fail_at=1 if rank == 0 else None))
        with pytest.raises(ArithmeticError) if rank == 0 else pytest.raises(RuntimeError, match=told_of(0)):
            engine.backward(loss)
        gradients = [piece.grad for piece in engine.step_tensors().where(lambda name: name.startswith("blocks.0"))]
        engine.module.blocks[0].requires_grad_(not trained)
        if rank == 0 and tries_again:
            with pytest.raises(RuntimeError, match="the last backward raised an exception"):
                engine.backward(loss_of(engine(x)))
        engine.zero_grad()
        engine.backward(loss_of(engine(x)))
        engine.step()
        return [bool(gradient.isnan().any()) for gradient in gradients if gradient is not None], engine.full_state_dict()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("setup", ["ddp", "bucketed", "zero1", "zero2", "zero3", "shard_grad_op", "no_shard"])
def test_what_a_failed_backward_owes_is_that_of_its_beginning(pools, setup, trained):
    """A schedule may freeze or thaw before it clears gradients; the other ranks have sent what trained before."""
    model = build(FailsSomewhere)
    model.blocks[0].requires_grad_(not trained)
    optimizer = sgd(list(model.parameters()))
    loss_of(model(rows(0, 2))).backward()
    optimizer.step()
    (_, first), (are_nan, second) = pools(2).run(turned_while_others_send, setup, trained, setup in ("ddp", "zero2"))
    assert all(are_nan)
    assert any(are_nan) is trained
    for state in (first, second):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


def frozen_and_thawed(rank, setup):
    """What the module says of a weight that is frozen and thawed at rest and inside full_params(), by turns."""
    strategy, options = SETUPS[setup]
    model = build()
    kept = model.leave.weight
    with Mesh({"data": 2}) as mesh, build_engine(strategy, model, sgd, mesh, **options) as engine:
        kept.requires_grad_(False)  # by a reference from before the engine
        said = [not engine.module.leave.weight.requires_grad]
        for at_rest, inside in ((False, True), (True, False), (True, False), (False, True)):
            engine.module.leave.weight.requires_grad_(at_rest)
            with engine.full_params() as module:
                said.append(module.leave.weight.requires_grad is at_rest)
                module.leave.weight.requires_grad_(inside)
            said.append(engine.module.leave.weight.requires_grad is inside)
        return said


@pytest.mark.parametrize("setup", ["ddp", "zero3", "full_shard", "shard_grad_op", "no_shard"])
def test_a_parameter_says_whether_it_trains_wherever_that_was_changed(pools, setup):
    for said in pools(2).run(frozen_and_thawed, setup):
        assert said == [True] * 9


def held_over_a_step(rank, num_ranks, strategy, keep_changes):
    with Mesh({"data": num_ranks}) as mesh, build_engine(strategy, build(), sgd, mesh) as engine:
        x = rows(0, num_ranks)[2 * rank : 2 * rank + 2]
        if strategy == "fsdp":
            engine.unshard("blocks.1")
        engine.backward(loss_of(engine(x)))
        with engine.full_params(keep_changes=keep_changes) as model:
            if keep_changes:
                with torch.no_grad():
                    model.leave.bias.add_(1.0)
            engine.step()
            inside = model.leave.bias.detach().clone()
            with torch.no_grad():
                output = engine(x)
        if strategy == "fsdp":
            engine.reshard("blocks.1")
        return output, inside, engine.full_state_dict()


@pytest.mark.parametrize("keep_changes", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
@FEW_RANKS
def test_a_step_reaches_parameters_that_the_user_holds(pools, num_ranks, strategy, keep_changes):
    model = build()
    optimizer = sgd(list(model.parameters()))
    loss_of(model(rows(0, num_ranks))).backward()
    if keep_changes:
        with torch.no_grad():
            model.leave.bias.add_(1.0)
    optimizer.step()
    whole = model(rows(0, num_ranks)).detach()
    results = pools(num_ranks).run(held_over_a_step, num_ranks, strategy, keep_changes)
    for rank, (output, inside, state) in enumerate(results):
        torch.testing.assert_close(output, whole[2 * rank : 2 * rank + 2], atol=1e-10, rtol=0)
        torch.testing.assert_close(inside, model.leave.bias.detach(), atol=1e-10, rtol=0)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0)


class Writes(Deep):
    """Forward writes into a parameter, as some normalisations do."""

    def forward(self, x, depth=None, **_):
        with torch.no_grad():
            self.leave.weight.div_(self.leave.weight.norm())
        return super().forward(x, depth)


def write_in_forward(rank, setup):
    strategy, options = SETUPS[setup]
    with Mesh({"data": 2}) as mesh, build_engine(strategy, build(Writes), sgd, mesh, **options) as engine:
        before = engine.full_state_dict()
        with pytest.raises(RuntimeError, match=r"parameter 'leave\.weight': it was written to.*keep_changes=True"):
            engine(rows(0, 2)[:2])
            engine.full_state_dict()  # shard_grad_op keeps what is gathered until then
        after = engine.full_state_dict()
        return all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("setup", ["zero3", "full_shard", "full_shard-dim0", "shard_grad_op"])
def test_a_write_into_a_gathered_parameter_is_not_lost_without_a_word(pools, setup):
    assert pools(2).run(write_in_forward, setup) == [True, True]


@pytest.mark.parametrize("setup", ["ddp", "bucketed", "zero1", "no_shard"])
@FEW_RANKS
def test_a_write_into_a_whole_parameter_stays(pools, setup, num_ranks):
    assert_story_equals_one_process(pools, setup, num_ranks, evaluate_before_step_alike, Writes)


def evaluate_before_step_alike(trainer):
    """Evaluation and training, without the rows' order mattering to what forward writes."""
    for step in range(2):
        trainer.backward(loss_of(trainer(trainer.rows(step))))
        trainer.step()
        trainer.zero_grad()
        with torch.inference_mode():
            trainer(trainer.rows(10 + step))
    return []


@EVERY_SETUP
@FEW_RANKS
def test_inference_mode_between_steps(pools, setup, num_ranks):
    assert_story_equals_one_process(pools, setup, num_ranks, evaluate_before_step_alike)


class ReturnsItsScale(Deep):
    """Forward returns a parameter itself, as contrastive models do with their temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, depth=None, **_):
        return {"y": super().forward(x, depth), "scale": self.scale, "bias": [self.leave.bias]}


def scaled_outside(trainer):
    """The loss uses what forward has returned."""
    for step in range(3):
        returned = trainer(trainer.rows(step))
        loss = (returned["y"] * returned["scale"].exp() + returned["bias"][0]).square().mean()
        loss.backward() if step == 1 else trainer.backward(loss)
        trainer.step()
        trainer.zero_grad()
    return []


@EVERY_SETUP
@FEW_RANKS
def test_a_parameter_that_forward_returns_can_be_used_in_the_loss(pools, setup, num_ranks):
    assert_story_equals_one_process(pools, setup, num_ranks, scaled_outside, ReturnsItsScale)
