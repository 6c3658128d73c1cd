"""What the attention of a long sequence sends over ranks: exchanged heads beside keys that travel."""

import pandas as pd
import plotly.graph_objects as go

from shardlab.plots.theme import COLLECTIVE_COLOURS, finish, new_figure
from shardlab.vocabulary import Collective

TITLE = "What a rank sends for the attention of a layer"
EXCHANGES = "ulysses"
DASHES = ("solid", "dash", "dot", "dashdot")


def context_traffic(sent: pd.DataFrame) -> go.Figure:
    """Draw what each way sends over the number of ranks; a diamond where two send the same.

    Args:
        sent: columns ``way``, ``ranks``, ``heads_per_key`` (heads for each key-value head), and ``sent``, in times of
            a rank's own keys and values; of ways that do not exchange heads, one line is drawn.
    """
    is_exchange = sent["way"] == EXCHANGES
    others = sent[~is_exchange].groupby("ranks")["sent"].max()
    figure = new_figure(TITLE, "in times of its own keys and values; backward sends as much again")
    figure.add_scatter(
        x=others.index, y=others, name=" or ".join(sent[~is_exchange]["way"].unique()), mode="lines",
        line={"color": COLLECTIVE_COLOURS[Collective.ALL_GATHER], "width": 4},
    )  # fmt: skip
    said = []
    for place, (heads, rows) in enumerate(sent[is_exchange].groupby("heads_per_key")):
        own = rows.set_index("ranks")["sent"]
        colour, words = COLLECTIVE_COLOURS[Collective.ALL_TO_ALL], f"{heads} head{'s' * (heads != 1)} a key"
        figure.add_scatter(
            x=own.index, y=own, name=f"{EXCHANGES}, {words}", mode="lines",
            line={"color": colour, "width": 3, "dash": DASHES[place % len(DASHES)]},
        )  # fmt: skip
        equal = own[own == others.reindex(own.index)]
        figure.add_scatter(
            x=equal.index, y=equal, mode="markers", showlegend=False, name=f"equal, {words}",
            marker={"color": colour, "size": 13, "symbol": "diamond"},
        )  # fmt: skip
        less = own[own < others.reindex(own.index)].index
        said.append(f"with {words} from {less.min()} ranks on" if len(less) else f"with {words} on none of these")
    figure.update_xaxes(title_text="ranks")
    figure.update_yaxes(title_text="sent", rangemode="tozero")
    return finish(figure, f"{EXCHANGES} sends less {', '.join(said)}.")
