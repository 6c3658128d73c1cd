"""Sequences over ranks against one process, in float64, with the messages of the formulas."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from shardlab.comm import BaseMesh
from shardlab.comm.mesh import Mesh
from shardlab.context import ContextParallel, attention, messages_of, positions_of, share_of_work
from shardlab.engines import HFSDP, HPZ, Bucketed, build_engine
from shardlab.launch import RankError
from shardlab.models import GPT, GPTConfig
from shardlab.models.gpt import next_token_loss

WAYS = [("ulysses", False), ("gathered", False), ("gathered", True), ("ring", False), ("ring", True)]


def config(num_ranks):
    return GPTConfig(
        vocab_size=11, seq_len=4 * num_ranks, num_layers=2, num_heads=2 * num_ranks, num_kv_heads=num_ranks,
        hidden=8 * num_ranks,
    )  # fmt: skip


def gpt(num_ranks):
    torch.manual_seed(0)
    return GPT(config(num_ranks)).double()


def tokens_of(num_ranks, num_data_ranks):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(11, (num_data_ranks, 3, 4 * num_ranks + 1), generator=generator)
    return tokens[..., :-1], tokens[..., 1:]


def sgd(params):
    return torch.optim.SGD(params, 0.5, momentum=0.9)


class Log:
    def __init__(self):
        self.events = []

    def issued(self, event):
        if event.axis == "context":
            self.events.append((event.op, event.numel))

    def started(self, event):
        pass

    completed = waited = started


def trained(_, num_data_ranks, num_ranks, way, zigzag, strategy):
    log = Log()
    rows = {"data": num_data_ranks} if isinstance(strategy, str) else {"replica": num_data_ranks, "shard": 1}
    with Mesh({**rows, "context": num_ranks}) as mesh:
        over = ContextParallel(mesh["context"], way, zigzag=zigzag)
        inputs, targets = (every[mesh[next(iter(rows))].rank] for every in tokens_of(num_ranks, num_data_ranks))
        losses = []
        made = strategy if isinstance(strategy, str) else strategy()
        with build_engine(made, gpt(num_ranks), sgd, mesh) as engine:
            for _ in range(2):
                log.events.clear()
                with over, mesh.observed_by(log):
                    loss = next_token_loss(
                        engine(over.part(inputs), over.positions(inputs.shape[1])), over.part(targets)
                    )
                    engine.backward(loss)
                losses.append(loss.item())
                engine.clip_grad_norm_(0.1)
                engine.step()
                engine.zero_grad()
            return engine.full_state_dict(), losses, log.events


def one_process(num_data_ranks, num_ranks):
    model = gpt(num_ranks)
    optimizer = sgd(model.parameters())
    inputs, targets = (every.flatten(0, 1) for every in tokens_of(num_ranks, num_data_ranks))
    losses = []
    for _ in range(2):
        loss = next_token_loss(model(inputs), targets)
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), losses


# Each way at 3 ranks, which halve nothing, and by turns at 2, at 4 and beside data ranks.
PLACES = [
    *((1, 3, *way) for way in WAYS),
    (1, 2, "ulysses", False), (1, 2, "ring", True), (1, 4, "gathered", True), (1, 4, "ring", False),
    (2, 2, "ulysses", False), (2, 2, "gathered", False), (2, 2, "ring", True),
]  # fmt: skip


@pytest.mark.parametrize(("num_data_ranks", "num_ranks", "way", "zigzag"), PLACES)
def test_equal_to_one_process_with_the_messages_of_the_formulas(pools, num_data_ranks, num_ranks, way, zigzag):
    strategy = "fsdp" if num_data_ranks > 1 else "bucketed"
    wanted, losses = one_process(num_data_ranks, num_ranks)
    answers = pools(num_data_ranks * num_ranks).run(trained, num_data_ranks, num_ranks, way, zigzag, strategy)
    for state, *_ in answers:
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0, msg=name)
    assert torch.tensor([own for _, own, _ in answers]).double().mean(0).tolist() == pytest.approx(losses, abs=1e-6)
    sizes = config(num_ranks)
    plan = messages_of(
        way, num_ranks, batch=3, seq_len=sizes.seq_len, heads=sizes.num_heads, kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
    )  # fmt: skip
    forward = [(str(one.op), one.numel) for one in plan]
    back = [("reduce_scatter" if op == "all_gather" else op, numel) for op, numel in forward]
    received = [("recv", numel) for op, numel in forward + back if op == "send"]
    for *_, events in answers:
        assert sorted((str(op), numel) for op, numel in events) == sorted(2 * (forward + back + received))  # layers


@pytest.mark.parametrize("strategy", [HFSDP, HPZ])
def test_groups_of_ranks_take_other_parts_of_a_sequence_as_other_rows(pools, strategy):
    """The inner axis is then the product of shard and context, and what both axes make together is that of all."""
    wanted, losses = one_process(2, 2)
    for state, own, _ in pools(4).run(trained, 2, 2, "gathered", True, strategy):
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0, msg=name)
        assert len(own) == len(losses)


def test_what_each_way_sends_and_the_work_of_the_busiest_rank():
    sizes = {"batch": 2, "seq_len": 64, "heads": 16, "kv_heads": 4, "head_dim": 8}
    for num_ranks in (2, 4):
        ulysses, gathered, ring = (
            sum(one.num_sent for one in messages_of(way, num_ranks, **sizes)) for way in ("ulysses", "gathered", "ring")
        )
        assert ulysses == (2 * 16 + 2 * 4) * 8 * 2 * 64 // num_ranks * (num_ranks - 1) // num_ranks
        assert gathered == ring == 2 * 4 * 8 * 2 * 64 // num_ranks * (num_ranks - 1)
        assert (ulysses < gathered) == (num_ranks > 16 // 4 + 1)
        assert share_of_work(64, num_ranks, zigzag=True) == 1
        assert share_of_work(4096, num_ranks) == pytest.approx(2 - 1 / num_ranks, rel=1e-3)
    assert positions_of(8, 2, 0, zigzag=True).tolist() == [0, 1, 6, 7]


def gradient_of_recomputed(_, x, way, zigzag, use_reentrant):
    with Mesh({"context": 3}) as mesh, ContextParallel(mesh["context"], way, zigzag=zigzag) as over:
        own = over.part(x, 2).requires_grad_()
        checkpoint(causal, own, use_reentrant=use_reentrant).square().sum().backward()
        return over.positions(x.shape[2]), own.grad


@pytest.mark.parametrize(("way", "zigzag"), WAYS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_computes_attention_again_among_ranks(pools, way, zigzag, use_reentrant):
    x = torch.sin(torch.arange(72, dtype=torch.float64)).view(1, 3, 12, 2).requires_grad_()
    causal(x).square().sum().backward()
    for places, own in pools(3).run(gradient_of_recomputed, x.detach(), way, zigzag, use_reentrant):
        torch.testing.assert_close(own, x.grad[:, :, places], atol=1e-12, rtol=0)


def test_a_backward_behind_the_block_that_would_compute_attention_again_is_refused(pools):
    with pytest.raises(RankError, match="a checkpoint with use_reentrant=True computes attention again in it"):
        pools(2).run(attend, recomputed, {"way": "ring"}, 4)


def recomputed(x):
    return checkpoint(causal, x.requires_grad_(), use_reentrant=True)


def attend(_, model, over, seq_len):
    with Mesh({"context": 2}) as mesh:
        own = ContextParallel(mesh["context"], **over)
        for one in (causal, model):  # what was computed in one block says nothing of the next
            with own:
                one(own.part(torch.ones(1, 2, seq_len, 2), 2))


def causal(x):
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def without_a_mask(x):
    return functional.scaled_dot_product_attention(x, x, x)


def in_windows(x):
    windows = x.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1)
    return functional.scaled_dot_product_attention(windows, windows, windows, is_causal=True)


def without_a_batch(x):
    return functional.scaled_dot_product_attention(x[0], x[0], x[0], is_causal=True)


def after_a_prefix(x):
    keys = torch.cat([x[:, :, :1], x], 2)
    return functional.scaled_dot_product_attention(x, keys, keys, is_causal=True)


def with_longer_values(x):
    return functional.scaled_dot_product_attention(x, x, torch.cat([x, x], -1), is_causal=True)


def by_hand(x):
    return (x @ x.mT).softmax(-1) @ x


def of_a_layer(x):
    return nn.MultiheadAttention(2, 1)(x[0], x[0], x[0])


@pytest.mark.parametrize(
    ("model", "over", "seq_len", "told"),
    [
        (without_a_mask, {"way": "ring"}, 4, "over ranks it is causal, without a mask"),
        (without_a_mask, {"way": "ring", "zigzag": True}, 6, "seq_len: 6 tokens do not divide into 4 pieces"),
        (in_windows, {"way": "ulysses"}, 4, r"attention: of 2 tokens on all ranks, and part\(\) has divided \[4\]"),
        (without_a_batch, {"way": "ulysses"}, 4, r"queries \(2, 2, 2\) and keys .*; over ranks both are \(batch"),
        (after_a_prefix, {"way": "ulysses"}, 4, r"keys \(1, 2, 3, 2\); over ranks both are .*, of the same tokens"),
        (with_longer_values, {"way": "ring"}, 4, r"values \(1, 2, 2, 4\) travel together in a ring.*'gathered'"),
        (by_hand, {"way": "ring"}, 4, "and attention written by hand, would see this rank's part alone"),
        (of_a_layer, {"way": "ring"}, 4, "nn.MultiheadAttention, and attention written by hand, would see"),
        (without_a_mask, {"way": "ulysses", "zigzag": True}, 4, "zigzag: ulysses computes whole sequences"),
    ],
)
def test_what_ranks_would_compute_wrong_is_refused(pools, model, over, seq_len, told):
    with pytest.raises(RankError, match=told):
        pools(2).run(attend, model, over, seq_len)


SIZES = {"batch": 1, "seq_len": 8, "heads": 4, "kv_heads": 2, "head_dim": 2}


@pytest.mark.parametrize(
    ("way", "num_ranks", "sizes", "told"),
    [
        ("ulysses", 4, {}, "kv_heads: 2 are not divided by the 4 ranks; use 'gathered' or 'ring'"),
        ("ulysses", 2, {"heads": 3, "kv_heads": 1}, "heads: 3 are not divided by the 2 ranks"),
        ("ring", 3, {}, "seq_len: 8 tokens do not divide into 3 pieces on 3 ranks; give a multiple of 3"),
        ("gathered", 2, {"kv_heads": 3}, "kv_heads: 3 do not divide the 4 heads"),
        ("star", 2, {}, "way: 'star' is not one of ulysses, gathered, ring"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_ranks_start(way, num_ranks, sizes, told):
    with pytest.raises(ValueError, match=told):
        messages_of(way, num_ranks, **SIZES | sizes)


class Order(TorchFunctionMode):
    """What a ring does, one after another."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.logsumexp:
            self.found.append("compute")
        return func(*args, **(kwargs or {}))

    def issued(self, event):
        if event.op == "send":
            self.found.append("send")

    def waited(self, event):
        if event.op == "recv":
            self.found.append("received")

    def started(self, event):
        pass

    completed = started


def ring(rank):
    with Mesh({"context": 3}) as mesh, Order() as order, mesh.observed_by(order):
        x = torch.ones(1, 2, 2, 2)
        attention("ring", x, x, x, mesh["context"], zigzag=True)
        return order.found


def test_keys_travel_while_a_ring_computes(pools):
    hop = ["send", "compute", "received"]
    assert pools(3).run(ring) == [[*hop, *hop, "compute"]] * 3


def test_a_strategy_that_names_the_axis_of_sequences_is_told_to_leave_it_out():
    own = type("OverBoth", (Bucketed,), {"name": "over_both", "axes": ("data", "context")})()
    with pytest.raises(ValueError, match="axes: leave 'context' out: a mesh that has it"):
        build_engine(own, nn.Linear(2, 2), torch.optim.SGD, BaseMesh({"data": 1, "context": 1}, [0]))
