"""What users do at the edges of a step: write into pieces, average in hooks, keep gradients, save the optimizer's state."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from shardlab.launch import RankError, current
from shardlab.vocabulary import Role
from tests.dist import cases
from tests.dist.every_engine import ENGINES, assert_states, engine_of
from tests.dist.test_users_code import PLACES, STEPPED_IN_PIECES, OnRanks, in_one_process, loss_of, on_ranks, sgd, train

GATHERED = [key for key in ENGINES if key.startswith(("zero3", "fsdp"))]
NOT_THREE = [(key, size) for key, size in PLACES if size != 3]  # half the time
ON_TWO = [key for key in ENGINES if "hybrid" not in key]
OTHERS = [(key, size) for key, size in PLACES if key not in STEPPED_IN_PIECES]


@torch.no_grad()
def clamp(optimizer):
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            tensor.clamp_(-0.1, 0.1)


@torch.no_grad()
def clamped_before_the_step(engine):
    for param in engine.module[0].parameters():
        param.requires_grad_(False)
    for step in range(3):
        with torch.enable_grad():
            engine.backward(loss_of(engine, step))
        clamp(engine.optimizer)
        engine.step()
        engine.zero_grad()


def clamped_after_the_step(engine):
    for step in range(3):
        train(engine, step)
        clamp(engine.optimizer)
    engine.step()


def surgery(engine):
    """Gradients of two losses, of which the first are kept while the second are made."""
    for step in range(2):
        engine.backward(loss_of(engine, step))
        tensors = engine.tensors_of(lambda _: True)
        first = [tensor.grad for tensor in tensors]
        engine.zero_grad()
        engine.backward(loss_of(engine, step + 1))
        for tensor, gradient in zip(tensors, first, strict=True):
            if gradient is not None:
                tensor.grad = tensor.grad + 2 * gradient
        engine.step()
        engine.zero_grad()


STORIES = {story.__name__: story for story in (clamped_before_the_step, clamped_after_the_step, surgery)}


@pytest.mark.parametrize("name", ["clamped_before_the_step", "surgery"])
@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_pieces_are_written_and_gradients_kept_as_in_one_process(pools, key, num_ranks, name):
    expected = in_one_process(STORIES[name], num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(on_ranks, key, STORIES[name]), expected)


@pytest.mark.parametrize(("key", "num_ranks"), OTHERS)
def test_what_is_stepped_may_be_written_last_where_nothing_is_gathered_after(pools, key, num_ranks):
    expected = in_one_process(clamped_after_the_step, num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(on_ranks, key, clamped_after_the_step), expected)


def stepped_twice(engine):
    train(engine, 0)
    train(engine, 1)


def written_last(rank, key, precision):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=sgd, precision=precision) as engine:
        told = OnRanks(engine)
        train(told, 0)
        clamp(engine.optimizer)
        x = cases.rows("MLP", 0, 0, 4)[0]
        for refused in (lambda: engine(x), engine.full_state_dict, lambda: engine.full_params().__enter__()):
            with pytest.raises(RuntimeError, match="pieces were written to.*before engine.step"):
                refused()
        engine.step()  # gathers
        clamped = max(value.abs().max().item() for value in engine.full_state_dict().values())
        clamp(engine.optimizer)
        with pytest.raises(RuntimeError, match="pieces were written to"):
            engine.close()
        engine.step()
    return clamped


@pytest.mark.parametrize("precision", ["full", "bf16"])
@pytest.mark.parametrize("key", STEPPED_IN_PIECES)
def test_pieces_that_were_written_last_are_refused_until_a_step_gathers_them(pools, key, precision):
    for clamped in pools(2).run(written_last, key, precision):
        assert clamped == pytest.approx(0.1, abs=1e-3)


def written_by_its_owner(rank, key, story):  # noqa: ARG001
    """Nothing else tells the other ranks that a piece was written."""
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=sgd) as engine:
        told = OnRanks(engine)
        train(told, 0)
        state = engine.full_state_dict()
        if story == "frozen":
            told.module[2].requires_grad_(False)
            engine.backward(loss_of(told, 1))
        for tensor in engine.step_tensors().where(lambda name: name == "0.bias"):
            if tensor.numel():
                with torch.no_grad():
                    tensor.clamp_(-0.1, 0.1)
        if story == "loaded":
            engine.load_full_state_dict(state)
            train(told, 1)
            return engine.full_state_dict()
        if story == "frozen":
            engine.step()
            return engine.full_state_dict()
    return None


@pytest.mark.parametrize("key", ["zero1", "zero2"])
def test_what_one_rank_has_written_last_is_refused_there(pools, key):
    with pytest.raises(RankError, match="pieces were written to"):
        pools(2).run(written_by_its_owner, key, "last")


@pytest.mark.parametrize("key", ["zero1", "zero2"])
def test_what_one_rank_has_written_may_be_beside_what_is_frozen(pools, key):
    expected = in_one_process(written_beside_what_is_frozen, 2, cases.build("MLP"))
    assert_states(pools(2).run(written_by_its_owner, key, "frozen"), expected)


def written_beside_what_is_frozen(engine):
    train(engine, 0)
    engine.module[2].requires_grad_(False)
    engine.backward(loss_of(engine, 1))
    with torch.no_grad():
        engine.module[0].bias.clamp_(-0.1, 0.1)
    engine.step()


@pytest.mark.parametrize("key", STEPPED_IN_PIECES)
def test_what_one_rank_has_written_is_replaced_by_what_is_loaded(pools, key):
    expected = in_one_process(stepped_twice, 2, cases.build("MLP"))
    assert_states(pools(2).run(written_by_its_owner, key, "loaded"), expected)


def test_one_process_writes_into_the_parameters_themselves():
    expected = in_one_process(clamped_after_the_step, 1, cases.build("MLP"))
    with engine_of("zero1", 1, cases.build("MLP"), optimizer_fn=sgd) as engine:
        clamped_after_the_step(OnRanks(engine))
        assert_states([engine.full_state_dict()], expected)


def assigned(engine):
    train(engine, 0)
    for tensor in engine.tensors_of(lambda _: True):
        tensor.data = tensor.data.clamp(-0.1, 0.1)


def assigned_last(rank, key):  # noqa: ARG001
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        assigned(OnRanks(engine))
        engine.close()
        return engine.module.state_dict()


@pytest.mark.parametrize(("key", "num_ranks"), NOT_THREE)
def test_what_is_assigned_to_a_piece_after_the_step_is_there_at_the_end_or_refused(pools, key, num_ranks):
    expected = in_one_process(assigned, num_ranks, cases.build("MLP"))
    if key in STEPPED_IN_PIECES:
        with pytest.raises(RankError, match="pieces were written to"):
            pools(num_ranks).run(assigned_last, key)
    else:
        assert_states(pools(num_ranks).run(assigned_last, key), expected)


def sums_kept_in_a_list(rank, key, keeps):
    """In more bits they add up in the buckets alone."""
    with engine_of(key, 2, cases.build("MLP").float(), optimizer_fn=sgd, precision="bf16") as engine:
        x, y = (value.float() for value in cases.rows("MLP", rank, 0, 4))
        kept = []
        for _ in range(2):
            with engine.no_sync():
                engine.backward(torch.nn.functional.mse_loss(engine(x), y))
            if keeps:
                kept += [tensor.detach() for tensor in engine.live_tensors()[Role.GRADIENT]]
        engine.backward(torch.nn.functional.mse_loss(engine(x), y))
        return engine.full_gradients()


@pytest.mark.parametrize("key", STEPPED_IN_PIECES)
def test_sums_that_somebody_looks_at_stay(pools, key):
    (first, _), (second, _) = (pools(2).run(sums_kept_in_a_list, key, keeps) for keeps in (False, True))
    assert_states([second], first)


def averaging(engine, read):
    average = []

    def update(*_):
        values = read(engine)
        average[:] = [0.7 * old + 0.3 * new for old, new in zip(average or values, values, strict=True)]

    engine.optimizer.register_step_post_hook(update)
    for step in range(3):
        train(engine, step)
    return average


def of_the_module(engine):
    return [param.detach().clone() for param in engine.module.parameters()]


def of_the_state(engine):
    state = engine.module.state_dict() if not hasattr(engine, "full_state_dict") else engine.full_state_dict()
    return [value.clone() for value in state.values()]


READS = {"module": of_the_module, "state": of_the_state}


def clamped_by_a_hook(engine):
    engine.optimizer.register_step_post_hook(lambda optimizer, *_: clamp(optimizer))
    stepped_twice(engine)


@torch.no_grad()
def clamped_through_data_by_a_hook(engine):
    def clamp_data(optimizer, *_):
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.data.clamp_(-0.1, 0.1)

    engine.optimizer.register_step_post_hook(clamp_data)
    with torch.enable_grad():
        stepped_twice(engine)


def clamped_out_of_reach_by_a_hook(engine):
    """In place, but no value changes."""

    @torch.no_grad()
    def clamp_far(optimizer, *_):
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.clamp_(-100.0, 100.0)

    engine.optimizer.register_step_post_hook(clamp_far)
    stepped_twice(engine)


def written_by_one_rank_in_a_hook(engine):
    """In full parameters: it is in the piece of one rank alone."""

    @torch.no_grad()
    def halve(*_):
        with engine.full_params(keep_changes=True) as model:
            model[0].weight[0].mul_(0.5)

    engine.optimizer.register_step_post_hook(halve)
    stepped_twice(engine)


def clamped_where_there_is_a_gradient(engine):
    """A rank that holds nothing of a parameter has none there."""

    @torch.no_grad()
    def clamp_some(optimizer, *_):
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    tensor.clamp_(-0.1, 0.1)

    engine.optimizer.register_step_post_hook(clamp_some)
    stepped_twice(engine)


def clamped_in_full_params(engine):
    with engine.full_params(keep_changes=True) as model:

        @torch.no_grad()
        def clamp_all(*_):
            for param in model.parameters():
                param.clamp_(-0.1, 0.1)

        engine.optimizer.register_step_post_hook(clamp_all)
        stepped_twice(engine)


def logged_by_some(engine):
    if getattr(engine, "data_rank", 0) == 0:
        engine.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0]["lr"])
    stepped_twice(engine)


def patched_and_held(engine):
    step = engine.optimizer.step

    def patched(*args):
        step(*args)
        clamp(engine.optimizer)

    engine.optimizer.step = patched
    with engine.full_params():
        stepped_twice(engine)


HOOKED = {
    story.__name__: story
    for story in (
        clamped_by_a_hook,
        clamped_through_data_by_a_hook,
        clamped_out_of_reach_by_a_hook,
        written_by_one_rank_in_a_hook,
        clamped_where_there_is_a_gradient,
        clamped_in_full_params,
        logged_by_some,
        patched_and_held,
    )
}
HOOKED_PLACES = [
    (key, size, name) for key, size in NOT_THREE for name in HOOKED
    # Where pieces are gathered, what is written through .data after that is seen by nobody.
    if name != "clamped_through_data_by_a_hook" or key not in STEPPED_IN_PIECES
]  # fmt: skip


@pytest.mark.parametrize(("key", "num_ranks", "name"), HOOKED_PLACES)
def test_what_a_hook_of_the_optimizer_writes_counts(pools, key, num_ranks, name):
    expected = in_one_process(HOOKED[name], num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(on_ranks, key, HOOKED[name]), expected)


class Assigns(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad


class Hooked(Assigns):
    """Registers a hook itself, and so needs to say what it looks at."""

    shardlab_looks_at = "element"

    def __init__(self, params, seen, **options):
        super().__init__(params, **options)
        self.register_step_post_hook(lambda *_: seen.append(seen.read()))


class Seen(list):
    read = None


def read_by_a_hook(rank, key, holds, early):  # noqa: ARG001
    seen = Seen()
    make = partial(Hooked, seen=seen, lr=0.1) if early else partial(Assigns, lr=0.1)
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=make) as engine:
        told = OnRanks(engine)
        seen.read = (lambda: [p.detach().clone() for p in engine.module.parameters()]) if holds else (
            lambda: list(engine.full_state_dict().values()))  # fmt: skip
        if not early:
            engine.optimizer.register_step_post_hook(lambda *_: seen.append(seen.read()))
        with engine.full_params() if holds else nullcontext():
            train(told, 0)
            return dict(enumerate(seen[-1])), dict(enumerate(seen.read()))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("key", ON_TWO)
def test_a_hook_reads_what_is_there_after_the_step(pools, key, holds, early):
    for seen, after in pools(2).run(read_by_a_hook, key, holds, early):
        assert_states([seen], after)


class Forgetful(torch.optim.SGD):
    """Passes on only what it knows of a state dict."""

    def load_state_dict(self, state_dict):
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def loaded_by_a_forgetful_optimizer(rank, key, directory):  # noqa: ARG001
    make = partial(Forgetful, lr=0.1, momentum=0.9)
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=make) as engine:
        told = OnRanks(engine)
        train(told, 0)
        engine.load_full_optimizer_state_dict(engine.full_optimizer_state_dict())
        engine.save(directory)
        train(told, 1)
        engine.load(directory)
        train(told, 1)
        return engine.full_state_dict()


@pytest.mark.parametrize("key", ON_TWO)
def test_an_optimizer_with_its_own_load_state_dict_is_loaded(pools, key, tmp_path):
    make = partial(Forgetful, lr=0.1, momentum=0.9)
    expected = in_one_process(stepped_twice, 2, cases.build("MLP"), make)
    assert_states(pools(2).run(loaded_by_a_forgetful_optimizer, key, tmp_path), expected)


def averaged(rank, key, read):  # noqa: ARG001
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        return dict(enumerate(averaging(OnRanks(engine), READS[read])))


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_a_hook_of_the_optimizer_finds_the_stepped_model(pools, key, num_ranks, read):
    if read == "module" and key in GATHERED:
        return  # refused, as outside of a step
    expected = []
    in_one_process(lambda engine: expected.extend(averaging(engine, READS[read])), num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(averaged, key, read), dict(enumerate(expected)))


class Steps(torch.optim.Optimizer):
    """Plain descent, in a class that calls no other's step."""

    after = None

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])
        if self.after is not None:
            self.after(self)


