import pandas as pd

from shardlab import plots
from shardlab.plots.show import plain_json


def split():
    rows = [("one", 0, 100e3, 90e3, 0.0, 0.0, 0.0, 10e3), ("two", 0, 80e3, 50e3, 20e3, 0.0, 0.0, 10e3)]
    rows.append(("two", 1, 120e3, 50e3, 20e3, 40e3, 8e3, 2e3))
    names = ["run", "rank", "step_us", "compute_us", "moving_us", "waiting_us", "off_cpu_us", "other_us"]
    return pd.DataFrame(rows, columns=names).assign(source="measured", step=1)


def test_the_parts_of_a_bar_add_up_to_the_mean_step():
    figure = plots.step_parts(split())
    bars = [trace for trace in figure.data if trace.type == "bar"]
    names = ["compute", "exposed communication", "waiting for other ranks", "off the CPU", "other"]
    assert [bar.name for bar in bars] == names
    assert [bar.marker.pattern.shape for bar in bars] == [None, None, "\\", "/", None]
    assert [bar.x[1] for bar in bars] == [50.0, 20.0, 20.0, 4.0, 6.0]
    assert plots.summary_of(figure).startswith("A step: one 100 ms (90.0 ms compute")
    assert "NaN" not in str(plain_json(figure))
