"""Records of training loops that follow from arithmetic: what each rank works, sends and waits for, step by step."""

from dataclasses import dataclass

from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.records.tables import COLLECTIVES, SPANS, STEPS
from tests.analysis.hand_made import NAN, STEP, collective, span


@dataclass
class Loop:
    """A training loop; times in microseconds, sizes in bytes, of each unit."""

    engine: str = "bucketed"
    ranks: int = 2
    data: float = 100.0
    in_turn: bool = False  # one rank loads data in each step
    forward: float = 1000.0
    backward: float = 2000.0
    recompute: float = 0.0
    optimizer: float = 200.0
    late: float = 0.0  # of rank 1, off the CPU, in each backward
    slow_beside: float = 1.0  # how much longer backward takes beside a message
    sizes: tuple[int, ...] = (100_000,) * 4
    micro_batches: int = 1
    reduces_in_each: bool = False
    activations: int = 0  # bytes that a tensor axis sums behind each unit's forward
    buckets: int = 4
    prefetch: int = 1
    latency: float = 10.0
    us_per_byte: float = 0.001
    steps: int = 4  # the first is not judged, and three are needed

    def tables(self):
        self.rows, self.worked, self.of_steps = [], [], []
        self.now, self.free, self.seq = [0.0] * self.ranks, [0.0] * self.ranks, 0
        for step in range(self.steps):
            self.step, begins = step, list(self.now)
            self.work("data", "model", self.data, (step % self.ranks,) if self.in_turn else None)
            for micro_batch in range(self.micro_batches):
                self.is_last = self.reduces_in_each or micro_batch == self.micro_batches - 1
                {"fsdp": self.sharded, "zero3": self.zero3, "bucketed": self.bucketed}[self.engine]()
            self.work("optimizer", "model", self.optimizer)
            for rank, begin in enumerate(begins):
                times = {"start_us": begin, "step_us": self.now[rank] - begin, "exposed_comm_us": NAN}
                keys = {"run": "a", "source": "measured", "rank": rank, "step": self.step}
                self.of_steps.append(STEP | keys | times)
            if self.ranks > 1:
                self.wait(self.send("all_reduce", "loss", 8, "metrics"))
        return COLLECTIVES.frame(self.rows), SPANS.frame(self.worked), STEPS.frame(self.of_steps)

    @property
    def step_us(self):
        return self.tables()[2].query("step == 1")["step_us"].median()

    def bucketed(self):
        for unit in range(len(self.sizes)):
            self.work("forward", f"blocks.{unit}", self.forward)
            if self.activations:
                self.wait(self.send("all_reduce", f"output of blocks.{unit}", self.activations, "forward", "tensor"))
        pending, each = [], len(self.sizes) // self.buckets
        for place in range(len(self.sizes)):
            self.backward_of(len(self.sizes) - 1 - place)
            if (place + 1) % each == 0 and self.ranks > 1 and self.is_last:
                pending.append(self.send("all_reduce", f"gradients of bucket {place // each}", each * self.sizes[0]))
        for one in pending:
            self.wait(one)

    def zero3(self):
        count = len(self.sizes)
        size = count // self.buckets * self.sizes[0]
        for phase in ("forward", "backward"):
            for bucket in range(self.buckets):
                self.wait(self.send("all_gather", f"parameters of bucket {bucket}", size, phase))
            for unit in range(count):
                self.work("forward", f"blocks.{unit}", self.forward) if phase == "forward" else self.backward_of(unit)
        for bucket in range(self.buckets):
            self.wait(
                self.send("reduce_scatter", f"gradients of bucket {bucket}", count // self.buckets * self.sizes[0])
            )

    def sharded(self):
        count = len(self.sizes)
        for phase in ("forward", "backward"):
            order = list(range(count))[:: 1 if phase == "forward" else -1]
            gathers = {}
            for place, unit in enumerate(order):
                self.gather(gathers, order[place : place + 1], phase)
                self.wait(gathers[unit])
                self.gather(gathers, order[place + 1 : place + 1 + self.prefetch], phase)
                if phase == "forward":
                    self.work("forward", f"blocks.{unit}", self.forward * self.sizes[unit] / self.sizes[0])
                else:
                    self.backward_of(unit)
                    last = self.send("reduce_scatter", f"gradients of blocks.{unit}", self.sizes[unit])
        self.wait(last)

    def gather(self, gathers, units, phase):
        for unit in units:
            if unit not in gathers:
                gathers[unit] = self.send("all_gather", f"parameters of blocks.{unit}", self.sizes[unit], phase)

    def backward_of(self, unit):
        self.work("recompute", f"blocks.{unit}", self.recompute)
        beside = self.slow_beside if max(self.free) > max(self.now) else 1.0
        self.work("backward", f"blocks.{unit}", beside * self.backward * self.sizes[unit] / self.sizes[0])
        if self.late:
            self.work("off_cpu", f"blocks.{unit}", self.late, (1,))

    def work(self, kind, unit, us, ranks=None):
        for rank in range(self.ranks) if ranks is None else ranks:
            if us:
                self.worked.append(span(rank, unit, kind, self.now[rank], self.now[rank] + us, step=self.step))
            self.now[rank] += us

    def send(self, op, tag, size, phase="backward", axis="data"):
        hops = (self.ranks - 1) * (2 if op == "all_reduce" else 1)
        starts = [max(now, free) for now, free in zip(self.now, self.free, strict=True)]
        end = max(starts) + hops * (self.latency + size / self.ranks * self.us_per_byte)
        rows = []
        for rank, start in enumerate(starts):
            more = {"step": self.step, "op": op, "tag": tag, "phase": phase, "bytes": size, "group_size": self.ranks}
            more |= {"axis": axis, "wire_bytes": ring_wire_bytes(op, size, self.ranks)}
            rows.append(collective(rank, self.seq, (self.now[rank], start, end), **more))
            self.free[rank] = end
        self.seq += 1
        self.rows += rows
        return rows

    def wait(self, rows):
        for row in rows:
            row["wait_start_us"] = self.now[row["rank"]]
            row["wait_end_us"] = self.now[row["rank"]] = max(self.now[row["rank"]], row["end_us"])
