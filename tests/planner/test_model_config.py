"""A decoder is counted as its class builds it, to the parameter, and whatever is not known is refused by name.

The published models have the keys of their files; their parameters are those of transformers' modules.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.forecast.architectures import architectures
from shardlab.forecast.job import Job
from shardlab.forecast.model_config import decoder_of
from shardlab.forecast.transformer import layer_products
from tests.planner.test_search import GPT2, LLAMA, sizes

PUBLISHED = json.loads(Path(__file__).with_name("published_models.json").read_text())
LLAMA_2 = PUBLISHED["llama-7b"]["config"]
GEMMA = {"model_type": "gemma", "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8}


@pytest.fixture
def counted(tmp_path):
    def count(found):
        path = tmp_path / "config.json"
        path.write_text(found if isinstance(found, str) else json.dumps(found))
        return decoder_of(path)

    return count


def test_published_models_have_their_parameters(counted):
    found = {name: counted(row["config"]).num_params for name, row in PUBLISHED.items()}
    assert found == {name: row["num_params"] for name, row in PUBLISHED.items()}
    assert {counted(row["config"]).name for row in PUBLISHED.values()} == set(architectures())


def test_transformers_makes_modules_of_as_many(counted):
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    torch = pytest.importorskip("torch")
    for name, row in PUBLISHED.items():
        found = {key: value for key, value in row["config"].items() if key != "auto_map"}
        layers = next(key for key in ("n_layer", "n_layers", "num_layers", "num_hidden_layers") if key in found)
        kinds, types = ["global", "local"], ["sliding_attention", "full_attention"]
        two = {layers: 2, "layer_types": types, "attention_layers": kinds, "attention_types": [[kinds, 1]]}
        found |= {key: value for key, value in two.items() if key in found}
        plain = {key: value for key, value in found.items() if key != "model_type"}
        built = transformers.AutoConfig.for_model(found["model_type"], **plain)
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(built)
        assert counted(found).num_params == module.num_parameters(), name


def test_what_is_counted_is_what_a_job_has(counted):
    for row in PUBLISHED.values():
        decoder = counted(row["config"])
        job = Job(**{"seq_len": 128, **decoder.sizes}, micro_batch=1, data=8)
        assert job.num_params == decoder.num_params
        # All but embeddings, norms and biases is in the products, whose FLOPs are counted.
        products = sum(inner * columns for _, inner, columns in layer_products(job))
        assert 0.99 * job.layer_params < products <= job.layer_params


def test_a_file_gives_the_sizes_of_a_job(tmp_path, counted):
    assert {**sizes(tmp_path, LLAMA), "layer_numel": 0, "root_numel": 0} == {
        "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336, "vocab": 128256,
        "seq_len": 8192, "gated": True, "window": None, "windowed_layers": 0, "layer_numel": 0, "root_numel": 0,
    }  # fmt: skip
    assert (counted(LLAMA).num_params, counted(GPT2).num_params) == (8_030_261_248, 124_439_808)


def test_a_key_that_the_file_leaves_out_is_what_the_class_takes_and_is_named(counted):
    found = counted(GEMMA | {"num_key_value_heads": 1})
    assert found.num_params == 2_506_172_416 + 18 * 3 * 2048 * (24576 - 16384)
    assert found.assumed == {
        "head_dim": 256,
        "intermediate_size": 24576,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
    }
    assert counted(LLAMA_2 | {"num_key_value_heads": None, "head_dim": None}) == counted(LLAMA_2)
    assert counted(LLAMA_2 | {"quantization_config": {"bits": 4}, "rope_scaling": None, "num_experts": 0}) == counted(
        LLAMA_2
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no object"),
        ({"vocab_size": 3}, 'lacks model_type, such as "llama"'),
        (LLAMA | {"model_type": None}, "lacks model_type"),
        ({"architectures": ["GemmaForCausalLM"], "text_config": LLAMA, "hidden_act": "silu"}, "lacks model_type"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, r"is of bert BertForMaskedLM, .* \(those of"),
        (
            {"model_type": "gemma3", "text_config": GEMMA | {"model_type": "gemma3_text"}, "vision_config": {"a": 2}},
            "is of gemma3 with text_config, .*, or its text_config, of gemma3_text, in a file of its own",
        ),
        ({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16}}, "is of dbrx with ffn_config.moe_num_experts"),
        (LLAMA_2 | {"num_local_experts": 8}, "is of llama with num_local_experts, which is not counted; plan its"),
        (LLAMA_2 | {"text_config": {"hidden_size": 64}}, "is of llama with text_config"),
        (LLAMA_2 | {"vision_config": {"layers": 2}}, "is of llama with vision_config"),
        (LLAMA_2 | {"blocks": [{"moe": {"top_k": 2}}]}, r"is of llama with blocks\.0\.moe"),
        (LLAMA_2 | {"architectures": ["LlamaForSequenceClassification"]}, "is of LlamaForSequenceClassification, and"),
        (LLAMA_2 | {"architectures": ["LlavaLlamaForCausalLM"]}, "is of LlavaLlamaForCausalLM"),
        (LLAMA_2 | {"is_encoder_decoder": True}, "has is_encoder_decoder True; of llama only False is counted"),
        (LLAMA_2 | {"layer_types": ["linear_attention"]}, "has layer_types with 'linear_attention'"),
        (PUBLISHED["mpt-7b"]["config"] | {"attn_config": {"alibi": False}}, "has attn_config.alibi False"),
        (LLAMA_2 | {"hidden_size": "4096"}, "has hidden_size '4096'; it must be a whole number from 1 on"),
        (LLAMA_2 | {"num_hidden_layers": -1}, "has num_hidden_layers -1"),
        (LLAMA_2 | {"vocab_size": True}, "has vocab_size True"),
        (PUBLISHED["opt-125m"]["config"] | {"max_position_embeddings": None}, "has max_position_embeddings null"),
        (LLAMA_2 | {"intermediate_size": None}, "has intermediate_size null"),
        (LLAMA_2 | {"num_attention_heads": 33}, "has 33 heads, which do not divide hidden, 4096"),
        (LLAMA_2 | {"num_key_value_heads": 5}, "has 5 kv_heads, which do not divide heads, 32"),
        (LLAMA_2 | {"tie_word_embeddings": "no"}, "has tie_word_embeddings 'no'; it must be true or false"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(counted, found, said):
    with pytest.raises(ValueError, match=rf"^config: \S+ {said}"):
        counted(found)


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.text(max_size=3), st.just([]), st.just({})
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(PUBLISHED)), st.data())
def test_a_file_with_any_value_is_counted_or_refused(tmp_path_factory, name, data):
    found = dict(PUBLISHED[name]["config"])
    key = data.draw(st.sampled_from(sorted({*found, "architectures", "layer_types", "sliding_window", "text_config"})))
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(found | {key: data.draw(ODD)}))
    try:
        assert all(value >= 0 for value in decoder_of(path).sizes.values() if value is not None)
    except ValueError as error:
        assert str(error).startswith(f"config: {path} ")


@pytest.mark.parametrize(
    ("name", "window", "layers"),
    [
        ("mistral-7b-v0.1", 4096, 32), ("mistral-nemo", None, 0), ("qwen2.5-7b", None, 0), ("gemma-2-2b", 4096, 13),
        ("gemma-3-1b", 512, 22), ("phi-3-mini", 2047, 32), ("command-r7b", 4096, 24), ("exaone-4.0-32b", 4096, 48),
        ("olmo-3-7b", 4096, 24), ("llama-3-8b", None, 0), ("gpt-neo-1.3b", 256, 12),
    ],
)  # fmt: skip
def test_windows_are_read(counted, name, window, layers):
    found = counted(PUBLISHED[name]["config"]).sizes
    assert (found["window"], found["windowed_layers"]) == (window, layers)


def test_windows_of_some_layers_of_qwen(counted):
    found = PUBLISHED["qwen2-0.5b"]["config"] | {"use_sliding_window": True, "max_window_layers": 20}
    assert counted(found).sizes["windowed_layers"] == 4
    assert counted(found | {"layer_types": ["sliding_attention"] * 24}).sizes["windowed_layers"] == 24


@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 6), st.data())
def test_attention_is_of_the_tokens_in_the_window(seq_len, window, layers, data):
    windowed = data.draw(st.integers(0, layers))
    job = Job(64, layers, 4, 4, 256, 100, seq_len, 1, 1, window=window, windowed_layers=windowed, strategy="single")
    attended = [
        [min(token, window if layer < windowed else token) for token in range(seq_len)] for layer in range(layers)
    ]
    # A causal kernel's s / 2 a token is half a token off, of itself and of those that it attends to before.
    assert sum(map(sum, attended)) / layers == pytest.approx(job.span * seq_len / 2, abs=seq_len / 2 + 1e-6)
