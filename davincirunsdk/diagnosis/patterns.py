"""Known errors of Ascend jobs, as rows of data.

Codes and fragments come from HCCL's error table and its fault guide, the fault entries of
MindCluster's faultdiag, torch_npu's error codes and MindSpore's messages. Wording changes between
versions, so rows hold short fragments, never whole lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum


class Role(IntEnum):
    """What an error tells about the rank that printed it; the lower, the better it explains a failure.

    PRIMARY: the rank itself is the cause. ELSEWHERE: a victim, and the line names the culprit.
    EITHER: cause or victim. SECONDARY: a victim as a rule.
    """

    PRIMARY = 0
    ELSEWHERE = 1
    EITHER = 2
    SECONDARY = 3


P, ELSEWHERE, EITHER, S = Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One known error.

    Attributes:
        code: CANN or torch_npu code, or "" for a pattern that is known by fragments.
        fragments: Alternatives; of one alternative every fragment must be in the line (lower case).
        meaning: What happened, a clause.
        role: See `Role`.
        remedy: What to do, a clause.
        vague: It wraps other errors or says little: any other match is better.
        names: Its first group is the part of the line that names the suspects.
    """

    code: str = ""
    fragments: tuple[tuple[str, ...], ...] = ()
    meaning: str
    role: Role
    remedy: str
    vague: bool = False
    names: re.Pattern[str] | None = None


def _code(code: str, role: Role, meaning: str, remedy: str, *, vague: bool = False) -> Pattern:
    return Pattern(code=code, meaning=meaning, role=role, remedy=remedy, vague=vague)


def _text(
    role: Role,
    meaning: str,
    remedy: str,
    *alternatives: str | tuple[str, ...],
    vague: bool = False,
    names: str | None = None,
) -> Pattern:
    return Pattern(
        fragments=tuple(
            (a.lower(),) if isinstance(a, str) else tuple(part.lower() for part in a) for a in alternatives
        ),
        meaning=meaning,
        role=role,
        remedy=remedy,
        vague=vague,
        names=re.compile(names, re.ASCII | re.IGNORECASE) if names else None,
    )


_LEFTOVER = "end the leftover process or other job on this device, wait about 10 s, retry"
_MEMORY = "use a smaller batch or model part, and look for a leftover process on the card (npu-smi info)"
_OTHERS = "look for a rank without this error, or with an earlier one"
_NETWORK = "read the other end's log first, then check the link: hccn_tool -i N -link -g, -optical -g"
_ABOVE = "read the lines before it"
_TABLE = "correct the rank table (hccl-ranktable check FILE)"
_DEVICE = "check the device with npu-smi info; reset or replace it"

_HCCL_CODES = (
    _code("EI0001", P, "an environment variable has a bad value, or the table mixes IPv4 and IPv6",
          "correct the variable that the message names"),
    _code("EI0002", S, "a wait for another rank timed out inside a collective operation",
          f"{_OTHERS}; raise HCCL_EXEC_TIMEOUT only if a rank really is that slow"),
    _code("EI0003", P, "a collective operation got a bad argument, or RANK_ID is not a decimal number",
          "correct the argument that the message names"),
    _code("EI0004", P, "the rank table cannot be opened or is not JSON",
          "check that RANK_TABLE_FILE is a complete file, not a folder"),
    _code("EI0005", P, "ranks called a collective operation with different count, type or order",
          "compare code, seeds and data shapes of both ranks; look at drop_last"),
    _code("EI0006", S, "a wait for another rank's connection timed out while links were made",
          f"that rank died or never started; {_OTHERS}"),
    _code("EI0007", P, "HCCL ran out of streams, notifies or queue pairs",
          "create fewer communication groups"),
    _code("EI0008", P, "ranks have different HCCL versions", "install the same CANN version on every node"),
    _code("EI0009", P, "the NPU's network transport could not start",
          "check address, link and optical module: hccn_tool -i N -ip -g, -link -g, -optical -g, -lldp -g"),
    _code("EI0010", EITHER, "direct access between two NPUs could not be enabled",
          "look for a rank that ended before; if there is none, try HCCL_INTRA_ROCE_ENABLE=1"),
    _code("EI0011", P, "HCCL could not get NPU memory", f"{_MEMORY}; lower HCCL_BUFFSIZE"),
    _code("EI0012", EITHER, "an SDMA copy between NPUs failed", "look for a rank that ended before"),
    _code("EI0013", EITHER, "a RoCE transfer failed (status 12: no answer after all retries)", _NETWORK),
    _code("EI0014", P, "a value in the rank table is repeated, leaves a gap, or is not this host's",
          f"{_TABLE}: the message names the field"),
    _code("EI0015", S, "not every rank came to the exchange of addresses in time",
          'the root rank lists the missing ranks after "Failed to connect agent": look there'),
    _code("EI0016", P, "a setting such as the TLS switch differs between ranks",
          "make it equal on every node (hccn_tool -tls)"),
    _code("EI0017", P, "a field of the rank table is missing or is not a string",
          f"{_TABLE}: numbers are written as strings"),
    _code("EI0018", EITHER, "a UB transfer failed", _NETWORK),
    _code("EI0019", P, "a host port cannot be bound",
          "end leftovers and second jobs on this host, or set HCCL_IF_BASE_PORT"),
    _code("EI0020", P, "an NPU port cannot be bound",
          "one process per device, or set HCCL_NPU_SOCKET_PORT_RANGE"),
    _code("EI9999", EITHER, "an internal error of HCCL", _ABOVE, vague=True),
    _code("EJ0001", P, "HCCP could not start: the previous run probably still holds the device", _LEFTOVER),
)  # fmt: skip

