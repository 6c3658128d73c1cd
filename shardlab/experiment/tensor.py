"""The tensor axis of an experiment: what can be divided over it, the divided model, and its loss.

Data ranks are ``ranks / tp``. The ranks of a tensor group train on the same rows; logits stay in parts along the
vocabulary, so that no rank ever has all of them.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardlab.comm import BaseMesh
from shardlab.experiment.step import LossFn
from shardlab.models import MODELS, GPTConfig, build_model, next_token_loss
from shardlab.tensor_parallel import Plan, gpt_plan, parallelize_module, vocab_parallel_cross_entropy
from shardlab.tensor_parallel.plan import matched
from shardlab.vocabulary import MeshAxis

if TYPE_CHECKING:
    from shardlab.experiment.config import CompareConfig

TORCH_TP = "torch_tp"


def check_tensor_axis(config: "CompareConfig") -> None:
    """Refuse, by the field's name, what the tensor axis cannot divide.

    Raises:
        ValueError: ``tp`` does not divide the ranks, heads or vocabulary; the model has no plan; or a strategy that
            trains a whole model only.
    """
    if config.sequence_parallel and config.tp == 1:
        raise ValueError("sequence_parallel: it divides the sequence over the tensor axis; give tp=2 or more")
    if config.tp == 1:
        return
    if config.ranks % config.tp:
        raise ValueError(f"tp: {config.tp} does not divide {config.ranks} ranks; take a divisor of {config.ranks}")
    _check_peers(config)
    if config.sequence_parallel and config.seq_len % config.tp:
        raise ValueError(
            f"seq_len: {config.seq_len} does not divide over tp={config.tp} ranks, which sequence_parallel needs"
        )
    plan = _plan(config)
    with torch.device("meta"):
        model = build_model(config.model, config.seq_len)
    for name, style in matched(plan, model).items():
        try:
            style.check(name, model.get_submodule(name), config.tp)
        except ValueError as error:
            raise ValueError(f"tp: {error}") from None


def divided(model: nn.Module, config: "CompareConfig", strategy: str, mesh: BaseMesh) -> nn.Module:
    """The model with its layers divided over the mesh's tensor axis; as it is where nothing is divided. Collective."""
    return parallelize_module(model, _plan(config), mesh[MeshAxis.TENSOR]) if _divides(config, strategy) else model


def loss_of(config: "CompareConfig", strategy: str, mesh: BaseMesh) -> LossFn:
    """The mean loss of the next token, of logits that are whole, or in parts over the mesh's tensor axis."""
    if _divides(config, strategy):
        return partial(vocab_parallel_cross_entropy, comm=mesh[MeshAxis.TENSOR])
    return next_token_loss


def _plan(config: "CompareConfig") -> Plan:
    sizes = MODELS[config.model]
    if not isinstance(sizes, GPTConfig):
        gpts = ", ".join(name for name, known in MODELS.items() if isinstance(known, GPTConfig))
        raise ValueError(f"model: there is no plan that divides {config.model!r} over tp={config.tp}; take {gpts}")
    sizes = replace(sizes, seq_len=config.seq_len)
    return gpt_plan(sizes, sequence_parallel=config.sequence_parallel, gather_logits=False)


def _check_peers(config: "CompareConfig") -> None:
    """Of torch's engines the one that divides the model may stand beside ours, over the same ranks."""
    if peers := [name for name in config.strategies if name.startswith("torch_") and name != TORCH_TP]:
        raise ValueError(f"tp: it divides the models of our strategies only; start {', '.join(peers)} without it")
    if TORCH_TP not in config.strategies:
        return
    if config.tp != config.ranks:
        raise ValueError(f"tp: torch_tp divides the model over all {config.ranks} ranks; beside it give {config.ranks}")
    if config.sequence_parallel:
        raise ValueError("sequence_parallel: torch_tp keeps the sequence whole; leave out one of them")


def _divides(config: "CompareConfig", strategy: str) -> bool:
    """Not where one process trains alone, and not where torch's own engine divides the model."""
    return config.tp > 1 and strategy not in ("single", TORCH_TP)
