"""Mixed precision of FSDP: what it sends and holds, and the loss scale."""

import functools
import inspect
import warnings

import pytest
import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.engines.precision import Precision
from shardlab.optimizers.grad_scaler import GradScaler
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from tests.comm.test_communicator import Log
from tests.dist import cases
from tests.dist.every_engine import adamw, assert_states, engine_of, momentum, shards_of, step_on
from tests.dist.nasty import Deep


def rows(rank, num_ranks, step):
    x, y = cases.rows("MLP", step, 0, num_ranks)
    return cases.own_rows(x, rank).float(), cases.own_rows(y, rank).float()


def bytes_and_wire(rank, precision):
    log = Log()
    with Mesh({"data": 2}) as mesh:
        engine = build_engine("fsdp", cases.seeded(Deep), adamw, mesh, precision=precision, wrap="root")
        x, y = rows(rank, 2, 0)
        engine.strategy.units[0].gather()
        gathered = bytes_by_role(engine.live_tensors())[Role.GATHERED_PARAMETER]
        engine.strategy.units[0].reshard()
        with mesh.observed_by(log):
            engine.backward(cases.loss_of(engine(x), y))
            engine.step()
        held = bytes_by_role(engine.live_tensors())
        return (
            gathered,
            held,
            [(event.op, event.dtype, event.num_bytes) for event in log.events],
            shards_of(engine)[0].layout.padded_numel,
        )


