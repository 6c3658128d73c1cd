"""Time that is the same on every machine: computing takes what it is said to take, a message what its link needs."""


class VirtualClock:
    """One rank that computes, and a link that carries one message at a time.

    A message starts when it is sent and the one before it has ended; it takes latency_us + bytes / bytes_per_us.

    Args:
        latency_us: of each message.
        bytes_per_us: of the link; 125 is 1 Gbit/s.

    Attributes:
        now_us: where the rank has come to.
        exposed_us: how long it has waited for messages.
    """

    def __init__(self, latency_us: float, bytes_per_us: float) -> None:
        self._latency_us, self._bytes_per_us = latency_us, bytes_per_us
        self.now_us = self.exposed_us = self._link_free_us = 0.0

    def compute(self, time_us: float) -> None:
        """The rank is busy for so long; messages that are under way go on."""
        self.now_us += time_us

    def send(self, num_bytes: float) -> float:
        """Start a message; the time at which it ends."""
        start_us = max(self.now_us, self._link_free_us)
        self._link_free_us = start_us + self._latency_us + num_bytes / self._bytes_per_us
        return self._link_free_us

    def wait(self, end_us: float) -> None:
        """Go on at ``end_us``, or at once if that is over."""
        self.exposed_us += max(0.0, end_us - self.now_us)
        self.now_us = max(self.now_us, end_us)
