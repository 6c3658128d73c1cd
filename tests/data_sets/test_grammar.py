import hashlib
import math
from collections import defaultdict

import pytest

from shardlab.data_sets import Draw, Grammar, data_path, load_grammar

GRAMMAR = load_grammar()


def test_two_states_by_hand():
    grammar = Grammar("a", {"a": (Draw(b"x", 0.5, "a"), Draw(b"yy", 0.5, "b")), "b": (Draw(b"zzz", 1.0, "a"),)})
    assert grammar.stationary == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    assert grammar.mean_word_bytes == pytest.approx(2 / 3 * 1.5 + 1 / 3 * 3)
    assert grammar.floor_nats_per_byte == pytest.approx(2 / 3 * math.log(2) / 2)


def test_the_stationary_distribution_stays_where_it_is():
    after = defaultdict(float)
    for state, share in GRAMMAR.stationary.items():
        for draw in GRAMMAR.states[state]:
            after[draw.next_state] += share * draw.probability
    assert sum(after.values()) == pytest.approx(1, abs=1e-12)
    assert dict(after) == pytest.approx(GRAMMAR.stationary, abs=1e-12)


def nats_of(grammar, text):
    """Minus the log-probability of a text of whole words that begins in the first state."""
    state, total = grammar.start, 0.0
    while text:
        draw = next(draw for draw in grammar.states[state] if text.startswith(draw.word))
        state, text, total = draw.next_state, text[len(draw.word) :], total - math.log(draw.probability)
    return total


def test_the_true_model_reaches_the_floor_on_a_long_sample():
    text = GRAMMAR.text(1_500_000, seed=7)
    sentences = [line + b"\n" for line in text.split(b"\n")[:-1]]
    nats = [nats_of(GRAMMAR, sentence) for sentence in sentences]
    num_bytes = [len(sentence) for sentence in sentences]
    floor = GRAMMAR.floor_nats_per_byte
    # Sentences are independent: the error of the ratio of two sums is that of the mean of nats - floor * bytes.
    excess = [n - floor * b for n, b in zip(nats, num_bytes, strict=True)]
    standard_error = math.sqrt(sum(e * e for e in excess)) / sum(num_bytes)
    assert standard_error < 0.002 * floor
    assert abs(sum(nats) / sum(num_bytes) - floor) < 4 * standard_error


def test_the_text_is_the_same_everywhere_and_a_longer_one_begins_with_it():
    text = GRAMMAR.text(10_000)
    assert len(text) == 10_000
    assert GRAMMAR.text(20_000).startswith(text)
    assert GRAMMAR.text(10_000, seed=1) != text
    assert hashlib.sha256(text).hexdigest() == "be6ae8d4e802f0b2644d62bd512453e8cde90a5cb81bbb4facda04f113a10940"


def test_a_missing_data_file_is_named_with_both_places():
    assert data_path("grammar.json").is_file()
    with pytest.raises(FileNotFoundError, match=r"'nothing\.json' is neither .* nor "):
        data_path("nothing.json")


def test_a_grammar_without_an_exact_floor_is_refused():
    sure = Draw(b"x", 1.0, "a")
    for states, message in (
        ({"a": (Draw(b"x", 0.5, "a"),)}, "add up to 1"),
        ({"a": (Draw(b"x", 1.0, "b"),)}, r"unknown states \['b'\]"),
        ({"a": (Draw(b"x", 0.5, "a"), Draw(b"xy", 0.5, "a"))}, "begins another word"),
        ({"a": (Draw(b"", 1.0, "a"),)}, "is empty"),
        ({"a": (sure,), "b": (sure,)}, "never reached"),
        ({"a": (Draw(b"x", 1.0, "b"),), "b": (Draw(b"x", 1.0, "b"),)}, "lead back"),
    ):
        with pytest.raises(ValueError, match=rf"^grammar: .*{message}"):
            Grammar("a", states)