class StepsAndMore(Steps):
    """Goes on after its base class's step; torch runs hooks at the end of both, if there has been a plain one."""

    def step(self, closure=None):
        after, self.after = self.after, None
        super().step(closure)
        self.after = after
        if after is not None:
            after(self)


def steps(tensors, optimizer):
    Steps([torch.zeros(1)])  # from here on torch runs the hooks of this class
    return optimizer(tensors)


OPTIMIZERS = pytest.mark.parametrize("optimizer", [Steps, StepsAndMore])


def evaluating(rank, key, optimizer):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=partial(steps, optimizer=optimizer)) as engine:
        told = OnRanks(engine)
        engine.optimizer.after = lambda _: loss_of(told, 0)
        engine.backward(loss_of(told, 0))
        with pytest.raises(RuntimeError, match="pieces were written to"):
            engine.step()
        engine.optimizer.after = None
        engine.zero_grad()
        engine.step()  # of nothing: it gathers what the step that was refused had stepped
        train(told, 1)
        return engine.full_state_dict()


@OPTIMIZERS
@pytest.mark.parametrize("key", STEPPED_IN_PIECES)
def test_inside_an_optimizers_step_a_model_of_old_and_new_pieces_is_refused(pools, key, optimizer):
    expected = in_one_process(stepped_twice, 2, cases.build("MLP"))
    assert_states(pools(2).run(evaluating, key, optimizer), expected)


