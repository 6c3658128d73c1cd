"""The drawings at the heads of notebooks: their numbers are those of the planner, the replay and the exercises."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from shardlab.course import drawings, drawings_of_layers
from shardlab.course.drawings import DRAWINGS, MOMENTS
from shardlab.forecast.replay import Schedule, Unit, replay
from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.vocabulary import Collective


@pytest.mark.parametrize("draw", DRAWINGS)
def test_a_drawing_ends_with_its_line_in_both_layouts(draw):
    drawing = draw()
    wide, narrow = ElementTree.fromstring(drawing.svg()).findall("{*}svg")
    for layout in (wide, narrow):
        texts = layout.findall("{*}text")
        bold = [text.text for text in texts if text.get("font-weight")]
        assert drawing.takeaway.endswith(bold[-1])
        assert texts[-1].text == bold[-1]
    assert drawing._repr_mimebundle_()["text/plain"] == drawing.takeaway


def test_an_all_reduce_around_a_ring_ends_with_all_sums_everywhere():
    states = drawings.ring_states()
    assert states[-1] == [[60, 64, 68, 72]] * 4
    assert [states[3][rank][rank] for rank in range(4)] == [60, 64, 68, 72]
    for before, after in pairwise(states):
        assert [sum(a != b for a, b in zip(*cells, strict=True)) <= 1 for cells in zip(before, after, strict=True)] == [
            True
        ] * 4
    assert "6 hops" in drawings.ring().takeaway
    assert f"{ring_wire_bytes('all_reduce', 1, 4):g} of it" in drawings.ring().takeaway


def test_buckets_expose_what_the_clock_says():
    assert [drawings.sent_at(count, early=early)[1] for count, early in drawings.SENT_AS.values()] == [48, 34, 10]
    assert drawings.sent_at(4, early=True)[0] == [(10, 20), (20, 30), (30, 40), (40, 50)]


def test_bytes_and_trips_are_those_of_the_planner():
    assert drawings.who_keeps_what().takeaway.startswith("16, 10, 7, 4 bytes a parameter")
    assert drawings.borrow().takeaway == "Three trips of 6 of 8 rows = 18; ZeRO-2 makes two, 12."
    assert [sum(rows) for rows in drawings.BORROWED.values()] == [2, 10, 10, 2, 10, 18, 4]


def test_the_window_of_fsdp_is_that_of_the_replay():
    units = [Unit(str(number), 5e-3, 1e-2, 200e3, 200e3) for number in range(6)]
    root = Unit("root", 1e-3, 2e-3, 82e3, 82e3)
    found = replay(units, Schedule(prefetch=1), lambda _op, _axis, num_bytes: num_bytes / 5e7, root)
    computed = [*range(6), "root", "root", *range(5, -1, -1)]  # in this order
    for name, (now, ahead) in MOMENTS.items():
        phase, first = name.split()[0], 7 * name.startswith("backward")
        place = first + computed[first:].index(now)
        begin_us = 1e6 * found.computed[place][1]
        gathered = {
            message.tag for message, one in found.host.transfers.items()
            if message.op == Collective.ALL_GATHER and message.phase == phase and one.issued_us <= begin_us
        }  # fmt: skip
        held = gathered - {str(unit) for unit in computed[first:place]} | {"root"}
        assert held == {"root", str(now), str(ahead)}
    assert drawings.gathered_kb() == (482, 1282)


def test_a_zigzag_divides_the_boxes_of_a_causal_mask():
    assert drawings_of_layers.boxes_of_ranks(zigzag=False) == [3, 7, 11, 15]
    assert drawings_of_layers.boxes_of_ranks(zigzag=True) == [9] * 4


def test_two_axes_are_those_of_the_exercise():
    drawn = drawings.two_axes_of_a_mesh().svg()
    for words in ("out [1, 2, 3]", "out [2, 3, 4]", "[3, 5, 7]", "grad 0", "grad 3", "mean 1.5"):
        assert f">{words}<" in drawn
