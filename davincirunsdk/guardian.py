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

from davincirunsdk.mark import JOB_MARK

_PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:3]
from davincirunsdk.guardian_main import main
main(int(sys.argv[3]))
"""


class Guardian:
    """The supervising side: starts the guardian with the first job, lets it go with the last.

    All methods block for a few milliseconds at most and may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        os.register_at_fork(after_in_child=self._forget)

    def watch(self, what: str) -> None:
        """Have something ended or removed if this process dies.

        Args:
            what: A job's mark, for all processes that carry it; or the absolute path of a folder.

        Raises:
            OSError: No process could be started.
        """
        with self._lock:
            self._watched.add(what)
            if self._process is None or self._process.poll() is not None:
                self._start()
            else:
                self._tell(f"+{what}\0")

    def release(self, what: str) -> None:
        """End the watch over a job that has left nothing behind, or over a folder that is gone."""
        with self._lock:
            if what not in self._watched:
                return
            self._watched.remove(what)
            if self._process is None:
                return
            self._tell(f"-{what}\0")
            if self._watched:
                return
            os.close(self._pipe)
            process, self._process, self._pipe = self._process, None, -1
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def pid(self) -> int | None:
        """Pid of the guardian, None while nothing is watched."""
        process = self._process
        return process.pid if process is not None else None

    def revive(self) -> None:
        """Start it again if somebody ended it while jobs run."""
        with self._lock:
            if self._watched and self._process is not None and self._process.poll() is not None:
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
            for what in sorted(self._watched):
                self._tell(f"+{what}\0")
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    _PROGRAM,
                    str(Path(__file__).parents[1]),
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

    def _tell(self, order: str) -> None:
        try:
            os.write(self._pipe, os.fsencode(order))
        except BrokenPipeError:
            # It was ended from outside; `revive` tells a new one everything.
            pass

    def _forget(self) -> None:
        """In a forked child the guardian is the parent's, and whoever held the lock is not there."""
        if self._pipe >= 0:
            os.close(self._pipe)
        self._lock = threading.Lock()
        self._watched, self._process, self._pipe = set(), None, -1


guardian: Guardian = Guardian()
"""The one guardian of this process."""
