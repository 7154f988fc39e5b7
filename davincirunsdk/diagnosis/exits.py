"""Exit codes in words."""

from __future__ import annotations

import signal

from davincirunsdk.diagnosis.knowledge import Words
from davincirunsdk.types import signal_name

_SHELL_OFFSET = 128

_SIGNAL_READINGS = {
    signal.SIGHUP: Words(en="a terminal or session went away", zh="终端或会话断开"),
    signal.SIGINT: Words(en="Ctrl-C", zh="Ctrl-C"),
    signal.SIGABRT: Words(
        en="abort: a C++ exception or failed assertion, its stack is usually in the output",
        zh="中止：C++ 异常或断言失败，输出中通常有堆栈",
    ),
    signal.SIGBUS: Words(en="bus error: usually /dev/shm is full", zh="总线错误：通常是 /dev/shm 已满"),
    signal.SIGFPE: Words(en="arithmetic error", zh="算术错误"),
    signal.SIGILL: Words(
        en="illegal instruction: a binary built for another processor", zh="非法指令：二进制与处理器不匹配"
    ),
    signal.SIGKILL: Words(
        en="the out-of-memory killer (see dmesg), the platform, or a kill -9; it leaves no message",
        zh="内存不足被内核结束（见 dmesg）、平台或 kill -9；不会留下任何信息",
    ),
    signal.SIGSEGV: Words(
        en="segmentation fault; torch_npu and CANN sometimes do it while exiting after good work",
        zh="段错误；torch_npu 与 CANN 有时在正常完成后退出时发生",
    ),
    signal.SIGTERM: Words(
        en="the platform is stopping the job, or a kill from outside", zh="平台正在停止作业，或被外部结束"
    ),
}

_CODE_READINGS = {
    1: Words(en="usually an uncaught Python exception", zh="通常是未捕获的 Python 异常"),
    2: Words(
        en="usually wrong arguments or a script that cannot be opened", zh="通常是参数错误或脚本无法打开"
    ),
    126: Words(en="command is not executable", zh="命令不可执行"),
    127: Words(en="command not found", zh="找不到命令"),
}
_UNKNOWN = Words(en="exit status unknown", zh="退出状态未知")
_NOTHING = Words(en="", zh="")


def name_exit(exit_code: int | None, lang: str = "en") -> str:
    """Name how a process ended, without a reading.

    Args:
        exit_code: Negative for a signal, as in `subprocess`; None when nobody could learn it.
        lang: `en` or `zh`.

    Returns:
        Text such as `exit code 3`, `SIGKILL (signal 9)` or `exit status unknown`.
    """
    if exit_code is None:
        return _UNKNOWN.text(lang)
    name = signal_name(exit_code)
    if name is None:
        return f"退出码 {exit_code}" if lang == "zh" else f"exit code {exit_code}"
    number = f"信号 {-exit_code}" if lang == "zh" else f"signal {-exit_code}"
    return number if name.startswith("signal ") else f"{name} ({number})"


def explain_exit(exit_code: int | None, lang: str = "en") -> str:
    """Say how a process ended and what that probably means.

    Shells and containers report death by signal n as exit code 128 + n; such a code is read as
    that signal.

    Args:
        exit_code: Negative for a signal, as in `subprocess`; None when the host program took the
            exit status away.
        lang: `en` or `zh`.

    Returns:
        One line that starts with `exit code N` or the signal's name and number.
    """
    ended = name_exit(exit_code, lang)
    if exit_code is None:
        return ended
    reading = _CODE_READINGS.get(exit_code, _NOTHING)
    number = signal_behind(exit_code)
    if number is not None:
        reading = _SIGNAL_READINGS.get(number, _NOTHING)
        if exit_code > 0:
            behind = name_exit(-number, lang)
            ended += f"，即 {behind}" if lang == "zh" else f", which stands for {behind}"
    said = reading.text(lang)
    return f"{ended}{'：' if lang == 'zh' else ': '}{said}" if said else ended


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
