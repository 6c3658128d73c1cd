"""Observers of every communicator in this process, such as the board that shows where a hung rank waits.

A rank's process belongs to whoever started it; that starter watches all meshes, also those made in a notebook cell
that knows nothing of it. Everything else uses ``observed_by``.
"""

from shardlab.comm.events import Observer


class _Process:
    """One process, one set of watchers, for its whole life."""

    observers: tuple[Observer, ...] = ()


def watch_process(observer: Observer) -> None:
    """From now on every new communicator tells ``observer`` of its collectives."""
    _Process.observers = (*_Process.observers, observer)


def process_observers() -> tuple[Observer, ...]:
    """Those who watch the whole process."""
    return _Process.observers
