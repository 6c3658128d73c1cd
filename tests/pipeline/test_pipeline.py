"""Pipelines on real ranks against one process, in float64."""

import copy
import re
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardlab.comm.async_queues import StreamQueue
from shardlab.comm.callers import locate
from shardlab.comm.mesh import Mesh
from shardlab.comm.transports.nccl import NcclTransport
from shardlab.engines import DDP, FSDP, Bucketed, ZeRO1, ZeRO2, ZeRO3, build_engine
from shardlab.engines.moments import Moment
from shardlab.launch import RankError
from shardlab.models import GPT, GPTConfig
from shardlab.optimizers import GradScaler
from shardlab.pipeline import Like, Pipeline, cut, loans_of, messages_of, parts_of
from shardlab.pipeline.stages import params_of
from shardlab.schedules import Schedule, make_schedule
from tests.comm.device_streams import Device

CONFIG = GPTConfig(vocab_size=11, seq_len=6, num_layers=3, num_heads=2, hidden=8, tied=False)


def gpt(tied=False):
    torch.manual_seed(0)
    return GPT(replace(CONFIG, tied=tied)).double()


def loss_fn(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rows(num_data_ranks, num_micro_batches):
    tokens = torch.randint(11, (num_data_ranks, 2 * num_micro_batches, 7), generator=torch.Generator().manual_seed(1))
    return tokens[..., :-1], tokens[..., 1:]


def sgd(params):
    return torch.optim.SGD(params, 0.5, momentum=0.9)


class Log:
    """Of messages along the axis of stages, and of bytes along the others."""

    def __init__(self):
        self.events, self.files = [], set()

    def issued(self, event):
        self.files.add(locate(event).rpartition(":")[0])
        self.events.append((str(event.axis), str(event.op), event.tag, event.num_bytes))

    def started(self, event):
        pass

    completed = waited = started


def trained(rank, axes, schedule, options, make, tied, **how):
    """The parameters of this rank's stages after two steps, by name; the losses; the messages of the second step."""
    losses = []
    with Mesh(axes) as mesh:
        pipeline = Pipeline(gpt(tied), schedule, mesh, **options)
        inputs, targets = rows(axes["data"], schedule.num_micro_batches)
        place = mesh["data"].rank
        with build_engine(make(), pipeline.module, sgd, mesh) as engine:
            for _ in range(2):
                log = Log()
                with mesh.observed_by(log):
                    loss = pipeline.run(engine, loss_fn, inputs[place], targets[place], **how)
                assert log.files == {__file__}  # the line that called is none of the library
                losses.append(None if loss is None else loss.item())
                engine.clip_grad_norm_(0.1)
                engine.step()
                engine.zero_grad()
            return engine.full_state_dict(), losses, mesh["pipe"].rank, log.events


def one_process(num_data_ranks, num_micro_batches, tied):
    model = gpt(tied)
    optimizer = sgd(model.parameters())
    inputs, targets = (part.flatten(0, 1) for part in rows(num_data_ranks, num_micro_batches))
    losses = []
    for _ in range(2):
        loss = loss_fn(model(inputs), targets)
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, losses


def planned(schedule, tied):
    model = gpt(tied)
    loans = loans_of(model, cut(model, schedule.num_stages), schedule.rank_of)
    micro_batch = Like((2, CONFIG.seq_len, CONFIG.hidden), torch.float64)
    return messages_of(schedule, [micro_batch] * (schedule.num_stages - 1), loans)


@pytest.mark.parametrize(
    ("num_ranks", "axes", "plan", "m", "v", "make", "tied"),
    [
        (2, {"pipe": 2, "data": 1}, "gpipe", 3, 1, DDP, False),
        (2, {"pipe": 2, "data": 1}, "interleaved", 4, 2, Bucketed, True),
        (3, {"pipe": 3, "data": 1}, "1f1b", 4, 1, DDP, True),
        (4, {"pipe": 2, "data": 2}, "1f1b", 4, 1, Bucketed, True),
        (4, {"pipe": 2, "data": 2}, "zb-h1", 3, 1, ZeRO1, True),
        (4, {"pipe": 2, "data": 2}, "interleaved", 2, 2, ZeRO2, True),
        (4, {"pipe": 2, "data": 2}, "1f1b", 3, 1, ZeRO3, True),
        (4, {"pipe": 2, "data": 2}, "interleaved", 2, 2, FSDP, True),
        (4, {"pipe": 2, "data": 2}, "zb-h1", 3, 1, FSDP, True),
        (4, {"pipe": 4, "data": 1}, "zb-h1", 5, 1, ZeRO1, True),
    ],
)
def test_equal_to_one_process_with_the_messages_of_the_plan(pools, num_ranks, axes, plan, m, v, make, tied):
    schedule = make_schedule(plan, axes["pipe"], m, **({"stages_per_rank": v} if v > 1 else {}))
    wanted, losses = one_process(axes["data"], m, tied)
    answers = pools(num_ranks).run(trained, axes, schedule, {}, make, tied)
    found = {}
    for state, *_ in answers:
        found |= state
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-12, rtol=0, msg=name)
    assert set(found) == set(wanted)
    told = [own for _, own, *_ in answers if own[0] is not None]
    assert torch.tensor(told, dtype=torch.float64).mean(0).tolist() == pytest.approx(losses, abs=1e-12)
    plan = planned(schedule, tied)
    assert len(plan) == 2 * ((axes["pipe"] * v - 1) * m + tied)
    for *_, rank, events in answers:
        sent = [event[2:] for event in events if event[:2] == ("pipe", "send")]
        assert sent == [(one.tag, one.num_bytes) for one in plan if one.rank == rank]
        taken = [event[2:] for event in events if event[:2] == ("pipe", "recv")]
        assert sorted(taken) == sorted((one.tag, one.num_bytes) for one in plan if one.to == rank)


