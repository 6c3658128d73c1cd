"""Which notebooks are no tests; and where kernels of those that are come from."""

import sys
import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

collect_ignore = ["kaggle.ipynb"]  # for a machine with two GPUs


def pytest_configure() -> None:
    """Have nbval's kernels be forks: without imports of their own they take half of the time.

    They listen at files. A free port is looked for before the kernel starts, and ranks may have taken it by then.
    """
    if not sys.platform.startswith("linux"):
        return
    from jupyter_client.provisioning import local_provisioner
    from nbval import kernel

    sys.path.append(str(Path(__file__).parents[1]))
    from tests.notebooks.forked_kernel import ForkedKernel

    local_provisioner.launch_kernel = ForkedKernel
    made = kernel.KernelManager

    def at_files(**options: Any) -> Any:
        return made(transport="ipc", ip=str(Path(tempfile.gettempdir(), f"kernel-{uuid4().hex}")), **options)

    kernel.KernelManager = at_files
