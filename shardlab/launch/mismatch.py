"""Ranks that are in the same collective but not with the same thing: they wait for each other for ever, or die of it.

The numbers of a communicator's collectives run alike on all its ranks, so two ranks with the same number on the same
axis should be in one and the same collective. Where operation, elements or dtype differ, that is the mistake.
"""

from collections.abc import Sequence

from shardlab.launch.board import BoardRow, CallState
from shardlab.vocabulary import Collective

# A send meets a receive, and every rank may have parts of other sizes for an all-to-all.
_MAY_DIFFER = frozenset({Collective.SEND, Collective.RECV, Collective.ALL_TO_ALL})


def mismatch(rows: Sequence[BoardRow]) -> str:
    """A sentence that says which ranks are in what, where they differ; empty where they do not.

    Ranks of several groups along one axis may rightly differ; then it is a hint, no proof.

    Args:
        rows: what ``Board.read`` gave.
    """
    known = [row for row in rows if row.state is not CallState.NONE and row.seq >= 0 and row.op not in _MAY_DIFFER]
    # Who sends too much may be through before the receiver dies of it, so one unfinished rank is enough.
    for stuck in (row for row in known if row.state is not CallState.COMPLETED):
        same = [row for row in known if (row.axis, row.seq) == (stuck.axis, stuck.seq)]
        if len({(row.op, row.numel, row.dtype) for row in same}) > 1:
            places = ", ".join(f"rank {row.rank} in {row.call}" for row in same)
            return f"Collective {stuck.seq} of axis {stuck.axis!r} differs between ranks: {places}"
    return ""
