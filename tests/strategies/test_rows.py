"""Rows over two axes: equal to one process, and what each sends over which axis is what its first lines say."""

import contextlib

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import DDP, HFSDP, HPZ, Engine, ZeRO1, build_engine, zero_in_groups
from shardlab.engines.precision import Precision
from shardlab.engines.sharded_params import Placements
from shardlab.engines.zero_in_groups import STAGES
from shardlab.experiment import CompareConfig
from shardlab.launch import RankError
from shardlab.testing import check_strategy
from shardlab.trace.observed import wire_bytes
from shardlab.vocabulary import FLAG, Role

ROWS = [(outer, inner) for outer in STAGES for inner in STAGES]


class ByAxis:
    """What a rank sends in all, by the ring's formula, and how many messages, by axis."""

    def __init__(self):
        self.sent, self.messages = {}, {}

    def issued(self, event):
        if event.tag != FLAG and "norm" not in event.tag:
            self.sent[event.axis] = self.sent.get(event.axis, 0) + wire_bytes(event)
            self.messages[event.axis] = self.messages.get(event.axis, 0) + 1

    def started(self, event):
        """Not asked for."""

    completed = waited = started


def step_of(_, makes, micro_batches=1):
    """``step_on`` of each strategy, on 2 hosts of 2."""
    with Mesh({"replica": 2, "shard": 2}) as mesh:
        return [step_on(mesh, make, micro_batches) for make in makes]


def step_on(mesh, make, micro_batches):
    """Of the second step, per micro-batch, what is sent; what is held after the step, in elements."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    found = []
    with Engine(module, lambda params: torch.optim.Adam(params, lr=1e-3), mesh, make()) as engine:
        for step in range(2):
            for number in range(micro_batches):
                log = ByAxis()
                with mesh.observed_by(log):
                    with contextlib.nullcontext() if number == micro_batches - 1 else engine.no_sync():
                        engine.backward(engine(torch.randn(4, 16)).square().mean())
                    if number == micro_batches - 1:
                        engine.step()
                        engine.zero_grad()
                if step:
                    found.append({axis: sent / 4 for axis, sent in log.sent.items()})
        held = {role: sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()) / 4
                for role, tensors in engine.live_tensors().items()}  # fmt: skip
    return found, held


P = 3 * 16 * 16


def trained(rank, makes):
    """The weights after three steps of two micro-batches by each strategy, in float64."""
    found = []
    with Mesh({"replica": 2, "shard": 2}) as mesh:
        for make in makes:
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
            with Engine(module, lambda params: torch.optim.SGD(params, 0.1, momentum=0.9), mesh, make()) as engine:
                for step in range(3):
                    for number, rows in enumerate(rows_of(step)):
                        with contextlib.nullcontext() if number else engine.no_sync():
                            engine.backward(engine(rows[2 * rank : 2 * rank + 2]).square().mean() / 2)
                    engine.clip_grad_norm_(0.1)
                    engine.step()
                    engine.zero_grad()
                found.append(engine.full_state_dict())
    return found


def rows_of(step):
    return torch.randn(2, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def test_all_sixteen_equal_one_process(pools):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        for rows in rows_of(step):
            (module(rows).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    for precision, error, rows in ((Precision(), 1e-12, ROWS), (Precision(torch.float32), 1e-7, ROWS[::3])):
        makes = [lambda o=outer, i=inner, p=precision: zero_in_groups(o, i, precision=p) for outer, inner in rows]
        for states in pools(4).run(trained, [*makes, lambda p=precision: HFSDP(precision=p)]):
            for row, state in zip([*rows, "hfsdp"], states, strict=True):
                for name, value in module.state_dict().items():
                    torch.testing.assert_close(state[name], value, atol=error, rtol=0, msg=f"{row} {name}")


# What is divided inside, and what across, of which the parameters or not; numbers of all sixteen stand above.
@pytest.mark.parametrize("stages", [(2, 1), (1, 3)])
def test_rows_equal_one_process_in_all_that_users_do(stages):
    assert "equal to one process" in check_strategy(lambda: zero_in_groups(*stages), (4,), ("Unused",))


@pytest.mark.parametrize(("make", "models"), [(HFSDP, ("Unused",)), (HPZ, ("Uneven",))])
def test_sharded_units_over_two_axes_equal_one_process(make, models):
    assert "equal to one process" in check_strategy(make, (4,), models)


@pytest.mark.parametrize(
    ("make", "sizes", "model"),
    [(HFSDP, (1, 3), "Uneven"), (HFSDP, (1, 1), "Unused"), (lambda: zero_in_groups(2, 1), (3, 1), "Uneven")],
)
def test_a_group_of_one_is_right(make, sizes, model):
    mesh = dict(zip(("replica", "shard"), sizes, strict=True))
    assert "equal to one process" in check_strategy(make, models=(model,), mesh=mesh)


def with_a_piece_written(_, make):
    """What is refused where a piece is written to after the step, whose gather has been."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[1].requires_grad_(True)
    with (
        pytest.raises(RuntimeError, match=r"piece of '0.weight' was written to, and nobody has gathered it"),
        Mesh({"replica": 2, "shard": 2}) as mesh,
        Engine(model, lambda params: torch.optim.SGD(params, 0.1), mesh, make()) as engine,
    ):
        with torch.no_grad():
            engine.step_tensors().by_name("0.weight").mul_(0.5)
        engine.backward(engine(torch.ones(2, 4)).sum())


