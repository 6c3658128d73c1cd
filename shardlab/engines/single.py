"""One process, plain torch: what every other strategy must equal.

Nothing is sharded, nothing is sent. Bytes for P fp32 parameters with Adam: 4P parameters, 4P gradients, 8P state.
"""

from shardlab.engines.strategy import Strategy


class Single(Strategy):
    """Plain training in this process; guards refuse a mesh whose data axis has more than one rank."""

    name = "single"
    is_alone = True
