"""The grammar's text, drawn where this is imported: before ranks are forked, of which each would draw it again."""

from shardlab.data_sets import GRAMMAR_BYTES, grammar_text

grammar_text(GRAMMAR_BYTES)  # which is remembered
