"""The small GPT, its rows, and one strategy of the learner's that trains it on one rank."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from shardlab.comm.mesh import Mesh
from shardlab.exercises.assembled.engines import (
    Assembled,
    BucketedDataParallel,
    HookedDataParallel,
    Parts,
    ZeRO1OfParts,
)
from shardlab.exercises.assembled.units import FSDPOfParts, ZeRO3OfParts
from shardlab.exercises.judge import MessageLog
from shardlab.experiment import Workload
from shardlab.experiment.builtin import sequences
from shardlab.models import GPT, GPTConfig, next_token

ENGINES: dict[str, type[Assembled]] = {
    engine.name: engine
    for engine in (HookedDataParallel, BucketedDataParallel, ZeRO1OfParts, ZeRO3OfParts, FSDPOfParts)
}
SEQ_LEN, ROWS, SEED = 16, 4, 0
# The head is not tied to the embedding: so the model is a row of layers.
SIZES = GPTConfig(seq_len=SEQ_LEN, num_layers=3, num_heads=2, hidden=32, tied=False)


def make_model() -> nn.Module:
    """The small GPT, in float64."""
    return GPT(SIZES).double()


DATA = partial(sequences, "grammar", SEQ_LEN, ROWS, 1)  # each step has one micro-batch
SMALL_GPT = Workload(make_model, DATA, next_token, partial(torch.optim.AdamW, lr=1e-2), tp_plan=None, name="small GPT")


@dataclass(frozen=True)
class Trained:
    """What one rank has found: its losses; of the last step messages and bytes sent; bytes held between two steps."""

    losses: tuple[float, ...]
    messages: int
    sent_bytes: float
    rest_bytes: int


def train_on_rank(rank: int, name: str, parts: Parts, ranks: int, steps: int) -> Trained:
    """Some steps of a strategy made of ``parts``."""
    log, losses = MessageLog(), []
    with Mesh({"data": ranks}, device="cpu") as mesh:
        engine = ENGINES[name](parts, mesh.data, SMALL_GPT.build(SEED))
        engine.start(SMALL_GPT.optimizer)
        for own_rows, _ in zip(DATA(rank, ranks, SEED), range(steps), strict=False):
            log = MessageLog()  # the messages of the last step are told
            with mesh.observed_by(log):
                losses.append(engine.step(own_rows))
        sent = [message.sent_bytes for message in log.messages if message.is_sent]
        return Trained(tuple(losses), len(sent), sum(sent), engine.rest_bytes())
