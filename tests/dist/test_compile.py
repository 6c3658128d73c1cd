"""``torch.compile`` on blocks, on the module, on the engine: as one process computes, with every engine."""

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.trace.memory_by_role import bytes_by_role
from shardlab.vocabulary import Role
from tests.dist import cases
from tests.dist.every_engine import adamw, assert_states, own_batch, plain_steps, step_on
from tests.dist.test_fsdp import build

# Where parameters are whole there is nothing to trace but the module; the cases are shared out (``CASES``, by number).
SETUPS = {
    "bucketed": ("bucketed", {}, (2,)),
    "zero1": ("zero1", {}, (3,)),
    "zero3": ("zero3", {}, (1, 3, 5)),
    "fsdp": ("fsdp", {}, (0, 4, 6)),
}


@pytest.fixture(scope="module", autouse=True)
def _later_tests_have_ranks_without_the_compiler(pools):
    """All that it imports would be searched for cycles after every later call: 0.1 s in each rank."""
    yield
    pools(2).restart()


def blocks_replaced(model, backend):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)
    return model


def blocks_compiled(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def module_compiled(model, backend):
    model.compile(backend=backend)
    return model


def module_wrapped(model, backend):
    return torch.compile(model, backend=backend)


def steps(engine, call):
    """Two of them; the most bytes gathered between forward and backward."""
    most = 0
    for step in range(2):
        x, y = own_batch(engine, step=step)
        loss = cases.loss_of(call(x), y)
        most = max(most, bytes_by_role(engine.live_tensors()).get(Role.GATHERED_PARAMETER, 0))
        step_on(engine, loss)
    return most


def compiled(rank, setup, num_ranks, compile_it, backend, when):
    strategy, options, _ = SETUPS[setup]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        with Mesh({"data": num_ranks}) as mesh:
            model = build()
            if when == "before":
                model = compile_it(model, backend)
            engine = build_engine(strategy, model, adamw, mesh, **options)
            if when == "after":
                compile_it(model, backend)
            call = torch.compile(engine, backend=backend) if when == "engine" else engine
            most = steps(engine, call)
            state = {name.replace("_orig_mod.", ""): value for name, value in engine.full_state_dict().items()}
            return state, most, torch._dynamo.utils.counters["stats"]["unique_graphs"]
    finally:
        torch._dynamo.reset()


CASES = {
    "blocks replaced, then the engine": (blocks_replaced, "aot_eager", "before"),
    "blocks compiled, then the engine": (blocks_compiled, "eager", "before"),
    "the module, then the engine": (module_compiled, "aot_eager", "before"),
    "the wrapped module, then the engine": (module_wrapped, "eager", "before"),
    "the engine, then its blocks": (blocks_compiled, "aot_eager", "after"),
    "the engine, then its module": (module_compiled, "eager", "after"),
    "the engine itself": (None, "eager", "engine"),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_compiled_equals_one_process_that_is_not(pools, setup):
    expected = plain_steps(build(), adamw, 2, 0, 1)
    for name, case in (list(CASES.items())[number] for number in SETUPS[setup][2]):
        for state, gathered, graphs in pools(2).run(compiled, setup, 2, *case):
            assert_states([state], expected)
            assert graphs > 0, f"{name}: nothing was compiled"
            assert gathered == 0, f"{name}: weights were saved for backward"