def clamping(rank, key, optimizer):  # noqa: ARG001
    optimizer_fn = partial(steps, optimizer=optimizer)
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=optimizer_fn) as engine:
        engine.optimizer.after = clamp
        stepped_twice(OnRanks(engine))
        return engine.full_state_dict()


def clamped_in_the_step(engine):
    for step in range(2):
        train(engine, step)
        clamp(engine.optimizer)


@OPTIMIZERS
@pytest.mark.parametrize(("key", "num_ranks"), NOT_THREE)
def test_what_an_optimizer_does_after_its_base_classes_step_counts(pools, key, num_ranks, optimizer):
    expected = in_one_process(clamped_in_the_step, num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(clamping, key, optimizer), expected)


def logged_halfway(rank, key):  # noqa: ARG001
    optimizer_fn = partial(steps, optimizer=StepsAndMore)
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=optimizer_fn) as engine:
        engine.optimizer.after = clamp
        logged_by_some(OnRanks(engine))
        return engine.full_state_dict()


@pytest.mark.parametrize(("key", "num_ranks"), NOT_THREE)
def test_hooks_that_torch_runs_halfway_through_a_step_disturb_nothing(pools, key, num_ranks):
    expected = in_one_process(clamped_in_the_step, num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(logged_halfway, key), expected)


