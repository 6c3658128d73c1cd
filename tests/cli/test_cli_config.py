"""What ``forecast`` says of the model, and of a GPU that is known by its memory alone."""

import json
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from shardlab.cli import app
from tests.cli.test_cli_forecast import said
from tests.planner.test_model_config import PUBLISHED


@pytest.fixture
def forecast(tmp_path):
    """What a forecast of a published model says, in one line."""

    def run(name, *words, **other):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(PUBLISHED[name]["config"] | other))
        return " ".join(said("forecast", "--config", str(path), "--ranks", "8", *words).split())

    return run


def refused(tmp_path, name, *words, command="forecast"):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED[name]["config"]))
    done = CliRunner().invoke(app, [command, "--config", str(path), "--ranks", "8", *words])
    assert done.exit_code == 2
    return " ".join(done.output.split())


def test_the_number_of_parameters_stands_first(forecast):
    text = forecast("gemma-2b")
    rows = "Rows have all its 8,192 positions; --seq-len gives others."
    assert text.startswith(f"MODEL 2,506,172,416 parameters: gemma, 18 layers. {rows} PLANNED")
    assert "5.01 GB at rest, " in text
    found = json.loads(forecast("gemma-2b", "--json"))
    assert next(iter(found.items())) == ("num_params", 2_506_172_416)
    assert found["rest_bytes"] == 2 * 2_506_172_416


def test_what_the_file_leaves_out_and_rows_longer_than_its_positions_are_said(forecast, tmp_path):
    assert "The file leaves out vocab_size 262,208, max_position_embeddings 131,072: " in forecast(
        "gemma-3-4b text", "--gpu", "24GB", num_attention_heads=8, num_key_value_heads=4, head_dim=256
    )
    longer = forecast("llama-2-70b", "--seq-len", "8192", "--gpu", "24GB")
    assert "Rows of 8,192 tokens are longer than the 4,096 that it was made for." in longer
    assert "longer" not in forecast("llama-2-70b", "--gpu", "24GB")
    assert "seq-len: 2048 is given; " in refused(tmp_path, "gpt2", "--seq-len", "2048")


def test_a_gpu_known_by_its_memory_has_bytes_and_no_time(forecast, tmp_path):
    text = forecast("llama-7b", "--gpu", "24GB")
    assert "on 8 x 24GB MEMORY 13.5 GB at rest, 36.3 GB in tensors at the peak, of 24 GB: it does not fit" in text
    assert "TIME not known: of 24GB the memory is known and no speed; name a card, such as h100" in text
    found = json.loads(forecast("llama-7b", "--gpu", "24GB", "--json"))
    assert found["seconds"] is None
    assert found["peak_bytes"] == json.loads(forecast("llama-7b", "--json"))["peak_bytes"]
    assert "of 17.2 GB: it does not fit TIME not known: of t4 " in forecast("llama-7b", "--gpu", "t4")
    assert "gpu: of 24GB the memory is known" in refused(tmp_path, "llama-7b", "--gpu", "24GB", command="search")


@pytest.mark.parametrize(
    ("made", "words"),
    [(6_738_415_616, ""), (6_760_000_000, ""), (7_241_732_096, "7,241,732,096 parameters of it, 7.5% more: trust "),
     (KeyError("llama"), "cannot make its module (KeyError: 'llama'), so nothing was compared.")],
)  # fmt: skip
def test_a_module_of_transformers_with_other_parameters_is_said(forecast, monkeypatch, made, words):
    def from_config(_):
        if isinstance(made, Exception):
            raise made
        return SimpleNamespace(num_parameters=lambda: made)

    stands_in = SimpleNamespace(
        __version__="5", logging=SimpleNamespace(set_verbosity_error=lambda: None),
        AutoConfig=SimpleNamespace(for_model=lambda kind, **_: kind),
        AutoModelForCausalLM=SimpleNamespace(from_config=from_config),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "transformers", stands_in)
    text = forecast("llama-7b", "--gpu", "24GB")
    assert ("transformers 5 " in text) == bool(words)
    assert words in text
    notes = json.loads(forecast("llama-7b", "--gpu", "24GB", "--seq-len", "2048", "--json"))["notes"]
    assert [words in note for note in notes] == [True] * bool(words)
