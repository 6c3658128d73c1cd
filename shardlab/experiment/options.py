"""The options of a comparison and their defaults. No torch: the command line shows them before it imports that."""

import inspect
import re
from dataclasses import dataclass
from typing import Any

from shardlab.installed import num_cores


@dataclass(frozen=True)
class CompareOptions:
    """One model, several strategies, the same data. ``CompareConfig`` adds the checks.

    The command line takes its options and their help from here.

    Attributes:
        strategies: names of strategies, in the order in which they run: single, ddp, bucketed, zero1, zero2, zero3,
            fsdp, and torch's own: torch_ddp, torch_zero1, torch_fsdp2, torch_tp; in Python also a ``Strategy`` of your
            own.
        ranks: number of ranks; by default 4, but no more than there are cores, and at least 2.
        steps: number of optimizer steps.
        workload: your own model and data: a ``Workload``, or where one is: FILE.py:NAME or PACKAGE.MODULE:NAME. Then
            model, text, seq_len, dtype, learning_rate and sequence_parallel have no meaning: any other value than the
            default is refused.
        model: name of a built-in model: mlp, or gpt-1m, -3m, -10m, -30m, -60m, -120m.
        text: what to train on: 'stdlib' (the source of Python's standard library), 'grammar' (generated, of known
            entropy), or the path of a file.
        batch: sequences, or samples of a Dataset, in the global batch; by default 4 for each data rank and micro-batch.
        seq_len: bytes of a sequence.
        accumulation: micro-batches of a step.
        dtype: 'float32' or 'float64'.
        device: 'auto', 'cpu' or 'cuda'.
        seed: seed of the weights and of the choice of sequences.
        learning_rate: learning rate of AdamW.
        clip: largest global gradient norm; by default gradients are not clipped.
        bucket_mib: capacity of a bucket in MiB.
        partition: how ZeRO and FSDP divide parameters: 'elements', or whole parameters as 'round_robin', 'contiguous'
            or 'balanced'.
        sharding: FSDP: 'full_shard', 'shard_grad_op', 'no_shard' or 'hybrid_shard'.
        shard_group: of a strategy of two axes, such as FSDP with hybrid_shard: ranks of a group; by default the largest
            divisor of the data ranks below their number.
        wrap: what a unit is, for FSDP and in every timeline: 'auto' (the repeated blocks), 'root' (one unit), a number
            of parameters, or patterns of names: 'encoder.*,decoder.*'.
        prefetch: FSDP: units that are gathered ahead.
        layout: how FSDP cuts a unit: 'flat' (end to end) or 'dim0' (each parameter by rows, as FSDP2).
        precision: ZeRO and FSDP: 'full', 'bf16', or 'fp16' with a gradient scaler.
        offload: FSDP: what lies in host memory: 'none', 'parameters' or 'all'.
        replicate_below: FSDP: parameters with fewer elements stay replicated.
        broadcast_buffers: send the first data rank's buffers, such as BatchNorm's statistics, after each step, as DDP
            does before each forward; torch's own engines do as they always do.
        tp: tensor-parallel ranks, a divisor of the number of ranks; 'single' ignores it. Layers are divided by the
            workload's plan, or by one that is suggested: 'shardlab plan --workload F:NAME --tp 2' shows it.
        sequence_parallel: with tp: divide the sequence too, where each token is computed on its own.
        pipe: stages in a row: ranks of the axis of a pipeline, a divisor of the number of ranks; 'single' ignores it.
            Each strategy is trained inside the stages under each schedule. By default strategies then are single and
            ddp.
        schedule: with pipe: in which order stages work: gpipe, 1f1b, interleaved (two stages a rank), zb-h1, or a file
            of your own list, ending in .csv, as torch writes it.
        begins: with pipe: the part of the model with which each stage but the first begins; by default the largest
            stage has as few parameters as can be.
        micro_batches: with pipe: micro-batches of a step; by default 4 for each rank of the pipeline.
        link: emulate this link, for example '10Gbps,50us'.
        transport: how ranks on the CPU, or on one shared GPU, send: 'shared_memory' or 'gloo'; by default the first
            that works. Torch's own engines always use gloo on the CPU.
        timeout_s: a collective that takes longer, in seconds, ends the run.
        save_every: write a checkpoint of each strategy after so many steps, and after the last.
        resume: the directory of a comparison with checkpoints: each strategy goes on where its own ends, until it has
            taken as many steps as this one has.
    """

    strategies: tuple[str, ...] = ("single", "ddp", "bucketed", "zero1", "fsdp")
    ranks: int = max(2, min(4, num_cores()))
    steps: int = 20
    workload: Any = None
    model: str = "gpt-1m"
    text: str = "stdlib"
    batch: int | None = None
    seq_len: int = 64
    accumulation: int = 1
    dtype: str = "float32"
    device: str = "auto"
    seed: int = 0
    learning_rate: float = 1e-3
    clip: float | None = None
    bucket_mib: float = 1.0  # a model for learning is small: with the engines' 25 MiB it would be one bucket
    partition: str = "elements"
    sharding: str = "full_shard"
    shard_group: int | None = None
    wrap: str = "auto"
    prefetch: int = 1
    layout: str = "flat"
    precision: str = "full"
    offload: str = "none"
    replicate_below: int = 0
    broadcast_buffers: bool = False
    tp: int = 1
    sequence_parallel: bool = False
    pipe: int = 1
    schedule: tuple[str, ...] = ("1f1b",)
    begins: tuple[str, ...] = ()
    micro_batches: int | None = None
    link: str | None = None
    transport: str | None = None
    timeout_s: float = 300.0
    save_every: int | None = None
    resume: str | None = None


def option_helps() -> dict[str, str]:
    """By option, what the section 'Attributes' above says of it."""
    section = (inspect.getdoc(CompareOptions) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: text[:1].upper() + re.sub(r"\s+", " ", text[1:]) for name, text in entries}
