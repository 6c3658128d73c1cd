import pytest

from tests.plots.sample_records import make_records


@pytest.fixture(scope="session")
def records():
    return make_records()