class OneByOne(NcclTransport):
    """Gloo in the place of NCCL: here even the host waits for the other end of each message."""

    def exchange(self, messages):
        self.log.append(" ".join("send" if one.is_send else "recv" for one in messages))
        super().exchange(messages)


def one_by_one(_, schedule, tied):
    """As ``trained``, with DDP; and what this rank has done in the second step, in order."""
    log = []

    def watch(action):
        return nullcontext(log.append(str(action)))

    with Mesh({"pipe": len(schedule.ranks), "data": 1}) as mesh:
        comm = mesh["pipe"]
        comm._queue.close()
        comm._transport, comm._queue = OneByOne(comm._transport._group), StreamQueue(mesh.device, Device())
        comm._transport.log = log
        pipeline, (inputs, targets) = Pipeline(gpt(tied), schedule, mesh), rows(1, schedule.num_micro_batches)
        with build_engine("ddp", pipeline.module, sgd, mesh) as engine:
            for _ in range(2):
                log.clear()
                pipeline.run(engine, loss_fn, inputs[0], targets[0], watch=watch)
                told = list(log)
                engine.clip_grad_norm_(0.1)
                engine.step()
                engine.zero_grad()
            return engine.full_state_dict(), told


@pytest.mark.parametrize(
    ("schedule", "tied", "order"),
    [
        (make_schedule("gpipe", 2, 3), False, "0F0 send 0F1 send 0F2 send recv recv 0B0 recv 0B1 0B2"),
        (make_schedule("1f1b", 3, 4), False, "0F0 send 0F1 send 0F2 send recv 0B0 0F3 send recv recv 0B1 recv 0B2 0B3"),
        (make_schedule("interleaved", 2, 4, stages_per_rank=2), True, ""),
        (make_schedule("zb-h1", 4, 5), True, ""),
        (Schedule.from_csv("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n"), False, "0F0 send 0F1 send recv recv 0B0 0B1"),
    ],
)
def test_where_a_message_keeps_others_waiting_each_leaves_at_once_and_none_waits_for_ever(pools, schedule, tied, order):
    wanted, _ = one_process(1, schedule.num_micro_batches, tied)
    answers = pools(len(schedule.ranks)).run(one_by_one, schedule, tied)
    for state, _ in answers:
        for name, value in state.items():
            torch.testing.assert_close(value, wanted[name], atol=1e-12, rtol=0, msg=name)
    assert " ".join(answers[0][1]) == order or tied


@pytest.mark.parametrize(("keeps", "elements"), [(False, 2 * 3 + 1), (True, 2)])
def test_sharded_parameters_of_a_stage_are_gathered_for_each_pass_or_once(pools, keeps, elements):
    """Of m micro-batches (2m + 1) P_s (N-1)/N elements a rank, or 2 P_s (N-1)/N; both are equal to one process."""
    wanted, _ = one_process(2, 3, False)
    schedule = make_schedule("1f1b", 2, 3)
    for state, _, _, events in pools(4).run(
        trained, {"pipe": 2, "data": 2}, schedule, {}, FSDP, False, keeps_gathered=keeps
    ):
        for name, value in state.items():
            torch.testing.assert_close(value, wanted[name], atol=1e-12, rtol=0, msg=name)
        moved = sum(event[3] for event in events if event[0] == "data" and event[1] != "all_reduce")
        assert moved == elements * 8 * sum(value.numel() for value in state.values())


