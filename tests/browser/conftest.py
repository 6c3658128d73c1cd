"""One Chromium and one JupyterLab for the tests of this folder, ended with the last of them."""

import importlib.util
import os
import shutil

import pytest

from tests.browser.lab_server import JupyterLab
from tests.browser.notebook_page import NotebookPage

CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
]  # fmt: skip


def not_here(reason):
    """Skip; where the environment demands a browser, fail."""
    if os.environ.get("SHARDLAB_REQUIRE_BROWSER") == "1":
        pytest.fail(f"SHARDLAB_REQUIRE_BROWSER=1, but {reason}", pytrace=False)
    pytest.skip(reason)


# Not of the session: while Playwright is on, this thread has a running event loop, and asyncio.run (as in kaleido) is
# refused. Tests of other folders must not see that.
@pytest.fixture(scope="package")
def browser():
    if importlib.util.find_spec("playwright") is None:
        not_here("the package playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        not_here("neither chromium nor google-chrome is on the PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS, timeout=120_000)
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def lab(browser, tmp_path_factory):
    root, home = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("jupyterlab")
    lab = JupyterLab(root, home)
    yield lab
    assert not lab.stop(), "JupyterLab left processes behind"


@pytest.fixture(scope="module")
def open_notebook(browser, lab):
    """``open_notebook(name)`` is a NotebookPage; JupyterLab's own files are fetched for the first alone."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield lambda name: NotebookPage(context.new_page(), lab.url(name))
    context.close()
