"""The small process that ends a job's processes when their supervisor can no longer do it.

One guardian serves all jobs of a supervising process. It learns the jobs' marks, and the folders that
are to go with them, through a pipe,
watches the supervisor itself (not only the pipe: a child that the supervisor forked may hold the
pipe's other end open), and ends everything that carries a registered mark once the supervisor is
gone. It is started before the first worker and reads its orders from the pipe's buffer when it is
ready, so no worker waits for it and there is no moment without it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

from davincirunsdk.leftovers.mark import JOB_MARK

_PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:3]
from davincirunsdk.leftovers.guardian_main import main
main(int(sys.argv[3]))
"""


class Guardian:
    """The supervising side: starts the guardian with the first job, lets it go with the last.

    All methods block for a few milliseconds at most and may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: set[str] = set()
        self._folders: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        os.register_at_fork(after_in_child=self._forget)

    def watch(self, mark: str) -> None:
        """Have everything that carries `mark` ended if this process dies.

        Raises:
            OSError: No process could be started.
        """
        with self._lock:
            self._marks.add(mark)
            if self._process is None or self._process.poll() is not None:
                self._start()
            else:
                self._tell(f"+{mark}")

    def release(self, mark: str) -> None:
        """End the watch over a job that has left nothing behind."""
        with self._lock:
            if mark not in self._marks:
                return
            self._marks.remove(mark)
            if self._process is None:
                return
            self._tell(f"-{mark}")
            if self._marks:
                return
            self._tell(*(f"-{folder}" for folder in self._folders))
            os.close(self._pipe)
            process, self._process, self._pipe = self._process, None, -1
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def watch_folder(self, folder: Path) -> None:
        """Have a folder removed if this process dies while it has a job.

        Args:
            folder: An absolute path.
        """
        with self._lock:
            self._folders.add(str(folder))
            if self._process is not None:
                self._tell(f"+{folder}")

    def release_folder(self, folder: Path) -> None:
        """End the watch over a folder that is gone."""
        with self._lock:
            self._folders.discard(str(folder))
            if self._process is not None:
                self._tell(f"-{folder}")

    def pid(self) -> int | None:
        """Pid of the guardian, None while there is no job."""
        process = self._process
        return process.pid if process is not None else None

    def revive(self) -> None:
        """Start it again if somebody ended it while jobs run."""
        with self._lock:
            if self._marks and self._process is not None and self._process.poll() is not None:
                self._start()

    def _start(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
        read, self._pipe = os.pipe()
        psutil = importlib.util.find_spec("psutil")
        assert psutil is not None
        assert psutil.origin is not None
        try:
            # Everything is told before the guardian exists; the pipe's buffer keeps it.
            self._tell(*(f"+{what}" for what in (*self._folders, *sorted(self._marks))))
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    _PROGRAM,
                    str(Path(__file__).parents[2]),
                    str(Path(psutil.origin).parents[1]),
                    str(os.getpid()),
                ],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                # It is not part of an outer job, whose sweep would take it for a leftover.
                env={name: value for name, value in os.environ.items() if name != JOB_MARK},
                start_new_session=True,
            )
        finally:
            os.close(read)

    def _tell(self, *orders: str) -> None:
        try:
            os.write(self._pipe, os.fsencode("".join(f"{order}\0" for order in orders)))
        except BrokenPipeError:
            # It was ended from outside; `revive` tells a new one everything.
            pass

    def _forget(self) -> None:
        """In a forked child the guardian is the parent's, and whoever held the lock is not there."""
        if self._pipe >= 0:
            os.close(self._pipe)
        self._lock = threading.Lock()
        self._marks, self._folders, self._process, self._pipe = set(), set(), None, -1


guardian: Guardian = Guardian()
"""The one guardian of this process."""
