"""All ways to train a transformer, ranked."""

import json
import time
from statistics import median

import pytest

from shardlab.forecast.job import Job
from shardlab.forecast.model_config import decoder_of
from shardlab.forecast.search import (
    NEAR,
    RESERVE,
    USABLE,
    cards_that_would_do,
    miss_of,
    next_to_try,
    published_regrets,
    search,
)
from shardlab.forecast.step_model import Factors, step_parts

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    "hidden_act": "silu",
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
    "activation_function": "gelu_new",
}  # fmt: skip


def sizes(tmp_path, found):
    path = tmp_path / "config.json"
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    return decoder_of(path).sizes


def test_the_fastest_that_fits_is_first_and_each_other_says_why_it_falls_out(tmp_path):
    began = time.process_time()
    found = search(sizes(tmp_path, LLAMA), 1024, 2048, hardware="h100")
    assert time.process_time() - began < 30  # 5 on an idle core; this only tells of a search without end
    memory = found[0].job.card.memory_bytes
    fits = [one for one in found if RESERVE * one.peak_bytes <= memory]
    assert found[: len(fits)] == fits
    assert all(one.fits == (one in fits) for one in found)
    assert found[0].why_not == ""
    near = (1 + NEAR) * min(one.seconds for one in fits)
    first = [one for one in fits if one.seconds <= near]
    assert fits[: len(first)] == first
    assert found[0].peak_bytes < 1.05 * min(one.peak_bytes for one in first)
    assert [one.seconds for one in fits[len(first) :]] == sorted(one.seconds for one in fits[len(first) :])
    for one in fits[1:]:
        assert " slower: " in one.why_not or one.why_not == "a tie, as fast"
        assert one.is_tied == one.why_not.startswith("a tie, ")
    too_large = f"and {USABLE * memory / 1e9:.0f} GB can be used"
    for one in found[len(fits) :]:
        peak = one.peak_bytes
        tight = f"tight: fits if the allocator reserves less than {memory / peak:.2f} times its tensors"
        assert one.why_not == (tight if peak <= USABLE * memory else f"needs {peak / 1e9:.0f} GB, {too_large}")
    assert {one.job.tokens_per_step for one in found} == {2048 * 8192}
    assert all(one.job.data * one.job.tensor == 1024 for one in found)


LLAMA2_7B = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "ffn": 11008, "vocab": 32000, "seq_len": 4096}


def test_the_next_way_to_try_differs_in_one_option_and_gains_until_nothing_does():
    job = Job(**LLAMA2_7B, data=8, micro_batch=1, accumulation=4, recompute="full", hardware="h100")
    seconds, options = step_parts(job, Factors()).total(), list[str]()
    while following := next_to_try(job):
        option, found = following
        options.append(option)
        assert found.fits
        assert found.seconds < seconds / (1 + NEAR)
        assert sum(getattr(found.job, one) != getattr(job, one) for one in ("tensor", "micro_batch", "recompute")) <= 1
        job, seconds = found.job, found.seconds
        assert job.sequences == 32
    assert "--compiled" in options
    assert len(options) >= 2
    # One that does not fit is told of one that does, however slow.
    option, found = next_to_try(Job(**LLAMA2_7B | {"layers": 64}, data=4, micro_batch=1, hardware="h100"))
    assert (option, found.fits) == ("--tp 4", True)


def test_both_ways_of_accumulating_are_tried_where_gradients_are_sharded():
    found = search(LLAMA2_7B, 16, 32, hardware="4090")
    ways = {(one.job.strategy, one.job.no_sync) for one in found if one.job.accumulation > 1}
    assert ways == {
        ("ddp", True), ("bucketed", True), ("zero1", True),
        *((name, once) for name in ("zero2", "zero3", "fsdp", "shard_grad_op", "hybrid_shard") for once in (0, 1)),
    }  # fmt: skip
    like = {"tensor": 1, "strategy": "zero2", "micro_batch": 1, "recompute": "full"}
    once, each = (
        next(one for one in found if like | {"no_sync": no_sync} == {name: getattr(one.job, name) for name in keys})
        for no_sync, keys in ((True, (*like, "no_sync")), (False, (*like, "no_sync")))
    )
    whole = 2 * once.job.num_params  # gradients in 16 bits, of which 15 of 16 parts are kept besides
    assert once.peak_bytes - each.peak_bytes == pytest.approx(15 / 16 * whole)
    assert once.peak_bytes > 34e9
    assert each.seconds > once.seconds  # two reductions for one
    assert RESERVE * found[0].peak_bytes < 24 * 2**30


def test_what_is_slower_by_less_than_a_forecast_misses_is_a_tie():
    found = search(LLAMA2_7B, 8, 64, hardware="h100")
    fits, miss = [one for one in found if one.fits], miss_of(found[0].job, ())
    ties = [one for one in fits if one.is_tied]
    assert {one.job.way for one in ties} == {one.job.way for one in fits[: len(ties)]}
    assert 1 < len(ties) < len(fits)
    assert ties[-1].seconds <= (1 + miss) * fits[0].seconds < fits[len(ties)].seconds


def test_the_way_that_is_ranked_first_is_hardly_slower_than_the_fastest():
    regrets = published_regrets()
    assert len(regrets) >= 9
    assert median(regrets) == 0
    assert max(regrets) < 0.05


def test_the_fewest_cards_that_would_do_are_said():
    sizes = LLAMA2_7B | {"hidden": 5120, "layers": 40, "heads": 40, "kv_heads": 40, "ffn": 13824}
    assert not search(sizes, 8, 8, hardware="4090")[0].fits
    enough = cards_that_would_do(sizes, 8, hardware="4090")
    cards = enough.data * enough.tensor
    assert cards % 8 == 0
    assert search(sizes, cards, cards, hardware="4090")[0].fits
    assert not search(sizes, cards - 8, cards - 8, hardware="4090")[0].fits
    assert cards_that_would_do(sizes | {"seq_len": 2**22}, 8, hardware="4090") is None


def test_what_does_not_divide_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^batch: 7 sequences a step cannot be divided over 64 ranks"):
        search(sizes(tmp_path, GPT2), 64, 7, hardware="h100")