@pytest.mark.parametrize("make", [HFSDP, HPZ, lambda: zero_in_groups(1, 3), lambda: zero_in_groups(3, 2)])
def test_a_piece_that_nobody_gathers_is_refused(pools, make):
    pools(4).run(with_a_piece_written, make)


def seen_inside_a_step(_, make):
    """Outputs of forwards before a step, in a hook at its end, and after it; some ranks have no element to step."""
    torch.manual_seed(0)
    model, outputs = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), []
    with (
        Mesh({"replica": 2, "shard": 2}) as mesh,
        Engine(model, lambda params: torch.optim.SGD(params, 0.1), mesh, make()) as engine,
    ):
        engine.optimizer.register_step_post_hook(lambda *_: outputs.append(engine(torch.ones(1, 1)).item()))
        for _ in range(2):
            outputs.append(engine(torch.ones(1, 1)).item())
            engine.backward(engine(torch.ones(1, 1)).sum())
            engine.step()
            engine.zero_grad()
    return outputs


def test_what_hpz_keeps_in_a_host_is_never_what_was_there_before_the_step(pools):
    kept, plain = (pools(4).run(seen_inside_a_step, make)[0] for make in (HPZ, lambda: zero_in_groups(3, 3)))
    assert kept == plain
    assert len(set(kept)) == 3  # each step changes it, and its hook sees that


