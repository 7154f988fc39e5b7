"""Why a host cannot be used, from what ssh and the remote shell print, and what to do."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from davincirunsdk import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

LOGIN = 255
"""Exit code of ssh when it has no connection, rather than that of the command."""

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


def explain(code: int | None, text: str, *, told: str, host: str, program: Sequence[str], python: str) -> str:
    """Say why there is no agent on a host.

    Args:
        code: Exit code of ssh, None while it goes on.
        text: What was printed.
        told: The last of it, as a part of a sentence.
        host: Its name.
        program: Words of the ssh that was used.
        python: Python there.
    """
    if code == LOGIN:
        for pattern, what, remedy in _LOGIN_TROUBLE:
            if re.search(pattern, text, re.IGNORECASE):
                ssh = shlex.join([*program, host, "true"])
                return f"{what}{told}; {remedy.format(ssh=ssh, host=host)}"
        return f"ssh could not connect{told}; try `{shlex.join([*program, '-v', host, 'true'])}`"
    for pattern, what, remedy in _PYTHON_TROUBLE:
        if re.search(pattern, f"{code} {text}", re.IGNORECASE):
            return f"{what.format(python=python)}{told}; {remedy.format(python=python, version=__version__)}"
    return f"the agent ended with code {code} before its first word{told}"
