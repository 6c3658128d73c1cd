"""All ways to train a transformer, ranked."""

import json
import time

import pytest

from shardlab.planner.model_config import sizes_of
from shardlab.planner.search import USABLE, search

LLAMA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "hidden_act": "silu",
}  # fmt: skip
GPT2 = {
    "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
    "activation_function": "gelu_new",
}  # fmt: skip


def sizes(tmp_path, found):
    path = tmp_path / "config.json"
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    return sizes_of(path)


def test_the_fastest_that_fits_is_first_and_each_other_says_why_it_falls_out(tmp_path):
    began = time.process_time()
    found = search(sizes(tmp_path, LLAMA), 1024, 2048, hardware="h100")
    assert time.process_time() - began < 30  # 5 on an idle core; this only tells of a search without end
    room = USABLE * found[0].job.card.memory_bytes
    fits = [one for one in found if one.forecast.peak_bytes <= room]
    assert found[: len(fits)] == fits
    assert found[0].why_not == ""
    assert [one.forecast.seconds for one in fits] == sorted(one.forecast.seconds for one in fits)
    for one in fits[1:]:
        assert " slower: " in one.why_not
    for one in found[len(fits) :]:
        assert one.why_not.startswith(f"needs {one.forecast.peak_bytes / 1e9:.0f} GB, and {room / 1e9:.0f} GB")
    assert {one.job.tokens_per_step for one in found} == {2048 * 8192}
    assert all(one.job.data * one.job.tensor == 1024 for one in found)


def test_what_does_not_divide_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^sequences: 7 a step cannot be divided over 64 ranks"):
        search(sizes(tmp_path, GPT2), 64, 7, hardware="h100")