def clipped_while_held(rank, key):  # noqa: ARG001
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        told = OnRanks(engine)
        engine.backward(loss_of(told, 0))
        with engine.full_params() as model:
            clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=1.0)
            for refused in (clip, lambda params: [param.grad * 2 for param in params]):
                with pytest.raises(RuntimeError, match="engine.clip_grad_norm_"):
                    refused(model.parameters())
            engine.backward(loss_of(told, 1))
            for param in model.parameters():
                param.grad = None
            with pytest.raises(RuntimeError, match="set or cleared at the parameter"):
                engine.step()
            engine.zero_grad()
            stepped_twice(told)
        return engine.full_state_dict()


@pytest.mark.parametrize("key", GATHERED)
def test_a_gradient_that_is_elsewhere_is_not_taken_for_none_while_parameters_are_held(pools, key):
    num_ranks = 4 if "hybrid" in key else 2
    expected = in_one_process(stepped_twice, num_ranks, cases.build("MLP"))
    assert_states(pools(num_ranks).run(clipped_while_held, key), expected)


class Extrapolates(torch.optim.Optimizer):
    """Keeps the gradient of the step before, and no copy of it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    last = self.state[param].get("last", param.grad)
                    param.sub_(1.5 * param.grad - 0.5 * last, alpha=group["lr"])
                    self.state[param]["last"] = param.grad


def four_steps(engine):
    for step in range(4):
        train(engine, step)


def extrapolating(rank, key):  # noqa: ARG001
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=Extrapolates) as engine:
        four_steps(OnRanks(engine))
        return engine.full_state_dict()


@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_an_optimizer_may_keep_the_last_gradients(pools, key, num_ranks):
    expected = in_one_process(four_steps, num_ranks, cases.build("MLP"), Extrapolates)
    assert_states(pools(num_ranks).run(extrapolating, key), expected)


def adam(tensors):
    return torch.optim.AdamW(tensors, lr=0.05, eps=0.1)


def states_loaded(rank, key, path):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=adam) as engine:
        told = OnRanks(engine)
        train(told, 0)
        own = engine.optimizer.state_dict()
        if rank == 0:
            torch.save(own, path)
        engine.mesh.data.barrier().wait()
        model = cases.build("MLP")
        plain = adam(model.parameters()).state_dict()
        for refused in (*([torch.load(path)] if rank == 1 else []), plain):
            with pytest.raises(ValueError, match="not of these pieces; write engine.load_full_optimizer_state_dict"):
                engine.optimizer.load_state_dict(refused)
        engine.optimizer.load_state_dict(own)
        engine.load_full_optimizer_state_dict(engine.full_optimizer_state_dict())
        train(told, 1)
        return engine.full_state_dict()


@pytest.mark.parametrize("key", ["zero1", "zero2-round_robin", "zero3", "fsdp", "fsdp-dim0", "fsdp-offload-all"])
def test_the_state_of_another_ranks_pieces_is_refused(pools, tmp_path, key):
    expected = in_one_process(stepped_twice, 2, cases.build("MLP"), adam)
    assert_states(pools(2).run(states_loaded, key, str(tmp_path / "state.pt")), expected)


def plain_state_loaded(rank, key):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=adam) as engine:
        train(OnRanks(engine), 0)
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        return list(engine.optimizer.state_dict())


@pytest.mark.parametrize("key", ["ddp", "bucketed", "fsdp-no_shard"])
def test_the_state_of_whole_parameters_is_torchs(pools, key):
    assert pools(2).run(plain_state_loaded, key) == [["state", "param_groups"]] * 2


class SkipsNaN(torch.optim.SGD):
    """Leaves out the step if any gradient is not finite."""

    def step(self, closure=None):
        gradients = [param.grad for group in self.param_groups for param in group["params"]]
        if all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None):
            super().step(closure)


def skipping(rank, key):
    def optimizer_fn(tensors):
        return SkipsNaN(tensors, lr=0.1)

    with (
        pytest.raises(ValueError, match="SkipsNaN looks at the whole model"),
        engine_of(key, 2, cases.build("MLP"), optimizer_fn=optimizer_fn),
    ):
        raise AssertionError


@pytest.mark.parametrize("key", ["zero1", "zero2-round_robin", "zero3", "fsdp"])
def test_an_optimizer_that_looks_for_nan_everywhere_is_refused(pools, key):
    pools(2).run(skipping, key)


def assigned_before_backward(rank, key):  # noqa: ARG001
    """A backward through the old values would be right, and one through the new is not."""
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        told = OnRanks(engine)
        loss = loss_of(told, 0)
        for tensor in engine.step_tensors():
            tensor.data = tensor.data * 3
        with pytest.raises(RuntimeError, match="between forward and backward|pieces were written to"):
            engine.backward(loss)
        engine.zero_grad()
        engine.step()
    return True


@pytest.mark.parametrize("key", [key for key in ON_TWO if key in STEPPED_IN_PIECES or key.startswith("zero3")])
def test_pieces_assigned_between_forward_and_backward_are_refused(pools, key):
    assert pools(2).run(assigned_before_backward, key) == [True, True]


def written_by_hand(rank, key):  # noqa: ARG001
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        told = OnRanks(engine)
        train(told, 0)
        for refused in (engine.step, engine.full_state_dict):
            for unit in engine.units:
                engine.unshard(unit.name)
            with torch.no_grad():
                for param in engine.module.parameters():
                    param.fill_(0.5)
            with pytest.raises(RuntimeError, match="it was written to while it was gathered"):
                refused()
        train(told, 1)
        return engine.full_state_dict()


@pytest.mark.parametrize("key", ["fsdp", "fsdp-dim0", "fsdp-shard_grad_op", "fsdp-offload"])
def test_what_is_written_into_units_gathered_by_hand_is_refused(pools, key):
    expected = in_one_process(stepped_twice, 2, cases.build("MLP"))
    assert_states(pools(2).run(written_by_hand, key), expected)


def closed_while_held(rank, key):  # noqa: ARG001
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=sgd) as engine:
        told = OnRanks(engine)
        train(told, 0)
        engine.backward(loss_of(told, 1))
        with engine.full_params() as model:
            model.to("cpu")
            engine.close()
        optimizer = sgd(list(model.parameters()))
        x, y = cases.rows("MLP", 1, 0, 4)
        rows = slice(2 * cases.ROWS_PER_RANK)
        torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
        return model.state_dict()


@pytest.mark.parametrize("key", [key for key in ON_TWO if key not in ("ddp", "bucketed")])  # where gradients stay
def test_a_module_that_is_given_back_inside_full_params_trains_alone(pools, key):
    expected = in_one_process(stepped_twice, 2, cases.build("MLP"))
    assert_states(pools(2).run(closed_while_held, key), expected)


class FusedAndRaises(torch.optim.AdamW):
    """Its kernels write without raising autograd's version counters, and its step raises after them."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise KeyError("after the update")