def resumed(_, axes, plan, m, make, load, save):
    """A step from a checkpoint, if there is one; then another checkpoint is written."""
    with Mesh(axes) as mesh:
        pipeline = Pipeline(gpt(True), make_schedule(plan, axes["pipe"], m), mesh)
        inputs, targets = rows(axes["data"], m)
        place = mesh["data"].rank
        with build_engine(make(), pipeline.module, sgd, mesh) as engine:
            if load is not None:
                engine.load(load)
            pipeline.run(engine, loss_fn, inputs[place], targets[place])
            engine.step()
            engine.save(save)


def alone(load, save):
    with build_engine("single", gpt(True), sgd) as engine:
        if load is not None:
            engine.load(load)
        inputs, targets = (part.flatten(0, 1) for part in rows(2, 4))
        engine.backward(loss_fn(engine(inputs), targets))
        engine.step()
        engine.save(save)
        return engine.full_state_dict()


def test_checkpoints_are_the_whole_models_whatever_the_cut(pools, tmp_path):
    pools(4).run(resumed, {"pipe": 2, "data": 2}, "1f1b", 4, ZeRO1, None, tmp_path / "a")
    pools(4).run(resumed, {"pipe": 4, "data": 1}, "zb-h1", 8, DDP, tmp_path / "a", tmp_path / "b")
    found = alone(tmp_path / "b", tmp_path / "c")
    alone(None, tmp_path / "d")
    pools(4).run(resumed, {"pipe": 2, "data": 2}, "1f1b", 4, FSDP, tmp_path / "d", tmp_path / "e")
    for one in (found, alone(tmp_path / "e", tmp_path / "f")):
        for name, value in three_steps().items():
            torch.testing.assert_close(one[name], value, atol=1e-12, rtol=0, msg=name)


def refused_on_stages(rank, directory):
    """Targets that are not cut, options that one stage alone has, and an engine around something else."""
    with Mesh({"pipe": 2, "data": 1}) as mesh:
        pipeline = Pipeline(gpt(), make_schedule("1f1b", 2, 2), mesh)
        with build_engine(DDP(), pipeline.module, lambda params: torch.optim.SGD(params, 0.1 + rank), mesh) as engine:
            inputs, targets = (every[0] for every in rows(1, 2))
            with pytest.raises(ValueError, match="inputs: 4 rows, targets: a list; give tensors, whose rows 2"):
                pipeline.run(engine, loss_fn, inputs, list(targets))
            for given, named in (((inputs,), {}), ((inputs, targets), {}), ((), {"tokens": inputs})):
                with pytest.raises(ValueError, match=r"model: these are stages .*\(engine, loss_fn, inputs, targets\)"):
                    engine(*given, **named)
            with pytest.raises(ValueError, match=r"param_groups: 'lr' is 0.1 in a group of one rank, and 1.1 in that"):
                engine.save(directory)
        model = gpt()
        with (
            build_engine(DDP(), model, sgd, mesh) as engine,
            pytest.raises(ValueError, match=r"engine: it is around a GPT; build it around pipeline\.module"),
        ):
            Pipeline(model, make_schedule("1f1b", 2, 2), mesh).run(engine, loss_fn, inputs, targets)


def test_what_one_stage_cannot_do_alone_is_refused(pools, tmp_path):
    pools(2).run(refused_on_stages, tmp_path)


def three_steps():
    with build_engine("single", gpt(True), sgd) as engine:
        inputs, targets = (part.flatten(0, 1) for part in rows(2, 4))
        for _ in range(3):
            engine.backward(loss_fn(engine(inputs), targets))
            engine.step()
            engine.zero_grad()
        return engine.full_state_dict()


class Counted(torch.autograd.Function):
    """Notes how many of its graphs are alive."""

    class Token:
        alive = most = 0

        def __init__(self):
            kind = type(self)
            kind.alive += 1
            kind.most = max(kind.most, kind.alive)
            weakref.finalize(self, self.over)

        @classmethod
        def over(cls):
            cls.alive -= 1

    @staticmethod
    def forward(ctx, x):
        ctx.token = Counted.Token()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Watched(nn.Linear):
    def forward(self, x):
        return Counted.apply(super().forward(x))


