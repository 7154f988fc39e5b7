"""Rank tables of every form: text to `RankTable` and back, and the rules they must obey.

    table = parse(text)          # v0.1, lab mode, v1.0, v1.2 or v2.0, told by content
    text = dump(table)           # v1.x; a v0.1 or lab table is converted by this

Finding the file, waiting until it is complete and writing one are in `rank_table.file`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from davincirunsdk.cluster import printable
from davincirunsdk.findings import Finding
from davincirunsdk.rank_table import v0, v1, v2
from davincirunsdk.rank_table.decoding import BOM, Break, decode
from davincirunsdk.rank_table.findings import Findings, TooManyFaults, error_of, show
from davincirunsdk.rank_table.table import Json, RankTable, Row, Server, TableNode

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Finding", "RankTable", "Row", "Server", "TableNode", "dump", "examine", "inspect", "parse"]

_FORMS = {"server_list": v1.read, "group_list": v0.read, "rank_list": v2.read}
_OTHERS = {
    "node_list": "the heterogeneous form 1.1, which is not for training",
    "server_group_list": "MindIE's global table, which is for inference",
    "prefill_device_list": "a prefill/decode table, which is for inference",
    "devices": "the entry of one pod, as in a pod's annotation, not a whole table",
}


def parse(text: str | bytes, *, path: str | None = None) -> RankTable:
    """Read a rank table of any form and check it.

    Args:
        text: The JSON text, as UTF-8 if bytes.
        path: The file it came from, for messages.

    Returns:
        The table, its ranks worked out where the form writes none.

    Raises:
        RankTableError: It is no complete, correct rank table; the message lists every fault.
    """
    table, findings = examine(text)
    if table is None or findings.faults:
        raise error_of(findings.faults, path)
    return replace(table, as_is=not findings.rewrite, warnings=tuple(findings.warnings))


def inspect(text: str | bytes) -> tuple[Finding, ...]:
    """List what is wrong (fatal) and odd (not fatal) about a rank table.

    Args:
        text: The JSON text, as UTF-8 if bytes.

    Returns:
        Faults first, then warnings; empty for a table without blemish.
    """
    _, findings = examine(text)
    return (*findings.faults, *findings.warnings)


def dump(table: RankTable) -> str:
    """Write a table as HCCL reads it.

    Args:
        table: A table of any form.

    Returns:
        JSON text of one line: v2.0 for a v2.0 table, v1.2 for a v1.2 one, v1.0 for all others.
    """
    shaped = v2.write(table) if table.form == "v2.0" else v1.write(table)
    # The long list goes item by item, for the reason that `decoding` gives.
    pieces = {
        key: [msgspec.Raw(msgspec.json.encode(item)) for item in value] if isinstance(value, list) else value
        for key, value in shaped.items()
    }
    return msgspec.json.encode(pieces).decode()


def examine(text: str | bytes) -> tuple[RankTable | None, Findings]:
    """Read a table as far as it can be read, and note all that is wrong with it.

    Args:
        text: The JSON text, as UTF-8 if bytes.

    Returns:
        The table (None if the text is no table at all) and the findings. With faults among them,
        numbers in the table may be -1 where they could not be read.
    """
    findings = Findings()
    top = _decode(text, findings)
    if top is None:
        return None, findings
    for key, read in _FORMS.items():
        if key in top:
            try:
                return read(top, findings), findings
            except TooManyFaults:
                return None, findings
    status = top.get("status")
    if isinstance(status, str) and status.lower() not in ("completed", "complete"):
        findings.fault("status", show(status), '"completed"; the table is not finished yet')
        return None, findings
    known = next((meaning for key, meaning in _OTHERS.items() if key in top), None)
    found = f"{known} ({_keys(top)})" if known else _keys(top)
    findings.fault("", found, "server_list (v1.x), group_list (v0.1) or rank_list (v2.0)")
    return None, findings


def _keys(top: Iterable[str]) -> str:
    keys = sorted(top)
    listed = ", ".join(printable(key[:40]) for key in keys[:8]) + (", ..." if len(keys) > 8 else "")
    return f"the keys {listed}" if keys else "an empty object"


def _decode(text: str | bytes, findings: Findings) -> dict[str, Json] | None:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if data.startswith(BOM):
        data = data[len(BOM) :]
        findings.rewrite = True
    top = decode(data)
    if isinstance(top, Break):
        findings.fault("", f"invalid JSON: {top.words}", top.expected)
        return None
    if not isinstance(top, dict):
        findings.fault("", show(top), "a JSON object")
        return None
    return top
