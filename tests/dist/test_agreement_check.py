"""Ranks that skip a backward or a step are named; ranks that do the same are not, whatever the strategy."""

import re

import pytest
import torch

from shardlab.comm.mesh import Mesh
from shardlab.engines import STRATEGIES, build_engine, check_agreement
from shardlab.engines.agreement_check import Did, _sum_of_bits, did, disagreement
from shardlab.faults import SkippedCall, inject
from tests.dist import cases
from tests.dist.test_engines import adamw, one_step

WRONG = {
    "skips a backward": r"differ in backwards \(2 on most ranks, 1 on rank 1\);",
    "skips a step": r"steps \(2 on most ranks, 1 on rank 1\); sum of the parameters' bits \(rank 1 against 2 equal ones\)",
    "writes": r"differ in sum of the parameters' bits \(rank 1 against 2 equal ones\); write parameters alike",
    "another rate": r"differ in group 0's lr \(0\.01 on most ranks, 0\.5 on rank 1\).*; give the optimizer the same opt",
}


FAULTS = {"skips a backward": [SkippedCall(1, 1, "backward")], "skips a step": [SkippedCall(1, 1, "step")]}


def trains(rank, strategy, wrong, options=None):
    with (
        Mesh({"data": 3}) as mesh,
        build_engine(strategy, cases.build("MLP"), adamw, mesh, **(options or {})) as engine,
        inject(engine, *FAULTS.get(wrong, [])),
    ):
        one_step(engine, rank)
        engine.zero_grad()
        check_agreement(engine)
        if wrong == "another rate" and rank == 1:
            engine.optimizer.param_groups[0]["lr"] = 0.5
        if wrong is not None:
            one_step(engine, rank, step=1)
            engine.zero_grad()
        if wrong == "writes" and rank == 1:
            next(iter(engine.step_tensors())).data[0] += 1
        if wrong is not None:
            with pytest.raises(RuntimeError, match="agreement: ranks differ in ") as caught:
                check_agreement(engine)
            return str(caught.value)
        return did(engine).checksum is not None


@pytest.mark.parametrize("strategy", sorted(STRATEGIES.keys() - {"single", "torch_tp"}))
def test_ranks_that_do_the_same_agree(pools, strategy):
    has_sum = strategy not in ("zero3", "fsdp", "torch_fsdp2")
    assert pools(3).run(trains, strategy, None) == [has_sum] * 3


@pytest.mark.parametrize(("strategy", "options"), [("ddp", {}), ("fsdp", {"sharding": "no_shard"})])
@pytest.mark.parametrize("wrong", WRONG)
def test_the_rank_that_differs_is_named_on_all(pools, wrong, strategy, options):
    first, *others = pools(3).run(trains, strategy, wrong, options)
    assert others == [first, first]
    assert re.search(WRONG[wrong], first), first


def test_sentences():
    same = Did(4, 2, 17)
    assert disagreement([same, same]) == ""
    assert (
        disagreement([same, Did(3, 2, 17), same])
        == "agreement: ranks differ in backwards (4 on most ranks, 3 on rank 1)"
    )
    assert "sum of the parameters' bits (all ranks)" in disagreement([same, Did(4, 2, 18)])


def test_options_are_text_that_ranks_can_compare():
    params = torch.nn.Linear(2, 2).parameters()
    with build_engine("single", torch.nn.Linear(2, 2), lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.5))) as engine:
        engine.optimizer.param_groups[0]["rule"] = lambda: params  # its repr has an address
        told = did(engine).options
    assert told["group 0's lr"] == "0.5"
    assert told["group 0's betas"] == "(0.9, 0.999)"
    assert told["group 0's rule"] == "function"


def test_the_sum_is_that_of_the_bytes_wherever_they_lie():
    for dtype, numel in ((torch.float32, 7), (torch.bfloat16, 5), (torch.float64, 3), (torch.float32, 0)):
        flat = torch.randn(numel + 3).to(dtype)
        assert _sum_of_bits(flat[3:]) == _sum_of_bits(flat[3:].clone())
    assert _sum_of_bits(torch.tensor([1, 0, 2], dtype=torch.int32)) == 3