_CANN_CODES = (
    _code("EJ0002", P, "a network port of this NPU is down", "check it: hccn_tool -i N -link -g"),
    _code("EJ0003", P, "an IP address and port are already bound on this host",
          "end the second job or the leftover process"),
    _code("EL0001", P, "the device is absent or lost its heartbeat (hardware or driver)", _DEVICE),
    _code("EL0004", P, "device memory could not be allocated", _MEMORY),
    _code("EE1001", P, "this device id is not visible to the worker",
          "check ASCEND_RT_VISIBLE_DEVICES, DEVICE_ID and the devices of the container"),
    _code("EE1002", S, "waiting for a stream timed out: another rank is slow or gone, or an operator hangs",
          _OTHERS),
    _code("EE9999", EITHER, "an internal error of the CANN runtime", _ABOVE, vague=True),
    _code("EH9999", S, "AscendCL failed, often while waiting for a stream",
          "an operator before it, or another rank, failed first", vague=True),
    _code("EZ9999", P, "an AI Core operator failed", "find the operator's name in the lines around it"),
    _code("EZ9903", P, "an AI Core exception", "find the operator's name in the lines around it"),
    _code("E89999", P, "the operator library failed (tiling)", "find the operator in the message"),
    _code("E30008", P, "an AI CPU operator timed out, typically GetNext: data comes too slowly or not at all",
          "check the data pipeline"),
    _code("E39999", P, "an AI CPU operator failed", "find the operator's name in the lines around it"),
    _code("E19999", EITHER, "an internal error of the graph engine", _ABOVE, vague=True),
)  # fmt: skip

_TORCH_CODES = (
    _code("ERR02200", S, "a call of HCCL failed",
          f"{_OTHERS}, unless HCCL's own code nearby says more", vague=True),
    _code("ERR00100", EITHER, "a call of AscendCL failed", _ABOVE, vague=True),
    _code("ERR01100", EITHER, "an operator's call of AscendCL failed", _ABOVE, vague=True),
    _code("ERR00006", P, "torch_npu could not get memory", _MEMORY),
)  # fmt: skip

