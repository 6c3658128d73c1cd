import math

import pytest
import torch

from shardlab.models import GPT, MLP, MODELS, ByteMLPConfig, GPTConfig, build_model, next_token_loss

NUM_PARAMETERS = {  # at seq_len 128
    "mlp": 1_050_368,
    "gpt-1m": 1_040_768,
    "gpt-3m": 3_257_856,
    "gpt-10m": 10_795_008,
    "gpt-30m": 31_721_472,
    "gpt-60m": 59_329_280,
    "gpt-120m": 116_091_136,
}
SMALL = GPTConfig(vocab_size=11, seq_len=8, num_layers=2, num_heads=4, hidden=16)


def tokens(batch_size=3, seq_len=8, vocab_size=11):
    return torch.randint(vocab_size, (batch_size, seq_len), generator=torch.Generator().manual_seed(1))


def test_every_size_has_its_stated_number_of_parameters():
    with torch.device("meta"):
        counted = {name: sum(p.numel() for p in build_model(name, 128).parameters()) for name in MODELS}
    assert counted == NUM_PARAMETERS


def test_the_seed_alone_decides_the_weights_and_the_global_state_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build_model("gpt-1m", 16, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, other = build_model("gpt-1m", 16, seed=3).state_dict(), build_model("gpt-1m", 16, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["token_embedding.weight"], other["token_embedding.weight"])


def test_every_dtype_starts_from_the_same_weights():
    single = build_model("mlp", 16, torch.float32, seed=1).state_dict()
    double = build_model("mlp", 16, torch.float64, seed=1).state_dict()
    assert all(double[name].dtype == torch.float64 for name in double)
    assert all(torch.equal(double[name], single[name].double()) for name in single)


def test_an_untrained_model_is_near_the_uniform_loss_and_learns():
    for name in ("mlp", "gpt-1m"):
        model = build_model(name, 16, torch.float64, seed=0)
        inputs = tokens(4, 17, 256)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(3):
            loss = next_token_loss(model(inputs[:, :-1]), inputs[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(math.log(256), abs=0.2)
        assert losses[2] < losses[1] < losses[0]


def test_a_position_sees_only_what_came_before():
    model = GPT(SMALL).double().eval()
    first = tokens()
    changed = first.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    difference = (model(first) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:5].max() == 0
    assert difference[5:].min() > 0


def test_tied_head_and_embedding_are_one_parameter():
    tied, untied = GPT(SMALL), GPT(GPTConfig(11, 8, 2, 4, 16, tied=False))
    assert tied.head.weight is tied.token_embedding.weight
    numel = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert numel[1] - numel[0] == 11 * 16
    assert "head.weight" in dict(untied.named_parameters())
    assert "head.weight" not in dict(tied.named_parameters())


def test_grouped_query_attention_equals_full_attention_with_repeated_heads():
    grouped = GPT(GPTConfig(11, 8, 2, 4, 16, num_kv_heads=2)).double()
    full = GPT(SMALL).double()
    state = grouped.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            heads = state[name].unflatten(0, (2, 4))
            state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens()), full(tokens()), rtol=0, atol=1e-12)


def test_the_loss_is_the_mean_of_minus_log_probability():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    by_hand = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(next_token_loss(logits, targets), by_hand)
    assert next_token_loss(logits.bfloat16(), targets).dtype == torch.float32


def test_errors_name_the_field():
    for call, message in (
        (lambda: build_model("gpt-2", 16), "model: 'gpt-2' is not one of mlp, gpt-1m"),
        (lambda: build_model("mlp", 0), "seq_len: 0 is below 1"),
        (lambda: build_model("mlp", 16, torch.int64), "dtype: torch.int64 is not a floating-point type"),
        (lambda: GPTConfig(hidden=10, num_heads=4), "hidden: 10 is not a multiple of num_heads=4"),
        (lambda: GPTConfig(num_heads=4, num_kv_heads=3), "num_kv_heads: 3 does not divide num_heads=4"),
        (lambda: GPTConfig(dropout=1.0), "dropout: 1.0 is not at least 0 and below 1"),
        (lambda: ByteMLPConfig(hidden=0), "hidden: 0 is below 1"),
        (lambda: MLP(1, 1, 0, 1), "num_layers: 0 is below 1"),
        (lambda: GPT(SMALL)(tokens(1, 9)), "seq_len: 9 tokens; this model takes at most 8"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
