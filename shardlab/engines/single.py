"""One process, plain torch: what every other strategy must equal.

Nothing is sharded, nothing is sent. Bytes for P fp32 parameters with Adam: 4P parameters, 4P gradients, 8P state.
"""

from shardlab.engines.strategy import Given, LaidOut, Strategy


class Single(Strategy):
    """Plain training in this process.

    Raises:
        ValueError: the mesh's data axis has more than one rank.
    """

    name = "single"
    is_alone = True

    def lay_out(self, given: Given) -> LaidOut:
        """As the base."""
        laid_out = super().lay_out(given)
        if self.num_ranks > 1:
            raise ValueError(
                f"mesh: 'single' trains in one process, but the data axis has {self.num_ranks} ranks; "
                "use Mesh.alone(), or another strategy"
            )
        return laid_out
