"""The NPUs' use in the run report: real jobs beside an npu-smi that answers, hangs, floods or is cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import is_alive, wait_until

from davincirunsdk import start_distributed_train, wait_distributed_train
from davincirunsdk.supervision import usage
from davincirunsdk.supervision.npu_use import figures_of

if TYPE_CHECKING:
    from collections.abc import Sequence

PY = sys.executable
TABLE = Path(__file__).parents[1] / "rank_tables" / "v1_0_devices_0_and_4.json"
UNTIL_GO = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)"

# As on boards with two chips: NPU 4 of the host is chip 0 of board 2.
ANSWERS = """case "$*" in
"info -m") cat <<END
    NPU ID                         Chip ID                        Chip Phy-ID                    Chip Name
    0                              0                              0                              Ascend 910B3
    0                              1                              -                              Mcu
    2                              0                              4                              Ascend 910B3
END
;;
"info -t common -i 0") cat <<END
	NPU ID                         : 0
	Chip Count                     : 1

	Chip ID                        : 0
	Memory Usage Rate(%)           : 6
	HBM Usage Rate(%)              : 81
	Aicore Usage Rate(%)           : 97
	Aicore Freq(MHZ)               : 1000
	Temperature(C)                 : 46
	NPU Real-time Power(W)         : 69.0

	Chip Name                      : mcu
	Temperature(C)                 : 48
END
;;
"info -t common -i 2") cat <<END
	Chip ID                        : 0
	Aicore Usage Rate(%)           : 12
	Memory Usage Rate(%)           : 34
	Temperature(C)                 : NA

	Chip ID                        : 1
	Aicore Usage Rate(%)           : 99
END
;;
*) exit 9;;
esac"""

pytestmark = pytest.mark.usefixtures("job_folder")


def put_tool(folder: Path, script: str) -> dict[str, str]:
    """Put an npu-smi there that leaves its pid in `asked`; the variables that let it be found."""
    tools = folder / "tools"
    tools.mkdir()
    tool = tools / "npu-smi"
    tool.write_text(f"#!/bin/sh\necho $$ >> {folder}/asked\n{script}\n")
    tool.chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}"}


def asked(folder: Path) -> list[int]:
    """Pids of the tool's runs so far."""
    file = folder / "asked"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def ran(
    folder: Path, script: str | None, monkeypatch: pytest.MonkeyPatch, enough: int
) -> tuple[list[dict[str, Any]], str]:
    """Run a job of two ranks until each has enough events of kind `usage`; the events, and the page."""
    if script is not None:
        monkeypatch.setenv("PATH", put_tool(folder, script)["PATH"])
    monkeypatch.setattr(usage, "_STEP", 0.3)
    monkeypatch.setattr(usage, "_SHARE", 1.0)
    file, page = folder / "log/job-events.jsonl", folder / "run.html"

    def is_enough() -> bool:
        return file.read_text().count('"usage": {') >= 2 * enough and (script is None or bool(asked(folder)))

    job = start_distributed_train([PY, "-c", UNTIL_GO], rank_table=TABLE, html=page, name="job", echo="none")
    wait_until(is_enough, 30.0, "events")
    Path("go").touch()
    assert wait_distributed_train(job) == 0
    return [json.loads(line) for line in file.read_text().splitlines()], page.read_text()


def npus_of(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the events tell of NPUs."""
    return [one["usage"]["npu"] for one in events if "npu" in one.get("usage", {})]


def told(events: Sequence[dict[str, Any]]) -> list[str]:
    """Kinds of the events whose words are of the tool."""
    return [one["kind"] for one in events if "npu-smi" in one.get("detail", "")]


def test_each_rank_has_the_curve_of_its_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Board and chip of an NPU are looked up; figures that are not numbers are left out."""
    events, page = ran(tmp_path, ANSWERS, monkeypatch, 5)
    found = npus_of(events)
    assert {"npu": 0, "use": 97.0, "memory": 81.0, "temperature": 46.0} in found
    assert {"npu": 4, "use": 12.0, "memory": 34.0, "temperature": None} in found
    assert len({str(one) for one in found}) == 2
    for title in ("NPU cores in use", "NPU memory in use", "NPU temperature"):
        assert f"<h2>{title}</h2>" in page
    assert "NPU 4, rank 1: 12 %" in page


@pytest.mark.parametrize(
    "script",
    ["exec sleep 600", "sleep 600", "cat /dev/urandom", "head -c 3000 /dev/urandom", "echo", "exit 1"],
    ids=["hangs", "hangs in a child", "floods", "rubbish", "empty", "fails"],
)
def test_a_tool_of_no_use(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job and its other curves go on, and nothing of the tool outlives the job."""
    events, page = ran(tmp_path, script, monkeypatch, 3)
    assert not npus_of(events)
    assert "<h2>Resident memory</h2>" in page
    assert "<h2>NPU" not in page
    assert len(told(events)) <= 1
    for pid in asked(tmp_path):
        wait_until(lambda pid=pid: not is_alive(pid), 5.0, "the end of npu-smi")


def test_a_tool_of_no_use_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and it is asked ever more rarely."""
    events, _ = ran(tmp_path, "exit 1", monkeypatch, 8)
    assert told(events) == ["warning"]
    assert len(asked(tmp_path)) <= 8


def test_without_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No word of NPUs in page or events."""
    events, page = ran(tmp_path, None, monkeypatch, 2)
    assert not npus_of(events)
    assert not told(events)
    assert "NPU" not in page


def test_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """An npu-smi that hangs then ends by the limit that it was given, without us."""
    variables = put_tool(tmp_path, "sleep 600")
    words = [PY, "-m", "davincirunsdk", "--rank-table", str(TABLE), "--html", "run.html", PY, "-c", UNTIL_GO]
    with subprocess.Popen(words, env=os.environ | variables, stderr=subprocess.DEVNULL) as launcher:
        wait_until(lambda: asked(tmp_path), what="npu-smi to be asked")
        launcher.send_signal(signal.SIGKILL)
    (pid,) = asked(tmp_path)
    wait_until(lambda: not is_alive(pid), 20.0, "the end of npu-smi")


@given(
    st.text() | st.lists(st.sampled_from(["Chip ID", "Aicore Usage Rate(%)", " : ", "7", "\n"])).map("".join)
)
def test_whatever_it_prints(text: str) -> None:
    """Only figures that can be true are believed."""
    for figures in figures_of(text).values():
        assert all(-60 <= value <= 200 for value in figures.values())
    text = f"{text}\nAicore Usage Rate(%) : 1e99\nTemperature(C) : nan\nHBM Usage Rate(%) : -1"
    assert all(-60 <= value <= 200 for figures in figures_of(text).values() for value in figures.values())
