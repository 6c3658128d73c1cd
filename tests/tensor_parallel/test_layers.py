"""Each parallel layer equals the full one in float64 to 1e-12: output, gradients of input, weight and bias."""

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

SIZES = (2, 4)
SHAPES = {"2-D": (5,), "3-D": (2, 3), "one row": (1,), "vector": (), "4-D": (2, 1, 3)}
IN, OUT = 8, 12


def full_linear(seed, bias=True):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = nn.Linear(IN, OUT, bias=bias).double()
        if bias:
            nn.init.normal_(layer.bias)
    return layer


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def merged_gradients(layer, comm):
    slices = slices_of(layer)
    return {
        name: merge(param.grad, slices[name], comm) if name in slices else param.grad
        for name, param in layer.named_parameters()
    }


def run_linear(rank, kind, leading, options, bias):
    num_ranks = torch.distributed.get_world_size()
    with Mesh({"tensor": num_ranks}) as mesh:
        comm = mesh["tensor"]
        layer = kind(full_linear(seed=rank, bias=bias), comm, **options)  # the first rank's weights count
        x = random(*leading, IN, seed=1)
        part = kind is RowParallelLinear and options.get("input_is_parallel", True)
        x = (x.chunk(num_ranks, -1)[rank] if part else x).clone().requires_grad_()
        log = Log()
        with comm.observed_by(log):
            y = layer(x)
            forward = [(str(e.op), e.numel) for e in log.events]
            g = random(*leading, OUT, seed=2)
            y.backward(g if y.shape == g.shape else g.chunk(num_ranks, -1)[rank])
            backward = [(str(e.op), e.numel) for e in log.events][len(forward) :]
        return y.detach(), x.grad, merged_gradients(layer, comm), forward, backward


def reference(leading, bias):
    layer, x = full_linear(0, bias), random(*leading, IN, seed=1).requires_grad_()
    y = layer(x)
    y.backward(random(*leading, OUT, seed=2))
    return y.detach(), x.grad, {name: param.grad for name, param in layer.named_parameters()}


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


KINDS = {
    "column": (ColumnParallelLinear, {}),
    "column gathered": (ColumnParallelLinear, {"gather_output": True}),
    "row": (RowParallelLinear, {}),
    "row of a whole input": (RowParallelLinear, {"input_is_parallel": False}),
}


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("key", KINDS)
def test_linear_equals_the_full_layer(pools, key, num_ranks):
    kind, options = KINDS[key]
    for leading in SHAPES.values():
        for bias in (True, False):
            y, dx, gradients = reference(leading, bias)
            results = pools(num_ranks).run(run_linear, kind, leading, options, bias)
            whole = key != "column"
            close(torch.cat([r[0] for r in results], -1) if not whole else results[0][0], y)
            close(torch.cat([r[1] for r in results], -1) if key == "row" else results[0][1], dx)
            for found_y, found_dx, found, _, _ in results:
                assert found.keys() == gradients.keys()
                for name, gradient in gradients.items():
                    close(found[name], gradient)
                assert not whole or torch.equal(found_y, results[0][0])
                assert key == "row" or torch.equal(found_dx, results[0][1])


@pytest.mark.parametrize("num_ranks", SIZES)
def test_collectives_of_linear_layers(pools, num_ranks):
    """Column: none forward, one all-reduce of the input backward. Row: one of the output forward, none backward."""
    rows = 6
    expected = {
        "column": ([], [("all_reduce", rows * IN)]),
        "column gathered": ([("all_gather", rows * OUT)], [("all_reduce", rows * IN)]),
        "row": ([("all_reduce", rows * OUT)], []),
        "row of a whole input": ([("all_reduce", rows * OUT)], [("all_gather", rows * IN)]),
    }
    for key, (kind, options) in KINDS.items():
        for *_, forward, backward in pools(num_ranks).run(run_linear, kind, (2, 3), options, True):
            assert (forward, backward) == expected[key]


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
        gradients = {**{f"column.{k}": v for k, v in merged_gradients(column, comm).items()}}
        gradients |= {f"row.{k}": v for k, v in merged_gradients(row, comm).items()}
        return y.detach(), x.grad, gradients, [(str(e.op), e.tag, e.numel) for e in log.events]


