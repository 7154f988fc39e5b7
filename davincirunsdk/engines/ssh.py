"""OpenSSH reaches the nodes: `await run(["python", "train.py"], hosts="atlas[01-04]")`.

Each host has this package and an sshd; nothing of ours runs there before or after a job. The user's
own `ssh` carries the messages, with its keys, configuration, jump hosts and tickets: one connection
per host, over which an agent is started. The link's end ends the work on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from davincirunsdk import __version__
from davincirunsdk.concurrency import Patience, in_thread, shield
from davincirunsdk.engines.calls import (
    FROM_AGENT,
    Done,
    Failed,
    Found,
    Greeting,
    LogRead,
    Looked,
    RanksEnded,
    ReadLog,
    Refused,
    Report,
    Reported,
    SeesFile,
    SetLogsAside,
    Signal,
    Start,
    Started,
    Stop,
)
from davincirunsdk.engines.driver import NodesManager
from davincirunsdk.engines.hosts import choose, parse_hosts, read_hostfile
from davincirunsdk.engines.messages import NodeStarted
from davincirunsdk.engines.node import NodeLostError
from davincirunsdk.engines.ssh_agent import beat_interval, first_word
from davincirunsdk.engines.whole import called_like, to_its_end, to_its_end_blocking
from davincirunsdk.engines.wire import Channel, LinkEnded, Message, over_pipes
from davincirunsdk.errors import PlatformError
from davincirunsdk.leftovers.guardian import guardian
from davincirunsdk.leftovers.mark import JOB_MARK
from davincirunsdk.options import JobKeywords, JobOptions, refuse_unknown, spelled_out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Unpack

    from davincirunsdk.engines.given_table import GivenTable
    from davincirunsdk.engines.messages import LogPiece, NodeFacts, NodePlan, NodeReport
    from davincirunsdk.engines.node import NodeHandle
    from davincirunsdk.types import Event, RunResult

logger: logging.Logger = logging.getLogger("davincirunsdk")

M = TypeVar("M", bound=Message)

CARRIED = re.compile(r"PATH|LD_LIBRARY_PATH|(?:ASCEND_|HCCL_|MS_|GLOO_|TP_|PYTHON|OMP_|TORCH_|PYTORCH_).*")
"""Variables of the driver that the agents and their workers get; more are named by `env`."""

_OPTIONS = (
    "-T",
    "-oBatchMode=yes",
    "-oConnectTimeout=15",
    # To use a connection that the user keeps open is welcome, to leave a new one behind is not.
    "-oControlMaster=no",
    # A forwarding of the user's configuration may be taken by another connection.
    "-oClearAllForwardings=yes",
)
_AT_A_TIME = 32
"""Connections that are made at the same time: sshd drops some of more than that, and so do jump hosts."""

_ANSWER_PATIENCE = 60.0
"""Seconds for a host to be reached, log us in, start Python and look at its devices."""

_NOTICE_AFTER = 3.0
"""Seconds until a word is said about hosts that have not answered."""

_CLOSE_PATIENCE = 3.0
"""Seconds for an agent and its ssh to leave once their work is done."""

_NOISE_LINES = 40
"""Lines of what ssh and the remote shell print that are kept, to say why a host cannot be used."""

_LOGIN = 255
"""Exit code of ssh when it has no connection, rather than that of the command."""


@spelled_out(JobKeywords)
def manager(
    command: Sequence[str | os.PathLike[str]],
    work_dir: str | os.PathLike[str] = "./",
    log_dir: str | os.PathLike[str] | None = "./log",
    *,
    hosts: str | Sequence[str] | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    nnodes: int | None = None,
    ssh: str = "ssh",
    remote_python: str = "",
    collect: str = "all",
    collect_logs: bool = False,
    notify: Callable[[str], None] | None = None,
    on_event: Callable[[Event], object] | None = None,
    **keywords: Unpack[JobKeywords],
) -> NodesManager:
    """Describe a job over hosts that ssh reaches, to be used as `async with manager(...) as job`.

    Args:
        command: See `NodesManager`, as for all arguments that are not named here.
        work_dir: See there. Where it is there on this host, it has to be on all.
        log_dir: See there.
        hosts: Such as `a,b:8` or `atlas[01-16]`, or a list of such texts; a number is that of the
            workers on each.
        hostfile: File with a host on each line, as mpirun and DeepSpeed have it: `atlas01 slots=8`.
        nnodes: Number of hosts to take, from the first on; by default all.
        ssh: The program to use, with options, such as `ssh -p 2222`.
        remote_python: Python on the hosts; by default the path of this one.
        collect: See there.
        collect_logs: See there.
        notify: See there.
        on_event: See there.
        **keywords: See `JobOptions`, which documents every option once.

    Returns:
        The manager, not started yet.

    Raises:
        TypeError: As for `NodesManager`.
        ValueError: As for `NodesManager`; or the hosts cannot be read, or their slots do not fit.
    """
    refuse_unknown(keywords, JobKeywords.__annotations__)
    options = JobOptions.of(command, work_dir, log_dir, nnodes=nnodes, **keywords)
    return manager_of(
        options,
        hosts=hosts,
        hostfile=hostfile,
        ssh=ssh,
        remote_python=remote_python,
        collect=collect,
        collect_logs=collect_logs,
        notify=notify,
        on_event=on_event,
    )


def manager_of(
    options: JobOptions,
    *,
    hosts: str | Sequence[str] | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    ssh: str = "ssh",
    remote_python: str = "",
    collect: str = "all",
    collect_logs: bool = False,
    notify: Callable[[str], None] | None = None,
    on_event: Callable[[Event], object] | None = None,
) -> NodesManager:
    """Do what `manager` does with options that have been checked before.

    Args:
        options: What to run.
        hosts: See `manager`, as for all others.
        hostfile: See there.
        ssh: See there.
        remote_python: See there.
        collect: See there.
        collect_logs: See there.
        notify: See there.
        on_event: See there.

    Raises:
        TypeError: An argument is of a wrong kind.
        ValueError: No hosts or two lists of them are given, they cannot be read, or do not fit.
    """
    if options.rank_table is not None:
        raise ValueError(
            "rank_table has no use with ssh: hosts and slots say where workers are; leave it out"
        )
    if (hosts is None) == (hostfile is None):
        found = "neither" if hosts is None else "both"
        raise ValueError(f"{found} of hosts and hostfile is given: expected one, such as hosts='a,b:8'")
    if hosts is not None:
        listed = parse_hosts(hosts if isinstance(hosts, str) else ",".join(hosts))
    else:
        assert hostfile is not None
        listed = read_hostfile(hostfile)
    names, per_node = choose(listed, nnodes=options.nnodes, nproc_per_node=options.nproc_per_node)
    options = replace(options, nnodes=len(names), nproc_per_node=per_node)
    try:
        program = shlex.split(ssh)
    except ValueError as error:
        raise ValueError(f"ssh is {ssh!r}: {error}; expected a command such as 'ssh -p 2222'") from None
    if not program:
        raise ValueError("ssh is empty: expected a command such as 'ssh -p 2222'")
    placement = SshPlacement(
        names,
        program=program,
        python=remote_python or sys.executable,
        greeting=Greeting(
            env={name: value for name, value in os.environ.items() if CARRIED.fullmatch(name)},
            folders=(str(options.work_dir),) if os.path.isdir(options.work_dir) else (),
            nproc_per_node=per_node,
            lost_after=options.lost_after,
        ),
        notify=notify or (lambda text: logger.warning("%s", text)),
    )
    return NodesManager.from_options(
        placement, options, collect=collect, collect_logs=collect_logs, notify=notify, on_event=on_event
    )


@called_like(manager)
async def run(*arguments: Any, **options: Any) -> RunResult:
    """Run a command on several hosts and wait for its end on all of them.

    Cancelling stops the workers of all hosts with their grace period, then lets the cancellation
    through; `asyncio.timeout` around it works.

    Args:
        *arguments: See `manager`.
        **options: See `manager`.

    Returns:
        The result: workers of all hosts in rank order, paths as they are on the hosts.

    Raises:
        DistributedRuntimeError: A worker failed by itself, or a host was lost.
        PlatformError: Hosts cannot be used; the text has a line for each.
        RankTableError: The hosts' NPUs make no rank table.
        WorkerSpawnError: The command cannot be started on one of the hosts.
    """
    return await to_its_end(manager(*arguments, **options))


@called_like(manager)
def run_blocking(*arguments: Any, **options: Any) -> RunResult:
    """Do what `run` does in code that is not asynchronous, in a notebook's cell too.

    Ctrl-C stops the workers of all hosts with their grace period, a second one at once, and
    `KeyboardInterrupt` is raised when they are gone. In the main thread of a program that has the
    default action for SIGTERM, that signal does the same and then ends the program.

    Args:
        *arguments: See `manager`.
        **options: See `manager`.

    Returns:
        As `run`.

    Raises:
        DistributedRuntimeError: As `run`, and so for all its other errors.
    """
    return to_its_end_blocking(manager(*arguments, **options))


class SshPlacement:
    """One agent on each of several hosts, behind one ssh each.

    Args:
        hosts: Their names.
        program: Words of the ssh to use.
        python: Python on the hosts.
        greeting: What every agent is told first.
        notify: Takes a line when hosts have to be waited for.
    """

    renewal_timeout = 0.0

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        program: Sequence[str],
        python: str,
        greeting: Greeting,
        notify: Callable[[str], None],
    ) -> None:
        self._program = tuple(program)
        self._python = python
        self._greeting = greeting
        self._notify = notify
        outer = os.environ.get(JOB_MARK)
        own = secrets.token_hex(8)
        self._mark = f"{outer}/{own}" if outer else own
        self._nodes = [_SshNode(host, greeting) for host in hosts]

    async def open(self, table: GivenTable | None = None) -> Sequence[NodeHandle]:
        """Reach all hosts, start the agents and hear what they found.

        Args:
            table: None: the user named the hosts, so no table is taken.

        Returns:
            One handle per host, in their order.

        Raises:
            PlatformError: Hosts cannot be used; its text has a line for each. Nothing is left on any.
        """
        try:
            await in_thread(lambda: guardian.watch(self._mark, _CLOSE_PATIENCE))
            errors = await self._open_all()
            if errors:
                raise PlatformError(_joined(errors, len(self._nodes)))
        except BaseException:
            await self.close()
            raise
        return self._nodes

    async def renew(self, bound: float) -> Sequence[NodeHandle]:
        """Refuse: the user named the hosts, and there are no others.

        Args:
            bound: Not looked at.

        Raises:
            PlatformError: Always.
        """
        raise PlatformError("other hosts than those that were named cannot be had")

    async def until_lost(self) -> str:
        """Wait for ever: the hosts have nothing in common that could be lost."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        """End all agents and their links; a cancellation waits for it, a few seconds at most."""
        waits = Patience(lambda: None)
        closing = asyncio.gather(*(node.close() for node in self._nodes))
        with shield():
            await waits.wait(asyncio.ensure_future(closing))
            await waits.wait(in_thread(lambda: guardian.release(self._mark)))
        waits.settle()

    async def _open_all(self) -> dict[str, str]:
        """Open all nodes, some at a time; return errors by host."""
        places = asyncio.Semaphore(_AT_A_TIME)
        environment = {**os.environ, JOB_MARK: self._mark}

        async def open_one(node: _SshNode) -> None:
            async with places:
                await node.open(self._program, self._python, environment)

        tasks = {asyncio.ensure_future(open_one(node)): node.host for node in self._nodes}
        try:
            _, pending = await asyncio.wait(tasks, timeout=_NOTICE_AFTER)
            if pending:
                waiting = [tasks[task] for task in tasks if task in pending]
                rest = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
                self._notify(f"waiting for {', '.join(waiting[:8])}{rest}")
                await asyncio.wait(pending)
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
        errors: dict[str, str] = {}
        for task, host in tasks.items():
            error = task.exception()
            if isinstance(error, PlatformError):
                errors[host] = str(error)
            elif error is not None:
                raise error
        return errors


class _SshNode:
    """The way to one agent; see `NodeHandle`."""

    def __init__(self, host: str, greeting: Greeting) -> None:
        self.host = host
        self._greeting = greeting
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[int] | None = None
        self._channel: Channel | None = None
        self._facts: NodeFacts | None = None
        self._noise: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._numbers = itertools.count(1)
        self._lost = ""

    async def open(self, program: Sequence[str], python: str, environment: Mapping[str, str]) -> None:
        """Start the agent and hear what it found.

        Raises:
            PlatformError: That does not succeed; says why and what to do.
        """
        try:
            with anyio.fail_after(_ANSWER_PATIENCE):
                await self._open(program, python, environment)
        except TimeoutError:
            raise PlatformError(
                f"timed out: no answer within {_ANSWER_PATIENCE:g} s{self._last_noise()}; expected an agent "
                f"there: try `{shlex.join([*program, self.host, 'true'])}`"
            ) from None

    async def inspect(self, nproc_per_node: int | None) -> NodeFacts:
        assert self._facts is not None
        return self._facts

    async def start(self, plan: NodePlan, table: str) -> NodeStarted:
        try:
            answer = await self._call(Started, Start(call=next(self._numbers), plan=plan, table=table))
        except PlatformError as error:
            return NodeStarted(error=error)
        return answer.started

    async def report(self) -> NodeReport:
        return (await self._call(Reported, Report(next(self._numbers)))).report

    async def stop(self, now: bool) -> None:
        await self._call(Done, Stop(call=next(self._numbers), now=now))

    async def signal(self, number: int) -> None:
        await self._call(Done, Signal(call=next(self._numbers), signal=number))

    async def ranks_ended(self) -> None:
        await self._call(Done, RanksEnded(call=next(self._numbers)))

    async def sees_file(self, path: str, beginning: bytes) -> bool:
        message = SeesFile(call=next(self._numbers), path=path, beginning=beginning)
        return (await self._call(Looked, message)).found

    async def read_log(self, rank: int, start: int, size: int) -> LogPiece:
        message = ReadLog(call=next(self._numbers), rank=rank, start=start, size=size)
        return (await self._call(LogRead, message)).piece

    async def set_logs_aside(self, attempt: int) -> None:
        await self._call(Done, SetLogsAside(call=next(self._numbers), attempt=attempt))

    async def close(self) -> None:
        """End the link, and with it the agent; kills the ssh that does not go by itself."""
        with self._lock:
            self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._channel is not None and not self._lost:
            self._channel.end_sending()
            await self._channel.drain()
        if self._ended is not None and self._process is not None:
            if not self._lost:
                await asyncio.wait({self._ended}, timeout=_CLOSE_PATIENCE)
            if not self._ended.done():
                self._process.kill()
            await self._ended
        if self._channel is not None:
            self._channel.close()

    async def _open(self, program: Sequence[str], python: str, environment: Mapping[str, str]) -> None:
        nonce = secrets.token_hex(8)
        # Not in the home folder, whose files Python would take for modules.
        remote = f"cd / && exec {shlex.quote(python)} -m davincirunsdk.engines.ssh_agent {nonce}"
        words = [*program, *_OPTIONS, "--", self.host, remote]
        try:
            await in_thread(self._spawn, words, environment)
        except OSError as error:
            raise PlatformError(
                f"{words[0]} cannot be started here ({error.strerror}); expected OpenSSH's client: install "
                "openssh-client, or name another with --ssh"
            ) from None
        process = self._process
        if process is None:
            raise PlatformError("given up")
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._ended = in_thread(process.wait)
        reader, writer = await over_pipes(process.stdout, process.stdin)
        self._channel = Channel(reader, writer, accepts=FROM_AGENT)
        errors = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(errors), process.stderr)
        self._tasks.append(asyncio.ensure_future(self._read_noise(errors)))
        try:
            await reader.readuntil(first_word(nonce))
            version = (await reader.readline()).decode(errors="replace").strip()
        except asyncio.IncompleteReadError as end:
            self._noise += end.partial.decode(errors="replace").splitlines()[-_NOISE_LINES:]
            raise PlatformError(await self._explain(program, python)) from None
        except (asyncio.LimitOverrunError, ValueError):
            raise PlatformError(
                "found more than a MiB of output before the agent's first word; expected a login shell that "
                "prints little: look at its start-up files there"
            ) from None
        if version != __version__:
            raise PlatformError(
                f"found davincirunsdk {version} there and {__version__} here; expected one version: "
                f"`{python} -m pip install davincirunsdk=={__version__}` there"
            )
        self._channel.send(self._greeting)
        try:
            answer = await self._channel.receive(_ANSWER_PATIENCE)
        except LinkEnded:
            raise PlatformError(await self._explain(program, python)) from None
        if isinstance(answer, Refused):
            raise answer.error
        assert isinstance(answer, Found)
        self._facts = answer.facts
        lost_after = self._greeting.lost_after
        self._tasks.append(asyncio.ensure_future(self._channel.beat(beat_interval(lost_after))))
        self._tasks.append(asyncio.ensure_future(self._listen(self._channel, lost_after)))

    def _spawn(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            # Ctrl-C at the terminal is ours to pass on.
            start_new_session=True,
        )
        with self._lock:
            if not self._closed:
                self._process = process
                return
        process.kill()
        process.communicate()

    async def _listen(self, channel: Channel, lost_after: float) -> None:
        """Hand answers to those who wait for them, until the link ends."""
        try:
            while True:
                message = await channel.receive(lost_after)
                waiting = self._waiting.pop(getattr(message, "call", 0), None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
        except LinkEnded as end:
            self._lost = await self._why(end)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(NodeLostError(self._lost))
        self._waiting.clear()

    async def _why(self, end: LinkEnded) -> str:
        assert self._ended is not None
        await asyncio.wait({self._ended}, timeout=0.5)
        if not self._ended.done():
            return str(end)
        code = self._ended.result()
        what = "ssh lost its connection" if code == _LOGIN else "the agent there has ended"
        return f"{what} (exit code {code}){self._last_noise()}"

    async def _call(self, kind: type[M], message: Any) -> M:
        if self._lost:
            raise NodeLostError(self._lost)
        assert self._channel is not None
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._channel.send_exactly(message)
        self._waiting[message.call] = answer
        try:
            found = await answer
        finally:
            self._waiting.pop(message.call, None)
        if isinstance(found, Failed):
            raise RuntimeError(found.why)
        assert isinstance(found, kind)
        return found

    async def _read_noise(self, errors: asyncio.StreamReader) -> None:
        """Keep the last lines that ssh and the remote shell print."""
        while block := await errors.read(1 << 14):
            lines = block.decode(errors="replace").splitlines()
            self._noise = [*self._noise, *(line for line in lines if line.strip())][-_NOISE_LINES:]

    def _last_noise(self) -> str:
        return f": {self._noise[-1].strip()[:300]}" if self._noise else ""

    async def _explain(self, program: Sequence[str], python: str) -> str:
        """Say why there is no agent, from what ssh and the remote shell left."""
        assert self._ended is not None
        # The last words come through a pipe of their own.
        noise: asyncio.Future[None] = self._tasks[0]
        await asyncio.wait([noise], timeout=2.0)
        await asyncio.wait([self._ended], timeout=2.0)
        code = self._ended.result() if self._ended.done() else None
        text = "\n".join(self._noise)
        told = self._last_noise()
        if code == _LOGIN:
            for pattern, what, remedy in _LOGIN_TROUBLE:
                if re.search(pattern, text, re.IGNORECASE):
                    ssh = shlex.join([*program, self.host, "true"])
                    return f"{what}{told}; {remedy.format(ssh=ssh, host=self.host)}"
            return f"ssh could not connect{told}; try `{shlex.join([*program, '-v', self.host, 'true'])}`"
        for pattern, what, remedy in _PYTHON_TROUBLE:
            if re.search(pattern, f"{code} {text}", re.IGNORECASE):
                return (
                    f"{what.format(python=python)}{told}; {remedy.format(python=python, version=__version__)}"
                )
        return f"the agent ended with code {code} before its first word{told}"


_LOGIN_TROUBLE = (
    (
        "host identification has changed",
        "the key of the host is not the one that is known",
        "if it was set up anew, forget the old one: `ssh-keygen -R {host}`, then `{ssh}`",
    ),
    (
        "host key verification failed|no .* host key is known",
        "the key of the host is not known",
        "accept it once: `{ssh}`",
    ),
    (
        "permission denied|too many authentication failures|no supported authentication",
        "no permission to log in",
        "expected a login without a password: `ssh-copy-id {host}`, or load your key in ssh-agent",
    ),
    (
        "could not resolve|name or service not known|temporary failure in name",
        "the name of the host is not known",
        "look at its spelling, or name it in /etc/hosts or ~/.ssh/config",
    ),
    (
        "no route to host|network is unreachable",
        "no route to the host",
        "look whether it is up, and at the network between: `{ssh}`",
    ),
    (
        "connection refused",
        "no sshd listens there",
        "start it, or name its port: --ssh 'ssh -p PORT'",
    ),
    (
        "timed out|timeout",
        "timed out",
        "look whether the host is up, and at firewalls between: `{ssh}`",
    ),
)
_PYTHON_TROUBLE = (
    (
        r"no module named '?davincirunsdk'?\b(?!\.)",
        "davincirunsdk is not installed there for {python}",
        "`{python} -m pip install davincirunsdk=={version}` there, or set --remote-python (remote_python)",
    ),
    (
        r"no module named '?davincirunsdk\.",
        "another version of davincirunsdk is installed there",
        "expected one version: `{python} -m pip install davincirunsdk=={version}` there",
    ),
    (
        r"no module named",
        "davincirunsdk is there, but not all that it needs",
        "`{python} -m pip install davincirunsdk=={version}` there",
    ),
    (
        r"^12[67] |command not found|no such file or directory",
        "no python: {python} cannot be run there",
        "name the hosts' own with --remote-python (remote_python)",
    ),
)


def _joined(errors: Mapping[str, str], hosts: int) -> str:
    if len(errors) == 1 and hosts == 1:
        ((host, why),) = errors.items()
        return f"host {host}: {why}"
    lines = [f"  {host}: {why}" for host, why in errors.items()]
    return "\n".join([f"{len(errors)} of {hosts} hosts cannot be used:", *lines])
