"""The NPUs of this machine, by their device files, and which of them a process may see."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from davincirunsdk.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MASK = "ASCEND_RT_VISIBLE_DEVICES"
"""CANN's variable: which of the devices here a process sees, by their places among them."""

HIDDEN = ("", "NoDevFiles")
"""Values of the mask that hide every device on purpose; the second is Ray's."""

_DEVICE = re.compile(r"davinci([0-9]+)")
_SPAN = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_PHYSICAL_DRIVER = "Version=20.1.0"


def npus(root: Path) -> tuple[int, ...]:
    """List the physical numbers of the NPUs whose device files are here.

    Args:
        root: Folder that stands for `/`.

    Returns:
        The numbers, increasing; `davinci_manager` and the like are not devices.
    """
    try:
        entries = os.listdir(root / "dev")
    except OSError:
        return ()
    return tuple(sorted(int(match[1]) for entry in entries if (match := _DEVICE.fullmatch(entry))))


def visible(env: Mapping[str, str], present: tuple[int, ...]) -> tuple[int, ...]:
    """List the NPUs that the mask lets a process see.

    CANN stops reading the mask at its first bad entry and says nothing; a job would then run on
    fewer cards than its user meant, or without any. So a bad entry is an error here.

    Args:
        env: The environment.
        present: Physical numbers of the NPUs whose device files are here.

    Returns:
        Their physical numbers, increasing; all if the variable is unset.

    Raises:
        PlatformError: The mask is not one that CANN reads to its end.
    """
    places = mask_entries(env)
    if places is None or not present:
        return present
    if beyond := [place for place in places if place >= len(present)]:
        raise PlatformError(
            f"found an entry in the environment variable {MASK} that is out of range ({beyond[0]}): "
            f"it counts the devices present, and this node has {some(present, 'NPU')}; expected entries "
            f"from 0 to {len(present) - 1}: correct or unset it"
        )
    return tuple(present[place] for place in places)


def mask_entries(env: Mapping[str, str]) -> tuple[int, ...] | None:
    """Read the mask's entries.

    Args:
        env: The environment.

    Returns:
        The entries, strictly increasing; () where it hides every device; None if it is unset.

    Raises:
        PlatformError: An entry is not a number, or not larger than the one before it.
    """
    text = env.get(MASK)
    if text is None:
        return None
    if text.strip() in HIDDEN:
        return ()
    chosen: list[int] = []
    for place, part in enumerate(text.split(","), start=1):
        number = int(part) if part.isascii() and part.isdigit() and len(part) < 10 else None
        if number is None or (chosen and number <= chosen[-1]):
            what = "is not a number" if number is None else "is not larger than the one before it"
            raise PlatformError(
                f"found a bad list in the environment variable {MASK}: entry {place} {what}, and CANN "
                "ignores it and all that follow; expected increasing numbers with commas between and no "
                "blanks, such as 0,1,4: correct or unset it"
            )
        chosen.append(number)
    return tuple(chosen)


def parse_list(text: str) -> tuple[int, ...]:
    """Read a choice of devices.

    Args:
        text: Numbers and ranges such as `4-7` or `0,2`.

    Returns:
        The numbers, increasing.

    Raises:
        ValueError: It is something else.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        found = _SPAN.fullmatch(part.strip())
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{part!r} in {text!r} is not a device: expected for example 4-7 or 0,2")
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(sorted(numbers))


def choose(text: str, env: Mapping[str, str], present: tuple[int, ...]) -> tuple[int, ...]:
    """Hold a choice of devices against what is here.

    Args:
        text: As for `parse_list`; physical numbers.
        env: The environment.
        present: Physical numbers of the NPUs whose device files are here.

    Returns:
        The devices.

    Raises:
        PlatformError: A device is not here, or the mask hides it.
    """
    chosen = parse_list(text)
    if absent := [number for number in chosen if number not in present]:
        here = some(present, "NPU") if present else "no NPU (no device file such as /dev/davinci0)"
        raise PlatformError(
            f"found {here} on this node; expected {some(absent, 'NPU')} as well, asked for with --devices "
            "(devices): correct that"
        )
    seen = visible(env, present)
    if hidden := [number for number in chosen if number not in seen]:
        raise PlatformError(
            f"found {some(hidden, 'NPU')}, asked for with --devices (devices), hidden by the environment "
            f"variable {MASK}; expected all of them in sight: correct one of the two"
        )
    return chosen


def seen_without_files(env: Mapping[str, str], rows: Sequence[int]) -> tuple[int, ...]:
    """List the devices that processes see where device files cannot be seen: the rows count as all.

    Args:
        env: The environment.
        rows: Physical numbers of the devices that a rank table gives this node.

    Returns:
        The devices that the mask leaves, increasing. Its entries are places among the node's
        devices, which are the numbers themselves on a bare host; either reading will do.
    """
    entries = mask_entries(env)
    here = tuple(sorted(rows))
    if entries is None or entries == tuple(range(len(here))):
        return here
    return entries


def wants_physical_ids(root: Path) -> bool:
    """Tell the one driver release whose DEVICE_ID is the physical number and that has no ASCEND_DEVICE_ID."""
    try:
        with open(root / "usr/local/Ascend/driver/version.info", encoding="utf-8", errors="replace") as file:
            return file.readline().strip() == _PHYSICAL_DRIVER
    except OSError:
        return False


def some(numbers: Sequence[int], noun: str) -> str:
    """Word a set of devices: `NPUs 0-3, 6`."""
    return f"{noun if len(numbers) == 1 else noun + 's'} {span(numbers)}"


def span(numbers: Sequence[int]) -> str:
    """Word increasing numbers with runs drawn together: `0-3, 6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
