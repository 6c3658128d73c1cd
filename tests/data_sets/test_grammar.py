import hashlib
import json
import math

import numpy as np
import pytest

from shardlab.data_sets import grammar_text
from shardlab.installed import data_path

GRAMMAR = json.loads(data_path("grammar.json").read_text())
STATES = GRAMMAR["states"]


def test_the_floor_is_that_of_the_stationary_distribution():
    place = {name: number for number, name in enumerate(STATES)}
    moves, nats, sizes = np.zeros((len(place), len(place))), np.zeros(len(place)), np.zeros(len(place))
    for name, draws in STATES.items():
        for word, share, after in draws:
            moves[place[name], place[after]] += share
            nats[place[name]] -= share * math.log(share)
            sizes[place[name]] += share * len(word.encode())
    assert moves.sum(axis=1) == pytest.approx(1, abs=1e-12)
    balance = np.vstack([moves.T - np.eye(len(place)), np.ones(len(place))])
    stays = np.linalg.lstsq(balance, np.append(np.zeros(len(place)), 1.0), rcond=None)[0]
    assert stays @ moves == pytest.approx(stays, abs=1e-12)
    assert stays.min() > 1e-6, "each state is reached again and again"
    assert GRAMMAR["floor_nats_per_byte"] == pytest.approx(stays @ nats / (stays @ sizes), rel=1e-12)


def test_bytes_determine_the_words():
    for draws in STATES.values():
        words = [word for word, *_ in draws]
        assert all(words)
        assert all(map(str.isascii, words))
        assert not [1 for one in words for other in words if one != other and other.startswith(one)]
        assert len(set(words)) == len(words)


def nats_of(grammar, text):
    """Minus the log-probability of a text of whole words that begins in the first state."""
    state, total = grammar["start"], 0.0
    while text:
        word, share, state = next(draw for draw in grammar["states"][state] if text.startswith(draw[0]))
        text, total = text[len(word) :], total - math.log(share)
    return total


def test_the_true_model_reaches_the_floor_on_a_long_sample():
    text = grammar_text(1_500_000, seed=7).decode()
    sentences = [line + "\n" for line in text.split("\n")[:-1]]
    nats = [nats_of(GRAMMAR, sentence) for sentence in sentences]
    num_bytes = [len(sentence) for sentence in sentences]
    floor = GRAMMAR["floor_nats_per_byte"]
    # Sentences are independent: the error of the ratio of two sums is that of the mean of nats - floor * bytes.
    excess = [n - floor * b for n, b in zip(nats, num_bytes, strict=True)]
    standard_error = math.sqrt(sum(e * e for e in excess)) / sum(num_bytes)
    assert standard_error < 0.002 * floor
    assert abs(sum(nats) / sum(num_bytes) - floor) < 4 * standard_error


def test_the_text_is_the_same_everywhere_and_a_longer_one_begins_with_it():
    text = grammar_text(10_000)
    assert len(text) == 10_000
    assert grammar_text(20_000).startswith(text)
    assert grammar_text(10_000, seed=1) != text
    assert hashlib.sha256(text).hexdigest() == "be6ae8d4e802f0b2644d62bd512453e8cde90a5cb81bbb4facda04f113a10940"


def test_a_missing_data_file_is_named_with_both_places():
    assert data_path("grammar.json").is_file()
    with pytest.raises(FileNotFoundError, match=r"'nothing\.json' is neither .* nor "):
        data_path("nothing.json")