def test_gathers_move_16_bits_and_the_state_keeps_32(pools):
    for gathered, held, events, padded in pools(2).run(bytes_and_wire, "bf16"):
        assert gathered == 2 * padded
        assert events == [
            ("all_gather", "bfloat16", 2 * padded),
            ("all_gather", "bfloat16", 2 * padded),
            ("reduce_scatter", "float32", 4 * padded),
        ]
        assert held[Role.PARAMETER] == held[Role.GRADIENT] == 2 * padded
        assert held[Role.OPTIMIZER_STATE] <= 4 * padded


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(7, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return super().forward(x) * self.scale


def a_float32_buffer_in_a_unit(rank):
    """Its numbers make activations float32, which no 16-bit layer takes: the error names them and the way out."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Scaled(), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 5)), rows(rank, 2, 0)[0]
    with Mesh({"data": 2}) as mesh:
        with build_engine("fsdp", model, adamw, mesh, precision="bf16", wrap="root") as engine:
            with pytest.raises(RuntimeError, match=r"dtype|scalar type") as caught:
                engine(x)
            engine.full_state_dict()  # and nothing hangs afterwards
        half = Precision(torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)
        with build_engine("fsdp", model, adamw, mesh, precision=half) as engine:
            engine.backward(engine(x).sum())
            engine.step()
            return caught.value.__notes__, engine.full_state_dict()


def test_a_buffer_of_another_dtype_is_named_with_the_way_out(pools):
    for (note,), state in pools(2).run(a_float32_buffer_in_a_unit):
        assert "'0.scale' (torch.float32), '1.running_mean' (torch.float32)" in note
        assert "buffers=torch.bfloat16" in note
        assert all(bool(value.isfinite().all()) for value in state.values())


class Convolutions(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        self.norm, self.head = nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.body(x)).mean((2, 3)))


def batch_norms_in_16_bits(rank, strategy):
    """Refused before anything is sent; with weights and statistics in one dtype, or without weights, it runs."""
    said, log = [], Log()
    with Mesh({"data": 2}) as mesh:
        with mesh.observed_by(log):
            for norm in (nn.BatchNorm2d, nn.SyncBatchNorm):
                for precision in ("bf16", "fp16"):
                    with pytest.raises(
                        ValueError, match=f"^precision: {norm.__name__} 'body.1' keeps .*autocast"
                    ) as caught:
                        build_engine(strategy, Convolutions(norm), adamw, mesh, precision=precision)
                    said.append(str(caught.value))
        assert not log.events
        for norm, precision in (
            (nn.BatchNorm2d, Precision(torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)),
            (functools.partial(nn.BatchNorm2d, affine=False), "bf16"),
            (functools.partial(nn.GroupNorm, 2), "bf16"),
        ):
            with build_engine(
                strategy, cases.seeded(lambda n=norm: Convolutions(n)), adamw, mesh, precision=precision
            ) as engine:
                engine.backward(engine(images(rank, 0)).square().mean())
                engine.step()
        return said


def images(rank, step):
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def convolutions_under_autocast(rank, strategy):
    with engine_of(strategy, 2, cases.seeded(Convolutions), optimizer_fn=momentum) as engine:
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = engine(images(rank, step)).float().square().mean()
            step_on(engine, loss)
        return engine.full_state_dict()


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp"])
def test_a_batch_norm_in_16_bits_is_refused_and_what_is_said_instead_equals_one_process(pools, strategy):
    first, second = pools(2).run(batch_norms_in_16_bits, strategy)
    assert first == second
    plain = cases.seeded(Convolutions)
    optimizer, names = momentum(plain.parameters()), dict(plain.named_parameters())
    for step in range(3):
        for rank in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = plain(images(rank, step)).float().square().mean() / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in pools(2).run(convolutions_under_autocast, strategy):
        assert all(value.dtype in (torch.float32, torch.int64) for value in state.values())
        assert_states([{name: state[name] for name in names}], names, atol=1e-6)


def steps_without_a_scaler(_, precision):
    with engine_of("fsdp", 2, cases.seeded(Deep), optimizer_fn=adamw, precision=precision) as engine:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step()
        return [(str(warning.message).partition(" loses")[0], warning.filename) for warning in caught]


def test_float16_without_a_scaler_warns(pools):
    for warned in pools(2).run(steps_without_a_scaler, "fp16"):
        assert ("precision: float16 without a GradScaler", __file__) in warned
    assert pools(2).run(steps_without_a_scaler, "bf16") == [[], []]


def overflow(rank, strategy, options, in_a_piece):
    scales, steps = [], []
    with Mesh({"data": 2}) as mesh, build_engine(strategy, cases.seeded(Deep), adamw, mesh, **options) as engine:
        scaler = GradScaler(init_scale=4.0, growth_interval=2)
        for step in range(6):
            x, y = rows(rank, 2, step)
            loss = cases.loss_of(engine(x), y)
            overflows = step == 3 and rank == 1  # on one rank alone
            engine.backward(scaler.scale(loss * float("inf") if overflows and not in_a_piece else loss))
            if overflows and in_a_piece:  # of which the others have nothing
                next(piece.grad for piece in engine.step_tensors() if piece.grad is not None).view(-1)[0] = torch.inf
            scaler.unscale_(engine)
            engine.clip_grad_norm_(1.0)
            steps.append(scaler.step(engine))
            scales.append(scaler.current_scale)
            engine.zero_grad()
        return steps, scales, engine.num_steps, engine.full_state_dict()


def test_an_overflow_on_one_rank_makes_all_skip(pools):
    half = {"precision": "fp16"}
    for args in (("fsdp", half, False), ("fsdp", half, True), ("zero1", {}, True), ("bucketed", {}, False)):
        results = pools(2).run(overflow, *args)
        for steps, scales, num_steps, state in results:
            assert steps == [True, True, True, False, True, True]
            assert scales == [4.0, 8.0, 8.0, 4.0, 4.0, 8.0]
            assert num_steps == 5
            assert all(bool(torch.isfinite(value).all()) for value in state.values())


def torchs_loop(scaler, step_of, losses, scales):
    """What a loop with ``torch.amp.GradScaler`` writes; the scale after each step, and whether it was skipped."""
    for loss_of in losses:
        before = scaler.get_scale()
        loss = loss_of()
        scaler.scale([loss])[0].backward()
        scaler.unscale_(step_of)
        scaler.step(step_of)
        scaler.update()
        step_of.zero_grad()
        scales.append((scaler.get_scale(), before > scaler.get_scale()))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_a_loop_with_torchs_scaler_runs_with_ours(strategy, enabled):
    takes, wanted = (
        {p.name: p.default for p in inspect.signature(kind).parameters.values()}
        for kind in (GradScaler, torch.amp.GradScaler)
    )
    assert list(takes.items()) == list(wanted.items())
    arguments = {"device": "cpu", "init_scale": 8.0, "growth_factor": 4.0, "growth_interval": 2, "enabled": enabled}
    factors = [1.0, 1.0, torch.inf, 1.0, 1.0, 1.0] if enabled else [1.0] * 3
    x = torch.ones(2, 7, dtype=torch.float64)
    model, plain = (cases.seeded(Deep).double() for _ in range(2))
    optimizer, theirs, ours = adamw(plain.parameters()), [], []
    torchs, scaler = torch.amp.GradScaler(**arguments), GradScaler(**arguments)
    torchs_loop(torchs, optimizer, [lambda f=f: plain(x).sum() * f for f in factors], theirs)
    with build_engine(strategy, model, adamw) as engine:
        torchs_loop(scaler, engine, [lambda f=f: engine(x).sum() * f for f in factors], ours)
        state = engine.full_state_dict()
    assert ours == theirs
    assert scaler.state_dict() == torchs.state_dict()
    assert_states([state], plain.state_dict())
    if enabled:
        torchs.load_state_dict(scaler.state_dict())
        scaler.load_state_dict({"scale": 2.0, "num_good_steps": 5})  # of an older checkpoint
        scaler.update(16.0)
        assert (scaler.get_scale(), scaler.is_enabled()) == (16.0, True)
        assert scaler.state_dict()["_growth_tracker"] == 1


def test_wrong_arguments_name_the_field():
    wrong = {"init_scale": 0.0, "growth_factor": 1.0, "backoff_factor": 1.0, "growth_interval": 0, "device": 8.0}
    for field, value in wrong.items():
        with pytest.raises(ValueError, match=field):
            GradScaler(**{field: value})
    with pytest.raises(ValueError, match="precision: compute"):
        Precision(compute=torch.int32)
