"""What the tests on a GPU share. They need torch with CUDA, pytest and what shardlab itself imports (pandas, pyarrow,
psutil, cloudpickle, msgpack, typing_extensions); no plotly. One command, in the order of the files' names:

    python -m pytest -o addopts= -p no:cacheprovider tests/gpu
"""

import platform

import pytest
import torch

from shardlab.launch import RankPool

FIGURES = pytest.StashKey[list[str]]()


def pytest_configure(config):
    config.stash[FIGURES] = []


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter, config):
    figures = config.stash.get(FIGURES, [])
    if figures:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        card = torch.cuda.get_device_name(0)
        versions = (
            f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, Python {platform.python_version()}"
        )
        terminalreporter.section(f"figures on {torch.cuda.device_count()} x {card}, {versions}")
        for line in figures:
            terminalreporter.write_line(line)


@pytest.fixture
def figure(request):
    """Call it with a name and a value: the line stands at the end of the report."""
    return lambda name, value: request.config.stash[FIGURES].append(f"{name}: {value}")


@pytest.fixture(scope="session")
def gpu_pools():
    """``gpu_pools(n)``: n warm ranks on GPUs; a single one has a group of NCCL."""
    warm = {}

    def pool_of(num_ranks):
        if num_ranks not in warm:
            warm[num_ranks] = RankPool(num_ranks, device="cuda", timeout_s=120.0, preload=["torch._dynamo", "pandas"])
        return warm[num_ranks]

    yield pool_of
    for pool in warm.values():
        pool.close()
