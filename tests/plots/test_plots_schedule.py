from shardlab.plots import schedule_chart, summary_of
from shardlab.schedules import Kind, make_schedule, play

F, B, I, W = Kind  # noqa: E741


def test_every_action_is_a_bar_where_it_was_played():
    played = play(make_schedule("zb-h1", 2, 3), {F: 1.0, B: 2.0, I: 1.0, W: 1.0}, transfer_seconds=0.5)
    figure = schedule_chart(played, "ms")
    assert [bars.name for bars in figure.data] == ["forward", "backward of the input", "backward of the weights"]
    forward = figure.data[0]
    assert list(zip(forward.y, forward.text, forward.base, forward.x, strict=True))[3:] == [
        (1, "0", 1.5, 1.0), (1, "1", 3.5, 1.0), (1, "2", 7.5, 1.0)
    ]  # fmt: skip
    assert sum(len(bars.x) for bars in figure.data) == 2 * 3 * 3
    assert summary_of(figure).startswith(f"2 ranks, {played.seconds:g} ms of time: ")
