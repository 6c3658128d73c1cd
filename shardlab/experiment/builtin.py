"""The built-in workloads: the models of ``models.MODELS``, which learn to predict the next byte of a text."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from shardlab.comm.communicator import Communicator
from shardlab.data_sets import batch, load_text
from shardlab.experiment.options import CompareOptions
from shardlab.experiment.workload import SUGGESTED, Workload
from shardlab.models import MODELS, GPTConfig, build_model, next_token
from shardlab.tensor_parallel import Plan, gpt_plan, vocab_parallel_cross_entropy


def builtin(options: CompareOptions, rows: int) -> Workload:
    """The workload that ``options`` name.

    Args:
        options: ``model``, ``text``, ``seq_len``, ``dtype``, ``accumulation``, ``learning_rate``, ``wrap`` and
            ``sequence_parallel`` count.
        rows: sequences of a global micro-batch.
    """
    plan = tensor_plan(options)
    return Workload(
        model=partial(build_model, options.model, options.seq_len, getattr(torch, options.dtype), options.seed),
        data=partial(sequences, options.text, options.seq_len, rows, options.accumulation),
        loss=next_token,
        optimizer=partial(torch.optim.AdamW, lr=options.learning_rate),
        tp_plan=SUGGESTED if plan is None else plan,
        tp_loss=None if plan is None else next_token_of_parts,
        name=options.model,
    )


def next_token_of_parts(model: Any, sequences: tuple[Tensor, Tensor], axis: Communicator) -> Tensor:
    """``next_token`` from logits that stay divided along the vocabulary, so that no rank ever has all of them."""
    inputs, targets = sequences
    return vocab_parallel_cross_entropy(model(inputs), targets, axis)


def tensor_plan(options: CompareOptions) -> Plan | None:
    """How a GPT is divided; None for other models."""
    sizes = MODELS[options.model]
    if not isinstance(sizes, GPTConfig):
        return None
    sizes = replace(sizes, seq_len=options.seq_len)
    return gpt_plan(sizes, sequence_parallel=options.sequence_parallel, gather_logits=False)


def sequences(
    text: str, seq_len: int, rows: int, accumulation: int, rank: int, ranks: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's rows of each micro-batch of ``rows`` sequences."""
    data, own = load_text(text, seq_len), rows // ranks
    for number in count():
        step, micro_batch = divmod(number, accumulation)
        yield batch(data, step, micro_batch, range(rank * own, (rank + 1) * own), rows, seq_len, seed)