def with_partial_sums_clipped(_):
    model = nn.Linear(4, 4)
    with (
        Mesh({"replica": 2, "shard": 2}) as mesh,
        Engine(model, lambda params: torch.optim.SGD(params, 0.1), mesh, HFSDP()) as engine,
    ):
        with engine.no_sync():
            engine.backward(engine(torch.ones(2, 4)).sum())
        with pytest.raises(RuntimeError, match=r"engine.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def test_partial_sums_are_not_clipped_at_the_parameters_unseen(pools):
    pools(4).run(with_partial_sums_clipped)


def test_what_travels_across_groups_is_what_the_table_says(pools):
    makes = [lambda o=outer, i=inner: zero_in_groups(o, i) for outer, inner in ROWS]
    for (outer, inner), ((sent,), _) in zip(ROWS, pools(4).run(step_of, makes)[0], strict=True):
        whole = P if outer > inner or outer == inner == 0 else P / 2
        assert sent["replica"] == whole * (3 if outer == 3 else 2) / 2, (outer, inner)


def test_hfsdp_sends_across_hosts_once_and_divides_state_over_all(pools):
    for ((found, held),) in pools(4).run(step_of, [HFSDP], 3):
        # Inside no_sync() gradients are scattered inside the host: two gathers, a reduction; nothing across.
        assert [sent.get("replica", 0.0) for sent in found] == [0, 0, P / 2]
        assert [sent["shard"] for sent in found] == [3 * P / 2] * 3
        assert (held[Role.PARAMETER], held[Role.OPTIMIZER_STATE]) == (P / 2, 2 * P / 4)


def test_hpz_gathers_across_hosts_once_a_step(pools):
    for ((found, held),) in pools(4).run(step_of, [HPZ], 2):
        # The first forward, over all four; what it leaves inside the host serves until the step.
        assert [sent.get("replica_shard", 0.0) for sent in found] == [3 * P / 4, 3 * P / 4]
        assert [sent["shard"] for sent in found] == [P / 2, 2 * P / 2]
        assert (held[Role.PARAMETER], held[Role.OPTIMIZER_STATE]) == (P / 4, 2 * P / 4)


def test_what_a_row_cannot_have_is_refused():
    with pytest.raises(ValueError, match="outer: 4 is not one of 0, 1, 2, 3"):
        zero_in_groups(4, 1)
    with pytest.raises(ValueError, match="offload: 'hfsdp' takes none; leave it out, or take fsdp"):
        HFSDP(offload="all")
    with pytest.raises(ValueError, match=r"mesh: {'data': 4} has no axis 'replica', over which 'hpz' averages"):
        check_strategy(HPZ, mesh={"data": 4})


class OverPartOfAnAxis(ZeRO1):
    """Divides over half of the axis ``data``: the other halves have copies, which no axis says."""

    name = "over_part"

    def divide(self, given):
        outer, inner = given.mesh.split("data", inner=2)
        return inner, Placements(self.precision, replicas=(outer,), means_over=0)


class OverTooFew(ZeRO1):
    name, axes = "over_too_few", ("replica", "shard")

    def divide(self, given):
        return given.comms[1], Placements(self.precision, axes=given.comms)


class DividesByText(ZeRO1):
    name = "by_text"

    def divide(self, given):
        return self.comm, "all"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (OverPartOfAnAxis, r"divides what is stepped over 'data.inner', a part of one of its axes; name two axes"),
        (OverTooFew, r"divided over 2 ranks, and its axes have 4; for both axes divide over given.mesh.flatten"),
        (
            DividesByText,
            r"divide\(\) of 'by_text' returned \(.*'all'\); return the ranks, a communicator, and Placements",
        ),
    ],
)
def test_a_division_that_no_axis_says_is_refused(make, told):
    with pytest.raises(RankError, match=told):
        check_strategy(make, (4,), ("MLP",))


class OnItsOwnAxis(DDP):
    axes = ("ring",)


class OverOneOfTwo(DDP):
    """Reduces over its last axis alone."""

    axes = ("host", "gpu")


def on_axes(strategy, axes=("host", "gpu")):
    strategy.axes = axes
    return strategy


def over_one_axis_of_two(_, strategy, axes):
    with Mesh(axes) as mesh, pytest.raises(ValueError, match="mesh: its ranks have other rows along axis") as caught:
        build_engine(strategy, nn.Linear(2, 2), lambda params: torch.optim.SGD(params, 0.1), mesh)
    return str(caught.value)


def test_an_axis_of_the_mesh_that_nobody_averages_over_is_named(pools):
    told = "along axis {!r} too, and {} averages over {} alone; name all axes"
    for strategy, axes, words in (
        ("zero1", {"replica": 2, "data": 2}, ("replica", "zero1", "data")),
        (HFSDP(), {"data": 2, "replica": 2, "shard": 1}, ("data", "hfsdp", "replica and shard")),
        (on_axes(DDP(), ("gpu",)), {"host": 2, "gpu": 2}, ("host", "ddp", "gpu")),
        ("torch_fsdp2", {"data": 2, "shard": 2}, ("shard", "torch_fsdp2", "data")),
    ):
        assert all(told.format(*words) in said for said in pools(4).run(over_one_axis_of_two, strategy, axes))


def test_axes_that_are_one_name_are_refused():
    for refuse in (
        lambda strategy: check_strategy(lambda: strategy, (2,), ("MLP",)),
        lambda strategy: build_engine(strategy, nn.Linear(2, 2), torch.optim.Adam, None),
        lambda strategy: CompareConfig((strategy,)),
    ):
        with pytest.raises(ValueError, match=r"strategy: axes of 'own' is 'shard'; give a tuple, axes = \('data',\)"):
            refuse(type("Own", (DDP,), {"name": "own", "axes": "shard"})())


def test_axes_may_have_any_name_and_each_has_to_be_used():
    assert "equal to one process" in check_strategy(OnItsOwnAxis, (2,), ("MLP",))
    assert "equal to one process" in check_strategy(lambda: on_axes(zero_in_groups(1, 2)), (4,), ("FewElements",))
    with pytest.raises(AssertionError, match="nothing travelled over axis 'host', which its axes name"):
        check_strategy(OverOneOfTwo, (4,), ("MLP",))