def full_linear_back(seed):
    with torch.random.fork_rng():
        torch.manual_seed(100 + seed)
        return nn.Linear(OUT, IN).double()


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("num_ranks", SIZES)
def test_parts_of_the_sequence_equal_the_full_layers(pools, num_ranks, regather):
    column, row = full_linear(0), full_linear_back(0)
    x = random(2, 2 * num_ranks, IN, seed=1).requires_grad_()
    y = row(torch.tanh(column(x)))
    y.backward(random(2, 2 * num_ranks, IN, seed=2))
    plain = {f"column.{k}": p.grad for k, p in column.named_parameters()}
    plain |= {f"row.{k}": p.grad for k, p in row.named_parameters()}
    results = pools(num_ranks).run(run_on_sequence, regather)
    close(torch.cat([r[0] for r in results], 1), y.detach())
    close(torch.cat([r[1] for r in results], 1), x.grad)
    numel = 2 * 2 * num_ranks * IN
    again = [("all_gather", "input of column again", numel)] if regather else []
    for _, _, gradients, sent in results:
        for name, gradient in plain.items():
            close(gradients[name], gradient)
        assert sent == [
            ("all_gather", "input of column", numel),
            ("reduce_scatter", "output of row", numel),
            ("all_reduce", "gradient of row.bias", IN),
            ("all_gather", "gradient of output of row", numel),
            *again,
            ("reduce_scatter", "gradient of input of column", numel),
        ]


VOCABULARY, HIDDEN = 12, 6


def run_embedding(rank, shape, options, sequence_dim):
    num_ranks = torch.distributed.get_world_size()
    with Mesh({"tensor": num_ranks}) as mesh:
        comm = mesh["tensor"]
        layer = VocabParallelEmbedding(full_embedding(rank, options), comm, sequence_dim=sequence_dim)
        g = random(*shape, HIDDEN, seed=2)
        y = layer(tokens(shape))
        y.backward(g if sequence_dim is None else g.chunk(num_ranks, sequence_dim)[rank])
        return y.detach(), merged_gradients(layer, comm)["weight"]


def full_embedding(seed, options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Embedding(VOCABULARY, HIDDEN, **options).double()


def tokens(shape):
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 7}])
def test_embedding_equals_the_full_one(pools, options, num_ranks):
    for shape, dim in (((5,), None), ((2, 4), None), ((1,), None), ((2, 4), -2), ((2, 4), 1)):
        full = full_embedding(0, options)
        y = full(tokens(shape))
        y.backward(random(*shape, HIDDEN, seed=2))
        results = pools(num_ranks).run(run_embedding, shape, options, dim)
        found = results[0][0] if dim is None else torch.cat([r[0] for r in results], dim)
        assert torch.equal(found, y.detach())
        for result in results:
            close(result[1], full.weight.grad)


def run_cross_entropy(rank, shape, options):
    num_ranks = torch.distributed.get_world_size()
    with Mesh({"tensor": num_ranks}) as mesh:
        comm = mesh["tensor"]
        logits, targets = logits_and_targets(shape)
        part = logits.chunk(num_ranks, -1)[rank].clone().requires_grad_()
        log = Log()
        with comm.observed_by(log):
            loss = vocab_parallel_cross_entropy(part, targets, comm, **options)
            (loss if loss.dim() == 0 else loss.sum()).backward()
        return loss.detach(), part.grad, [(str(e.op), e.numel) for e in log.events]


def logits_and_targets(shape):
    targets = tokens(shape)
    targets.view(-1)[0] = 3  # which is what ignore_index ignores in the tests
    return 30 * random(*shape, VOCABULARY, seed=4), targets


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_equals_that_of_gathered_logits(pools, reduction, num_ranks):
    for shape, ignore_index in (((5,), -100), ((2, 4), 3), ((1,), -100)):
        options = {"ignore_index": ignore_index, "reduction": reduction}
        logits, targets = logits_and_targets(shape)
        logits.requires_grad_()
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)
        loss.sum().backward()
        results = pools(num_ranks).run(run_cross_entropy, shape, options)
        close(torch.cat([r[1] for r in results], -1), logits.grad)
        for found, _, sent in results:
            close(found.flatten(), loss.detach().flatten())
            assert sent == [("all_reduce", targets.numel() + 4), ("all_reduce", 2 * targets.numel())]


