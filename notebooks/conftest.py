"""Which notebooks are no tests; and where kernels of those that are come from."""

import sys
from pathlib import Path

collect_ignore = ["kaggle.ipynb"]  # for a machine with two GPUs


def pytest_configure() -> None:
    """Have nbval's kernels be forks: without imports of their own they take half of the time."""
    if not sys.platform.startswith("linux"):
        return
    from jupyter_client.provisioning import local_provisioner

    sys.path.append(str(Path(__file__).parents[1]))
    from tests.notebooks.forked_kernel import ForkedKernel

    local_provisioner.launch_kernel = ForkedKernel
