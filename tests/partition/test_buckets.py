import os
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.partition import ParamSpec, assign_buckets

SPECS = st.lists(st.integers(0, 40), max_size=30).map(
    lambda sizes: [ParamSpec(f"p{index}", (size,), 4) for index, size in enumerate(sizes)]
)


def specs_of(*numels):
    return [ParamSpec(f"p{index}", (numel,), 4) for index, numel in enumerate(numels)]


def test_buckets_fill_from_the_last_parameter_with_their_own_kind():
    assert assign_buckets(specs_of(1, 1, 1, 1, 1), 8) == ((4, 3), (2, 1), (0,))
    assert assign_buckets(specs_of(1, 100, 1, 1), 8) == ((3, 2), (1,), (0,))
    keys = ["fp32", "bf16", "fp32", "bf16", "fp32"]
    assert assign_buckets(specs_of(1, 1, 1, 1, 1), 1000, keys) == ((3, 1), (4, 2, 0))
    with pytest.raises(ValueError, match="bucket_bytes: 0 is too small"):
        assign_buckets(specs_of(1), 0)


@given(SPECS, st.integers(1, 200), st.data())
def test_every_parameter_is_in_one_bucket_within_capacity_and_key(specs, capacity_bytes, data):
    keys = data.draw(st.lists(st.sampled_from("ab"), min_size=len(specs), max_size=len(specs)))
    buckets = assign_buckets(specs, capacity_bytes, keys)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(specs)))
    for bucket in buckets:
        assert list(bucket) == sorted(bucket, reverse=True)
        assert len({keys[index] for index in bucket}) == 1
        nonzero = [specs[index].num_bytes for index in bucket if specs[index].num_bytes]
        assert sum(nonzero) <= capacity_bytes or len(nonzero) == 1
    completed = [bucket[-1] for bucket in buckets]
    assert completed == sorted(completed, reverse=True)


@given(SPECS, st.integers(1, 200))
def test_a_bucket_is_closed_only_when_the_next_would_not_fit(specs, capacity_bytes):
    buckets = assign_buckets(specs, capacity_bytes)
    assert [index for bucket in buckets for index in bucket] == list(reversed(range(len(specs))))
    for bucket, after in pairwise(buckets):
        assert sum(specs[index].num_bytes for index in (*bucket, after[0])) > capacity_bytes


def test_the_map_does_not_depend_on_the_hash_seed():
    code = (
        "from shardlab.partition import ParamSpec, assign_buckets\n"
        "specs = [ParamSpec(f'p{i}', (i % 7 + 1,), 4) for i in range(60)]\n"
        "keys = [(('float32', 'bfloat16', 'float64')[i * i % 3], i % 2 == 0) for i in range(60)]\n"
        "print(assign_buckets(specs, 64, keys), hash('a'))\n"
    )
    found = []
    for seed in ("1", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True)
        found.append(done.stdout.rsplit(maxsplit=1))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]
