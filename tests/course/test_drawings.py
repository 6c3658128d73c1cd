"""The drawings at the heads of notebooks: their numbers are those of the planner, the replay and the exercises."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch

from shardlab.analysis import overlap, waits
from shardlab.course import drawings, drawings_of_bytes, drawings_of_ranks
from shardlab.course.drawings import DRAWINGS, MOMENTS
from shardlab.forecast.replay import Schedule, Unit, replay
from shardlab.partition.chunks import ParamSpec
from shardlab.partition.ring_cost import ring_wire_bytes
from shardlab.planner import PlannedModel, Setup, model_states, predicted_collectives, predicted_memory
from shardlab.vocabulary import Collective
from tests.analysis.hand_made import collective, collectives, span, spans


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
    exposed = [drawings.sent(count, early=early).exposed_us for count, early in drawings.SENT_AS.values()]
    assert exposed == [48, 34, 10]
    assert drawings.of_kind(drawings.sent(4), "message") == [(10, 20), (20, 30), (30, 40), (40, 50)]


def test_half_the_bytes_help_where_nobody_waits_for_each():
    exposed = [drawings.sent(4, bytes_ms=ms, waits=waits).exposed_us for ms, waits in drawings.SENT_IN.values()]
    assert exposed == [10, 24, 6]


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
    assert drawings_of_ranks.boxes_of_ranks(zigzag=False) == [3, 7, 11, 15]
    assert drawings_of_ranks.boxes_of_ranks(zigzag=True) == [9] * 4


def test_two_axes_are_those_of_the_exercise():
    drawn = drawings.two_axes_of_a_mesh().svg()
    for words in ("out [1, 2, 3]", "out [2, 3, 4]", "[3, 5, 7]", "grad 0", "grad 3", "mean 1.5"):
        assert f">{words}<" in drawn


def test_who_comes_earlier_waits_for_the_last():
    comes = drawings_of_ranks.COMES_MS
    end = max(comes) + drawings_of_ranks.SUM_MS
    found = waits(collectives(*(collective(r, 0, (ms, ms, end), group_size=4) for r, ms in enumerate(comes))))
    assert (found["straggler_us"] == [40, 50, 0, 20]).all()
    drawn = drawings.last_to_come().svg()
    assert all(f">{ms} ms<" in drawn for ms in (20, 40, 50))
    assert ">0 ms<" not in drawn
    assert drawings.last_to_come().takeaway.startswith("0 + 1 + 2 + 3 = 6, on all four, at 70 ms")


def test_what_is_hidden_is_that_of_the_analysis():
    moved = [collective(0, seq, (begin, begin, end)) for seq, (begin, end) in enumerate(drawings_of_ranks.MESSAGES_MS)]
    worked = [span(0, "block", "backward", *times) for times in drawings_of_ranks.COMPUTE_MS]
    (row,) = overlap(collectives(*moved), spans(*worked)).to_dict("records")
    assert (row["overlap"], row["exposed_us"]) == (0.55, 9)
    assert drawings.hidden_part().takeaway == "11 of 20 ms are hidden: overlap 55 %. Exposed: 9 ms."


def test_two_are_faster_with_more_rows_than_the_drawing_says():
    times = {rows: [drawings_of_ranks.step_of(rows, num)[-1][1] for num in (1, 2)] for rows in range(2, 40, 2)}
    assert [rows for rows, (one, two) in times.items() if two < one] == [*range(14, 40, 2)]
    assert times[12] == [56, 56]
    assert "more than 12 rows" in drawings.one_or_two().takeaway


def test_who_is_to_blame_is_the_one_that_called_fewest():
    assert drawings.not_with_the_others().takeaway.startswith(
        "3 ranks wait in number 3, and time out. To blame is rank 1"
    )


def test_gradients_that_are_never_reduced():
    mean = torch.tensor(drawings_of_ranks.mean_gradient())
    for own in drawings_of_ranks.GRADIENTS:
        ratio, cosine = drawings_of_ranks.ratio_and_cosine(own)
        assert ratio == pytest.approx(float(torch.tensor(own).norm() / mean.norm()))
        assert cosine == pytest.approx(float(torch.cosine_similarity(torch.tensor(own), mean, dim=0)))
        assert cosine > 0, "a small step along it lowers the loss of all rows"
    assert "1.6 and 1.2 times as long, cosines 0.8 and 0.6" in drawings.never_reduced().takeaway


def blocks(count, numel=10**6):
    return PlannedModel.of_specs([ParamSpec(f"{number}.weight", (numel,), 4) for number in range(count)])


def test_a_step_begins_and_ends_with_what_the_planner_says():
    held = {name: sum(parts.values()) for name, parts in drawings_of_bytes.over_a_step().items()}
    assert held["rest"] == held["B0"] == model_states(3e6, 1, "fp32")[0].total_bytes / 1e6
    assert max(held, key=held.get) == "F2"
    assert drawings.bytes_of_a_step().takeaway.startswith("48 MB at rest, 16 bytes a parameter. The peak, 54,")


def test_prices_and_what_they_save_are_those_of_the_planner():
    units = {str(number): [f"{number}.weight"] for number in range(4)}
    for name, offload, dtype in (("FSDP", "none", None), ("bf16", "none", "bfloat16"), ("offload all", "all", None)):
        parts, price = drawings_of_bytes.held_by_option()[name]
        setup = Setup("fsdp", 2, units=units, offload=offload, compute_dtype=dtype, reduce_dtype="float32")
        on_rank_0 = predicted_memory(blocks(4), setup, ranks=[0])
        rest = on_rank_0[on_rank_0["role"].isin(["parameter", "gradient", "optimizer_state"])]["bytes"].sum()
        assert sum(parts[kind] for kind in ("parameter", "gradient", "optimizer")) == rest / 1e6
        sent = predicted_collectives(blocks(4), setup, ranks=[0])["wire_bytes"].sum() / 1e6
        assert f"sends {sent:g} MB" in price or name == "offload all"
    assert drawings.three_prices().takeaway.startswith("64 MB become 48, 32, 48:")


def test_readers_find_all_numbers_once():
    pieces = drawings_of_bytes.read_by_rank()
    assert [number for one in pieces for begin, end, _ in one for number in range(begin, end)] == [*range(12)]
    assert [[writer for *_, writer in one] for one in pieces] == [[0, 1], [1, 2], [2, 3]]


def test_rows_fit_and_one_more_does_not():
    for states in model_states(3e9, 4, "fp32")[1:]:
        rows = drawings_of_bytes.rows_left(states.strategy)
        assert 40e9 - 2.5e9 < states.total_bytes + rows * 2.5e9 <= 40e9
    assert drawings.what_is_left().takeaway.startswith("0, 4, 7, 11 rows:")
    assert drawings.fits_and_sends().takeaway.startswith("ZeRO-2 and ZeRO-3 fit, and ZeRO-2 sends least.")


def test_one_change_has_the_bytes_and_messages_of_the_planner():
    for name, (strategy, num_ranks, num_buckets) in drawings_of_bytes.CHANGES.items():
        setup = Setup(strategy.replace("ddp", "bucketed"), num_ranks, bucket_bytes=4 * 16 * 10**4 // num_buckets)
        messages = predicted_collectives(blocks(16, 10**4), setup, ranks=[0])
        messages = messages[messages["bytes"] > 1000]  # without flags
        held = predicted_memory(blocks(16, 10**4), setup, ranks=[0])
        held = held[held["role"].isin(["parameter", "gradient", "optimizer_state"])]["bytes"].sum()
        found = (held / 16e4, messages["wire_bytes"].sum() / 16e4, len(messages))
        assert drawings_of_bytes.bytes_and_messages()[name] == pytest.approx(found), name
