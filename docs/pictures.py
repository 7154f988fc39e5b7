"""Make README's pictures from real runs: terminals as SVG, run report and notebook in a browser as PNG.

`nox -s pictures` runs it; it needs Debian's package chromium for what a browser shows.
"""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import nbclient
import nbformat
import pyte
from nbconvert import HTMLExporter
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS, LINES = 108, 34
TRAIN = """
import os, sys, time
import davincirunsdk
rank, loss = int(os.environ["RANK"]), 2.4
for step in range(1, int(sys.argv[1]) + 1):
    time.sleep(0.02 + 0.004 * (rank == 5))
    loss *= 0.985
    davincirunsdk.progress(step, 200, loss=loss)
    if step % 50 == 0:
        print(f"step {step}: loss {loss:.3f}", flush=True)
    if rank == 2 and step == 120 and "--fail" in sys.argv:
        labels = {"batch": 17}
        raise ValueError(f"batch {labels['batch']} has no labels")
"""


CELL = """\
from davincirunsdk import start_and_wait_distributed_train

start_and_wait_distributed_train(
    ["python", "train.py", "200"], nproc_per_node=4, name="llama-7b", output_notebook=True
)"""


def screen_of(command: list[str], folder: Path, *, until: str = "", lines: int = LINES) -> pyte.Screen:
    """Run a command on a terminal and return what stands there at its end, or when a text is seen.

    Args:
        command: Its words.
        folder: Where it runs.
        until: Text at which the picture is taken; the command is then stopped.
        lines: Height of the terminal.
    """
    screen = pyte.Screen(COLUMNS, lines)
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(lines))
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, COLUMNS, 0, 0))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            data = os.read(terminal, 65536)
        except OSError:
            break
        if not data:
            break
        stream.feed(data)
        if until and any(until in line for line in screen.display):
            os.kill(pid, 15)
            break
    while True:
        try:
            if not os.read(terminal, 65536):
                break
        except OSError:
            break
    os.waitpid(pid, 0)
    os.close(terminal)
    return screen


def save(screen: pyte.Screen, title: str, path: Path, prompt: str) -> None:
    """Write a terminal as a picture."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)
    console.print(Text(f"$ {prompt}", style="bold"))
    rows = [screen.buffer[row] for row in range(screen.lines)]
    last = max(
        (number for number, row in enumerate(rows) if any(cell.data.strip() for cell in row.values())),
        default=0,
    )
    for row in rows[: last + 1]:
        text = Text()
        for column in range(screen.columns):
            cell = row[column]
            style = " ".join(
                filter(
                    None,
                    [
                        "bold" if cell.bold else "",
                        "reverse" if cell.reverse else "",
                        _colour(cell.fg),
                    ],
                )
            )
            text.append(cell.data, style=style or None)
        text.rstrip()
        console.print(text)
    path.write_text(console.export_svg(title=title))
    print(path)


def _colour(name: str) -> str:
    if name == "default":
        return ""
    if len(name) == 6 and all(letter in "0123456789abcdef" for letter in name.lower()):
        return f"#{name}"
    return {"brown": "yellow", "brightbrown": "bright_yellow"}.get(name, name.replace("bright", "bright_"))


def notebook(folder: Path) -> Path:
    """Run a cell in a real kernel and return the notebook as a page."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(book, resources={"metadata": {"path": str(folder)}}).execute()
    page = folder / "notebook.html"
    page.write_text(HTMLExporter().from_notebook_node(book)[0])
    return page


def browse(page: Path, path: Path, height: int) -> None:
    """Take a picture of a page."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        print(f"NOT MADE: {path} needs chromium")
        return
    subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--window-size=1100,{height}", f"--screenshot={path}", page.as_uri(),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    print(path)


def main() -> None:
    """Make all pictures."""
    command = Path(sys.executable).with_name("davincirun")
    # So that no picture shows where this Python is.
    os.environ["PATH"] = f"{command.parent}:{os.environ['PATH']}"
    control = Path(sys.executable).with_name("davincirunctl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        base = [str(command), "--nproc-per-node", "8", "--name", "llama-7b"]
        failing = [*base, "--echo", "0", "--html", "run.html", "python", "train.py", "200", "--fail"]
        save(
            screen_of(failing, folder),
            "davincirun",
            HERE / "failure.svg",
            "davincirun --echo 0 --html run.html python train.py 200 --fail",
        )
        browse(folder / "run.html", HERE / "run-report.png", 1500)
        save(
            screen_of([*base, "--live", "train.py", "200"], folder, until="step 50"),
            "davincirun --live",
            HERE / "live.svg",
            "davincirun --live train.py 200",
        )
        job = shlex.join([*base, "--quiet", "--echo", "none", "train.py", "2000"])
        look = f"{control} list; {control} status llama-7b; {control} stacks llama-7b"
        # Other jobs of this machine do not belong into the picture.
        alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
        shell = screen_of([*alone, "sh", "-c", f"{job} 2>/dev/null & sleep 3; {look}; kill $!; wait"], folder)
        save(shell, "davincirunctl", HERE / "control.svg", "davincirunctl list; ... status; ... stacks")
        browse(notebook(folder), HERE / "notebook.png", 520)


if __name__ == "__main__":
    main()
