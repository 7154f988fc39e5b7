"""README's examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


OTHERS = {"--epochs", "--fail", "--kill-on-bad-exit", "--signal", "--strict", "--html", "--standalone"} | {
    "--timeout-graceful-shutdown",
    # Of torchrun and msrun, which the command translates.
    "--rdzv-endpoint", "--shutdown-timeout", "--nproc", "--worker", "--join", "--local",
}  # fmt: skip
"""Options in README that are not the command's own."""

CLIENT = """
import sys
from starlette.testclient import TestClient
with TestClient(app) as client:
    job = client.post("/start", json={"command": [sys.executable, "train.py"]}).json()["job"]
    print(client.get(f"/log/{job}").text, end="")
    assert client.post("/start", json={"command": ["no-such-command"]}).status_code == 422
    assert client.post("/start", json={}).status_code == 422
    assert client.get("/log/none").status_code == 404
"""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text.strip().split("\n")[0][:40])
@pytest.mark.parametrize("failing", [False, True], ids=["good", "failing"])
def test_python_examples_run(example: str, failing: bool, job_folder: Path) -> None:
    """Every Python example runs as printed, and shows a failure as a failure."""
    (job_folder / "train.py").write_text(
        # In one write: a worker may be stopped between two.
        "import os\nprint('step 1 of rank ' + os.environ['RANK'] + '\\n', end='')\n"
        + ("raise SystemExit(4)\n" * failing)
    )
    service = "Starlette" in example
    (job_folder / "example.py").write_text(example + CLIENT * service)
    done = subprocess.run(
        [sys.executable, "example.py"],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=job_folder,
        check=False,
    )
    said = done.stdout + done.stderr
    if failing and not service:
        # Both ranks fail in the same way; whether the second one did so before it was stopped is chance.
        title = r"failed: (rank \d is the root cause|ranks .* failed alike).*exit code 4"
        assert re.search(title, said)
        assert "Traceback" not in done.stderr or "DistributedRuntimeError" in done.stderr
    elif service:
        # Where one fails, the others may be stopped before they have said anything.
        lines = {f"[rank {rank}] step 1 of rank {rank}" for rank in range(8)}
        assert set(done.stdout.splitlines()) <= lines
        assert failing or set(done.stdout.splitlines()) == lines
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert (job_folder / "log").is_dir()


def test_the_batch_file_is_the_one_that_is_run() -> None:
    """README shows the Slurm batch file that tests/multinode runs."""
    assert (Path(__file__).parents[1] / "multinode" / "train.sbatch").read_text() in README


def test_contributing_names_what_is_there() -> None:
    """All sessions, all parts of the package, and no file that is gone."""
    house = Path(__file__).parents[2]
    section = README.partition("## Contributing")[2].partition("## License")[0]
    listed = re.search(r"says what each needs\):(.*?)\.\n", section, re.DOTALL)
    assert listed is not None
    sessions = re.findall(r"^@nox\.session.*?^def (\w+)", (house / "noxfile.py").read_text(), re.M | re.S)
    assert set(re.findall(r"(\w+)(?: \([^)]*\))?(?:,|$)", listed[1])) == {*sessions} - {"tests"}
    words = " ".join(re.findall(r"`([^`]+)`", section)).split()
    for word in words:
        if word.endswith(("/", ".py")):
            assert (house / word).exists() or (house / "davincirunsdk" / word).exists(), word
    parts = {f"{part.parent.name}/" for part in (house / "davincirunsdk").glob("*/__init__.py")}
    assert parts <= set(words)


def test_the_documented_commands_exist() -> None:
    """Every option that README names is an option of the command."""
    said = subprocess.run(
        [sys.executable, "-m", "davincirunsdk", "--help-all"],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    ).stdout
    for option in set(re.findall(r"davincirun(?: [^\n]*?)?(--[a-z-]+)", README)) | set(
        re.findall(r"`(--[a-z-]+)", README)
    ):
        if option not in OTHERS:
            assert option in said, option
