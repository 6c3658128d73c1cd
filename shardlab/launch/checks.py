"""What a configuration asks of ranks, checked before any starts."""

from collections.abc import Sequence

from shardlab.comm.torch_engine_groups import check_torch_engines
from shardlab.comm.transports.choice import check_transport
from shardlab.launch.placement import MOST_RANKS, place, torchrun_env
from shardlab.launch.pool import RankPool


def check_ranks(
    ranks: int, device: str, strategies: Sequence[str], transport: str | None, link: str | None = None
) -> None:
    """Check that ranks can start here, that they can send as asked, and that torch's own engines can, if named.

    Args:
        ranks: their number, at least 1.
        device: see ``RankPool``.
        strategies: names from ``engines.STRATEGIES``.
        transport: see ``Mesh``.
        link: see ``Mesh``.

    Raises:
        ValueError: they cannot; the message names the field.
    """
    env = torchrun_env()
    if env is not None and env.world_size != ranks:
        raise ValueError(f"ranks: {ranks}, but torchrun started {env.world_size} processes; the numbers must be equal")
    if env is None and ranks > MOST_RANKS:
        raise ValueError(f"ranks: {ranks} was given; one machine starts at most {MOST_RANKS}")
    placement = place(ranks, device)
    check_transport(placement.backend, transport, link)
    # Under torchrun a process may see its own GPU alone; there the engines themselves refuse.
    if env is None and any(strategy.startswith("torch_") for strategy in strategies):
        check_torch_engines(placement.device_type, placement.backend)


def check_pool(pool: RankPool, ranks: int, device: str, *, by: str = "config") -> None:
    """Check that a configuration asks for the ranks that a pool has.

    Args:
        pool: the ranks.
        ranks: the number that is asked for.
        device: ``auto``, which these ranks are, ``cpu`` or ``cuda``.
        by: the configuration, for the message.

    Raises:
        ValueError: it asks for others.
    """
    if pool.world_size != ranks:
        raise ValueError(f"pool: {pool.world_size} ranks, but {by}.ranks is {ranks}")
    own = pool.placement.device_type
    if device not in ("auto", own):
        raise ValueError(f"pool: its ranks are on {own}, but {by}.device is {device!r}; leave device out")
