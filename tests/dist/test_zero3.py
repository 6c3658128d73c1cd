"""What is special about ZeRO-3: nothing is whole between two steps, and a released parameter says so."""

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from tests.comm.test_communicator import Log
from tests.dist import cases
from tests.dist.test_engines import adamw, one_step


def bytes_over_a_step(rank, num_ranks, options):
    log = Log()
    with (
        Mesh({"data": num_ranks}) as mesh,
        build_engine("zero3", cases.build("MLP").float(), adamw, mesh, **options) as engine,
    ):
        seen = {"built": bytes_by_role(engine.live_tensors())}
        x, y = (cases.own_rows(part, rank).float() for part in cases.rows("MLP", 0, 0, num_ranks))
        with mesh.observed_by(log):
            loss = cases.loss_of(engine(x), y)
            seen["after forward"] = bytes_by_role(engine.live_tensors())
            engine.backward(loss)
            engine.step()
        seen["at rest"] = bytes_by_role(engine.live_tensors())
        return seen, engine.padding_bytes, [(e.op, e.tag, e.numel) for e in log.events], len(engine.buckets)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_everything_is_sharded_at_rest(pools, num_ranks):
    numel = sum(param.numel() for param in cases.build("MLP").parameters())
    for options in ({}, {"bucket_bytes": 600}):
        results = pools(num_ranks).run(bytes_over_a_step, num_ranks, options)
        for seen, padding, events, num_units in results:
            chunk = (4 * numel + padding) // num_ranks
            assert seen["built"][Role.PARAMETER] == seen["at rest"][Role.PARAMETER] == chunk
            assert seen["at rest"][Role.GRADIENT] == chunk
            assert all(held[Role.GATHERED_PARAMETER] == 0 for held in seen.values())
            gathers = [("all_gather", f"parameters of bucket {index}") for index in range(num_units)]
            reduces = [("reduce_scatter", f"gradients of bucket {index}") for index in range(num_units)]
            assert [event[:2] for event in events] == [*gathers, *gathers, *reduces]
            assert sum(event[2] for event in events) == 3 * (numel + padding // 4)
        assert sum(seen["at rest"][Role.OPTIMIZER_STATE] for seen, *_ in results) == 8 * numel


def released(rank):
    with Mesh({"data": 2}) as mesh:
        model = cases.build("Tied")
        engine = build_engine("zero3", model, adamw, mesh)
        metadata = [
            (name, tuple(param.shape), param.dtype, param.requires_grad) for name, param in model.named_parameters()
        ]
        with pytest.raises(RuntimeError, match=r"'encoder\.weight' is sharded"):
            model.decoder(torch.ones(1, 7).double())
        with pytest.raises(RuntimeError, match=r"'head\.bias' is sharded"):
            _ = model.head.bias + 1
        with engine.full_params() as module:
            tied = module.encoder.weight is module.decoder.weight
            total = float(sum(param.detach().sum() for param in module.parameters()))
        with engine.full_params(keep_changes=True) as module, torch.no_grad():
            module.head.bias.fill_(3.0)
        state = engine.full_state_dict()
        engine.close()
        return metadata, tied, total, state, {name: value.clone() for name, value in model.state_dict().items()}


def test_a_released_parameter_has_its_metadata_and_a_clear_error(pools):
    plain = cases.build("Tied")
    for metadata, tied, total, state, after_close in pools(2).run(released):
        assert metadata == [(n, tuple(p.shape), p.dtype, True) for n, p in plain.named_parameters()]
        assert tied
        assert total == pytest.approx(float(sum(param.detach().sum() for param in plain.parameters())))
        expected = plain.state_dict()
        expected["head.bias"] = torch.full((5,), 3.0).double()
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
            assert torch.equal(after_close[name], value), name


def load_into_another(rank):
    with Mesh({"data": 3}) as mesh:
        with build_engine("zero1", cases.build("Uneven", seed=7), adamw, mesh) as first:
            one_step(first, rank, "Uneven")
            state = first.full_state_dict()
        with build_engine("zero3", cases.build("Uneven", seed=1), adamw, mesh) as second:
            second.load_full_state_dict(state)
            return all(torch.equal(value, state[name]) for name, value in second.full_state_dict().items())


def test_a_full_state_goes_from_one_strategy_into_another(pools):
    assert pools(3).run(load_into_another) == [True] * 3


def fails_in_forward(rank):
    with Mesh({"data": 2}) as mesh:
        engine = build_engine("zero3", cases.build("MLP"), adamw, mesh)
        with pytest.raises(RuntimeError, match="mat1"):
            engine(torch.ones(2, 3).double())
        return bytes_by_role(engine.live_tensors())[Role.GATHERED_PARAMETER]


def test_after_an_error_in_forward_nothing_stays_gathered(pools):
    assert pools(2).run(fails_in_forward) == [0, 0]


class Failing(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("planted")


def after_other_backwards(rank):
    """A plain backward that raised, and ``torch.autograd.grad``: neither has an end that the engine sees."""
    with Mesh({"data": 2}) as mesh, build_engine("zero3", cases.build("MLP"), adamw, mesh) as engine:
        x = cases.own_rows(cases.rows("MLP", 0, 0, 2)[0], rank)
        with pytest.raises(ArithmeticError):
            Failing.apply(engine(x)).sum().backward()
        engine(x)
        gathered = [bytes_by_role(engine.live_tensors())[Role.GATHERED_PARAMETER]]
        engine.zero_grad()
        x = x.clone().requires_grad_()
        torch.autograd.grad(engine(x).sum(), x)
        engine(x)
        return [*gathered, bytes_by_role(engine.live_tensors())[Role.GATHERED_PARAMETER]]


def test_a_forward_reshards_what_a_backward_without_an_end_has_left(pools):
    assert pools(2).run(after_other_backwards) == [[0, 0]] * 2


def refused_after_a_part(rank):
    model = cases.build("MLP")
    with Mesh({"data": 2}) as mesh:
        engine = build_engine("zero3", model, adamw, mesh, bucket_bytes=64)
        assert len(engine.buckets) > 2
        name = engine.buckets[-1].layout.names[0]
        owner = model.get_submodule(name.rpartition(".")[0])
        own = owner._parameters.pop(name.rpartition(".")[2])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(torch.zeros(own.shape, dtype=own.dtype)))
        x = cases.own_rows(cases.rows("MLP", 0, 0, 2)[0], rank)
        with pytest.raises(RuntimeError, match="replaced"):
            engine(x)
        return bytes_by_role(engine.live_tensors()).get(Role.GATHERED_PARAMETER, 0)


def test_a_gather_that_is_refused_after_a_part_leaves_nothing_gathered(pools):
    assert pools(2).run(refused_after_a_part) == [0, 0]


class HasNoElements(nn.Module):
    """Of the first parameter's bucket the second rank holds nothing."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.weight = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(2)
        return x @ self.weight.T


def written_in_forward(rank):
    with Mesh({"data": 2}) as mesh:
        engine = build_engine("zero3", HasNoElements(), adamw, mesh, partition="contiguous")
        with pytest.raises(RuntimeError, match="'weight': it was written to while it was gathered"):
            engine(torch.ones(2, 4, dtype=torch.float64))
        return len(engine.step_tensors().by_name("weight"))


def test_a_rank_without_elements_refuses_what_the_others_refuse(pools):
    assert 0 in pools(2).run(written_in_forward)
