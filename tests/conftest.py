"""After every test: no process, descriptor, task or thread is left; no call of ours blocked the loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import marked_processes
from recorded import EVERY_KIND, Recorded

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGE = str(Path(__file__).parents[1] / "davincirunsdk") + os.sep
_TEST_MARK = "PYTEST_OF_DAVINCIRUN"
_BLOCKING_EVENTS = frozenset(
    "open os.mkdir os.rename os.remove os.listdir os.scandir shutil.rmtree subprocess.Popen"
    " socket.getaddrinfo time.sleep".split()
)


class _BlockDetector:
    """Hears of blocking calls by audit events: where a loop runs in the thread and our code is the caller."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.armed = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.armed or event not in _BLOCKING_EVENTS or asyncio._get_running_loop() is None:
            return
        frame = sys._getframe(1)
        caller = None
        while frame is not None:
            name = frame.f_code.co_filename
            # The blocking API blocks by its nature; imports and tracebacks read files once.
            if "importlib" in name or name.endswith(
                ("linecache.py", "traceback.py", "davincirunsdk/blocking.py")
            ):
                return
            if caller is None and name.startswith(_PACKAGE):
                caller = f"{name}:{frame.f_lineno}"
            if frame.f_code.co_name == "_run_once":
                break
            frame = frame.f_back  # type: ignore[assignment] # the outermost frame has none
        if caller is not None:
            self.found.append(f"{event}{arguments[:1]} from {caller}")


_detector = _BlockDetector()
sys.addaudithook(_detector)

# Every program inherits what a shell in the background (Ctrl-C) or nohup (hang-up) ignores.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


_LONG = frozenset(
    "test_diagnosis_corpus test_diagnosis_real test_leftovers_saving test_meet_jobs test_stall test_restarts"
    " test_loop_health test_demo test_logs_streams".split()
)
"""Modules whose tests take minutes together: what they hold does not depend on Python's version."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the longest tests."""
    for item in items:
        if item.path.stem in _LONG:
            item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process started in a test lives on after it, no descriptor and no thread of ours stays."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(_TEST_MARK, value)
    monkeypatch.delenv("DAVINCIRUN_JOB", raising=False)
    before = _descriptors()
    _detector.found.clear()
    _detector.armed = True
    yield
    _detector.armed = False
    deadline = time.monotonic() + 5.0
    # A guardian needs a moment to look around before it leaves.
    while (left := marked_processes(_TEST_MARK, value)) and time.monotonic() < deadline:
        time.sleep(0.02)
    names = [f"{process.pid} {process.cmdline()}" for process in left if process.is_running()]
    for process in left:
        process.kill()
    assert not names, f"processes left behind: {names}"
    if request.node.get_closest_marker("keeps_descriptors") is None:
        while (extra := _descriptors() - before) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not extra, f"descriptors left open: {[(fd, target) for fd, target in extra]}"
    pumps = [thread.name for thread in threading.enumerate() if thread.name == "davincirun-_carry"]
    assert not pumps, "a log pump still runs"
    assert not _detector.found, f"blocking calls in the event loop: {_detector.found}"


def _descriptors() -> set[tuple[str, str]]:
    """Open descriptors but for those of event loops: the background loop lives as long as the process."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "eventpoll" in target or target.startswith("socket:"):
            continue
        found.add((fd, target))
    return found


@pytest.fixture
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh current folder, so that `./log` of a job is the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    return tmp_path


@pytest.fixture
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Recorded]:
    """The records of a job of `workers/kinds.py`: a worker of each kind, or of those given by `indirect`."""
    made = Recorded(tmp_path, getattr(request, "param", EVERY_KIND))
    yield made
    made.kill_all()
