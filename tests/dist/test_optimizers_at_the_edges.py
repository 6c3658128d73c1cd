"""Groups chosen by identity, other optimizers after no_sync(), gradients with a graph, optimizers that project."""

import itertools

import pytest
import torch
from torch import nn

from shardlab.engines.optimizer_trial import LooksAt, Stepped, flat_pieces, looks_at
from shardlab.engines.step_tensors import StepTensors
from shardlab.launch import current
from tests.comm.test_communicator import Log
from tests.dist import cases
from tests.dist.every_engine import ENGINES, assert_states, engine_of

PIECES = [key for key in ENGINES if key.startswith(("zero", "fsdp")) and "hybrid" not in key and "no_shard" not in key]
WHOLE = [key for key in ENGINES if not key.startswith(("zero", "fsdp"))]


def sgd(tensors):
    return torch.optim.SGD(tensors, lr=0.1)


def loss_of(engine, rank, step=0):
    x, y = (cases.own_rows(part, rank) for part in cases.rows("MLP", 0, step, 2))
    return cases.loss_of(engine(x), y)


class Marked(nn.Parameter):
    pass


def marked():
    model = cases.build("MLP")
    for name, param in list(model.named_parameters()):
        if name.endswith("bias"):
            param.no_decay = True
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, made := Marked(param.detach()))
            made.no_decay = True
    return model


WAYS = {
    "identity": lambda known: lambda tensor: id(tensor) in known,
    "attribute": lambda known: lambda tensor: getattr(tensor, "no_decay", False),
    "class": lambda known: lambda tensor: isinstance(tensor, Marked),
}


def groups_made(key, way, keeps):
    model = marked()
    wanted = WAYS[way]({id(param) for param in model.parameters() if isinstance(param, Marked)})

    def make(tensors):
        ours, others = [one for one in tensors if wanted(one)], [one for one in tensors if not wanted(one)]
        return sgd({"ours": ours, "others": others}.get(keeps, [{"params": ours, "lr": 1.0}, {"params": others}]))

    try:
        with engine_of(key, 2, model, optimizer_fn=make) as engine:
            return [len(group["params"]) for group in engine.optimizer.param_groups]
    except ValueError as error:
        return str(error)


def grouped(rank, key):
    return [groups_made(key, way, keeps) for way, keeps in CHOICES]


CHOICES = [
    ("identity", "both"), ("identity", "others"), ("identity", "ours"), ("attribute", "both"), ("class", "both")
]  # fmt: skip


@pytest.mark.parametrize("key", ENGINES)
def test_groups_by_what_pieces_do_not_have_are_refused(pools, key):
    biases = sum(isinstance(param, Marked) for param in marked().parameters())
    others = len(list(cases.build("MLP").parameters())) - biases
    for answers in pools(4 if "hybrid" in key else 2).run(grouped, key):
        for (_, keeps), answer in zip(CHOICES, answers, strict=True):
            if key in WHOLE:
                assert answer == {"others": [others], "ours": [biases], "both": [biases, others]}[keeps]
            else:
                assert "or by identity, class or attributes" in answer


def stepped_by_another(rank, key):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=sgd) as engine:
        second = torch.optim.SGD(list(engine.step_tensors())[:1], lr=0.1)
        with engine.no_sync():
            engine.backward(loss_of(engine, rank))
        with pytest.raises(RuntimeError, match=r"inside no_sync\(\); call engine\.finish_gradients\(\) first"):
            second.step()
        engine.finish_gradients()
        second.step()
        engine.step()


@pytest.mark.parametrize("key", [*WHOLE, *PIECES])
def test_another_optimizer_waits_for_means(pools, key):
    if key != "single":
        pools(2).run(stepped_by_another, key)


def penalized(rank, key):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=sgd) as engine:
        loss = loss_of(engine, rank)
        loss.backward(create_graph=True)
        with pytest.raises(RuntimeError, match="does not require grad"):
            sum(param.grad.square().sum() for param in engine.module.parameters()).backward()
        engine.zero_grad()


def test_the_mean_of_a_gradient_has_no_graph(pools):
    pools(2).run(penalized, "ddp")


