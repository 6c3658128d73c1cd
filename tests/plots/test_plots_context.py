"""Who sends less, drawn from messages that ranks have counted, crosses where the rule says."""

import pandas as pd
import torch

from shardlab.comm.mesh import Mesh
from shardlab.context import WAYS, attention
from shardlab.plots import context_traffic, summary_of
from tests.comm.test_communicator import Log

KEYS = 12  # key-value heads, which 2, 3 and 4 divide


def counted(rank, num_ranks):
    """What this rank sends, in times of its own keys and values, by way and heads for each key."""
    rows = []
    with Mesh({"context": num_ranks}) as mesh:
        for heads_per_key in (1, 2, 3):
            for way in WAYS:
                q, k = torch.ones(1, KEYS * heads_per_key, 1, 1), torch.ones(1, KEYS, 1, 1)
                log = Log()
                with mesh.observed_by(log):
                    attention(way, q, k, k, mesh["context"])
                sent = sum(shares(event, num_ranks) * event.numel for event in log.events)
                rows.append((way, num_ranks, heads_per_key, sent / (2 * KEYS)))
    return rows


def shares(event, num_ranks):
    """Of a buffer, what a rank sends of it."""
    return {"send": 1, "recv": 0}.get(str(event.op), (num_ranks - 1) / num_ranks)


def test_ulysses_sends_less_on_more_ranks_than_heads_for_each_key_and_one(pools):
    rows = [row for num_ranks in (2, 3, 4) for row in pools(num_ranks).run(counted, num_ranks)[0]]
    figure = context_traffic(pd.DataFrame(rows, columns=["way", "ranks", "heads_per_key", "sent"]))
    other, *lines = figure.data
    assert (other.name, list(other.y)) == ("gathered or ring", [1, 2, 3])  # N - 1
    for heads, line, equal in zip((1, 2, 3), lines[::2], lines[1::2], strict=True):
        assert list(line.y) == [(heads + 1) * (ranks - 1) / ranks for ranks in (2, 3, 4)]
        assert list(equal.x) == [heads + 1]
    assert summary_of(figure) == (
        "ulysses sends less with 1 head a key from 3 ranks on, with 2 heads a key from 4 ranks on, "
        "with 3 heads a key on none of these."
    )
