"""``torch.compile`` of a divided model: it computes as one process and sends what it sends uncompiled."""

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import build_engine
from shardlab.tensor_parallel import vocab_parallel_cross_entropy
from tests.comm.test_communicator import Log

from tests.tensor_parallel.test_engines import (  # isort: skip
    ENGINES, OPTIMIZERS, PLANS, assert_same, parallel, reference, train_engine,
)  # fmt: skip
from tests.tensor_parallel.test_layers import assert_cross_entropies, run_cross_entropy


@pytest.fixture(scope="module", autouse=True)
def _later_tests_have_ranks_without_the_compiler(pools):
    """All that it imports would be searched for cycles after every later call: 0.1 s in each rank."""
    yield
    pools(2).restart()


def block(model, backend):
    model.blocks[-1].compile(backend=backend)


def module(model, backend):
    model.compile(backend=backend)


def nothing(model, backend):
    """The model as it is."""


def trained(rank, plan, compile_it, backend):
    """Two models one after the other where that is quick, and whether anything was compiled."""
    strategy, options, axes = ENGINES["alone"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    results, log = [], Log()
    try:
        with Mesh(axes) as mesh:
            for _ in range(2 if backend == "eager" else 1):
                model = parallel(rank, mesh, PLANS[plan])
                with build_engine(strategy, model, OPTIMIZERS["sgd"], mesh, **options) as engine:
                    compile_it(model, backend)
                    with mesh["tensor"].observed_by(log):
                        losses, norms = train_engine(engine, mesh, 2)
                    results.append((losses, norms, engine.full_state_dict(), engine.full_optimizer_state_dict()))
        sent = [(str(event.op), event.tag, event.numel) for event in log.events]
        return results, sent, torch._dynamo.utils.counters["stats"]["unique_graphs"]
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("plan", "compile_it", "backend"),
    [("whole", block, "aot_eager"), ("regather, logits in parts", module, "eager")],
)
def test_a_compiled_model_trains_as_one_that_is_not(pools, plan, compile_it, backend):
    """On tensor ranks alone: under the engines of the data axis ``tests/dist`` compiles."""
    _, expected, _ = pools(2).run(trained, plan, nothing, backend)[0]
    for results, sent, graphs in pools(2).run(trained, plan, compile_it, backend):
        assert_same(results, reference("sgd", 2))
        assert sent == expected
        assert graphs > 0


def compiled_loss(rank, cases):
    torch._dynamo.reset()
    try:
        return run_cross_entropy(rank, cases, torch.compile(vocab_parallel_cross_entropy, backend="aot_eager"))
    finally:
        torch._dynamo.reset()


def test_a_compiled_loss_equals_that_of_gathered_logits(pools):
    """Of batches of different sizes: the second is traced with sizes that are symbols."""
    cases = [((4,), {}), ((3,), {})]
    assert_cross_entropies(cases, pools(2).run(compiled_loss, cases))
