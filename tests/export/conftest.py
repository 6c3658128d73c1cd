import pytest

from shardlab.experiment import CompareConfig, compare


@pytest.fixture(scope="session")
def comparison(pools, tmp_path_factory):
    """Real records: bucketed all-reduces, and FSDP on two axes at four ranks."""
    config = CompareConfig(
        strategies=("bucketed", "fsdp"), ranks=4, steps=4, model="mlp", text="grammar", seq_len=8, device="cpu",
        bucket_mib=0.5, sharding="hybrid_shard", shard_group=2, link="10Gbps,300us",
    )  # fmt: skip
    return compare(config, tmp_path_factory.mktemp("run") / "out", pool=pools(4))
