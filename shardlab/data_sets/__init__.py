"""Text to train on, as bytes, and the batches drawn from it."""

from shardlab.data_sets.text import VOCAB_SIZE, TextData, batch, grammar_text, load_text
from shardlab.installed import data_path

__all__ = ["VOCAB_SIZE", "TextData", "batch", "data_path", "grammar_text", "load_text"]
