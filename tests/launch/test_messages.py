"""What travels by value, what by name, and the text of notebook cells."""

import linecache
import traceback

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardlab.launch.messages import pack, unpack


def test_installed_code_goes_by_name():
    assert unpack(pack(torch.nn.Linear, "x")) is torch.nn.Linear
    assert len(pack(torch.nn.Linear, "x").blob) < 200


def test_code_that_goes_by_value_knows_its_file_and_line():
    def outer():
        return lambda: None

    sent = unpack(pack(outer, "x"))
    assert sent.__code__ is not outer.__code__
    for here, there in ((outer, sent), (outer(), sent())):
        assert there.__code__.co_filename == __file__
        assert there.__code__.co_firstlineno == here.__code__.co_firstlineno


def test_functions_may_name_the_operators_of_torch():
    """As policies of selective checkpointing do."""

    def policy(operator):
        return operator is torch.ops.aten.mm.default, torch.utils.deterministic.fill_uninitialized_memory

    assert unpack(pack(policy, "x"))(torch.ops.aten.mm.default) == policy(torch.ops.aten.mm.default)


class Own(torch.optim.SGD):
    def step(self, closure=None):
        """Nothing."""


def stepped(rank):
    seen, optimizer = [], Own([torch.zeros(1)])
    hook = register_optimizer_step_pre_hook(lambda stepped, *_: seen.append(stepped is optimizer))
    try:
        optimizer.step()
    finally:
        hook.remove()
    return seen


def test_an_optimizer_s_class_that_was_used_here_calls_the_hooks_of_the_rank(pools):
    Own([torch.zeros(1)])  # torch wraps the class's step now
    assert pools(2).run(stepped) == [[True], [True]]


def test_a_module_on_a_gpu_keeps_its_parameters(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))  # its tensors become copies in host memory
    model = torch.nn.BatchNorm1d(3)
    model.bias.requires_grad_(False)
    model.tied, leaf = model.weight, torch.ones(2, requires_grad=True)
    found, found_leaf = unpack(pack((model, leaf), "the model"))
    assert {name: type(param) for name, param in found.named_parameters()} == {
        "weight": torch.nn.Parameter, "bias": torch.nn.Parameter,
    }  # fmt: skip
    assert found.weight is found.tied
    assert (found.weight.requires_grad, found.bias.requires_grad, found_leaf.requires_grad) == (True, False, True)
    assert torch.equal(found.running_var, model.running_var)
    found(torch.ones(4, 3)).sum().backward()
    assert found.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn])
def test_tensors_of_dtypes_that_torch_cannot_unpickle_travel(dtype):
    """Tokens of a file, as 16 bits without a sign; frozen weights of 8 bits."""
    weight = torch.nn.Parameter(torch.tensor([[1, 2]]).to(dtype), requires_grad=False)
    for one in unpack(pack((weight, weight.data, weight.data[0, 0]), "tokens")):
        assert one.dtype == dtype
        assert one.flatten().tolist() == [1, 2][: one.numel()]
    assert isinstance(unpack(pack(weight, "a weight")), torch.nn.Parameter)
    if dtype.is_floating_point:
        assert unpack(pack(weight.data.requires_grad_(), "a leaf")).requires_grad


def test_tensors_that_share_memory_share_it_on_the_other_side_and_are_sent_once():
    """The rows of a data set, and weights that are tied through ``.data``."""
    matrix, first, second = torch.zeros(100, 100), torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    second.weight.data = first.weight.data
    payload = pack((list(matrix), matrix.view(torch.int32), first, second), "rows")
    assert len(payload.blob) < 2 * matrix.nbytes
    rows, bits, first, second = unpack(payload)
    rows[3].fill_(1.0)
    assert bits.sum(1).nonzero().tolist() == [[3]]
    assert first.weight.data_ptr() == second.weight.data_ptr() != bits.data_ptr()


def test_source_of_a_cell_travels_for_tracebacks(monkeypatch):
    file, text = "/tmp/ipykernel_1/2.py", "def cell():\n    raise ValueError('in the cell')\n"
    monkeypatch.setitem(linecache.cache, file, (len(text), None, text.splitlines(keepends=True), file))
    scope = {"__name__": "__main__"}
    exec(compile(text, file, "exec"), scope)
    payload = pack(scope["cell"], "x")
    monkeypatch.delitem(linecache.cache, file)
    with pytest.raises(ValueError, match="in the cell") as caught:
        unpack(payload)()
    assert "raise ValueError('in the cell')" in "".join(traceback.format_exception(caught.value))
