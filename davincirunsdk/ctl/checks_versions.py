"""Check of versions: driver, CANN and frameworks, and the pairs that belong together.

Pairs as in the compatibility tables of torch_npu (COMPATIBILITY.md) and MindFormers (its page on
installation); a pair that stands in neither is not judged.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from davincirunsdk.findings import Finding, Level
from davincirunsdk.host.devices import npus

if TYPE_CHECKING:
    from pathlib import Path

    from davincirunsdk.ctl.doctor import Site

_ASK = """
import importlib.metadata as m, json
found = {}
for name in ("torch", "torch_npu", "mindspore", "mindformers"):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""
_SECONDS = 20.0

_CANN_OF_TORCH_NPU = {
    "9.1.0": ("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"),
    "9.0.0": ("2.10.0", "2.9.0.post2", "2.8.0.post4", "2.7.1.post4"),
    "8.5.0": ("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"),
    "8.3.RC1": ("2.8.0", "2.7.1", "2.6.0.post3", "2.1.0.post17"),
    "8.2.RC1": ("2.6.0", "2.5.1.post1", "2.1.0.post13"),
    "8.1.RC1": ("2.5.1",),
}
_CANN_OF_MINDSPORE = {
    "2.9.0": "9.0.0",
    "2.7.2": "8.5.0",
    "2.7.1": "8.3.RC1",
    "2.7.0": "8.2.RC1",
    "2.6.0": "8.1.RC1",
    "2.4.10": "8.0.0",
}
_TOOLKITS = ("ascend-toolkit/latest", "cann", "ascend-toolkit")
_VERSION = re.compile(r"^\s*(?:Version|version|package_version)\s*=\s*(\S+)", re.MULTILINE)


def versions(site: Site) -> list[Finding]:
    """Say which versions are here, and which of them do not belong together."""
    driver = _read_version(site.root / "usr/local/Ascend/driver/version.info")
    cann = _cann(site)
    packages = _packages(site.python or sys.executable)
    here = {"driver": driver, "CANN": cann, **packages}
    known = ", ".join(f"{name} {version}" for name, version in here.items() if version)
    findings = []
    if npus(site.root) and not cann:
        findings.append(
            Finding(
                where="versions",
                found="no CANN toolkit, though NPUs are here",
                expected="the toolkit, and its set_env.sh read in this shell (`source .../set_env.sh`)",
                level=Level.WARNING,
            )
        )
    findings += _mismatches(cann, packages)
    if known:
        findings.append(Finding(where="versions", found=known, level=Level.OK))
    return findings


def _mismatches(cann: str, packages: dict[str, str]) -> list[Finding]:
    torch, torch_npu = packages.get("torch", ""), packages.get("torch_npu", "")
    findings = []
    if torch and torch_npu and _release(torch) != _release(torch_npu):
        findings.append(
            Finding(
                where="versions",
                found=f"torch {torch} beside torch_npu {torch_npu}",
                expected=f"torch {_release(torch_npu)}: their first three numbers must be the same, or the "
                "import fails",
            )
        )
    fitting = [release for release, packed in _CANN_OF_TORCH_NPU.items() if torch_npu in packed]
    findings += _against_cann("torch_npu", torch_npu, cann, fitting)
    mindspore = packages.get("mindspore", "")
    pair = _CANN_OF_MINDSPORE.get(_release(mindspore)) if mindspore else None
    return findings + _against_cann("mindspore", mindspore, cann, [pair] if pair else [])


def _against_cann(name: str, version: str, cann: str, fitting: list[str]) -> list[Finding]:
    if not fitting or not cann or any(_same(cann, one) for one in fitting):
        return []
    return [
        Finding(
            where="versions",
            found=f"{name} {version} beside CANN {cann}",
            expected=f"CANN {' or '.join(fitting)}, with which it was released",
            level=Level.WARNING,
        )
    ]


def _same(here: str, wanted: str) -> bool:
    return here.lower().startswith(wanted.lower())


def _release(version: str) -> str:
    return ".".join(re.findall(r"\d+", version)[:3])


def _cann(site: Site) -> str:
    homes = [site.env.get("ASCEND_HOME_PATH", ""), site.env.get("ASCEND_TOOLKIT_HOME", "")]
    places = [site.root / home.lstrip("/") for home in homes if home]
    places += [site.root / "usr/local/Ascend" / name for name in _TOOLKITS]
    for place in places:
        named = ("version.info", "version.cfg", "ascend_toolkit_install.info", "compiler/version.info")
        files = [place / name for name in named]
        for file in [*files, *sorted(place.glob("*-linux/ascend_toolkit_install.info"))]:
            if found := _read_version(file):
                return found
    return ""


def _read_version(file: Path) -> str:
    try:
        found = _VERSION.search(file.read_text(errors="replace"))
    except OSError:
        return ""
    return found[1] if found else ""


def _packages(python: str) -> dict[str, str]:
    """Ask the workers' Python what it has; nothing heavy is imported."""
    try:
        answer = subprocess.run(
            [python, "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=True,
            text=True,
        ).stdout
        found = json.loads(answer)
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    return {str(name): str(version) for name, version in found.items()}
