"""What is said of a model from a ``config.json``: its parameters first, then what of it is not as one may think."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from importlib import import_module
from math import isfinite, nan
from pathlib import Path
from typing import Any

from shardlab.cli.console import say
from shardlab.forecast.model_config import Decoder, decoder_of, model_type_of, read_config

APART = 0.005  # of the parameters: by how much transformers may count others before it is said
ROUND = 0.05  # likewise, by how much a round number such as 7B may differ from the model that it stands for
FACTORS = {"K": 3, "M": 6, "B": 9, "T": 12}  # powers of ten
MOST_PARAMS = 2e14  # of a model like Llama: about 1,000 layers of 1,000 heads
LIKE_LLAMA: Mapping[str, Any] = {"head_dim": 128, "vocab": 32000, "seq_len": 4096, "gated": True}  # arXiv 2307.09288


@dataclass(frozen=True)
class CountedModel:
    """A decoder of a file, or like Llama and of some size, with rows of some length."""

    config: Path | None
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
        if not seq_len:
            notes.append(f"Rows have all its {positions:,} positions; --seq-len gives others.")
        sizes = {**decoder.sizes, "seq_len": seq_len or positions}
        return cls(config, replace(decoder, sizes=sizes), tuple(notes))

    @classmethod
    def given(cls, config: Path | None, params: str, seq_len: int) -> "CountedModel":
        """The one of a file or of a number of parameters, of which one is given."""
        if (config is None) == (not params):
            raise ValueError("config, params: give one of them: --config config.json, or --params 13B")
        return cls.of(config, seq_len) if config else cls.like_llama(number_of_params(params), seq_len)

    @classmethod
    def like_llama(cls, num_params: float, seq_len: int) -> "CountedModel":
        """The decoder of about so many parameters: as many layers as heads, or about so many, and an MLP 8/3 as wide.

        From 16 on eight divides the heads, so that tensor parallelism does.
        """

        def of(heads: int, layers: int) -> Decoder:
            hidden = LIKE_LLAMA["head_dim"] * heads
            ffn = 256 * -(-hidden // 96)
            sizes = {"hidden": hidden, "ffn": ffn, "layers": layers, "heads": heads, "kv_heads": heads, **LIKE_LLAMA}
            sizes |= {"layer_numel": hidden * (4 * hidden + 3 * ffn + 2)}
            sizes |= {"root_numel": hidden * (2 * sizes["vocab"] + 1), "seq_len": seq_len or sizes["seq_len"]}
            return Decoder("like Llama", sizes, {}, learns_positions=False)

        if num_params > MOST_PARAMS:
            raise ValueError(f"params: {num_params:g} is given; at most {MOST_PARAMS:g} are allowed")
        numbers = (*range(1, 16), *range(16, 1000, 8))
        found = min((of(heads, heads) for heads in numbers), key=lambda one: abs(one.num_params - num_params))
        if abs(found.num_params / num_params - 1) > ROUND:
            layers = (num_params - found.sizes["root_numel"]) / found.sizes["layer_numel"]
            found = of(found.sizes["heads"], max(1, round(layers)))
        if found.num_params > 2 * num_params:
            raise ValueError(f"params: {num_params:g} is given; the smallest like Llama has {found.num_params:,}")
        note = "Its sizes are assumed, with a vocabulary of {vocab:,}; --config takes those of a file."
        return cls(None, found, (note.format(**found.sizes),))

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
        notes = [*self.notes, *filter(None, [self._difference()])]
        return {"num_params": self.decoder.num_params, "model_type": self.decoder.name, "notes": notes}

    def print_difference(self) -> None:
        """Print what transformers counts otherwise: after the answer, which waits for no import of seconds."""
        if said := self._difference():
            say(said)

    def _difference(self) -> str:
        return difference(self.config, self.decoder.num_params) if self.config else ""


def number_of_params(text: str) -> float:
    """The number of parameters, from a text such as 7.5B.

    Raises:
        ValueError: it is not a number above 0.
    """
    factor = FACTORS.get(text[-1:].upper())
    try:
        # As a decimal, because 1.1 * 10**9 is not a whole number in binary floating point.
        found = float(Decimal(text) if factor is None else Decimal(text[:-1]).scaleb(factor))
    except InvalidOperation:
        found = nan
    if not (isfinite(found) and found > 0):
        raise ValueError(f"params: {text!r} is given; it must be a number above 0, or one with {', '.join(FACTORS)}")
    return found


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