def most_held(_, schedule):
    Counted.Token.alive = Counted.Token.most = 0
    with Mesh({"pipe": 4, "data": 1}) as mesh:
        model = nn.Sequential(*(Watched(3, 3) for _ in range(schedule.num_stages)))
        pipeline = Pipeline(model, schedule, mesh)
        with build_engine("ddp", pipeline.module, sgd, mesh) as engine:
            pipeline.run(engine, nn.functional.mse_loss, torch.ones(8, 3), torch.zeros(8, 3))
    return Counted.Token.most, Counted.Token.alive


@pytest.mark.parametrize("plan", ["gpipe", "1f1b", "interleaved"])
def test_a_rank_holds_as_many_micro_batches_as_the_schedule_says(pools, plan):
    schedule = make_schedule(plan, 4, 8)
    found = pools(4).run(most_held, schedule)
    assert found == [(schedule.in_flight(rank), 0) for rank in range(4)]


def clipped_by_torch(_, make, how):
    with Mesh({"pipe": 2, "data": 1}) as mesh:
        pipeline = Pipeline(gpt(), make_schedule("1f1b", 2, 2), mesh)
        inputs, targets = rows(1, 2)
        with build_engine(make(), pipeline.module, sgd, mesh) as engine:
            pipeline.run(engine, loss_fn, inputs[0], targets[0])
            nn.utils.clip_grad_norm_(engine.step_tensors() if how == "tensors" else engine.module.parameters(), 0.1)
            engine.finish_gradients()


class ByTheNorm(torch.optim.SGD):
    """Steps by the norm of all gradients that it is given."""

    shardlab_looks_at = "model"


def stepped_by_the_norm(_):
    with Mesh({"pipe": 2, "data": 1}) as mesh:
        module = Pipeline(gpt(), make_schedule("1f1b", 2, 2), mesh).module
        build_engine("ddp", module, lambda tensors: ByTheNorm(tensors, lr=0.1), mesh)


def test_an_optimizer_that_looks_at_the_whole_model_is_refused_in_a_stage(pools):
    with pytest.raises(
        RankError, match=r"ByTheNorm looks at the whole model, .*; use bucketed or ddp, and no pipeline"
    ):
        pools(2).run(stepped_by_the_norm)


def twice(_, m, make):
    """The norm of one run's gradients, of two runs' sum, and when guards have looked in the second run."""
    with Mesh({"pipe": 2, "data": 2}) as mesh:
        pipeline = Pipeline(gpt(), make_schedule("1f1b", 2, m), mesh)
        inputs, targets = (every[mesh["data"].rank] for every in rows(2, m))
        with build_engine(make(), pipeline.module, sgd, mesh) as engine:
            pipeline.run(engine, loss_fn, inputs, targets)
            once = engine.clip_grad_norm_(1e9)
            moments, ask = [], engine._guards.ask
            engine._guards.ask = lambda moment, one: (moments.append(moment), ask(moment, one))
            pipeline.run(engine, loss_fn, inputs, targets)
            return once.item(), engine.clip_grad_norm_(1e9).item(), moments


@pytest.mark.parametrize(("make", "m"), [(DDP, 1), (ZeRO2, 1), (ZeRO1, 3)])
def test_a_second_run_adds_to_the_means_and_guards_look_once(pools, make, m):
    for once, both, moments in pools(4).run(twice, m, make):
        assert both == pytest.approx(2 * once, abs=1e-12)
        # At the first of all backwards, and at the last, which sends.
        ends = Moment.BACKWARD, Moment.BACKWARD_ENDED, Moment.BACKWARD_SENDS
        assert [moments.count(one) for one in ends] == [1, 0, 1]


def refused_precision(_):
    with Mesh({"pipe": 3, "data": 1}) as mesh:
        pipeline = Pipeline(gpt(True).float(), make_schedule("1f1b", 3, 2), mesh)
        with build_engine(ZeRO1(precision="bf16"), pipeline.module, sgd, mesh) as engine:
            try:
                pipeline.run(engine, loss_fn, *(every[0] for every in rows(1, 2)))
            except ValueError as error:
                return str(error)


def test_a_lent_weight_that_would_be_rounded_is_refused_on_all_ranks(pools):
    told = pools(3).run(refused_precision)
    assert told[0].startswith("precision: 'token_embedding.weight' is tied over ranks")
    assert told == [told[0]] * 3


