"""Ranks whose clocks began at different times, as on two hosts, have one time axis."""

import subprocess
import sys

import pytest

from shardlab.trace.store import load_run
from tests.launch.helpers import script_env

AHEAD = ["unshare", "--time", "--monotonic", "5000", "--fork"]
SCRIPT = """
import sys
from shardlab.experiment import CompareConfig, compare

config = CompareConfig(strategies=("bucketed",), ranks=2, steps=3, model="mlp", device="cpu")
compare(config, sys.argv[1])
"""
# The second of two ranks has a clock that is 5,000 seconds ahead.
WRAPPER = """#!/bin/sh
[ "$RANK" = 0 ] || exec {ahead} {python} {script} {out}
exec {python} {script} {out}
"""


def can_shift_clocks():
    try:
        return subprocess.run([*AHEAD, "true"], capture_output=True, timeout=10).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not can_shift_clocks(), reason="this user may not make a time namespace")
def test_times_of_a_second_host_count_from_the_same_moment(tmp_path):
    script, wrapper, out = tmp_path / "train.py", tmp_path / "rank.sh", tmp_path / "out"
    script.write_text(SCRIPT)
    wrapper.write_text(WRAPPER.format(ahead=" ".join(AHEAD), python=sys.executable, script=script, out=out))
    wrapper.chmod(0o755)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run([*command, wrapper], capture_output=True, text=True, env=script_env(), timeout=120)
    assert done.returncode == 0, done.stderr
    rows = load_run(out / "records" / "bucketed").collectives
    ends = rows[rows["op"] == "all_reduce"].pivot_table(index=["step", "seq"], columns="rank", values="end_us")
    assert len(ends)
    assert ((ends[0] - ends[1]).abs() < 1e6).all()
    assert (ends < 100e6).all().all()
