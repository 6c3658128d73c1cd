"""A schedule placed by hand: legal moves begin as early as they can, others are refused with the reason."""

import pytest

from shardlab.course.widgets.place_actions import Board, place_actions
from shardlab.schedules import Kind, make_schedule, play


def test_moves_are_refused_with_their_reason_and_the_bubble_is_that_of_the_clock():
    board = Board(2, 2)
    assert board.place("1F0") == "1F0 needs the output of 0F0, which nobody has done yet"
    assert board.place("0B0") == "0B0 needs the activations of 0F0, which nobody has done yet"
    for text in ("0F0", "0F1", "1F0"):
        assert board.place(text) == ""
    assert board.place("0F0") == "0F0 stands already"
    assert board.place("0F2") == "0F2 is no action of this step"
    assert board.place("0B0") == "0B0 needs the gradient of 1B0, which nobody has done yet"
    assert str(board).splitlines()[1] == "rank 1   . F0"
    for text in ("1B0", "0B0", "1F1", "1B1"):
        assert board.place(text) == ""
    board.undo()
    assert not board.is_complete
    for text in ("1B1", "0B1"):
        assert board.place(text) == ""
    played = play(make_schedule("1f1b", 2, 2), {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0})
    assert (board.schedule(), board.idle) == (played.schedule, played.idle)
    assert str(board).splitlines()[-1] == "9 slots, 33% of the ranks' time idle so far; complete"


def test_columns_stand_below_each_other_whatever_the_numbers():
    board = Board(11, 11)
    for number in range(11):
        assert board.place(f"0F{number}") == board.place(f"1F{number}") == ""
    rows = str(board).splitlines()
    assert rows[0].index("F10") + 4 == rows[1].index("F10") == len(rows[1]) - 3
    assert [place for place, letter in enumerate(rows[10]) if letter == "."] == list(range(11, 11 + 4 * 12, 4))
    for numbers in (0, 2), (2, 0), (2, 1.5):
        with pytest.raises(ValueError, match="integers from 1"):
            Board(*numbers)


def test_buttons_place_the_next_of_a_rank():
    box = place_actions(2, 1)
    first, second = (row.children for row in box.children[:2])
    second[0].click()
    assert "1F0 needs the output of 0F0" in box.children[-2].value
    for button in (first[0], second[0], second[1], first[1]):
        button.click()
    assert "complete" in box.children[-1].value
    first[0].click()
    assert "rank 0 has done all F" in box.children[-2].value
