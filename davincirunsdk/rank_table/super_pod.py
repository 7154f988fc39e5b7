"""What npu-smi tells of a super pod (Atlas A3): which one a host is in, and its devices' numbers there."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from davincirunsdk.errors import PlatformError
from davincirunsdk.host.tools import ask, chips_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SDID = re.compile(r"^\s*SDID\s*:\s*(\d+)\s*$", re.MULTILINE)
_POD = re.compile(r"^\s*Super Pod ID\s*:\s*(\d+)\s*$", re.MULTILINE)
_NONE = str(0xFFFFFFFF)
"""What a driver tells where there is no super pod: -1 as it prints unsigned numbers."""
_AT_ONCE = 8
"""Calls side by side: each takes about a second, and a host has 16 devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperPod:
    """A host's place in its super pod.

    Attributes:
        name: The super pod's id.
        device_ids: Physical number of each device, to its number in the super pod (SDID).
    """

    name: str
    device_ids: Mapping[int, str]


def find_super_pod(smi: str, present: Sequence[int], chosen: Sequence[int]) -> SuperPod | None:
    """Ask npu-smi for the super pod of this host.

    Args:
        smi: Path of npu-smi.
        present: Physical numbers of all devices here, in increasing order.
        chosen: Those to ask for.

    Returns:
        None where npu-smi knows of none: on every machine but Atlas A3, and with older drivers.

    Raises:
        PlatformError: npu-smi knows it for some of the devices only, or tells two super pods.
    """
    chips = chips_of(ask([smi, "info", "-m"]), present)

    def place(number: int) -> tuple[str, str] | None:
        if number not in chips:
            return None
        npu, chip = chips[number]
        text = ask([smi, "info", "-t", "spod-info", "-i", npu, "-c", chip])
        sdid, pod = _SDID.search(text), _POD.search(text)
        return (pod[1], sdid[1]) if sdid and pod and _NONE not in (sdid[1], pod[1]) else None

    first = place(chosen[0])
    if first is None:
        return None
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        found = dict(zip(chosen, [first, *threads.map(place, chosen[1:])], strict=True))
    known = {number: told for number, told in found.items() if told is not None}
    if missing := sorted(found.keys() - known.keys()):
        raise PlatformError(
            f"found no super pod facts for NPU {', '.join(map(str, missing))} but for others of this host; "
            "expected them for all: look what `npu-smi info -m` and `npu-smi info -t spod-info` print"
        )
    if len(names := sorted({pod for pod, _ in known.values()})) > 1:
        raise PlatformError(
            f"found NPUs of super pods {', '.join(names)} on this host; expected one: look what "
            "`npu-smi info -t spod-info` prints for each"
        )
    return SuperPod(name=names[0], device_ids={number: sdid for number, (_, sdid) in known.items()})
