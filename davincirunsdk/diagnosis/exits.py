"""Exit codes in words."""

from __future__ import annotations

import signal

from davincirunsdk.types import signal_name

_SHELL_OFFSET = 128

_SIGNAL_READINGS = {
    signal.SIGHUP: "a terminal or session went away",
    signal.SIGINT: "Ctrl-C",
    signal.SIGABRT: "abort: a C++ exception or failed assertion, its stack is usually in the output",
    signal.SIGBUS: "bus error: usually /dev/shm is full",
    signal.SIGFPE: "arithmetic error",
    signal.SIGILL: "illegal instruction: a binary built for another processor",
    signal.SIGKILL: "the out-of-memory killer (see dmesg), the platform, or a kill -9",
    signal.SIGSEGV: "segmentation fault; torch_npu and CANN sometimes do it while exiting after good work",
    signal.SIGTERM: "the platform is stopping the job, or a kill from outside",
}

_CODE_READINGS = {
    1: "usually an uncaught Python exception",
    2: "usually wrong arguments or a script that cannot be opened",
    126: "command is not executable",
    127: "command not found",
}


def name_exit(exit_code: int | None) -> str:
    """Name how a process ended, without a reading.

    Args:
        exit_code: Negative for a signal, as in `subprocess`; None when nobody could learn it.

    Returns:
        Text such as `exit code 3`, `SIGKILL (signal 9)` or `exit status unknown`.
    """
    if exit_code is None:
        return "exit status unknown"
    name = signal_name(exit_code)
    if name is None:
        return f"exit code {exit_code}"
    number = f"signal {-exit_code}"
    return number if name == number else f"{name} ({number})"


def explain_exit(exit_code: int | None) -> str:
    """Say how a process ended and what that probably means.

    Shells and containers report death by signal n as exit code 128 + n; such a code is read as
    that signal.

    Args:
        exit_code: Negative for a signal, as in `subprocess`; None when the host program took the
            exit status away.

    Returns:
        One line that starts with `exit code N` or the signal's name and number.
    """
    if exit_code is None:
        return "exit status unknown: the host program took it"
    ended = name_exit(exit_code)
    reading = _CODE_READINGS.get(exit_code, "")
    number = signal_behind(exit_code)
    if number is not None:
        reading = _SIGNAL_READINGS.get(number, "")
        if exit_code > 0:
            ended += f", which stands for {name_exit(-number)}"
    return f"{ended}: {reading}" if reading else ended


def signal_behind(exit_code: int | None) -> signal.Signals | None:
    """Tell which signal ended a process, also when a shell in between reported it as 128 + n.

    Args:
        exit_code: Negative for a signal, as in `subprocess`.

    Returns:
        The signal; None when there was none, or when a positive code is no common shell report.
    """
    if exit_code is None or 0 <= exit_code <= _SHELL_OFFSET:
        return None
    try:
        number = signal.Signals(-exit_code if exit_code < 0 else exit_code - _SHELL_OFFSET)
    except ValueError:
        return None
    # A program may well choose 150 or 200 as a code of its own.
    return number if exit_code < 0 or number in _SIGNAL_READINGS else None
