"""A prediction is kept and compared; without one the cell asks, and the notebook goes on."""

import numpy as np
import pytest

from shardlab.course import predict


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


def test_without_a_number_it_asks_and_says_what_was_found(capsys) -> None:
    predict("sent in a step", None, "MB").against(4.130304)
    asked, found = capsys.readouterr().out.splitlines()
    assert asked == "sent in a step, in MB? Put your number in the place of None before you run on."
    assert found == "sent in a step: 4.13 MB (you made no prediction)"


def test_what_is_no_number_is_refused() -> None:
    for value in (float("nan"), float("inf"), "4", True):
        with pytest.raises(ValueError, match=r"value: .* was given; give a finite number of MB, or None"):
            predict("sent", value, "MB")
