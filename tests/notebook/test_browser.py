"""The panel as a person sees it: JupyterLab, Notebook 7 and the classic notebook in a real browser."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

WAIT = 60_000.0
"""Milliseconds that the browser waits for anything."""

TRAIN = r"""
import os, sys, time
for step in range(3): print("step", step)
print("\033[31mstill\033[0m <i>running</i>", flush=True)
while not os.path.exists("go"): time.sleep(0.02)
if sys.argv[1] == "bad" and os.environ["RANK"] == "1": raise ValueError("no labels")
time.sleep(0 if sys.argv[1] == "good" else 600)
"""
CELL = """import sys, davincirunsdk
davincirunsdk.start_and_wait_distributed_train(
    [sys.executable, "train.py", "{}"], output_notebook=True, nproc_per_node=2)"""

FRONT_ENDS = {
    "jupyterlab": (["jupyterlab"], "lab/tree/job.ipynb", ".jp-OutputArea-output"),
    "notebook": (["notebook"], "notebooks/job.ipynb", ".jp-OutputArea-output"),
    "classic": (["jupyter", "nbclassic"], "nbclassic/notebooks/job.ipynb", ".output_subarea"),
}


def free_port() -> int:
    """Find a port for the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def page() -> Iterator[Page]:
    """A page of a headless browser."""
    from playwright.sync_api import sync_playwright

    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser_path is not None, "no browser: install Debian's package chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser.new_page(viewport={"width": 1280, "height": 900})
        browser.close()


def serve(front_end: list[str], folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Start a notebook server that shows nothing of its own."""
    options = {
        "IdentityProvider.token": "",
        "LabApp.news_url": "",
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        "ServerApp.disable_check_xsrf": True,
        "ServerApp.port": port,
        "ServerApp.root_dir": folder,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    scripts = Path(sys.executable).parent
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *front_end, "--no-browser", "--allow-root", *words],
            stdout=log,
            stderr=log,
            env={**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"},
        )

    def answers() -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api").close()
        except OSError:
            return False
        return True

    wait_until(answers, 60, "the server answers")
    return server


def start_kernel(port: int) -> None:
    """Start the kernel before the page does: a page that starts one may ask, start two, or drop cells."""
    session = {"path": "job.ipynb", "name": "", "type": "notebook", "kernel": {"name": "python3"}}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/sessions",
        data=json.dumps(session).encode(),
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).close()


def run_all(page: Page, front_end: str) -> None:
    """Run all cells, as a person would."""
    from playwright.sync_api import TimeoutError

    if front_end == "classic":
        page.wait_for_function(
            "window.Jupyter && Jupyter.notebook && Jupyter.notebook.kernel"
            " && Jupyter.notebook.kernel.is_connected()",
            timeout=WAIT,
        )
        page.evaluate("Jupyter.notebook.execute_all_cells()")
        return
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=WAIT)
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=WAIT)
    while True:
        # A page that still loads may lose a click.
        try:
            page.click("text=Run >> nth=0", timeout=WAIT / 12)
            page.click("text=Run All Cells >> nth=0", timeout=WAIT / 12)
            page.wait_for_selector('.jp-InputPrompt:has-text("[*]")', timeout=WAIT / 4)
        except TimeoutError:
            continue
        return


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_job_in_a_notebook(front_end: str, page: Page, tmp_path: Path) -> None:
    """A panel per cell says how the job stands while it runs, when it has ended well, and when it failed."""
    module, path, output = FRONT_ENDS[front_end]
    (tmp_path / "train.py").write_text(TRAIN)
    empty: dict[str, object] = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    cells = [{**empty, "id": ending, "source": CELL.format(ending)} for ending in ("good", "bad")]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "job.ipynb").write_text(json.dumps(notebook))

    def shown() -> list[str]:
        texts = page.eval_on_selector_all(output, "all => all.map(one => one.innerText)")
        return [text for text in texts if text.startswith(("RUNNING", "SUCCEEDED", "FAILED"))]

    def until(words: str) -> None:
        page.wait_for_function(
            "([where, what]) => [...document.querySelectorAll(where)]"
            ".some(one => one.innerText.includes(what))",
            arg=[output, words],
            timeout=WAIT,
        )

    port = free_port()
    server = serve(module, tmp_path, port)
    try:
        start_kernel(port)
        page.goto(f"http://127.0.0.1:{port}/{path}")
        run_all(page, front_end)
        until("[rank 1] still <i>running</i>")
        until("[rank 0] still <i>running</i>")
        (panel,) = shown()
        assert panel.startswith("RUNNING")
        assert panel.count("still <i>running</i>") == 4, "a cell of the table and a line for each rank"
        assert panel.count("[rank 0] step 2") == 1
        assert "\x1b" not in panel
        (tmp_path / "go").touch()
        until("ValueError: no labels")
        until("rank 1 is the root cause")
        page.screenshot(path=tmp_path / "ended.png")
        good, bad = shown()
        assert good.startswith("SUCCEEDED")
        assert good.count("SUCCEEDED") == 3
        assert good.count("[rank 1] still <i>running</i>") == 1
        assert bad.startswith("FAILED")
        assert "rank 0\tSTOPPED" in bad
        assert "rank 1\tFAILED" in bad
    except BaseException:
        page.screenshot(path=tmp_path / "failed.png")
        raise
    finally:
        server.terminate()
        server.wait(30)