# Most specific first: of two rows that fit one line equally well, the earlier is taken.
FRAGMENTS = (
    # HCCL's own finding, printed by the surviving ranks: completion error, then stuck, then lost.
    *(
        _text(ELSEWHERE, meaning, "read the log of the rank that it names",
              ("cluster exception location", kind),
              names=r"cluster exception location\[ip/id\]: ?\[([\w.:/-]{1,80})\]")
        for kind, meaning in (
            ("error cqe occurred", "HCCL located a failed transfer on another rank"),
            ("stuck occurred", "HCCL located a stuck rank"),
            ("heartbeat lost occurred", "HCCL lost the heartbeat of a rank"),
        )
    ),
    _text(ELSEWHERE, "these ranks did not come to the exchange of addresses", "read their logs first",
          "failed to connect agent[", names=r"failed to connect agent\[([\d, ]{1,80})\]"),

    _text(P, "the device is occupied", _LEFTOVER,
          "the last training process is running", "may be other processes occupying this card",
          "open tsdclient failed", "tsdopen failed, deviceid"),
    _text(P, "the device id is not one of this container's",
          "check ASCEND_RT_VISIBLE_DEVICES and DEVICE_ID against the devices present",
          "invalid device id", ("setdevice failed", "devid is invalid"), "devid is invalid"),
    _text(P, "CANN's libraries are not found", "source CANN's set_env.sh before the start",
          ("libhccl.so", "cannot open shared object file"),
          ("libascendcl.so", "cannot open shared object file"),
          "please check that the cann package is installed"),
    _text(P, "a path variable is missing", "source CANN's set_env.sh before the start if it is one of CANN's",
          ("_path", "environment variable is not set")),

    _text(P, "the rank table cannot be read", "check that RANK_TABLE_FILE is a complete file, not a folder",
          "get hccl rank_table_file failed", ("[hcomloadranktablefile]get file[", "real path error")),
    _text(P, "the rank table, or the choice of device, is wrong", _TABLE,
          ("load file[", "to json fail"), "the ranktable or rank is invalid", "[parse][clusterinfo]",
          "[check][ip]fail", ("ranktable config devid", "but local devid")),
    _text(P, "RANK_ID is not set for this process", "start the program with davincirun, or set RANK_ID",
          "environment variables rank_id has not been exported"),
    _text(P, "this number of devices is not possible on this machine",
          "use 1, 2, 4 or a multiple of 8 devices per node",
          "devnum must be divisible by 8, or equal to 1, 2 or 4"),
    _text(P, "HCCL does not find this host's address on a network interface",
          "set HCCL_IF_IP or HCCL_SOCKET_IFNAME to one that exists",
          "is not found in the nic list", "get host ip fail by socket ifname"),
    _text(P, "a port cannot be used", "choose another port, or end the leftover process that holds it",
          "address already in use", "the ip address and port have been bound already", "failed to call bind",
          "failed to call listen", "ra socket listen start fail",
          ("the port number of meta server node", "is invalid")),

    _text(P, "MindSpore's processes did not come together: one is missing, late, or has wrong settings",
          "check that the scheduler runs and that MS_SCHED_HOST, MS_SCHED_PORT and MS_WORKER_NUM agree",
          "failed to connect to the meta server node url", "spawned worker process number is not as expected",
          "repeated registration node", ("role name", "is invalid")),
    _text(ELSEWHERE, "MindSpore lost contact with other workers, first with", "read that worker's log",
          "the total number of timed out node is",
          names=r"worker ([\w.:-]{1,64}) is the first one timed out"),
    _text(ELSEWHERE, "MindSpore lost contact with worker", "read that worker's log",
          ("is timed out", "it may exit with exception"),
          names=r"node: ?([\w.:-]{1,64}) is timed out"),

    _text(P, "ranks ran different operations, or different code",
          "compare code, seeds and data shapes of the ranks",
          "[rankconsistentimpl][compareframe]"),
    _text(P, "the TLS switch differs between ranks", "make it equal on every node (hccn_tool -tls)",
          "some ranks tlsstatus are inconsistent"),
    _text(P, "the host or container ran out of memory",
          "raise the container's limit, or use fewer data workers and a smaller cache",
          "memory cgroup out of memory", "out of memory: killed process", "exitstatus=137"),
    _text(P, "NPU memory is used up", _MEMORY,
          "out of memory", "allocate continuous memory failed", "devmemallochugepagemanaged failed"),
    _text(P, "the device lost its heartbeat (hardware or driver)", _DEVICE,
          "device lost heartbeat", "device lost heartbeart"),
    _text(P, "device memory has an error (hardware)",
          f"{_DEVICE}; npu-smi info -t ecc -i N shows the counters",
          "hbm multi-bit ecc error", "suspect device mem error", "reason=[device mem error]", "uce error"),
    _text(P, "a task on the device was aborted", "look for the operator or device error before it",
          "reason=[device task abort]"),
    _text(EITHER, "a link between NPUs failed", _NETWORK, "reason=[link error]"),
    _text(EITHER, "the device was stopped by force",
          "look for the rank or platform that asked for it", "force stop"),
    _text(P, "data comes too slowly or not at all", "check the data pipeline and its storage",
          ("it takes more than", "seconds to fetch a batch"), ("getnext", "timeout"),
          ("getnext", "timed out"), "aicpu_getnext"),
    _text(P, "an operator failed on the device", "find the operator's name in the message",
          ("aicore kernel execute failed", "fault kernel_name"), "aicore kernel execute failed",
          "aicpu kernel execute failed"),
    _text(P, "shared memory or a disk is full", "enlarge /dev/shm (docker --shm-size), or free the disk",
          "no space left on device", "bus error", "unable to open shared memory object"),
    _text(P, "the command line is wrong", "correct the argument that the message names",
          "torchrun: error: unrecognized arguments:", "launch.py: error:",
          ("argument --node_rank", "invalid int value")),
    _text(P, "the host's operating system is in trouble", "look at dmesg; ask the administrator",
          ("task", "blocked for more than"), "self-detected stall", "nf_conntrack: table full",
          "kernel panic", "i/o error", "input/output error"),

    # Kinds that HCCL writes into its own log from CANN 8.5 on.
    _text(P, "HCCL refused a setting", "correct what the message names",
          ("[initgroupstage]", "[envconfig]"), ("[initgroupstage]", "[ranktableconfig]"),
          ("[initgroupstage]", "[ranktablecheck]")),
    _text(P, "ranks disagree in parameters or versions", "make them equal on every rank",
          ("[initchannelstage]", "[parameterconflict]"), ("[initchannelstage]", "[versionconflict]")),
    _text(P, "a collective operation got an argument that it does not take", "correct what the message names",
          ("[taskexecstage]", "[invalidargument]"), ("[taskexecstage]", "[not supported]")),
    _text(EITHER, "HCCL lacked a resource, or a task failed", _ABOVE,
          ("[initgroupstage]", "[resource]"), ("[taskexecstage]", "[runfailed]")),
    _text(S, "HCCL waited in vain for another rank", _OTHERS,
          ("[initgroupstage]", "[ranktabledetect]"), ("[initchannelstage]", "[timeout]"),
          ("[taskexecstage]", "[timeout]"), ("[taskexecstage]", "[heartbeatabnormal]")),

    _text(EITHER, "a transfer between NPUs failed: the link was down, or the other end exited", _NETWORK,
          "cqe error status[12]", "[heartbeat]cqe err status", "error cqe"),
    _text(S, "links to another rank could not be made", _OTHERS,
          "wait links establish completed failed", "connected p2p timeout", "get qp status timeout_",
          "link_error_info"),
    _text(S, "not every rank came to the exchange of addresses in time", _OTHERS,
          "topo exchange agent get socket timeout", "topo exchange server get socket timeout"),
    _text(S, "a wait for another rank timed out inside a collective operation", _OTHERS,
          ("task run failed", "notify wait"), "notify wait execute failed", "ffts+ run failed",
          "watchdog caught collective operation timeout"),
    _text(S, "another rank closed its connection", "it probably ended before: read its log",
          "connection closed by peer"),
    _text(EITHER, "a connection was broken from the other side",
          "see whether the peer is another rank (read its log) or a server", "connection reset by peer"),
    _text(S, "waiting for the device timed out: an operator or another rank hangs", _OTHERS,
          "sync stream timeout", "stream sync timeout", "event wait timeout", "device synchronize failed",
          "error code is 107020"),
    _text(S, "the communication group could not be made", _OTHERS,
          ("communicator of group", "inited failed"), vague=True),
    _text(S, "a call of HCCL failed", _OTHERS, "hccl error in", vague=True),
    _text(EITHER, "the NPU reports errors late, so the stack may point at a later line",
          "rerun with ASCEND_LAUNCH_BLOCKING=1 to find the true place",
          "kernel errors might be asynchronously reported", "ascend_launch_blocking", vague=True),
)  # fmt: skip

CODES = {pattern.code: pattern for pattern in (*_HCCL_CODES, *_CANN_CODES, *_TORCH_CODES)}

# torch_npu builds its numbers from a part of itself and a kind of error.
TORCH_PARTS = {"00": "core", "01": "operators", "02": "communication", "03": "graph", "04": "profiler"}
TORCH_KINDS = {
    "001": "bad parameter",
    "002": "wrong type",
    "003": "bad value",
    "004": "bad pointer",
    "005": "internal error",
    "006": "no memory",
    "007": "not supported",
    "008": "not found",
    "009": "not available",
    "010": "a system call failed",
    "011": "time-out",
    "012": "no permission",
    "100": "AscendCL call failed",
    "200": "HCCL call failed",
    "300": "graph engine call failed",
    "999": "exception",
}