def whole_logits(rank, num_ranks):
    """What is said of gathered logits, and whether such parts pass as only look like them."""
    with Mesh({"tensor": num_ranks}) as mesh:
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


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gathered_logits_are_refused(pools, num_ranks):
    expected = nn.functional.cross_entropy(torch.tensor([0.0, 1.0, 2.0] * num_ranks), torch.tensor(4))
    for message, loss in pools(num_ranks).run(whole_logits, num_ranks):
        assert "gather_logits=False" in message
        torch.testing.assert_close(loss, expected)


def nearly_alike(rank):
    """Losses of parts that differ by less than the sums of their exponentials show, with all targets in the first."""
    with Mesh({"tensor": 2}) as mesh:
        x = random(16, 64, seed=5).float()
        targets = torch.randint(32, 128, (16,), generator=torch.Generator().manual_seed(6))
        head = torch.zeros(256, 64, requires_grad=True)
        nn.functional.cross_entropy(x @ head.T, targets).backward()
        small_step = x @ (-1e-6 * head.grad).T
        masked = small_step.clone()
        masked[:, [0, 128]] = -torch.inf
        invalid = small_step.clone()
        invalid[3, 200] = torch.nan
        padded = torch.zeros_like(small_step)
        padded[:, -3:] = -torch.inf
        return [
            (
                vocab_parallel_cross_entropy(logits.chunk(2, -1)[rank], targets, mesh["tensor"]),
                nn.functional.cross_entropy(logits, targets),
            )
            for logits in (small_step, masked, invalid, padded)
        ]


def test_parts_that_are_nearly_alike_are_not_taken_for_gathered_logits(pools):
    for losses in pools(2).run(nearly_alike):
        for loss, expected in losses:
            torch.testing.assert_close(loss, expected, equal_nan=True)


def rearranged(rank, num_ranks):
    """Losses of parts that have the same values in other places, with all targets in the first part."""
    with Mesh({"tensor": num_ranks}) as mesh:
        targets, losses = torch.tensor([0, 3]), []
        for dtype in (torch.float32, torch.float64):
            drawn, two_valued = random(2, 4, seed=7).to(dtype), torch.tensor([0, 1, 1, 0], dtype=dtype)
            for part, dim in ((drawn, -1), (drawn, 0), (torch.stack([two_valued, 1 - two_valued]), 0)):
                parts = [part, *[part.flip(dim)] * (num_ranks - 1)]
                loss = vocab_parallel_cross_entropy(parts[rank], targets, mesh["tensor"])
                losses.append((loss, nn.functional.cross_entropy(torch.cat(parts, -1), targets)))
        return losses


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_with_the_same_values_in_other_places_are_not_taken_for_gathered_logits(pools, num_ranks):
    for losses in pools(num_ranks).run(rearranged, num_ranks):
        for loss, expected in losses:
            torch.testing.assert_close(loss, expected)


