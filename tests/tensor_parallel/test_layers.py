"""Each parallel layer equals the full one in float64 to 1e-12: output, gradients of input, weight and bias."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.comm.slices import merge
from shardlab.partition.slices import slices_of
from shardlab.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from tests.comm.test_communicator import Log
from tests.dist import cases

SIZES = (2, 4)
SHAPES = [(5,), (2, 3), (1,), (), (2, 1, 3)]  # before the features
IN, OUT = 8, 12


def full_linear(seed, bias=True):
    return cases.seeded(partial(nn.Linear, IN, OUT, bias), seed).double()


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def merged_gradients(layer, comm):
    slices = slices_of(layer)
    return {
        name: merge(param.grad, slices[name], comm) if name in slices else param.grad
        for name, param in layer.named_parameters()
    }


def run_linear(comm, kind, options, leading, bias):
    layer = kind(full_linear(seed=comm.rank, bias=bias), comm, **options)  # the first rank's weights count
    x = random(*leading, IN, seed=1)
    part = kind is RowParallelLinear and options.get("input_is_parallel", True)
    x = (x.chunk(comm.num_ranks, -1)[comm.rank] if part else x).clone().requires_grad_()
    log = Log()
    with comm.observed_by(log):
        y = layer(x)
        forward = [(str(e.op), e.numel) for e in log.events]
        g = random(*leading, OUT, seed=2)
        y.backward(g if y.shape == g.shape else g.chunk(comm.num_ranks, -1)[comm.rank])
        backward = [(str(e.op), e.numel) for e in log.events][len(forward) :]
    return y.detach(), x.grad, merged_gradients(layer, comm), forward, backward


def run_linears(rank):
    with Mesh({"tensor": torch.distributed.get_world_size()}) as mesh:
        return [run_linear(mesh["tensor"], *KINDS[key][:2], leading, bias) for key, leading, bias in CASES]


def reference(leading, bias):
    layer, x = full_linear(0, bias), random(*leading, IN, seed=1).requires_grad_()
    y = layer(x)
    y.backward(random(*leading, OUT, seed=2))
    return y.detach(), x.grad, {name: param.grad for name, param in layer.named_parameters()}


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


KINDS = {  # class, options, what is sent for six rows forward and backward
    "column": (ColumnParallelLinear, {}, [], [("all_reduce", 6 * IN)]),
    "column gathered": (
        ColumnParallelLinear, {"gather_output": True}, [("all_gather", 6 * OUT)], [("all_reduce", 6 * IN)],
    ),
    "row": (RowParallelLinear, {}, [("all_reduce", 6 * OUT)], []),
    "row of a whole input": (
        RowParallelLinear, {"input_is_parallel": False}, [("all_reduce", 6 * OUT)], [("all_gather", 6 * IN)],
    ),
}  # fmt: skip
CASES = list(product(KINDS, SHAPES, (True, False)))


@pytest.mark.parametrize("num_ranks", SIZES)
def test_linear_equals_the_full_layer_and_sends_what_is_stated(pools, num_ranks):
    """Column: none forward, one all-reduce of the input backward. Row: one of the output forward, none backward."""
    for (key, leading, bias), results in zip(CASES, zip(*pools(num_ranks).run(run_linears), strict=True), strict=True):
        y, dx, gradients = reference(leading, bias)
        whole = key != "column"
        close(torch.cat([r[0] for r in results], -1) if not whole else results[0][0], y)
        close(torch.cat([r[1] for r in results], -1) if key == "row" else results[0][1], dx)
        for found_y, found_dx, found, *sent in results:
            close(found, gradients)
            assert not whole or torch.equal(found_y, results[0][0])
            assert key == "row" or torch.equal(found_dx, results[0][1])
            assert leading != (2, 3) or tuple(sent) == KINDS[key][2:]


def run_on_sequence(rank, regather):
    """A column and a row layer between activations in parts along the sequence, dim 1 of 3."""
    num_ranks = torch.distributed.get_world_size()
    with Mesh({"tensor": num_ranks}) as mesh:
        comm = mesh["tensor"]
        column = ColumnParallelLinear(full_linear(rank), comm, sequence_dim=1, regather=regather)
        row = RowParallelLinear(full_linear_back(rank), comm, sequence_dim=1)
        x = random(2, 2 * num_ranks, IN, seed=1).chunk(num_ranks, 1)[rank].clone().requires_grad_()
        log = Log()
        with comm.observed_by(log):
            y = row(torch.tanh(column(x)))
            y.backward(random(2, 2 * num_ranks, IN, seed=2).chunk(num_ranks, 1)[rank])
        gradients = merged_gradients(nn.ModuleDict({"column": column, "row": row}), comm)
        return y.detach(), x.grad, gradients, [(str(e.op), e.tag, e.numel) for e in log.events]


def full_linear_back(seed):
    return cases.seeded(partial(nn.Linear, OUT, IN), 100 + seed).double()


@pytest.mark.parametrize("num_ranks", SIZES)
def test_parts_of_the_sequence_equal_the_full_layers(pools, num_ranks):
    column, row = full_linear(0), full_linear_back(0)
    x = random(2, 2 * num_ranks, IN, seed=1).requires_grad_()
    y = row(torch.tanh(column(x)))
    y.backward(random(2, 2 * num_ranks, IN, seed=2))
    layers = nn.ModuleDict({"column": column, "row": row})
    plain = {name: param.grad for name, param in layers.named_parameters()}
    numel = 2 * 2 * num_ranks * IN
    for regather, again in ((False, []), (True, [("all_gather", "input of column again", numel)])):
        results = pools(num_ranks).run(run_on_sequence, regather)
        close(torch.cat([r[0] for r in results], 1), y.detach())
        close(torch.cat([r[1] for r in results], 1), x.grad)
        for _, _, gradients, sent in results:
            close(gradients, plain)
            assert sent == [
                ("all_gather", "input of column", numel),
                ("reduce_scatter", "output of row", numel),
                ("all_reduce", "gradient of row.bias", IN),
                ("all_gather", "gradient of output of row", numel),
                *again,
                ("reduce_scatter", "gradient of input of column", numel),
            ]


VOCABULARY, HIDDEN = 12, 6


def run_embeddings(rank, cases):
    num_ranks, found = torch.distributed.get_world_size(), []
    with Mesh({"tensor": num_ranks}) as mesh:
        for options, shape, sequence_dim in cases:
            comm = mesh["tensor"]
            layer = VocabParallelEmbedding(full_embedding(rank, options), comm, sequence_dim=sequence_dim)
            g = random(*shape, HIDDEN, seed=2)
            y = layer(tokens(shape))
            y.backward(g if sequence_dim is None else g.chunk(num_ranks, sequence_dim)[rank])
            found.append((y.detach(), merged_gradients(layer, comm)["weight"]))
    return found


def full_embedding(seed, options):
    return cases.seeded(partial(nn.Embedding, VOCABULARY, HIDDEN, **options), seed).double()


def tokens(shape):
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("num_ranks", SIZES)
def test_embedding_equals_the_full_one(pools, num_ranks):
    places = (((5,), None), ((2, 4), None), ((1,), None), ((2, 4), -2), ((2, 4), 1))
    cases = [(options, *place) for options in ({}, {"padding_idx": 7}) for place in places]
    for (options, shape, dim), *results in zip(cases, *pools(num_ranks).run(run_embeddings, cases), strict=True):
        full = full_embedding(0, options)
        y = full(tokens(shape))
        y.backward(random(*shape, HIDDEN, seed=2))
        assert torch.equal(results[0][0] if dim is None else torch.cat([r[0] for r in results], dim), y.detach())
        for _, gradient in results:
            close(gradient, full.weight.grad)


def run_cross_entropy(rank, cases, loss_of=vocab_parallel_cross_entropy):
    num_ranks, found = torch.distributed.get_world_size(), []
    with Mesh({"tensor": num_ranks}) as mesh:
        for shape, options in cases:
            logits, targets = logits_and_targets(shape)
            part = logits.chunk(num_ranks, -1)[rank].clone().requires_grad_()
            log = Log()
            with mesh.observed_by(log):
                loss = loss_of(part, targets, mesh["tensor"], **options)
                (loss if loss.dim() == 0 else loss.sum()).backward()
            found.append((loss.detach(), part.grad, [(str(e.op), e.numel) for e in log.events]))
    return found


def logits_and_targets(shape):
    targets = tokens(shape)
    targets.view(-1)[0] = 3  # which is what ignore_index ignores in the tests
    return 30 * random(*shape, VOCABULARY, seed=4), targets


@pytest.mark.parametrize("num_ranks", SIZES)
def test_cross_entropy_equals_that_of_gathered_logits(pools, num_ranks):
    ways = product((0.0, 0.3), ("mean", "sum", "none"), (((5,), -100), ((2, 4), 3), ((1,), -100)))
    cases = [
        (shape, {"ignore_index": ignore_index, "label_smoothing": smoothing, "reduction": reduction})
        for smoothing, reduction, (shape, ignore_index) in ways
    ]
    assert_cross_entropies(cases, pools(num_ranks).run(run_cross_entropy, cases))


def assert_cross_entropies(cases, found_by_rank):
    for (shape, options), *results in zip(cases, *found_by_rank, strict=True):
        logits, targets = logits_and_targets(shape)
        logits.requires_grad_()
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)
        loss.sum().backward()
        close(torch.cat([r[1] for r in results], -1), logits.grad)
        sums = 3 if options.get("label_smoothing") else 2
        for found, _, sent in results:
            close(found.flatten(), loss.detach().flatten())
            assert sent == [("all_reduce", targets.numel() + 4), ("all_reduce", sums * targets.numel())]


def whole_logits(rank):
    """What is said of gathered logits, and whether such parts pass as only look like them."""
    with Mesh({"tensor": 2}) as mesh:
        comm = mesh["tensor"]
        logits, targets = logits_and_targets((2, 3))
        with pytest.raises(RuntimeError, match="logits: all ranks were given the same 12 a token") as error:
            vocab_parallel_cross_entropy(logits.float(), targets, comm, ignore_index=3)
        certain = torch.full((2, 3, 12), -200.0).scatter(-1, targets.unsqueeze(-1), 0.0)
        with pytest.raises(RuntimeError, match="logits: all ranks were given the same 12 a token"):
            vocab_parallel_cross_entropy(certain, targets, comm)
        nothing = torch.full((2, 3), -100)
        vocab_parallel_cross_entropy(logits, nothing, comm)
        vocab_parallel_cross_entropy(torch.zeros(0, 6), targets[:0, 0], comm)
        vocab_parallel_cross_entropy(torch.zeros(2, 3, 6), targets % 6, comm)  # a head of zeros
        repeated = torch.tensor([0.0, 1.0, 2.0])  # on all ranks, but the second of them has the target
        return str(error.value), vocab_parallel_cross_entropy(repeated, torch.tensor(4), comm)


def test_gathered_logits_are_refused(pools):
    expected = nn.functional.cross_entropy(torch.tensor([0.0, 1.0, 2.0] * 2), torch.tensor(4))
    for message, loss in pools(2).run(whole_logits):
        assert "gather_logits=False" in message
        torch.testing.assert_close(loss, expected)


def nearly_alike(rank):
    """Losses that differ by less than the sums of their exponentials show, with all targets in the first part."""
    x = random(16, 64, seed=5).float()
    targets = torch.randint(32, 128, (16,), generator=torch.Generator().manual_seed(6))
    head = torch.zeros(256, 64, requires_grad=True)
    nn.functional.cross_entropy(x @ head.T, targets).backward()
    small_step = x @ (-1e-6 * head.grad).T
    masked, invalid, padded = small_step.clone(), small_step.clone(), torch.zeros_like(small_step)
    masked[:, [0, 128]] = -torch.inf
    invalid[3, 200] = torch.nan
    padded[:, -3:] = -torch.inf
    return losses_of([(logits.chunk(2, -1), targets) for logits in (small_step, masked, invalid, padded)])


def rearranged(rank):
    """Parts that have the same values in other places, with all targets in the first part."""
    cases = []
    for dtype in (torch.float32, torch.float64):
        drawn, two_valued = random(2, 4, seed=7).to(dtype), torch.tensor([0, 1, 1, 0], dtype=dtype)
        for part, dim in ((drawn, -1), (drawn, 0), (torch.stack([two_valued, 1 - two_valued]), 0)):
            cases.append(([part, part.flip(dim), part.flip(dim)], torch.tensor([0, 3])))
    return losses_of(cases)


def losses_of(cases):
    """Of each case: the loss of the parts, that of all together, and whether the gradient is finite where that is."""
    found = []
    with Mesh({"tensor": len(cases[0][0])}) as mesh:
        for parts, targets in cases:
            part = parts[mesh["tensor"].rank].clone().requires_grad_()
            loss = vocab_parallel_cross_entropy(part, targets, mesh["tensor"])
            loss.backward()
            expected = nn.functional.cross_entropy(torch.cat(list(parts), -1), targets)
            found.append((loss.detach(), expected, bool(part.grad.isfinite().all()) or bool(expected.isnan())))
    return found


@pytest.mark.parametrize(("num_ranks", "parts"), [(2, nearly_alike), (3, rearranged)])
def test_parts_that_look_alike_are_not_taken_for_gathered_logits(pools, num_ranks, parts):
    for losses in pools(num_ranks).run(parts):
        for loss, expected, is_finite in losses:
            torch.testing.assert_close(loss, expected, equal_nan=True)
            assert is_finite


def half(rank):
    with Mesh({"tensor": 2}) as mesh:
        logits, targets = logits_and_targets((4,))
        part = logits.bfloat16().chunk(2, -1)[rank].requires_grad_()
        loss = vocab_parallel_cross_entropy(part, targets, mesh["tensor"])
        loss.backward()
        return loss.detach(), part.grad.dtype


def test_half_precision_logits_are_raised(pools):
    logits, targets = logits_and_targets((4,))
    expected = nn.functional.cross_entropy(logits.bfloat16().float(), targets)
    for loss, gradient_dtype in pools(2).run(half):
        assert loss.dtype == torch.float32
        assert gradient_dtype == torch.bfloat16
        torch.testing.assert_close(loss, expected)


def refused(rank):
    """What is said of each bad call, beside what is to be said."""
    with Mesh({"tensor": 4}) as mesh:
        comm = mesh["tensor"]
        column = ColumnParallelLinear(nn.Linear(8, 8), comm, name="up")
        row = RowParallelLinear(nn.Linear(8, 8), comm, name="down")
        whole_row = RowParallelLinear(nn.Linear(8, 8), comm, input_is_parallel=False, name="down")
        embedding = VocabParallelEmbedding(nn.Embedding(8, 2), comm)
        loss = partial(vocab_parallel_cross_entropy, torch.zeros(3, 2), comm=comm)
        attempts = {
            "up: out_features: 6 does not divide over 4 tensor-parallel ranks; use 4 or 8, or 3 ranks": (
                lambda: ColumnParallelLinear(nn.Linear(8, 6), comm, name="up")
            ),
            "down: in_features: 7 does not divide": lambda: RowParallelLinear(nn.Linear(7, 8), comm, name="down"),
            "embedding: num_embeddings: 11 does not divide over 4 tensor-parallel ranks; use 8 or 12": (
                lambda: VocabParallelEmbedding(nn.Embedding(11, 2), comm)
            ),
            "max_norm": lambda: VocabParallelEmbedding(nn.Embedding(8, 2, max_norm=1.0), comm),
            "does not divide over 4": lambda: ColumnParallelLinear(nn.Linear(8, 8), comm, parts=(4, 2)),
            "gather_output would mix the parts": (
                lambda: ColumnParallelLinear(nn.Linear(8, 8), comm, parts=(4, 4), gather_output=True)
            ),
            "regather is for an input in parts": lambda: ColumnParallelLinear(nn.Linear(8, 8), comm, regather=True),
            "on the meta device": lambda: ColumnParallelLinear(nn.Linear(8, 8, device="meta"), comm),
            "up: the input has 2 input features; 8 are needed: this is one of 4 parts; use gather_output=True": (
                lambda: column(torch.zeros(3, 2))
            ),
            "down: the input has 8 input features; 2 are needed: this is the whole of it; use input_is": (
                lambda: row(torch.zeros(3, 8))
            ),
            "down: the input has 2 input features; 8 are needed: this is one of": lambda: whole_row(torch.zeros(3, 2)),
            "up: the input has 5 input features; 8 are needed": lambda: column(torch.zeros(3, 5)),
            "out of range": lambda: embedding(torch.tensor([8])),
            "index out of range": lambda: embedding(torch.tensor([-1])),
            "targets: shape ": lambda: loss(torch.zeros(2, dtype=torch.int64)),
            "reduction: 'max' is not one of mean, sum, none": lambda: loss(torch.tensor([1, 2, 3]), reduction="max"),
            "out of bounds": lambda: loss(torch.tensor([1, 2, 8])),
            "is out of bounds": lambda: loss(torch.tensor([1, 2, -1])),
        }
        return [(said(attempt), words) for words, attempt in attempts.items()]


def said(attempt):
    with pytest.raises((ValueError, IndexError, RuntimeError)) as error:
        attempt()
    return str(error.value)


def test_bad_input_is_refused_on_every_rank(pools):
    for messages in pools(4).run(refused):
        for message, words in messages:
            assert words in message
