"""A probabilistic grammar whose entropy is known exactly: no model's loss on its text can go below this floor.

In each state one word is drawn, and the word determines the next state; no word of a state is a prefix of another word
of that state. From a known first state, the bytes therefore determine all words and states, and the text has exactly
the entropy of the draws:

    floor = sum_s pi(s) H(s) / sum_s pi(s) L(s)      nats per byte

Legend: pi(s) share of draws made in state s (the stationary distribution, pi = pi P), H(s) = -sum_w p(w|s) ln p(w|s)
entropy of one draw, L(s) = sum_w p(w|s) bytes(w) mean length of one draw. The numerator is the entropy rate per word of
a unifilar source (Shannon, "A mathematical theory of communication", 1948, section 7); the ratio of the two means is
the rate per byte, since both averages are over the same draws.

A model that sees windows from anywhere in the text does not know the state at first. That costs at most the entropy of
its place in the grammar given the first byte, once per window.
"""

import json
import math
import random
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from shardlab.installed import data_path

_Table = tuple[list[float], list[tuple[bytes, int, "_Table"]]]


@dataclass(frozen=True)
class Draw:
    """One word of a state: its bytes, its probability, the state that follows."""

    word: bytes
    probability: float
    next_state: str


@dataclass(frozen=True)
class Grammar:
    """States by name, each a choice of words; text starts in the state ``start``."""

    start: str
    states: Mapping[str, tuple[Draw, ...]]

    def __post_init__(self) -> None:
        """Check everything that the formula for the floor assumes."""
        for name, draws in self.states.items():
            _check_state(name, draws, self.states)
        for name in (self.start, *self.states):
            if name not in self.states or self.start not in _reachable(self.states, name):
                raise ValueError(f"grammar: state {name!r} must exist and lead back to {self.start!r}")
        if unreached := sorted(set(self.states) - _reachable(self.states, self.start)):
            raise ValueError(f"grammar: states {unreached} are never reached from {self.start!r}")

    def text(self, num_bytes: int, seed: int = 0) -> bytes:
        """The first ``num_bytes`` bytes of a text drawn with ``seed``; the last word may be cut.

        It is the same on every machine: only ``random.Random.random`` is used, whose sequence Python guarantees.
        """
        draw_uniform = random.Random(seed).random
        # Of each state: where its draws begin, and of each draw the word, its length and the next state's table.
        tables: dict[str, _Table] = {name: ([], []) for name in self.states}
        for name, (begins, choices) in tables.items():
            draws = self.states[name]
            begins += list(accumulate(draw.probability for draw in draws))[:-1]
            choices += [(draw.word, len(draw.word), tables[draw.next_state]) for draw in draws]
        (begins, choices), words, length = tables[self.start], [], 0
        while length < num_bytes:
            word, size, (begins, choices) = choices[bisect(begins, draw_uniform())]
            words.append(word)
            length += size
        return b"".join(words)[:num_bytes]

    @property
    def stationary(self) -> dict[str, float]:
        """Share of all draws that are made in each state: the solution of pi = pi P with sum 1."""
        names = list(self.states)
        balance = -torch.eye(len(names), dtype=torch.float64)
        for column, name in enumerate(names):
            for draw in self.states[name]:
                balance[names.index(draw.next_state), column] += draw.probability
        balance[-1] = 1  # The balance equations are redundant, so the last is replaced by sum(pi) = 1.
        ones = torch.zeros(len(names), dtype=torch.float64)
        ones[-1] = 1
        return dict(zip(names, torch.linalg.solve(balance, ones).tolist(), strict=True))

    @property
    def mean_word_bytes(self) -> float:
        """Mean bytes of one draw."""
        return self._mean(lambda draw: len(draw.word))

    @property
    def floor_nats_per_byte(self) -> float:
        """Exact entropy rate: the lowest mean cross-entropy that a model can reach, see the head of this file."""
        return self._mean(lambda draw: -math.log(draw.probability)) / self.mean_word_bytes

    def _mean(self, value: Callable[[Draw], float]) -> float:
        """The mean of something over the draws of a long text."""
        return sum(
            share * draw.probability * value(draw)
            for name, share in self.stationary.items()
            for draw in self.states[name]
        )


def load_grammar(path: Path | None = None) -> Grammar:
    """The grammar of a JSON file, by default ``data/grammar.json``.

    Raises:
        ValueError: the probabilities of a state do not add up to 1, a state is unknown, or a word is ambiguous.
        FileNotFoundError: there is no such file.
    """
    spec = json.loads((data_path("grammar.json") if path is None else path).read_text(encoding="utf-8"))
    states = {
        name: tuple(Draw(word.encode(), probability, next_state) for word, probability, next_state in draws)
        for name, draws in spec["states"].items()
    }
    return Grammar(spec["start"], states)


def _check_state(name: str, draws: tuple[Draw, ...], states: Mapping[str, object]) -> None:
    if abs(sum(draw.probability for draw in draws) - 1) > 1e-9 or min(d.probability for d in draws) <= 0:
        raise ValueError(f"grammar: probabilities of state {name!r} must be above 0 and add up to 1")
    if unknown := sorted({draw.next_state for draw in draws} - set(states)):
        raise ValueError(f"grammar: state {name!r} leads to unknown states {unknown}")
    for index, draw in enumerate(draws):
        if not draw.word or any(other.word.startswith(draw.word) for at, other in enumerate(draws) if at != index):
            raise ValueError(f"grammar: word {draw.word!r} of state {name!r} is empty or begins another word")


def _reachable(states: Mapping[str, tuple[Draw, ...]], start: str) -> set[str]:
    seen, waiting = set(), [start]
    while waiting:
        state = waiting.pop()
        if state in states and state not in seen:
            seen.add(state)
            waiting.extend(draw.next_state for draw in states[state])
    return seen
