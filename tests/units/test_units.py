"""Which modules are units: by structure, by name, by class, by size and by a function; and what to write instead."""

import pytest
import torch
from torch import nn

from shardlab import show_units
from shardlab.models import MODELS, GPTConfig, build_model
from shardlab.trace.units import watched_modules
from shardlab.units import parse_wrap, units_of, wrap_text, wrapped_modules
from shardlab.units.structure import called_modules
from tests.units import look_alikes
from tests.units.look_alikes import CASES, GPT2, Experts, Residual


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_blocks_are_found_by_structure(device):
    for case, (build, expected) in CASES.items():
        with torch.device(device):
            assert list(wrapped_modules(build())) == expected, case


def test_of_the_packages_own_models_they_are_the_layers():
    for name, config in MODELS.items():
        with torch.device("meta"):
            module = build_model(name)
        prefix = "blocks" if isinstance(config, GPTConfig) else "mlp.layers"
        assert list(wrapped_modules(module)) == [f"{prefix}.{place}" for place in range(config.num_layers)]


def test_a_block_that_stands_at_two_places_is_one_unit():
    module = look_alikes.Stack(2)
    module.layers.append(module.layers[0])
    module.again = module.layers[1]
    assert list(wrapped_modules(module)) == ["layers.0", "layers.1"]


BLOCKS = ["transformer.h.0", "transformer.h.1", "transformer.h.2"]
CHOSEN = (
    ("root", []),
    ("transformer.h.*", BLOCKS),
    ("transformer.h.[01]", BLOCKS[:2]),
    ("transformer.*.*.up", [f"{block}.up" for block in BLOCKS]),
    ("transformer.w?e", ["transformer.wte", "transformer.wpe"]),
    (["transformer.h.0", "lm_head"], ["transformer.h.0", "lm_head"]),
    (("lm_head", "transformer.h.0", nn.LayerNorm), ["transformer.h.0", "transformer.ln_f", "lm_head"]),
    (Residual, BLOCKS),
    (144, [f"{block}.up" for block in BLOCKS]),
    (200, BLOCKS),
    (lambda name, module: name.endswith("1") and isinstance(module, Residual), BLOCKS[1:2]),
)


def test_a_pattern_a_class_a_size_or_a_function_chooses():
    for wrap, expected in CHOSEN:
        assert list(wrapped_modules(GPT2(), wrap)) == expected


def test_what_is_never_called_is_no_unit():
    every = list(wrapped_modules(look_alikes.Stack(1, Experts), lambda name, module: True))
    assert {"layers", "layers.0.experts", "layers.0.attention.out_proj"}.isdisjoint(every)
    assert {"layers.0", "layers.0.experts.0", "layers.0.attention", "layers.0.router"} <= set(every)


REFUSED = (
    ("block", ["'block' matches no module, and is not one of auto, root", "'transformer.h.*'", "'lm_head'"]),
    ("*.h", ["'*.h' is a ModuleList that is never called", "'transformer.h.*'"]),
    ("transformer.drop", ["is a Dropout", "has no parameters"]),
    (("transformer.h.*", "head"), ["'head' matches no module"]),
    (nn.Conv2d, ["no unit can be a Conv2d", "Embedding", "Residual", "Linear"]),
    (nn.ModuleList, ["no unit can be a ModuleList"]),
    (10_000, ["no module has 10,000 parameters", "the largest has 280", "'root'"]),
    (0, ["0 parameters is below 1"]),
    (lambda name, module: False, ["the function is true for no module", "'transformer.h.*'"]),
    *((wrap, ["is not one of auto, root, a pattern"]) for wrap in (None, True, (), (3, "lm_head"))),
)


def test_what_matches_nothing_is_refused_with_what_there_is():
    for wrap, words in REFUSED:
        with pytest.raises(ValueError, match=r"^wrap: ") as caught:
            wrapped_modules(GPT2(), wrap)
        assert not [word for word in words if word not in str(caught.value)], str(caught.value)
        assert "\n" not in str(caught.value)


TYPED = {
    "auto": "auto", "root": "root", "100000": 100_000, "blocks.*": ("blocks.*",),
    "encoder.*, decoder.*": ("encoder.*", "decoder.*"), "[ab].0": ("[ab].0",),
}  # fmt: skip


def test_what_is_typed_in_a_terminal_and_what_a_record_says():
    assert {text: parse_wrap(text) for text in TYPED} == TYPED
    for wrap in TYPED.values():
        assert parse_wrap(wrap_text(wrap)) == wrap
    assert wrap_text(("a.*", Residual)) == "a.*,Residual"
    assert wrap_text(build_model) == "build_model"
    for text in ("", "0", "-5", "1.5", "1e5", "a..b", "blocks.", ".blocks", "a,", "a b", "100k"):
        with pytest.raises(ValueError, match=r"^wrap: .* is not one of auto, root, a number of parameters above 0"):
            parse_wrap(text)


def test_the_table_counts_every_parameter_once():
    module = GPT2().double()
    module.transformer["h"][0].up.requires_grad_(False)
    table = show_units(module).set_index("unit")
    assert table.index.tolist() == ["transformer.h.0", "transformer.h.1", "transformer.h.2", "root"]
    assert table["class"].tolist() == ["Residual"] * 3 + ["GPT2"]
    assert table["parameters"].tolist() == [280, 280, 280, 2 * 11 * 8 + 16]  # the tied head is no parameter more
    assert table["bytes"].sum() == sum(param.nbytes for param in module.parameters())
    assert table["trainable"].tolist() == [136 / 280, 1, 1, 1]
    # A weight of two units belongs to neither of them; a unit without parameters is none.
    tied = show_units(module, ("transformer.wte", "transformer.wpe", "lm_head")).set_index("unit")
    assert tied.index.tolist() == ["transformer.wpe", "root"]
    assert tied["parameters"].sum() == table["parameters"].sum()


def test_the_table_has_the_units_that_the_policy_gives():
    with torch.device("meta"):
        module = build_model("gpt-120m")
    for wrap in ("auto", "root", "blocks.*.mlp", nn.Linear, 1_000_000):
        table = show_units(module, wrap)
        assert table["unit"].tolist() == [*units_of(module, wrap), "root"]
        assert table["parameters"].sum() == 116_091_136


@pytest.mark.parametrize("wrap", ["auto", "root", "every"])
def test_what_is_watched_lies_side_by_side(wrap):
    """No module is watched twice or inside another, and every unit is watched that has no unit inside."""
    for build, _ in CASES.values():
        module = build()
        chosen = (tuple(called_modules(module)) or "root") if wrap == "every" else wrap  # nested units
        watched = watched_modules(module, chosen)
        seen = set(watched.values())
        assert len(seen) == len(watched)
        assert {inner for child in seen for inner in child.modules() if inner is not child}.isdisjoint(seen)
        units = wrapped_modules(module, chosen)
        assert {name for name in units if not any(inner.startswith(f"{name}.") for inner in units)} <= set(watched)


def test_a_module_that_stands_in_units_and_beside_them_is_watched_with_the_units():
    module = look_alikes.Stack(2)
    module.activation = module.layers[0].activation = module.layers[1].activation = nn.GELU()
    assert list(watched_modules(module)) == ["embed_tokens", "layers.0", "layers.1", "norm"]


def test_units_around_units_are_not_watched():
    module = GPT2(1)
    watched = list(watched_modules(module, ("transformer.h.*", "transformer.h.*.up")))
    rest = ["transformer.wte", "transformer.wpe", "transformer.drop"]
    assert watched == [*rest, "transformer.h.0.up", "transformer.h.0.down", "transformer.ln_f", "lm_head"]