def hooked(_, make):
    """How often hooks of one's own have seen a gradient, after a run and after a plain backward behind it."""
    seen, known = {"before": 0, "in forward": 0}, []

    def count(when):
        def see(_):
            seen[when] += 1

        return see

    with Mesh({"pipe": 2, "data": 1}) as mesh:
        pipeline = Pipeline(gpt(), make_schedule("1f1b", 2, 3), mesh)
        first, second, *_ = pipeline.module.parameters()

        def watched(*_):
            if not known:
                known.append(second.register_hook(count("in forward")))

        with build_engine(make(), pipeline.module, sgd, mesh) as engine:
            first.register_hook(count("before"))
            inputs, targets = (every[0] for every in rows(1, 3))
            next(pipeline.module.modules()).register_forward_pre_hook(watched)
            pipeline.run(engine, loss_fn, inputs, targets)
            counts = dict(seen)
            engine.zero_grad()
            num = engine.num_backwards
            sum(param.sum() for param in engine.params.values()).backward()  # past the engine's own outputs
            known[0].remove()
            return counts, engine.num_backwards - num, len(second._backward_hooks)


@pytest.mark.parametrize("make", [DDP, ZeRO1])
def test_hooks_of_ones_own_see_each_micro_batch_and_a_plain_backward_behind_a_run_is_noticed(pools, make):
    assert pools(2).run(hooked, make) == [({"before": 3, "in forward": 3}, 1, 1)] * 2


def scaled(rank, make):
    """The scale, and whether the engine has stepped, where only the first stage overflows."""
    with Mesh({"pipe": 2, "data": 1}) as mesh:
        pipeline = Pipeline(gpt(), make_schedule("1f1b", 2, 2), mesh)
        with build_engine(make(), pipeline.module, sgd, mesh) as engine:
            scaler = GradScaler(init_scale=4.0)
            inputs, targets = (every[0] for every in rows(1, 2))
            if rank == 0:
                next(pipeline.module.parameters()).register_hook(lambda gradient: gradient * torch.inf)
            pipeline.run(engine, lambda logits, wanted: scaler.scale(loss_fn(logits, wanted)), inputs, targets)
            return scaler.step(engine), scaler.get_scale()


def tied_gradient(_, was_frozen, is_whole):
    """Of a weight of two stages, frozen or thawed in the whole model, or where one of them trains it alone."""
    with Mesh({"pipe": 2, "data": 1}) as mesh:
        model = gpt(True)
        model.token_embedding.requires_grad_(not was_frozen)
        pipeline = Pipeline(model, make_schedule("1f1b", 2, 2), mesh)
        inputs, targets = (every[0] for every in rows(1, 2))
        with build_engine(ZeRO1(), pipeline.module, sgd, mesh) as engine:
            for name, param in (model if is_whole else pipeline.module).named_parameters():
                param.requires_grad_(name != "token_embedding.weight" or was_frozen)
            pipeline.run(engine, loss_fn, inputs, targets)
            return engine.full_gradients().get("token_embedding.weight")


def test_a_weight_of_two_stages_is_frozen_and_thawed_in_the_whole_model(pools):
    assert pools(2).run(tied_gradient, False, True) == pools(2).run(tied_gradient, False, False) == [None, None]
    whole = gpt(True)
    loss_fn(whole(rows(1, 2)[0][0]), rows(1, 2)[1][0]).backward()
    thawed = pools(2).run(tied_gradient, True, True)[0]
    torch.testing.assert_close(thawed, whole.token_embedding.weight.grad, atol=1e-12, rtol=0)
    with pytest.raises(RankError, match="trains on one rank alone; thaw it in the whole model"):
        pools(2).run(tied_gradient, True, False)


@pytest.mark.parametrize("make", [DDP, ZeRO2])
def test_an_overflow_in_one_stage_makes_all_skip_the_step(pools, make):
    assert pools(2).run(scaled, make) == [(False, 2.0)] * 2


def evaluated_and_infinite(_, make):
    """A loss in inference mode, and whether the engine has stepped where the next one is infinite."""
    with Mesh({"pipe": 2, "data": 1}) as mesh:
        pipeline = Pipeline(gpt(), make_schedule("zb-h1", 2, 2), mesh)
        with build_engine(make(), pipeline.module, sgd, mesh) as engine:
            scaler = GradScaler(init_scale=4.0)
            inputs, targets = (every[0] for every in rows(1, 2))
            with torch.inference_mode():
                loss = pipeline.run(engine, loss_fn, inputs, targets)
            pipeline.run(engine, lambda *given: scaler.scale(loss_fn(*given)) * torch.inf, inputs, targets)
            return None if loss is None else loss.item(), scaler.step(engine)