def expanded(rank, key):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=sgd) as engine:
        params = list(engine.module.parameters())
        for param, gradient in zip(params, torch.autograd.grad(sum(one.sum() for one in params), params), strict=True):
            param.grad = gradient * 1.0 if rank else gradient
        engine.finish_gradients()
        return [float(param.grad.sum()) / param.numel() for param in params]


@pytest.mark.parametrize("key", ["ddp", "bucketed"])
def test_an_expanded_gradient_is_averaged(pools, key):
    assert all(value == 1.0 for found in pools(2).run(expanded, key) for value in found)


def transformed(rank, key):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=sgd) as engine:
        x = cases.own_rows(cases.rows("MLP", 0, 0, 2)[0], rank)
        found = torch.func.grad(lambda rows: engine(rows).sum())(x)
        (wanted,) = torch.autograd.grad(engine(x.requires_grad_()).sum(), x)
        engine.backward(loss_of(engine, rank))
        return float((found - wanted).abs().max())


@pytest.mark.parametrize("key", ["ddp", "bucketed", "zero1", "zero2"])
def test_gradients_of_inputs_by_torch_func(pools, key):
    assert max(pools(2).run(transformed, key)) < 1e-12


class Projects(torch.optim.Optimizer):
    """Projects its update where the gradient is nearly at right angles to the weight, as SGDP does."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                update, along = param.grad, param / param.norm().clamp(min=1e-12)
                if nn.functional.cosine_similarity(update.flatten(), param.flatten(), 0).abs() < 1e-3:
                    update = 2 * update - along * (along * update).sum()
                param.sub_(update, alpha=group["lr"])


def test_an_optimizer_that_projects_is_found_to_look_at_tensors():
    params = {"weight": nn.Parameter(torch.randn(6, 4)), "bias": nn.Parameter(torch.randn(6))}
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    stepped = Stepped(StepTensors(params), shapes, torch.device("cpu"))
    assert looks_at(Projects(params.values(), 0.1), stepped, (flat_pieces,)) is LooksAt.TENSOR
    for plain in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Rprop):
        assert looks_at(plain(params.values(), lr=0.1), stepped, (flat_pieces,)) is LooksAt.ELEMENT


class BeginsWithIntegers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
        self.second = nn.Parameter(torch.full((4,), 1 / 3, dtype=torch.float64))

    def forward(self):
        return self.second.square().sum()


def norm_of(rank, key):
    model = BeginsWithIntegers()
    with engine_of(
        key, 2, model, optimizer_fn=lambda tensors: sgd(tensors.where(lambda name: name == "second"))
    ) as engine:
        engine.backward(engine())
        return float(engine.clip_grad_norm_(10.0))


@pytest.mark.parametrize("key", ["ddp", "bucketed"])
def test_the_norm_has_the_widest_dtype(pools, key):
    assert pools(2).run(norm_of, key) == [pytest.approx(4 / 3, abs=1e-14)] * 2


def with_a_list_from_before(rank, key, how):
    model = cases.build("MLP")
    params = [param for param in model.parameters() if param.requires_grad]
    with engine_of(key, 2, model, optimizer_fn=sgd) as engine:
        engine.backward(loss_of(engine, rank))
        if how == "clip":
            with pytest.raises(RuntimeError, match=r"write engine\.clip_grad_norm_\(max_norm\)"):
                nn.utils.clip_grad_norm_(params, 0.1)
            engine.step()
        else:
            for param in params:
                param.grad = None
            with pytest.raises(RuntimeError, match=r"it was set or cleared at the parameter"):
                engine.step()
        engine.zero_grad()
        assert all(param.grad is None for param in params)
        engine.backward(loss_of(engine, rank, 1))
        engine.step()
        engine.zero_grad()
    assert all(param.grad is None for param in params)
    cases.loss_of(model(cases.rows("MLP", 0, 0, 2)[0]), cases.rows("MLP", 0, 0, 2)[1]).backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("how", ["clip", "clear"])
@pytest.mark.parametrize("key", PIECES)
def test_a_list_of_parameters_from_before_the_engine_has_no_gradients_to_clip(pools, key, how):
    pools(2).run(with_a_list_from_before, key, how)


def written_to_pieces(rank, key):
    with engine_of(key, 2, cases.build("MLP"), optimizer_fn=sgd) as engine:
        engine.backward(loss_of(engine, rank))
        piece = engine.optimizer.param_groups[0]["params"][0]
        piece.requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"write model\.get_parameter\('.*'\)\.requires_grad_\(False\)"):
            engine.step()
        piece.requires_grad_(True)
        param = next(iter(engine.params.values()))
        engine.optimizer.state[param] = {}
        with pytest.raises(RuntimeError, match=r"write engine\.optimizer\.state\[engine\.step_tensors\(\)\.by_name"):
            engine.step()
        del engine.optimizer.state[param]
        engine.step()


@pytest.mark.parametrize("key", PIECES)
def test_what_is_written_to_pieces_as_if_to_parameters_is_refused(pools, key):
    pools(2).run(written_to_pieces, key)


def transposed():
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)).double()
    model[1].weight.data = model[0].weight.data.t()
    return model


def of_a_buffer():
    model = nn.Sequential(nn.Linear(5, 7)).double()
    model.register_buffer("target", model[0].weight.detach().t())
    return model


def scripted():
    return nn.Sequential(torch.jit.script(nn.Linear(5, 7)), nn.Linear(7, 5))


def refused(rank, key, make):
    with pytest.raises(ValueError, match="model: ") as caught, engine_of(key, 2, make(), optimizer_fn=sgd):
        pass
    return str(caught.value)


@pytest.mark.parametrize("make", [transposed, of_a_buffer])
@pytest.mark.parametrize("key", PIECES)
def test_transposed_memory_is_shared_memory(pools, key, make):
    assert all("two tensors over the same memory" in text for text in pools(2).run(refused, key, make))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("key", [key for key in PIECES if key.startswith(("zero3", "fsdp"))])
def test_a_scripted_part_is_refused_where_parameters_are_sharded(pools, key):
    assert all("'0' is a RecursiveScriptModule" in text for text in pools(2).run(refused, key, scripted))


class Halves(torch.optim.SGD):
    """Changes what it is given when it is built, as an optimizer that normalizes weights does."""

    def __init__(self, tensors):
        super().__init__(tensors, lr=0.1)
        with torch.no_grad():
            for group in self.param_groups:
                for tensor in group["params"]:
                    tensor.mul_(0.5)


def by_name(tensors):
    return [
        {"params": tensors.where(lambda name: name.endswith("bias"))},
        {"params": tensors.where(lambda name: not name.endswith("bias"))},
    ]


def hooked(tensors):
    for tensor in tensors:
        tensor.register_hook(torch.zeros_like)
        tensor.register_post_accumulate_grad_hook(lambda param: param.data.zero_())
        tensor.kept, tensor.requires_grad = torch.zeros_like(tensor), True
    return torch.optim.SGD(by_name(tensors), lr=0.1)


def with_effects(rank, key):
    model = cases.build("MLP")
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    calls = []

    def halving(tensors):
        calls.append(tensors)
        return Halves(tensors)

    with engine_of(key, 2, model, optimizer_fn=halving) as engine:
        engine.step()  # gathers what was written into pieces
        halved = [float((param - before[name] / 2).abs().max()) for name, param in engine.full_state_dict().items()]
    num_hooks = []
    for make in (sgd, hooked):
        with engine_of(key, 2, cases.build("MLP"), optimizer_fn=make) as engine:
            params = [param for param in engine.params.values() if param.requires_grad]
            num_hooks.append([
                len(param._backward_hooks or ()) + len(param._post_accumulate_grad_hooks or ()) for param in params
            ])  # fmt: skip
            kept = [hasattr(param, "kept") for param in params], [hasattr(one, "kept") for one in engine.step_tensors()]
    left = any(kept[0]) or num_hooks[0] != num_hooks[1]
    return max(halved), len(calls), left and key not in WHOLE, all(kept[1])


@pytest.mark.parametrize("key", ENGINES)
def test_what_is_done_to_the_tensors_is_done_to_them_alone(pools, key):
    """One call where all tensors are in one group; and the trials leave nothing at the parameters."""
    for found in pools(4 if "hybrid" in key else 2).run(with_effects, key):
        assert found == (0.0, 1, False, True)


def of_a_schedule(tensors):
    rate = float(torch.logspace(-3, -1, 5)[2])  # reads a new tensor
    return torch.optim.SGD(
        [
            {"params": [tensor for tensor in tensors if not hasattr(tensor, "no_decay")], "weight_decay": 0.1},
            {"params": [tensor for tensor in tensors if hasattr(tensor, "no_decay")], "weight_decay": 0.0},
        ],
        lr=rate,
    )


def grouped_by_attributes(rank, key):
    with (
        pytest.raises(ValueError, match="or by identity, class or attributes"),
        engine_of(key, 2, marked(), optimizer_fn=of_a_schedule),
    ):
        pass


@pytest.mark.parametrize("key", ["zero1", "zero3", "fsdp"])
def test_groups_by_attributes_are_found_where_values_are_read(pools, key):
    pools(2).run(grouped_by_attributes, key)


def sent_by(rank, key, fused):
    """What a step sends where a part of the model is frozen."""
    log, adam = Log(), lambda tensors: torch.optim.AdamW(tensors, lr=0.1, fused=fused)
    with engine_of(key, 2, cases.build("Frozen"), optimizer_fn=adam) as engine:
        for step in range(2):
            x, y = (cases.own_rows(part, rank) for part in cases.rows("Frozen", step, 0, 2))
            engine.backward(cases.loss_of(engine(x), y))
            with engine.mesh.observed_by(log):
                engine.step()
            engine.zero_grad()
    return [event.tag for event in log.events]


@pytest.mark.parametrize("key", ["zero1", "zero1-balanced", "zero2"])
def test_a_fused_step_gathers_nothing_that_is_frozen(pools, key):
    assert pools(2).run(sent_by, key, True) == pools(2).run(sent_by, key, False)


def with_gradients_at_frozen_pieces(rank, key, fused):
    def adam(tensors):
        return torch.optim.AdamW(tensors, lr=0.1, fused=fused)

    with engine_of(key, 2, cases.build("Frozen"), optimizer_fn=adam) as engine:
        x, y = (cases.own_rows(part, rank) for part in cases.rows("Frozen", 0, 0, 2))
        engine.backward(cases.loss_of(engine(x), y))
        for name, piece in engine.step_tensors().items():
            if not engine.params[name].requires_grad:
                piece.grad = torch.ones_like(piece)
        engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("key", ["zero1", "zero1-balanced", "zero2"])
def test_a_fused_step_of_frozen_pieces_by_the_users_gradients_is_gathered(pools, key):
    first, second = pools(2).run(with_gradients_at_frozen_pieces, key, True)
    unfused, _ = pools(2).run(with_gradients_at_frozen_pieces, key, False)
    assert_states([first, second], unfused)


class WithoutRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.empty, self.bias = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.randn(5))

    def forward(self, x):
        return self.empty.sum() + (self.bias * x).sum()


def without_rows(rank, key):
    with engine_of(key, 2, WithoutRows(), "adamw") as engine:
        engine.backward(engine(torch.ones(5) * rank))
        engine.step()
        return engine.num_steps


@pytest.mark.parametrize("key", ["zero1", "zero3", "fsdp"])
def test_a_matrix_without_rows_is_tried_too(pools, key):
    assert pools(2).run(without_rows, key) == [1, 1]


class SplitLater(torch.optim.AdamW):
    """Takes all tensors, and makes groups of them by their shapes afterwards."""

    def __init__(self, tensors):
        super().__init__(tensors, lr=0.1)
        params = self.param_groups[0]["params"]
        self.param_groups[0]["params"] = [one for one in params if one.ndim > 1]
        self.add_param_group({"params": [one for one in params if one.ndim < 2], "weight_decay": 0.0})


def through_iterators(tensors):
    def some(wanted):
        return filter(lambda one: (one.numel() > 200) is wanted, itertools.chain(tensors))

    return torch.optim.AdamW([{"params": some(True)}, {"params": some(False), "weight_decay": 0.0}], lr=0.1)


def after_a_write(tensors):
    with torch.no_grad():
        torch._foreach_clamp_max_([tensor.mul_(1.0) for tensor in tensors], 1e9)
    return of_a_schedule(tensors)


class Reads(torch.optim.SGD):
    """Reads what it has just been given, which has no values when it is tried."""

    def __init__(self, groups):
        super().__init__(groups, lr=0.1)
        self.scales = [1 / float(one.abs().mean()) for group in self.param_groups for one in group["params"] if len(one)]


def reading(tensors):
    return Reads(of_a_schedule(tensors).param_groups)


def rates(tensors):
    return torch.optim.SGD([{"params": [one], "lr": 0.5 if one.dim() > 1 else 0.1} for one in tensors], lr=0.1)


def betas(tensors):
    return torch.optim.Adam([{"params": [one], "betas": (0.5 if one.dim() > 1 else 0.9, 0.9)} for one in tensors], lr=0.1)


def fails_with_pieces(tensors):
    for one in tensors:
        if one.numel() != 16:
            raise LookupError("16 elements were expected")
    return torch.optim.SGD(tensors, lr=0.1)


CHOOSE = {
    "later": SplitLater,
    "iterators": through_iterators,
    "reading": reading,
    "rates": rates,
    "betas": betas,
    "write": after_a_write,
}


def chosen(rank, key, how, from_meta):
    torch.manual_seed(0)
    model = marked()
    if from_meta:
        model = nn.Sequential(nn.Linear(6, 6, device="meta"), nn.Linear(6, 6, device="meta"))
        for param in model[0].parameters():
            param.no_decay = True
    ids = {id(param) for param in list(model.parameters())[:2]}

    def by_identity(tensors):
        return sgd([{"params": [t for t in tensors if (id(t) in ids) is wanted]} for wanted in (True, False)])

    unlike = "or by identity, class or attributes"
    why = "could not be tried with the module's parameters" if how == "write" and not from_meta else unlike
    with (
        pytest.raises(ValueError, match=f"optimizer_fn: .*{why}.*choose by name"),
        engine_of(key, 2, model, optimizer_fn=by_identity if how == "identity" else CHOOSE[how]),
    ):
        pass


@pytest.mark.parametrize(
    ("key", "how"), [(key, how) for key in ("zero1", "zero3", "fsdp") for how in CHOOSE if (key, how) != ("zero1", "write")]
)
def test_however_tensors_are_chosen_by_what_pieces_do_not_have_it_is_refused(pools, key, how):
    pools(2).run(chosen, key, how, False)


@pytest.mark.parametrize("how", ["identity", "write"])
def test_parameters_that_are_allocated_by_the_engine_are_those_of_the_model(pools, how):
    pools(2).run(chosen, "fsdp", how, True)


def lacks_memory(tensors):
    if not next(iter(tensors)).is_meta:
        raise torch.OutOfMemoryError("no room for the state")
    return sgd(tensors)


def raises_it(rank, key, make, words):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with pytest.raises((ValueError, RuntimeError), match=words), engine_of(key, 2, model, optimizer_fn=make):
        pass


@pytest.mark.parametrize("key", ["zero1", "fsdp"])
def test_another_error_of_the_function_is_told(pools, key):
    pools(2).run(raises_it, key, lacks_memory, "^(?!optimizer_fn).*no room for the state")
    pools(2).run(raises_it, key, fails_with_pieces, "optimizer_fn: .*with pieces it raises LookupError: 16 elements were")


def picking(tensors):
    drawn = float(torch.rand(1))
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    optimizer = Halves([{"params": [one for one in tensors if one.requires_grad], "momentum": drawn}])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)  # which changes the options of its groups
    return optimizer


def picked(rank, key):
    model = cases.build("MLP")
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    torch.manual_seed(0)
    with engine_of(key, current().world_size, model, optimizer_fn=picking) as engine:
        drawn = torch.rand(1)
        kept = [name for name, param in engine.params.items() if param.grad is not None]
        engine.zero_grad()
        engine.step()  # gathers what was written into pieces
        halved = [float((param - before[name] / 2).abs().max()) for name, param in engine.full_state_dict().items()]
    torch.manual_seed(0)
    return max(halved), float(drawn - torch.rand(2)[1]), kept


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("key", ["zero1", "zero2", "zero3", "fsdp", "zero1-balanced"])
def test_where_single_tensors_are_picked_too_they_are_changed_once(pools, key, num_ranks):
    for found in pools(num_ranks).run(picked, key):
        assert found == (0.0, 0.0, [])
