"""One process, plain torch: what every other strategy must equal.

Nothing is sharded, nothing is sent. Bytes for P fp32 parameters with Adam: 4P parameters, 4P gradients, 8P state.
"""

from shardlab.engines.base import Engine


class Single(Engine):
    """Plain training in this process.

    Raises:
        ValueError: the mesh's data axis has more than one rank.
    """

    name = "single"

    def _prepare(self) -> None:
        if self.comm.num_ranks > 1:
            raise ValueError(
                f"mesh: 'single' trains in one process, but the data axis has {self.comm.num_ranks} ranks; "
                "use Mesh.alone(), or another strategy"
            )

    def _finish_gradients(self) -> None:
        """The gradients are complete as they are."""