@pytest.mark.parametrize("make", [DDP, FSDP])
def test_weights_whose_gradients_come_late_are_evaluated_and_overflow_like_others(pools, make):
    (_, losses), answers = one_process(1, 2, False), pools(2).run(evaluated_and_infinite, make)
    assert answers == [(None, False), (pytest.approx(losses[0], abs=1e-12), False)]


@pytest.mark.parametrize(("make", "how"), [(DDP, "tensors"), (ZeRO1, "tensors"), (DDP, "parameters")])
def test_torchs_clipping_of_a_stage_alone_is_refused(pools, make, how):
    with pytest.raises(RankError, match=r"(another|a different) norm on each rank"):
        pools(2).run(clipped_by_torch, make, how)


def test_stages_are_balanced_and_keep_the_models_names():
    model = gpt()
    assert cut(model, 2) == (("embed", "blocks.0"), ("blocks.1", "blocks.2", "logits"))
    assert cut(model, 2, ("blocks.2",)) == (("embed", "blocks.0", "blocks.1"), ("blocks.2", "logits"))
    assert cut(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), 3) == (("0",), ("1",), ("2",))
    large_first = nn.Sequential(nn.Linear(50, 1), nn.Linear(4, 1), nn.Linear(1, 1))  # more than twice the mean
    assert cut(large_first, 3) == (("0",), ("1",), ("2",))


def test_a_cut_is_balanced_by_what_parts_cost():
    names = list(parts_of(gpt()))
    assert cut(gpt(), 2) == cut(gpt(), 2, costs={n: sum(p.numel() for _, p in params_of(gpt(), [n])) for n in names})
    dear = dict.fromkeys(names, 1e-3) | {names[-1]: 1.0}  # of seconds most are in the last part
    assert cut(gpt(), 2, costs=dear) == (tuple(names[:-1]), (names[-1],))
    for wrong in ({}, dear | {names[0]: -1.0}, dear | {names[0]: float("nan")}):
        with pytest.raises(ValueError, match=f"costs: part '{names[0]}' has none from 0; give one for each of"):
            cut(gpt(), 2, costs=wrong)


def leaves_out_a_layer():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    model.parts = lambda: {"0": ("0",), "2": ("2",)}
    return model


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def doubled():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_forward_hook(lambda _module, _given, output: output * 2)
    return model


def says(parts):
    """A model whose ``parts()`` returns something."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.parts = lambda: parts
    return model


@pytest.mark.parametrize(
    ("make", "num_stages", "begins", "told"),
    [
        (lambda: says([("0", ["0"])]), 2, (), "model: parts() has to return a dict, of each part the names it uses; "),
        (lambda: says({"0": ("0",), "one": ("1",)}), 2, (), "it uses; 'Sequential' object has no attribute 'one'"),
        (lambda: says({"0": ("0",), "1": None}), 2, (), "names it uses; 'NoneType' object is not iterable"),
        (gpt, 6, (), "stages: 6 of a model with 5 parts; give 1 to 5"),
        (gpt, 2, ("blocks.9",), "begins: blocks.9 cannot begin the stages behind the first; give 1 of blocks.0"),
        (gpt, 3, ("blocks.1", "blocks.0"), "begins: blocks.1, blocks.0 cannot begin the stages behind the first"),
        (lambda: nn.Linear(2, 2), 1, (), "model: Linear does not say where it may be cut"),
        (lambda: Residual(nn.Linear(2, 2), nn.Linear(2, 2)), 2, (), "model: Residual does not say where it may be cut"),
        (doubled, 2, (), "model: it has hooks of its own, and stages call its parts alone; register them on a part"),
        (leaves_out_a_layer, 2, (), "model: '1.weight' is in no part; name in parts() all that forward runs"),
    ],
)
def test_what_cannot_be_cut_is_refused(make, num_stages, begins, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        cut(make(), num_stages, begins)


def refused(_, schedule):
    with Mesh({"pipe": 2, "data": 1}) as mesh:
        Pipeline(copy.deepcopy(gpt()), schedule, mesh)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (make_schedule("1f1b", 3, 3), "schedule: it is for 3 ranks, and axis 'pipe' has 2"),
        (
            Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"),
            "it deadlocks: 0B0 of rank 0 waits for 1B0 of rank 1",
        ),
    ],
)
def test_a_schedule_that_ranks_cannot_do_is_refused(pools, schedule, told):
    with pytest.raises(RankError, match=re.escape(told)):
        pools(2).run(refused, schedule)