def masked_alike(rank, num_ranks):
    """Losses of a head of zeros, of which each rank has other or as many masked logits; refused by no rank."""
    with Mesh({"tensor": num_ranks}) as mesh:
        targets, losses = torch.tensor([0, 1]), []
        for masked in ((1, 2, 0), (1, 1, 1)):
            logits = torch.zeros(2, 6 * num_ranks, dtype=torch.float64)
            for part, num_masked in zip(logits.chunk(num_ranks, -1), masked, strict=False):
                part[:, 6 - num_masked :] = -torch.inf
            part = logits.chunk(num_ranks, -1)[rank].clone().requires_grad_()
            loss = vocab_parallel_cross_entropy(part, targets, mesh["tensor"])
            loss.backward()
            losses.append((loss.detach(), nn.functional.cross_entropy(logits, targets), part.grad.isfinite().all()))
        return losses


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_masked_constant_logits_are_refused_by_no_rank(pools, num_ranks):
    for losses in pools(num_ranks).run(masked_alike, num_ranks):
        for loss, expected, is_finite in losses:
            torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
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
    with Mesh({"tensor": 4}) as mesh:
        comm = mesh["tensor"]
        column = ColumnParallelLinear(nn.Linear(8, 8), comm, name="up")
        row = RowParallelLinear(nn.Linear(8, 8), comm, name="down")
        whole_row = RowParallelLinear(nn.Linear(8, 8), comm, input_is_parallel=False, name="down")
        embedding = VocabParallelEmbedding(nn.Embedding(8, 2), comm)
        logits = torch.zeros(3, 2)
        attempts = [
            (ValueError, lambda: ColumnParallelLinear(nn.Linear(8, 6), comm, name="up")),
            (ValueError, lambda: RowParallelLinear(nn.Linear(7, 8), comm, name="down")),
            (ValueError, lambda: VocabParallelEmbedding(nn.Embedding(11, 2), comm)),
            (ValueError, lambda: VocabParallelEmbedding(nn.Embedding(8, 2, max_norm=1.0), comm)),
            (ValueError, lambda: ColumnParallelLinear(nn.Linear(8, 8), comm, parts=(4, 2))),
            (ValueError, lambda: ColumnParallelLinear(nn.Linear(8, 8), comm, parts=(4, 4), gather_output=True)),
            (ValueError, lambda: ColumnParallelLinear(nn.Linear(8, 8), comm, regather=True)),
            (ValueError, lambda: ColumnParallelLinear(nn.Linear(8, 8, device="meta"), comm)),
            (ValueError, lambda: column(torch.zeros(3, 2))),
            (ValueError, lambda: row(torch.zeros(3, 8))),
            (ValueError, lambda: whole_row(torch.zeros(3, 2))),
            (ValueError, lambda: column(torch.zeros(3, 5))),
            (IndexError, lambda: embedding(torch.tensor([8]))),
            (IndexError, lambda: embedding(torch.tensor([-1]))),
            (ValueError, lambda: vocab_parallel_cross_entropy(logits, torch.zeros(2, dtype=torch.int64), comm)),
            (ValueError, lambda: vocab_parallel_cross_entropy(logits, torch.tensor([1, 2, 3]), comm, reduction="max")),
            (RuntimeError, lambda: vocab_parallel_cross_entropy(logits, torch.tensor([1, 2, 8]), comm)),
            (RuntimeError, lambda: vocab_parallel_cross_entropy(logits, torch.tensor([1, 2, -1]), comm)),
        ]
        messages = []
        for kind, attempt in attempts:
            with pytest.raises(kind) as error:
                attempt()
            messages.append(str(error.value))
        return messages


def test_bad_input_is_refused_on_every_rank(pools):
    results = pools(4).run(refused)
    said = [
        "up: out_features: 6 does not divide over 4 tensor-parallel ranks; use 4 or 8, or 3 ranks",
        "down: in_features: 7 does not divide over 4 tensor-parallel ranks; use 4 or 8",
        "embedding: num_embeddings: 11 does not divide over 4 tensor-parallel ranks; use 8 or 12",
        "max_norm",
        "does not divide over 4",
        "gather_output would mix the parts",
        "regather is for an input in parts",
        "on the meta device",
        "up: the input has 2 input features; 8 are needed: this is one of 4 parts; use gather_output=True",
        "down: the input has 8 input features; 2 are needed: this is the whole of it; use input_is_parallel=False",
        "down: the input has 2 input features; 8 are needed: this is one of 4 parts",
        "up: the input has 5 input features; 8 are needed",
        "out of range",
        "out of range",
        "targets: shape ",
        "reduction: 'max' is not one of mean, sum, none",
        "out of bounds",
        "out of bounds",
    ]
    for messages in results:
        for message, text in zip(messages, said, strict=True):
            assert text in message
