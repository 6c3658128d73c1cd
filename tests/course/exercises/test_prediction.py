"""A prediction is kept and compared; without one nothing of the answer is printed."""

import numpy as np
import pytest

from shardlab.course import predict

WORDS = ("more", "as many", "fewer")


def test_a_number_is_compared_with_what_was_found(capsys) -> None:
    for value, found, words in (
        (4_000_000, 4_130_304, "messages: 4,130,304; you predicted 4,000,000, 3.2% too low\n"),
        (1000.04, 1000, "messages: 1,000; you predicted 1,000, 0.004% too high\n"),
        (np.int64(4), np.int64(4), "messages: 4; you predicted 4, exactly\n"),
        (1, 2.5, "messages: 2.5; you predicted 1, too low by a factor of 2.5\n"),
        (30, 10, "messages: 10; you predicted 30, too high by a factor of 3\n"),
        (3, 0, "messages: 0; you predicted 3, too high by 3\n"),
        (-1, 2, "messages: 2; you predicted -1, too low by 3\n"),
    ):
        prediction = predict("messages", value)
        assert capsys.readouterr().out == ""
        prediction.against(found)
        assert capsys.readouterr().out == words


def test_a_direction_is_compared_with_both_numbers(capsys) -> None:
    for found, beside, words in (
        (8, 6, "sent by bf16: more (8 B and 6 B), and you predicted 'fewer'\n"),
        (6, 6, "sent by bf16: as many (6 B and 6 B), and you predicted 'fewer'\n"),
        (5.5, 6, "sent by bf16: fewer (5.5 B and 6 B), as you predicted\n"),
    ):
        predict("sent by bf16", "fewer", "B", among=WORDS).against(found, beside)
        assert capsys.readouterr().out == words


def test_without_a_prediction_the_answer_is_not_printed(capsys) -> None:
    for among, asked in (((), "sent, in MB? "), (WORDS, "sent, in MB? (more, as many, fewer) ")):
        predict("sent", None, "MB", among=among).against(4.130304)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{asked}Put your prediction in the place of None before you run on."
        assert lines[1] == "sent: shown once you have predicted it, in the place of None above."


def test_what_is_no_prediction_is_refused() -> None:
    for value in (float("nan"), float("inf"), "4", True):
        with pytest.raises(ValueError, match=r"value: .* was given; give a finite number of MB, or None"):
            predict("sent", value, "MB")
    with pytest.raises(ValueError, match=r"value: 'less' was given; give one of more, as many, fewer, or None"):
        predict("sent", "less", among=WORDS)
