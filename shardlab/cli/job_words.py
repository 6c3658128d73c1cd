"""What is said in words of a model from a ``config.json``, and of a job: how it is trained, whether it fits, its rates.

Of a model its parameters come first, then what of it is not as one may think.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from shardlab.cli.console import count
from shardlab.forecast.model_config import Decoder, decoder_of, model_type_of, read_config

if TYPE_CHECKING:
    from shardlab.forecast.job import Job


def planned(job: "Job", gpu: str) -> str:
    """How it is trained, on which GPUs; the strategy first."""
    kept = f"{job.precision} with {job.kept.total} bytes a parameter"
    return f"{job.way}; rows of {count(job.seq_len, 'token')}, {kept}, on {job.data * job.tensor} x {gpu}"


def memory_of(job: "Job", room: float) -> str:
    """Bytes of a GPU with so much memory, and whether they fit."""
    from shardlab.forecast.peak import peak_bytes, rest_bytes

    peak = peak_bytes(job)
    said = f"{rest_bytes(job) / 1e9:.3g} GB at rest, {peak / 1e9:.3g} GB in tensors at the peak, of {room / 1e9:.3g} GB"
    return f"{said}: {verdict(peak, room)}{_of_logits(job, room)}"


def verdict(peak_bytes: float, room: float) -> str:
    """Whether tensors of so many bytes fit, with what the allocator reserves on top."""
    from shardlab.forecast.predict import RESERVED, USABLE

    least, most = RESERVED
    if least * peak_bytes > room:
        return "it does not fit"
    if peak_bytes > USABLE * room:
        return f"it hardly fits, with less than {1 - USABLE:.0%} left for libraries and the allocator"
    if most * peak_bytes < room:
        return "it fits"
    often = f"{room / peak_bytes:.3g} times that; {least:g} to {most:g} times were seen"
    return f"it fits, unless the allocator reserves more than {often}"


def _of_logits(job: "Job", room: float) -> str:
    """What helps, where it does not fit or hardly, and logits are the reason; else empty."""
    from shardlab.forecast.peak import logits_bytes, peak_bytes
    from shardlab.forecast.predict import USABLE

    logits, peak = logits_bytes(job), peak_bytes(job)
    if peak <= USABLE * room or (2 * logits < peak and peak - logits > USABLE * room):
        return ""
    return (
        f"; {logits / 1e9:.3g} GB of it are logits, {job.tokens:,} tokens x {job.vocab:,} words: a chunked loss, which "
        "makes them for some tokens at a time, would save most of these"
    )


def rates(job: "Job", seconds: float) -> dict[str, float]:
    """Tokens a second and a day over all ranks, and the MFU."""
    rate = job.tokens_per_step / seconds
    return {"tokens_per_second": rate, "tokens_per_day": 86400 * rate, "mfu": job.mfu(seconds)}


def in_digits(value: float, digits: int) -> str:
    """A number rounded to so many digits, and written out: 19100000 is 19,100,000."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 1e6 else f"{rounded:,g}"


APART = 0.005  # of the parameters: by how much transformers may count others before it is said


@dataclass(frozen=True)
class CountedModel:
    """A decoder of a file, with rows of some length."""

    config: Path
    decoder: Decoder
    notes: tuple[str, ...]

    @classmethod
    def of(cls, config: Path, seq_len: int) -> "CountedModel":
        """The one of a file; where ``seq_len`` is 0 rows are as long as its positions.

        Raises:
            ValueError: see ``decoder_of``; or rows have no length, or a greater one than a table of positions.
        """
        decoder = decoder_of(config)
        positions, notes = decoder.sizes.get("seq_len"), []
        if not (seq_len or positions):
            raise ValueError(f"seq-len: {config} does not say it; give --seq-len 4096, for example")
        if decoder.assumed:
            left_out = ", ".join(f"{key} {value:,}" for key, value in decoder.assumed.items())
            notes.append(f"The file leaves out {left_out}: these are what transformers takes for {decoder.name}.")
        if positions and seq_len > positions:
            if decoder.learns_positions:
                raise ValueError(f"seq-len: {seq_len} is given; {config} has a table of {positions}; give at most that")
            notes.append(f"Rows of {seq_len:,} tokens are longer than the {positions:,} that it was made for.")
        sizes = {**decoder.sizes, "seq_len": seq_len or positions}
        return cls(config, replace(decoder, sizes=sizes), tuple(notes))

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of ``Job``."""
        return self.decoder.sizes

    @property
    def line(self) -> tuple[str, str]:
        """Of an answer."""
        counted = f"{self.decoder.num_params:,} parameters: {self.decoder.name}, {self.sizes['layers']} layers"
        return "MODEL", " ".join([f"{counted}.", *self.notes])

    def as_json(self) -> Mapping[str, Any]:
        """The same by name."""
        notes = [*self.notes, *filter(None, [difference(self.config, self.decoder.num_params)])]
        return {"num_params": self.decoder.num_params, "model_type": self.decoder.name, "notes": notes}

    def print_difference(self) -> None:
        """Print what transformers counts otherwise: after the answer, which waits for no import of seconds."""
        if said := difference(self.config, self.decoder.num_params):
            Console(highlight=False).print(said)


def difference(config: Path, num_params: int) -> str:
    """A sentence, where transformers is installed and makes a module with other parameters of the file; else empty.

    The module is made on the meta device: that takes seconds, most of them for the import, and no memory.
    """
    try:
        torch, transformers = import_module("torch"), import_module("transformers")
    except ImportError:
        return ""
    found = read_config(config)
    kind = model_type_of(found)
    # Code beside the weights is not run, and quantized weights are of the same matrices.
    plain = {key: found[key] for key in found.keys() - {"model_type", "auto_map", "quantization_config"}}
    transformers.logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **plain))
    except Exception as error:  # whatever it raises of a file that it does not take
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"transformers {transformers.__version__} cannot make its module ({why}), so nothing was compared."
    apart = module.num_parameters() / num_params - 1
    if abs(apart) <= APART:
        return ""
    return (
        f"transformers {transformers.__version__} makes a module of {module.num_parameters():,} parameters of it, "
        f"{abs(apart):.1%} {'more' if apart > 0 else 'fewer'}: trust shardlab plan --workload of it instead."
    )
