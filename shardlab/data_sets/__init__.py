"""Text to train on, as bytes, and the batches drawn from it."""

from shardlab.data_sets.grammar import Draw, Grammar, load_grammar
from shardlab.data_sets.text import VOCAB_SIZE, TextData, batch, load_text
from shardlab.installed import data_path

__all__ = ["VOCAB_SIZE", "Draw", "Grammar", "TextData", "batch", "data_path", "load_grammar", "load_text"]
