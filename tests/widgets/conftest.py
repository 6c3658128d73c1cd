import pytest

from shardlab.experiment import compare
from tests.widgets.runs import SMALL


@pytest.fixture(scope="package")
def comparison(pools, tmp_path_factory):
    return compare(SMALL, tmp_path_factory.mktemp("widgets") / "run", pool=pools(2))
