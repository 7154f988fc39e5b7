"""Jobs as a person sees them: JupyterLab, Notebook 7 and the classic notebook in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
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

LOAD = "%load_ext davincirunsdk"
STOPPED = """%%davincirun --nproc-per-node 4 --stop-signal INT
import os, time
rank = os.environ["RANK"]
print("training", rank)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("saved", rank)
"""
WRONG = """%%davincirun --nproc-per-node 4
import os, time

rank = os.environ["RANK"]
print("live", rank)
while not os.path.exists("go"):
    time.sleep(0.02)
if rank == "2":
    labels = {}
    labels["none"]
time.sleep(600)
"""
LINE = 10
"""Of the cell above, where it fails."""

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
        yield browser.new_page(viewport={"width": 1280, "height": 1800})
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


def is_connected(port: int) -> bool:
    """Tell whether the page is connected to the kernel; before that it would ask which one to start."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/kernels") as answer:
        return any(kernel["connections"] for kernel in json.load(answer))


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
            page.wait_for_function(
                "/[*0-9]/.test(document.querySelector('.jp-Notebook .jp-InputPrompt').innerText)",
                timeout=WAIT / 4,
            )
        except TimeoutError:
            continue
        return


def run_last(page: Page, front_end: str) -> None:
    """Run the last cell by its keys, on a page that has run others."""
    page.click(
        {"classic": ".code_cell .CodeMirror"}.get(front_end, ".jp-CodeCell .cm-content") + " >> nth=-1"
    )
    page.keyboard.press("Control+Enter")


def press_stop(page: Page, front_end: str) -> None:
    """Press the stop button."""
    stop = {"classic": 'button[title="interrupt the kernel"]'}
    page.click(stop.get(front_end, '[data-command="notebook:interrupt-kernel"] >> nth=0'), timeout=WAIT)


@contextmanager
def opened(front_end: str, sources: list[str], page: Page, folder: Path) -> Iterator[None]:
    """A page that shows a notebook, whose kernel runs; what it looked like is kept when a test fails."""
    module, path, _ = FRONT_ENDS[front_end]
    empty: dict[str, object] = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    cells = [{**empty, "id": f"cell{place}", "source": source} for place, source in enumerate(sources)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "job.ipynb").write_text(json.dumps(notebook))
    port = free_port()
    server = serve(module, folder, port)
    try:
        start_kernel(port)
        page.goto(f"http://127.0.0.1:{port}/{path}")
        wait_until(lambda: is_connected(port), WAIT / 1000, "the page is connected")
        yield
    except BaseException:
        page.screenshot(path=folder / "failed.png")
        raise
    finally:
        server.terminate()
        server.wait(30)


def panels(page: Page, front_end: str) -> list[str]:
    """The text of each panel."""
    texts = page.eval_on_selector_all(FRONT_ENDS[front_end][2], "all => all.map(one => one.innerText)")
    return [text for text in texts if text.startswith(("RUNNING", "SUCCEEDED", "FAILED", "STOPPED"))]


def until(page: Page, front_end: str, words: str) -> None:
    """Wait for a text in a cell's output."""
    page.wait_for_function(
        "([where, what]) => [...document.querySelectorAll(where)].some(one => one.innerText.includes(what))",
        arg=[FRONT_ENDS[front_end][2], words],
        timeout=WAIT,
    )


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_job_in_a_notebook(front_end: str, page: Page, tmp_path: Path) -> None:
    """A panel per cell says how the job stands while it runs, when it has ended well, and when it failed."""
    (tmp_path / "train.py").write_text(TRAIN)
    with opened(front_end, [CELL.format("good"), CELL.format("bad")], page, tmp_path):
        run_all(page, front_end)
        until(page, front_end, "[rank 1] still <i>running</i>")
        until(page, front_end, "[rank 0] still <i>running</i>")
        (panel,) = panels(page, front_end)
        assert panel.startswith("RUNNING")
        assert panel.count("still <i>running</i>") == 4, "a cell of the table and a line for each rank"
        assert panel.count("[rank 0] step 2") == 1
        assert "\x1b" not in panel
        (tmp_path / "go").touch()
        until(page, front_end, "ValueError: no labels")
        until(page, front_end, "rank 1 is the root cause")
        page.screenshot(path=tmp_path / "ended.png")
        good, bad = panels(page, front_end)
        assert good.startswith("SUCCEEDED")
        assert good.count("SUCCEEDED") == 3
        assert good.count("[rank 1] still <i>running</i>") == 1
        assert bad.startswith("FAILED")
        assert "rank 0\tSTOPPED" in bad
        assert "rank 1\tFAILED" in bad


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_cell_as_a_job(front_end: str, page: Page, tmp_path: Path) -> None:
    """`%%davincirun`: live panel, stop button, and tracebacks that point into the cell."""
    with opened(front_end, [LOAD, STOPPED, WRONG], page, tmp_path):
        run_all(page, front_end)
        for rank in range(4):
            until(page, front_end, f"[rank {rank}] training {rank}")
        (panel,) = panels(page, front_end)
        assert panel.startswith("RUNNING")
        assert panel.count("RUNNING") == 5, "the job and each rank"
        page.screenshot(path=tmp_path / "running.png")
        press_stop(page, front_end)
        until(page, front_end, "KeyboardInterrupt")
        page.screenshot(path=tmp_path / "stopped.png")
        (panel,) = panels(page, front_end)
        assert panel.startswith("STOPPED")
        for rank in range(4):
            assert f"[rank {rank}] saved {rank}" in panel
        run_last(page, front_end)
        for rank in range(4):
            until(page, front_end, f"[rank {rank}] live {rank}")
        (tmp_path / "go").touch()
        until(page, front_end, "DistributedRuntimeError")
        page.screenshot(path=tmp_path / "wrong.png")
        failed = panels(page, front_end)[-1]
        assert failed.startswith("FAILED")
        shown = "\n".join(
            page.eval_on_selector_all(FRONT_ENDS[front_end][2], "all => all.map(one => one.innerText)")
        )
        assert re.search(rf'cell-3\.py", line {LINE}, in <module>\s.*labels\["none"\]', shown)
        assert "KeyError: 'none'" in shown
