"""Workloads with a name: the built-in models, which learn to predict the next byte of a text, and the place of one.

A terminal names the place as ``FILE.py:NAME`` or ``PACKAGE.MODULE:NAME``; the built-in models are ``models.MODELS``.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shardlab.comm.communicator import Communicator
from shardlab.data_sets import batch, load_text
from shardlab.experiment.options import CompareOptions
from shardlab.experiment.trained.workload import SUGGESTED, Workload
from shardlab.models import MODELS, GPTConfig, build_model, next_token
from shardlab.tensor_parallel import Plan, gpt_plan, vocab_parallel_cross_entropy
from shardlab.vocabulary import class_of


def workload_at(place: str) -> Workload:
    """The workload that a file or an importable module holds under a name.

    A file is read anew each time, so it may have been edited since.

    Raises:
        ValueError: there is no such file, module or name, importing fails, or the name is no ``Workload``.
    """
    source, _, name = place.rpartition(":")
    if not source or not name.isidentifier():
        raise ValueError(f"workload: {place!r} is not FILE.py:NAME or PACKAGE.MODULE:NAME, as train.py:workload is")
    module = _from_file(Path(source)) if source.endswith(".py") else _imported(source)
    found = getattr(module, name, None)
    if isinstance(found, Workload):
        return found
    known = [key for key, value in vars(module).items() if isinstance(value, Workload)]
    what = "has no" if found is None else f"has {class_of(found)}, not a Workload, as"
    raise ValueError(f"workload: {source} {what} {name!r}; its workloads are: {', '.join(known) or 'none'}")


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"workload: there is no file {path.absolute()}")
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for a script: it may import its neighbours, here and on the ranks
    known = sys.modules.get(path.stem)
    is_free = known is None or getattr(known, "__file__", None) == str(path.absolute())
    name = path.stem if is_free else f"workload_{path.stem}"  # a file may be called like a module, random.py say
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickling looks up what it defines
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)  # half of it
        raise ValueError(f"workload: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"workload: module {name!r} cannot be imported: {type(error).__name__}: {error}") from error


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
        data=partial(sequences, options.text, options.seq_len, rows, options.accumulation), loss=next_token,
        optimizer=partial(torch.optim.AdamW, lr=options.learning_rate), tp_plan=SUGGESTED if plan is None else plan,
        tp_loss=None if plan is None else next_token_of_parts, name=options.model,
    )  # fmt: skip


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
