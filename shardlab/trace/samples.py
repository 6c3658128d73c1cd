"""The rows of table ``memory`` of one step: what is held at rest, what the process holds beside it, and the peak."""

import torch

from shardlab.analysis.held_bytes import PEAK, REST
from shardlab.trace.known_tensors import with_unattributed
from shardlab.trace.memory_by_role import ByRole, LiveTensors, MemoryLedger, Moment, bytes_by_role
from shardlab.trace.observed import Row, memory_rows, process_rows, unit_place
from shardlab.trace.process_memory import Allocator, ProcessMemory, ResidentBytes
from shardlab.vocabulary import Phase


class MemorySamples:
    """Samples of one rank, as rows of one step after another.

    Args:
        device: of the compute.
        origin_ns: from where times count.
    """

    def __init__(self, device: torch.device, origin_ns: int) -> None:
        self.rows: list[Row] = []
        self._device, self._on_cuda, self._origin_ns = device, device.type == "cuda", origin_ns
        self._resident_bytes, self._process_memory = ResidentBytes(), ProcessMemory()

    def begin_step(self) -> None:
        """Forget the rows of the step before."""
        self.rows = []
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def at_rest(self, named: LiveTensors, time_ns: int, phase: Phase) -> None:
        """Sample what is held now, in place of an earlier sample of this step.

        Args:
            named: the tensors whose role is known; on the CPU all others count too, as unattributed.
            time_ns: now.
            phase: now.
        """
        self.rows.clear()
        held = bytes_by_role(named if self._on_cuda else with_unattributed(named))
        self._sample(REST, held, time_ns, phase, Allocator.now(self._device) if self._on_cuda else Allocator())
        if not self._on_cuda:  # there the allocator's figures say what matters
            parts, resident_bytes = self._process_memory.parts(held), self._resident_bytes()
            self.rows += process_rows(parts, time_ns - self._origin_ns, phase, resident_bytes)

    def peak(self, ledger: MemoryLedger | None) -> int | None:
        """Add the rows of a traced step; return the step's peak: the CUDA allocator's, else the ledger's, else None."""
        allocator = Allocator.peak(self._device) if self._on_cuda else Allocator()
        if ledger is None:
            return allocator.allocated_bytes
        moments = ledger.moments()
        highest = max(moments, key=lambda moment: moment.num_bytes)
        self._sample(PEAK, highest.by_role, highest.time_ns, highest.phase, allocator)
        for moment in moments:
            self.rows += self._course(moment)
        return highest.num_bytes if allocator.allocated_bytes is None else allocator.allocated_bytes

    def _course(self, moment: Moment) -> list[Row]:
        """Rows of a moment within the step; the resident set is not read then."""
        time_ns = moment.time_ns - self._origin_ns
        return memory_rows(unit_place(moment.unit), moment.by_role, time_ns, moment.phase, None, Allocator())

    def _sample(self, where: str, held: ByRole, time_ns: int, phase: Phase, allocator: Allocator) -> None:
        since_ns, resident_bytes = time_ns - self._origin_ns, self._resident_bytes()
        self.rows += memory_rows(where, held, since_ns, phase, resident_bytes, allocator)