def raised_after_the_update(rank, key):  # noqa: ARG001
    fused = partial(FusedAndRaises, lr=0.1, fused=True)
    with engine_of(key, current().world_size, cases.build("MLP"), optimizer_fn=fused) as engine:
        told = OnRanks(engine)
        train(told, 0)
        engine.optimizer.fails = True
        engine.backward(loss_of(told, 1))
        with pytest.raises(KeyError, match="after the update"):
            engine.step()
        with pytest.raises(RuntimeError, match="pieces were written to"):
            loss_of(told, 2)
        engine.optimizer.fails = False
        engine.zero_grad()
        engine.step()  # of nothing: it gathers
        assert torch.isfinite(loss_of(told, 2))
    return True


@pytest.mark.parametrize("key", [key for key in ON_TWO if key in STEPPED_IN_PIECES])
def test_a_fused_step_that_raises_after_the_update_counts_as_written(pools, key):
    assert pools(2).run(raised_after_the_update, key) == [True, True]


def read_inside_the_step(rank, key):  # noqa: ARG001
    with engine_of(
        key, current().world_size, cases.build("MLP"), optimizer_fn=partial(steps, optimizer=Steps)
    ) as engine:
        seen = []
        engine.optimizer.after = lambda _: seen.append(engine.full_state_dict())
        train(OnRanks(engine), 0)
        return seen[0], engine.full_state_dict()


OFFLOADED = [key for key in ENGINES if "offload" in key]


@pytest.mark.parametrize("key", OFFLOADED)
def test_a_state_read_inside_an_offloaded_step_is_the_stepped_one(pools, key):
    for inside, after in pools(2).run(read_inside_the_step, key):
        assert_states([inside], after)
