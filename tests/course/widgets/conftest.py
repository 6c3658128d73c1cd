import pytest

from shardlab.experiment import CompareConfig, compare

SMALL = CompareConfig(
    strategies=("zero1", "zero3"), ranks=2, steps=4, model="gpt-1m", text="grammar", seq_len=16, batch=2, device="cpu",
    timeout_s=60.0,
)  # fmt: skip


@pytest.fixture(scope="package")
def comparison(pools, tmp_path_factory):
    """Records of a small comparison on two real ranks, made once for all tests of this folder."""
    return compare(SMALL, tmp_path_factory.mktemp("widgets") / "run", pool=pools(2))
