"""Known errors of Ascend jobs, as rows of data in English and Chinese.

Codes and fragments come from HCCL's error table and fault guide (`hccl`), the fault entries of
MindCluster's faultdiag (`faultdiag`), torch_npu's error codes (`torch_npu`), MindSpore's messages
(`mindspore`), and common knowledge about Linux and Python (`host`). Wording changes between versions, so
rows hold short fragments, never whole lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Role(str, Enum):
    """What an error tells about the rank that printed it.

    PRIMARY: the rank, or what it runs on, is the cause. SECONDARY: it is a victim as a rule.
    UNKNOWN: cause or victim.
    """

    PRIMARY = "primary"
    SECONDARY = "secondary"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """One text in both languages."""

    en: str
    zh: str

    def text(self, lang: str) -> str:
        """Return the text in `en` or `zh`."""
        return self.zh if lang == "zh" else self.en


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One known error.

    Attributes:
        code: CANN or torch_npu code, "" for a row that is known by fragments.
        fragments: Alternatives; of one alternative every fragment must be in the line (lower case).
        component: Who reports it, such as HCCL.
        meaning: What happened, a clause.
        cause: The usual cause, a clause; empty where the meaning says it.
        remedy: What to do, a clause.
        role: See `Role`.
        source: Where the row is from.
        vague: It wraps other errors or says little: any other row is better.
        link: It is about a connection between two ends, either of which may be at fault.
        hedged: Its own words sound like advice ("maybe ...") and are a finding all the same.
        names: The lines around it name the culprit: the row is worth more than others of its role.
        broad: A cause that says less than another cause beside it.
        mild: It helps to understand, but whose fault it is the sentence says, not the row.
        overrides: Whatever else its line says, it is an effect.
        aside: A remark that is true beside any other finding.
    """

    code: str = ""
    fragments: tuple[tuple[str, ...], ...] = ()
    component: str
    meaning: Words
    cause: Words
    remedy: Words
    role: Role
    source: str
    vague: bool = False
    link: bool = False
    hedged: bool = False
    names: bool = False
    broad: bool = False
    mild: bool = False
    overrides: bool = False
    aside: bool = False

    @property
    def label(self) -> str:
        """How it is called in a report: its code, or the fragments that were found."""
        return self.code or '"' + " ... ".join(self.fragments[0]) + '"'


P, S, U = Role.PRIMARY, Role.SECONDARY, Role.UNKNOWN

_NOTHING = Words(en="", zh="")


def _w(en: str, zh: str) -> Words:
    return Words(en=en, zh=zh)


def _code(
    code: str,
    component: str,
    role: Role,
    meaning: Words,
    cause: Words,
    remedy: Words,
    source: str = "hccl",
    *,
    vague: bool = False,
    link: bool = False,
    hedged: bool = False,
    broad: bool = False,
) -> Known:
    return Known(
        code=code,
        component=component,
        role=role,
        meaning=meaning,
        cause=cause,
        remedy=remedy,
        source=source,
        vague=vague,
        link=link,
        hedged=hedged,
        broad=broad,
    )


def _text(
    component: str,
    role: Role,
    meaning: Words,
    cause: Words,
    remedy: Words,
    source: str,
    *alternatives: str | tuple[str, ...],
    vague: bool = False,
    link: bool = False,
    hedged: bool = False,
    names: bool = False,
    mild: bool = False,
    overrides: bool = False,
    aside: bool = False,
) -> Known:
    return Known(
        fragments=tuple(
            (one.lower(),) if isinstance(one, str) else tuple(part.lower() for part in one)
            for one in alternatives
        ),
        component=component,
        role=role,
        meaning=meaning,
        cause=cause,
        remedy=remedy,
        source=source,
        vague=vague,
        link=link,
        hedged=hedged,
        names=names,
        mild=mild,
        overrides=overrides,
        aside=aside,
    )


_LEFTOVER = _w(
    "find the leftover process or other job on this device and end it, wait about 10 s, retry",
    "找到并结束占用该设备的残留进程或其他作业，等待约 10 秒后重试",
)
_MEMORY = _w(
    "use a smaller batch or model part, and look for a leftover process on the card (npu-smi info)",
    "减小 batch 或模型切分，并用 npu-smi info 查看卡上是否有残留进程",
)
_OTHERS = _w(
    "look at the ranks without this error, or with an earlier one",
    "查看没有此错误的 rank，或更早报错的 rank",
)
_OTHERS_OR_SLOW = _w(
    "look at the ranks without this error, or with an earlier one; if one only was slow (saving, evaluating, preparing "
    "data), raise the time-out (HCCL_EXEC_TIMEOUT, the process group's timeout)",
    "查看没有此错误或更早报错的 rank；若只是有 rank 较慢（保存、评测、准备数据），增大超时（HCCL_EXEC_TIMEOUT、进程组 timeout）",
)
_NETWORK = _w(
    "read the other end's log first, then check the link: hccn_tool -i N -link -g, -optical -g",
    "先看对端日志，再检查链路：hccn_tool -i N -link -g、-optical -g",
)
_PEER_OR_NET = _w(
    "the link was down for too long, or the process at the other end ended first",
    "链路闪断时间过长，或对端进程先退出",
)
_ABOVE = _w("read the message and the lines before it", "阅读该信息及其之前的日志行")
_TABLE = _w(
    "correct the rank table (hccl-ranktable check FILE)", "修正 rank table（hccl-ranktable check FILE）"
)
_TABLE_FILE = _w(
    "check that RANK_TABLE_FILE is a complete file, not a folder",
    "检查 RANK_TABLE_FILE 是完整的文件，而不是目录",
)
_DEVICE = _w(
    "check the device with npu-smi info; reset or replace it", "用 npu-smi info 检查设备，必要时复位或更换"
)
_HARDWARE = _w("hardware or driver", "硬件或驱动问题")
_OPERATOR = _w(
    "with the operator's name from the lines around it, check its inputs (shape, type, index range); rerun with "
    "ASCEND_LAUNCH_BLOCKING=1 to find the line of the script",
    "从相邻日志行得到算子名，检查其输入（形状、类型、索引范围）；用 ASCEND_LAUNCH_BLOCKING=1 重跑以定位脚本中的代码行",
)
_DATA = _w(
    "check the data pipeline and its storage: speed, workers that died",
    "检查数据管道与存储：速度、是否有数据进程退出",
)
_PORT = _w(
    "end the old process or second job that holds the port, or choose another port",
    "结束占用端口的旧进程或其他作业，或换一个端口",
)
_SET_ENV = _w("source CANN's set_env.sh before the start", "启动前执行 source .../set_env.sh")
_SCRIPTS = _w(
    "compare scripts, seeds, data shapes and drop_last of the ranks",
    "比较各 rank 的脚本、随机种子、数据形状与 drop_last",
)
_CORRECT = _w("correct what the message names", "按提示修正所指的内容")
_WAIT_CAUSE = _w(
    "another rank died, hangs, is slow, or ran a different number of steps",
    "其他 rank 退出、卡住、过慢，或步数不一致",
)
_WAITED = _w(
    "look at the ranks without this error, or with an earlier one, and for `error cqe` in plog; raise "
    "HCCL_EXEC_TIMEOUT only if a rank really is that slow",
    "查看没有此错误或更早报错的 rank，并在 plog 中查找 error cqe；确实有 rank 很慢时才增大 HCCL_EXEC_TIMEOUT",
)
_SLOW_START = _w(
    "look at what rank 0, or the rank that is named, did meanwhile; prepare data and models before the processes "
    "meet, or give init_process_group a longer timeout",
    "查看 rank 0 或被指出的 rank 当时在做什么；在进程汇合之前准备好数据与模型，或增大 init_process_group 的 timeout",
)
_SAME_END = _w("local and remote end have the same address", "本端与对端地址相同")
_TOO_LARGE = _w(
    "the batch or model part is too large, or a leftover process holds memory",
    "batch 或模型切分过大，或有残留进程占用内存",
)
_PEER_GONE = _w("another rank died or never started", "其他 rank 已退出或从未启动")

_HCCL = (
    _code("EI0001", "HCCL", P,
          _w("an environment variable has a bad value, or the table mixes IPv4 and IPv6",
             "环境变量取值非法，或 rank table 混用 IPv4 与 IPv6"),
          _w("a typing error, or a value out of range", "拼写错误或超出范围"),
          _w("correct the variable that the message names", "修正提示中的环境变量")),
    _code("EI0002", "HCCL", S,
          _w("a wait for another rank timed out inside a collective operation", "集合通信算子中等待其他 rank 超时"),
          _WAIT_CAUSE,
          _WAITED),
    _code("EI0003", "HCCL", P,
          _w("a collective operation got a bad argument, or RANK_ID is not a decimal number",
             "集合通信参数非法，或 RANK_ID 不是十进制数"),
          _w("the script, or RANK_ID", "脚本或 RANK_ID"),
          _w("correct the argument that the message names", "修正提示中的参数")),
    _code("EI0004", "HCCL", P, _w("the rank table cannot be opened or is not JSON", "rank table 打不开或不是 JSON"),
          _w("a wrong path, a folder, or a half-written file", "路径错误、给的是目录，或文件未写完"), _TABLE_FILE),
    _code("EI0005", "HCCL", P,
          _w("ranks called a collective operation with different count, type or order",
             "各 rank 集合通信的数量、类型或顺序不一致"),
          _w("ranks run different code or data shapes", "各 rank 的代码或数据形状不同"), _SCRIPTS),
    _code("EI0006", "HCCL", S,
          _w("a wait for another rank's connection timed out while links were made", "建链时等待其他 rank 的连接超时"),
          _PEER_GONE,
          _w("find the rank that does not report it, or reports something else first; the wait is "
             "HCCL_CONNECT_TIMEOUT + 20 s",
             "找到没有报此错误、或先报其他错误的 rank；等待时间为 HCCL_CONNECT_TIMEOUT + 20 秒")),
    _code("EI0007", "HCCL", P, _w("HCCL ran out of streams, notifies or queue pairs", "HCCL 的 stream、notify 或 QP 资源耗尽"),
          _w("too many communicators", "通信域过多"), _w("create fewer communication groups", "减少通信域数量")),
    _code("EI0008", "HCCL", P, _w("ranks have different HCCL versions", "各 rank 的 HCCL 版本不一致"),
          _w("mixed CANN installations", "混装了不同的 CANN"),
          _w("install the same CANN version on every node", "所有节点安装相同版本的 CANN")),
    _code("EI0009", "HCCL", P, _w("the NPU's network transport could not start", "NPU 网络传输初始化失败"),
          _w("link down, no optical module, or no device address", "链路断开、无光模块或设备无 IP"),
          _w("check hccn_tool -i N -ip -g, -link -g, -optical -g, -lldp -g",
             "检查 hccn_tool -i N -ip -g、-link -g、-optical -g、-lldp -g")),
    _code("EI0010", "HCCL", U, _w("direct access between two NPUs could not be enabled", "两个 NPU 间 P2P 使能失败"),
          _w("the other end ended, or hardware", "对端退出，或硬件问题"),
          _w("look for a rank that ended before; if there is none, try HCCL_INTRA_ROCE_ENABLE=1",
             "先看是否有 rank 更早退出；若没有，尝试 HCCL_INTRA_ROCE_ENABLE=1"), link=True),
    _code("EI0011", "HCCL", P, _w("HCCL could not get NPU memory", "HCCL 申请 NPU 内存失败"),
          _w("out of memory, or a leftover process", "内存不足或有残留进程"),
          _w("use a smaller batch, lower HCCL_BUFFSIZE, end leftovers", "减小 batch、调小 HCCL_BUFFSIZE、清理残留进程")),
    _code("EI0012", "HCCL", U, _w("an SDMA copy between NPUs failed", "NPU 间 SDMA 拷贝失败"),
          _w("the process at the other end ended, or memory was freed", "对端进程退出，或内存被释放"),
          _w("look for a rank that ended before", "查看是否有 rank 更早退出"), link=True),
    _code("EI0013", "HCCL", U, _w("a RoCE transfer failed (status 12: no answer after all retries)",
                                  "RoCE 传输失败（状态 12：重传次数用尽）"),
          _PEER_OR_NET, _NETWORK, link=True),
    _code("EI0014", "HCCL", P, _w("a value in the rank table is repeated, leaves a gap, or is not this host's",
                                  "rank table 中的取值重复、不连续，或与本机不符"),
          _w("the rank table", "rank table 有误"),
          _w("correct the field that the message names (hccl-ranktable check FILE)",
             "修正提示中的字段（hccl-ranktable check FILE）")),
    _code("EI0015", "HCCL", S, _w("not every rank came to the exchange of addresses in time", "并非所有 rank 按时参加地址交换"),
          _w("some ranks never came", "有 rank 没有到达"),
          _w('the root rank lists the missing ranks after "Failed to connect agent": look there',
             "root rank 在 “Failed to connect agent” 后列出缺失的 rank，查看它们")),
    _code("EI0016", "HCCL", P, _w("a setting such as the TLS switch differs between ranks", "各 rank 配置不一致（如 TLS 开关）"),
          _NOTHING, _w("make it equal on every node (hccn_tool -tls)", "在所有节点上保持一致（hccn_tool -tls）")),
    _code("EI0017", "HCCL", P, _w("a field of the rank table is missing or is not a string", "rank table 缺少字段或字段不是字符串"),
          _w("numbers that are not written as strings", "数字没有写成字符串"),
          _w("write strings; hccl-ranktable check FILE names the place", "写成字符串；hccl-ranktable check FILE 会指出位置")),
    _code("EI0018", "HCCL", U, _w("a UB transfer failed", "UB 传输失败"), _PEER_OR_NET, _NETWORK, link=True),
    _code("EI0019", "HCCL", P, _w("a host port cannot be bound", "主机端口绑定失败"),
          _w("an old process, or a second job on the same host", "旧进程，或同一主机上的第二个作业"),
          _w("end leftovers and second jobs on this host, or set HCCL_IF_BASE_PORT",
             "结束本机残留进程与其他作业，或设置 HCCL_IF_BASE_PORT")),
    _code("EI0020", "HCCL", P, _w("an NPU port cannot be bound", "NPU 端口绑定失败"),
          _w("several processes on one device", "同一设备上有多个进程"),
          _w("run one process per device, or set HCCL_NPU_SOCKET_PORT_RANGE",
             "每个设备只运行一个进程，或设置 HCCL_NPU_SOCKET_PORT_RANGE")),
    _code("EI9999", "HCCL", U, _w("an internal error of HCCL", "HCCL 内部错误"), _NOTHING, _ABOVE, vague=True),
    _code("EJ0001", "HCCP", P, _w("HCCP could not start", "HCCP 进程启动失败"),
          _w("the previous run still holds the device", "上一次运行仍占用设备"), _LEFTOVER, "faultdiag", hedged=True),
    _code("EJ0002", "HCCP", P, _w("a network port of this NPU is down", "该 NPU 的网口断开"), _NOTHING,
          _w("check it: hccn_tool -i N -link -g; other ranks report EI0006", "检查 hccn_tool -i N -link -g；其他 rank 会报 EI0006"),
          "faultdiag"),
    _code("EJ0003", "HCCP", P, _w("an IP address and port are already bound on this host", "本机的 IP 与端口已被绑定"),
          _w("a second job, or a leftover process", "第二个作业或残留进程"),
          _w("end the second job or the leftover process", "结束第二个作业或残留进程"), "faultdiag"),
)  # fmt: skip

_CANN = (
    _code("EL0001", "driver", P, _w("the device is absent or abnormal (it lost its heartbeat)", "设备不存在或异常（心跳丢失）"),
          _HARDWARE, _DEVICE, "faultdiag"),
    _code("EL0004", "driver", P, _w("device memory could not be allocated", "设备内存申请失败"),
          _w("out of memory", "内存不足"), _MEMORY, "faultdiag"),
    _code("EE1001", "runtime", P, _w("this device id is not visible to the worker", "该设备号对进程不可见"),
          _w("wrong ASCEND_RT_VISIBLE_DEVICES or DEVICE_ID", "ASCEND_RT_VISIBLE_DEVICES 或 DEVICE_ID 有误"),
          _w("check ASCEND_RT_VISIBLE_DEVICES, DEVICE_ID and the devices of the container",
             "检查 ASCEND_RT_VISIBLE_DEVICES、DEVICE_ID 与容器中的设备"), "faultdiag"),
    _code("EE1002", "runtime", S, _w("waiting for a stream timed out", "流同步超时"),
          _w("another rank is slow or gone, or an operator hangs", "其他 rank 过慢或退出，或算子卡住"), _OTHERS_OR_SLOW, "faultdiag"),
    _code("EE9999", "runtime", U, _w("an internal error of the CANN runtime", "CANN runtime 内部错误"), _NOTHING, _ABOVE,
          "faultdiag", vague=True),
    _code("EH9999", "AscendCL", S, _w("AscendCL failed, often while waiting for a stream", "AscendCL 失败，常见于流同步"),
          _w("an operator before it, or another rank, failed first", "之前的算子或其他 rank 先失败"), _ABOVE, "faultdiag",
          vague=True),
    _code("EZ9999", "operators", P, _w("an AI Core operator failed", "AI Core 算子执行失败"), _NOTHING, _OPERATOR, "faultdiag", broad=True),
    _code("EZ9903", "operators", P, _w("an AI Core exception", "AI Core 异常"), _NOTHING, _OPERATOR, "faultdiag", broad=True),
    _code("E89999", "operators", P, _w("the operator library failed (tiling)", "算子库失败（tiling）"), _NOTHING, _OPERATOR,
          "faultdiag", broad=True),
    _code("E30008", "AI CPU", P, _w("an AI CPU operator timed out, typically GetNext", "AI CPU 算子超时，通常是 GetNext"),
          _w("data comes too slowly or not at all", "数据加载过慢或中断"), _DATA, "faultdiag"),
    _code("E39999", "AI CPU", P, _w("an AI CPU operator failed", "AI CPU 算子执行失败"), _NOTHING, _OPERATOR, "faultdiag", broad=True),
    _code("EZ1001", "operators", P, _w("an operator got an argument that it does not take", "算子的参数不被支持"), _NOTHING,
          _w("correct the shape, type or format that the message names", "按提示修正形状、类型或格式"), "cann", broad=True),
    _code("EC0010", "compiler", P, _w("CANN's compiler cannot import a Python module", "CANN 编译器无法导入 Python 模块"),
          _w("CANN's Python packages are not on this process's path, or do not fit its Python",
             "该进程找不到 CANN 的 Python 包，或其与 Python 版本不符"),
          _w("source CANN's set_env.sh in the shell that starts the job; pip install the packages that CANN lists for its "
             "compiler", "在启动作业的 shell 中 source CANN 的 set_env.sh；用 pip 安装 CANN 编译器所需的 Python 包"), "cann"),
    _code("E19999", "graph engine", U, _w("an internal error of the graph engine", "图引擎内部错误"), _NOTHING, _ABOVE,
          "faultdiag", vague=True),
)  # fmt: skip

_TORCH = (
    _code("ERR02200", "torch_npu", S, _w("a call of HCCL failed", "调用 HCCL 失败"), _WAIT_CAUSE, _OTHERS, "torch_npu",
          vague=True),
    _code("ERR00100", "torch_npu", U, _w("a call of AscendCL failed", "调用 AscendCL 失败"), _NOTHING, _ABOVE, "torch_npu",
          vague=True),
    _code("ERR01100", "torch_npu", U, _w("an operator's call of AscendCL failed", "算子调用 AscendCL 失败"), _NOTHING, _ABOVE,
          "torch_npu", vague=True),
    _code("ERR00006", "torch_npu", P, _w("torch_npu could not get memory", "torch_npu 申请内存失败"),
          _w("out of memory", "内存不足"), _MEMORY, "torch_npu"),
)  # fmt: skip

FRAGMENTS: tuple[Known, ...] = (
    # HCCL's own finding, printed by the surviving ranks: completion error, then stuck, then lost.
    *(
        _text("HCCL", S, meaning, _NOTHING,
              _w("read the log of the rank that it names", "查看它所指 rank 的日志"), "hccl",
              ("cluster exception location", kind), names=True)
        for kind, meaning in (
            ("error cqe occurred", _w("HCCL located a failed transfer on another rank", "HCCL 定位到其他 rank 传输失败")),
            ("stuck occurred", _w("HCCL located a stuck rank", "HCCL 定位到卡住的 rank")),
            ("heartbeat lost occurred", _w("HCCL lost the heartbeat of a rank", "HCCL 丢失某 rank 的心跳")),
        )
    ),
    _text("HCCL", S, _w("some ranks did not come to the exchange of addresses", "有 rank 没有参加地址交换"), _PEER_GONE,
          _w("read the logs of the ranks it lists", "查看它列出的 rank 的日志"), "hccl", "failed to connect agent[", names=True),
    _text("TSD", P, _w("the device is occupied", "设备被占用"),
          _w("a leftover process or another job", "残留进程或其他作业"), _LEFTOVER, "faultdiag",
          "the last training process is running", "may be other processes occupying this card",
          "open tsdclient failed", "tsdopen failed, deviceid", hedged=True),
    _text("runtime", P, _w("the device id is not one of this container's", "设备号不属于该容器"), _NOTHING,
          _w("check ASCEND_RT_VISIBLE_DEVICES and DEVICE_ID against the devices present",
             "对照现有设备检查 ASCEND_RT_VISIBLE_DEVICES 与 DEVICE_ID"), "faultdiag",
          "invalid device id", ("setdevice failed", "devid is invalid"), "devid is invalid", "setdevice failed"),
    _text("CANN", P, _w("CANN's libraries are not found", "找不到 CANN 的库"),
          _w("CANN's environment was not set", "没有设置 CANN 环境"), _SET_ENV, "faultdiag",
          ("libhccl.so", "cannot open shared object file"), ("libascendcl.so", "cannot open shared object file"),
          "please check that the cann package is installed", hedged=True),
    _text("CANN", P, _w("a path variable is missing", "缺少路径环境变量"), _NOTHING, _SET_ENV, "faultdiag",
          ("_path", "environment variable is not set")),
    _text("host", P, _w("a shared library is not found", "找不到共享库"), _NOTHING,
          _w("install the package that has it, or set LD_LIBRARY_PATH", "安装所属软件包，或设置 LD_LIBRARY_PATH"), "host",
          "cannot open shared object file"),
    _text("HCCL", P, _w("the rank table cannot be read", "无法读取 rank table"), _NOTHING, _TABLE_FILE, "faultdiag",
          "get hccl rank_table_file failed", ("[hcomloadranktablefile]get file[", "real path error")),
    _text("HCCL", P, _w("the rank table, or the choice of device, is wrong", "rank table 或设备选择有误"), _NOTHING, _TABLE,
          "faultdiag", ("load file[", "to json fail"), "the ranktable or rank is invalid", "[parse][clusterinfo]",
          "[check][ip]fail", ("ranktable config devid", "but local devid")),
    _text("HCCL", P, _w("RANK_ID is not set for this process", "该进程没有 RANK_ID"),
          _w("the program was not started by a launcher", "程序不是由启动器启动的"),
          _w("start the program with davincirun, or set RANK_ID", "用 davincirun 启动，或设置 RANK_ID"), "faultdiag",
          "environment variables rank_id has not been exported"),
    _text("HCCL", P, _w("this number of devices is not possible on this machine", "该机器不支持这样的设备数"), _NOTHING,
          _w("use 1, 2, 4 or a multiple of 8 devices per node", "每节点使用 1、2、4 或 8 的倍数个设备"), "faultdiag",
          "devnum must be divisible by 8, or equal to 1, 2 or 4"),
    _text("HCCL", P, _w("HCCL does not find this host's address on a network interface", "HCCL 在网卡上找不到本机地址"), _NOTHING,
          _w("set HCCL_IF_IP or HCCL_SOCKET_IFNAME to one that exists", "将 HCCL_IF_IP 或 HCCL_SOCKET_IFNAME 设为存在的值"),
          "faultdiag", "is not found in the nic list", "get host ip fail by socket ifname"),
    _text("network", P, _w("the process finds no network interface, or no address of its own, for the job",
                           "进程找不到可用于作业的网卡或本机地址"),
          _w("the host's name does not resolve to it, or the interface is not in the container",
             "主机名无法解析到本机，或容器中没有该网卡"),
          _w("name the interface to the other nodes in GLOO_SOCKET_IFNAME, HCCL_SOCKET_IFNAME or NCCL_SOCKET_IFNAME "
             "(davincirun --iface)",
             "在 GLOO_SOCKET_IFNAME、HCCL_SOCKET_IFNAME 或 NCCL_SOCKET_IFNAME 中指定到其他节点的网卡（davincirun --iface）"),
          "torch", "no socket interface found", "connectfullmesh failed",
          "unable to find address for", ("unable to resolve hostname", "address")),
    _text("HCCL", P, _SAME_END,
          _w("two hosts or containers report one address, or two ranks use one NPU",
             "两个主机或容器报告了同一地址，或两个 rank 使用同一个 NPU"),
          _w("check that every rank has an NPU of its own (set_device, ASCEND_RT_VISIBLE_DEVICES) and every host an address "
             "of its own (HCCL_IF_IP, rank table)",
             "检查每个 rank 使用各自的 NPU（set_device、ASCEND_RT_VISIBLE_DEVICES），每个主机有各自的地址（HCCL_IF_IP、rank table）"),
          "hccl", ("local ip", "remote ip", "same"), ("local and remote", "address", "same"),
          ("localip", "remoteip", "equal")),
    _text("host", P, _w("a port cannot be used: another process holds it", "端口被占用"),
          _w("a leftover process, or another job on this host", "残留进程或本机的其他作业"), _PORT, "faultdiag",
          "address already in use", "the ip address and port have been bound already", "failed to call bind",
          "failed to call listen", "ra socket listen start fail", "eaddrinuse",
          ("port", "already in use"), ("port", "is occupied"), ("port", "has been used"),
          ("listen on ip[", "specific port[", "fail")),
    _text("MindSpore", P, _w("the scheduler's port number is invalid", "scheduler 端口号非法"), _NOTHING,
          _w("set MS_SCHED_PORT to a free port between 1024 and 65535", "将 MS_SCHED_PORT 设为 1024 到 65535 间的空闲端口"),
          "faultdiag", ("the port number of meta server node", "is invalid")),
    _text("MindSpore", U,
          _w("MindSpore's processes did not come together", "MindSpore 进程未能组成集群"),
          _w("a process is missing or late, or the scheduler is gone", "有进程缺失或太晚，或 scheduler 不在"),
          _w("check that the scheduler runs and that MS_SCHED_HOST, MS_SCHED_PORT and MS_WORKER_NUM agree",
             "检查 scheduler 是否运行，以及 MS_SCHED_HOST、MS_SCHED_PORT、MS_WORKER_NUM 是否一致"), "faultdiag",
          "failed to connect to the meta server node url"),
    _text("MindSpore", P,
          _w("MindSpore's processes have wrong numbers or roles", "MindSpore 进程数或角色有误"), _NOTHING,
          _w("check MS_WORKER_NUM, MS_ROLE and MS_NODE_ID", "检查 MS_WORKER_NUM、MS_ROLE 与 MS_NODE_ID"), "faultdiag",
          "spawned worker process number is not as expected", "repeated registration node",
          ("role name", "is invalid")),
    _text("MindSpore", S, _w("MindSpore lost contact with other workers", "MindSpore 与其他 worker 失去联系"), _PEER_GONE,
          _w("read the log of the worker it names", "查看它所指 worker 的日志"), "faultdiag",
          "the total number of timed out node is", ("is timed out", "it may exit with exception"), names=True),
    _text("HCCL", P, _w("ranks ran different operations, or different code", "各 rank 执行的算子或代码不同"), _NOTHING, _SCRIPTS,
          "faultdiag", "[rankconsistentimpl][compareframe]"),
    _text("torch", P, _w("ranks called different collective operations, or with different shapes",
                         "各 rank 的集合通信操作或形状不同"), _NOTHING, _SCRIPTS, "host",
          ("detected mismatch between collectives", "rank"), "inconsistent across ranks",
          ("collectives", "out of sync")),
    _text("HCCL", P, _w("the TLS switch differs between ranks", "各 rank 的 TLS 开关不一致"), _NOTHING,
          _w("make it equal on every node (hccn_tool -tls)", "在所有节点上保持一致（hccn_tool -tls）"), "faultdiag",
          "some ranks tlsstatus are inconsistent"),
    _text("host", P, _w("a library finds no room for its thread-local data", "静态 TLS 空间不足"),
          _w("the order in which libraries are loaded", "库的加载顺序"),
          _w("import that library first, or put it into LD_PRELOAD", "先导入该库，或将其加入 LD_PRELOAD"), "host",
          "static tls block"),
    _text("CUDA", P, _w("GPU memory is used up", "GPU 显存不足"), _TOO_LARGE,
          _w("use a smaller batch or model part, and look for a leftover process on the card (nvidia-smi)",
             "减小 batch 或模型切分，并用 nvidia-smi 查看卡上是否有残留进程"), "cuda",
          "cuda out of memory", "cuda error: out of memory", "cuda_error_out_of_memory"),
    _text("driver", P, _w("NPU memory is used up", "NPU 内存不足"), _TOO_LARGE, _MEMORY, "faultdiag",
          "npu out of memory", "outofmemoryerror", "allocate continuous memory failed", "devmemallochugepagemanaged failed"),
    _text("host", P, _w("the host or container ran out of memory", "主机或容器内存不足"),
          _w("the container's limit, or data workers", "容器内存限制，或数据加载进程"),
          _w("raise the container's limit, or use fewer data workers and a smaller cache",
             "提高容器内存限制，或减少数据进程与缓存"), "faultdiag",
          "memory cgroup out of memory", "out of memory: killed process", "exitstatus=137", "cannot allocate memory",
          "std::bad_alloc", "oom-kill", "oomkilled", "oom_kill event", "memoryerror"),
    _text("driver", P, _w("the device's memory is used up", "设备内存不足"), _TOO_LARGE, _MEMORY, "faultdiag",
          "out of memory", "memory allocation failed", "failed to allocate memory", ("aclrtmalloc failed", "size")),
    _text("driver", P, _w("the device lost its heartbeat", "设备心跳丢失"), _HARDWARE, _DEVICE, "faultdiag",
          "device lost heartbeat", "device lost heartbeart"),
    _text("CUDA", P, _w("the device's memory has an error that cannot be corrected", "设备内存出现无法纠正的错误"),
          _w("hardware", "硬件故障"),
          _w("keep the job off this card, reset or replace it (nvidia-smi -q -d ECC)", "避开该卡，复位或更换（nvidia-smi -q -d ECC）"),
          "cuda", "uncorrectable ecc error", "uncorrectable nvlink error", "has fallen off the bus"),
    _text("CUDA", P, _w("a kernel read or wrote outside its memory, or an assertion in it failed", "核函数越界访问或断言失败"),
          _w("an index out of range, such as a label or token id", "索引越界，例如标签或 token id"),
          _w("rerun with CUDA_LAUNCH_BLOCKING=1 to find the true place", "用 CUDA_LAUNCH_BLOCKING=1 重跑以定位真实位置"), "cuda",
          "illegal memory access", "device-side assert", "misaligned address", "unspecified launch failure"),
    _text("CUDA", P, _w("two ranks use one device", "两个 rank 使用了同一设备"), _NOTHING,
          _w("set the device from LOCAL_RANK in every rank, and no more ranks than devices",
             "每个 rank 用 LOCAL_RANK 设置设备，rank 数不超过设备数"), "nccl", "duplicate gpu detected", "invalid device ordinal"),
    _text("driver", P, _w("device memory has an error", "设备内存错误"), _w("hardware", "硬件故障"),
          _w("read the counters with npu-smi info -t ecc -i N; reset or replace the device",
             "用 npu-smi info -t ecc -i N 查看计数；复位或更换设备"), "torch_npu",
          "hbm multi-bit ecc error", "hbm multi bit ecc error", "suspect device mem error", "reason=[device mem error]", "uce error"),
    _text("driver", P, _w("direct access between two NPUs could not be enabled", "两个 NPU 间 P2P 使能失败"),
          _w("the two are not in one container or partition, or the driver refuses", "两个 NPU 不在同一容器或分区，或驱动拒绝"),
          _w("copy through host memory or load on the rank's own device (map_location); check npu-smi info -t topo",
             "经主机内存拷贝，或加载到本 rank 的设备（map_location）；检查 npu-smi info -t topo"), "torch_npu",
          "haldeviceenablep2p failed", "aclrtdeviceenablepeeraccess", "rtenablep2p"),
    _text("runtime", P, _w("a task on the device was aborted", "设备上的任务被中止"), _NOTHING,
          _w("look for the operator or device error before it", "查看之前的算子或设备错误"), "torch_npu",
          "reason=[device task abort]"),
    _text("HCCL", U, _w("a link between NPUs failed", "NPU 间链路故障"), _PEER_OR_NET, _NETWORK, "torch_npu",
          "reason=[link error]", link=True),
    _text("torch_npu", S, _w("the device was stopped by force", "设备被强制停止"),
          _w("another rank failed, and the framework asked for it", "其他 rank 失败后框架要求停止"),
          _w("look for the rank that failed first", "查看最先失败的 rank"), "torch_npu", "force stop", "suspect remote", overrides=True),
    _text("data", P, _w("data comes too slowly or not at all", "数据加载过慢或中断"),
          _w("slow storage, or a data worker that died", "存储过慢或数据进程退出"), _DATA, "faultdiag",
          ("it takes more than", "seconds to fetch a batch"), ("getnext", "timeout"), ("getnext", "timed out"),
          ("getnext", "time out"), ("getnext", "slow data processing"), ("getnext", "task error"), "aicpu_getnext", "data feeder", ("data queue", "timeout"), ("data queue", "empty"),
          hedged=True),
    _text("data", P, _w("a process that loads data died", "数据加载进程退出"),
          _w("memory, /dev/shm, or an error in the dataset", "内存、/dev/shm 不足，或数据集代码出错"),
          _w("look for its own message above; try num_workers=0; enlarge /dev/shm and memory",
             "查看上方它自己的信息；尝试 num_workers=0；增大 /dev/shm 与内存"), "host",
          ("dataloader worker", "exited unexpectedly"), ("dataloader worker", "is killed by signal"),
          ("dataset worker", "exited"), ("dataset process", "killed")),
    _text("host", P, _w("a helper process of this rank was killed", "该 rank 的辅助进程被杀死"),
          _w("nearly always the kernel, for memory", "几乎总是内核因内存不足所为"),
          _w("use fewer helper processes (num_proc, num_workers), or raise the container's memory limit; dmesg tells of it",
             "减少辅助进程数（num_proc、num_workers），或提高容器内存限制；可查看 dmesg"), "host",
          "subprocesses has abruptly died", "process pool was terminated abruptly",
          "worker process managed by the executor was unexpectedly terminated"),
    _text("operators", P, _w("a kernel's binary is not installed for this chip", "未安装该芯片的算子二进制"),
          _w("the kernels package is missing or is for another chip", "缺少 kernels 包或型号不符"),
          _w("install CANN's kernels package for this chip and version", "安装与芯片和版本匹配的 CANN kernels 包"), "host",
          ("kernel", "binary", "not found"), ("can not find", "kernel"), ("kernel binary", "failed"), ("binary_info_config.json", "not exist"),
          ("binary_info_config.json", "does not support"), ("opp_kernel", "not"),
          ("kernel bin", "not found"), ("op binary", "not found")),
    _text("operators", P, _w("an operator failed on the device", "算子在设备上执行失败"), _NOTHING, _OPERATOR, "faultdiag",
          ("aicore kernel execute failed", "fault kernel_name"), "aicore kernel execute failed",
          "aicpu kernel execute failed", "vector core exception", "aicore exception",
          ("aicore", "times out"), ("aicore", "timeout"), ("aicpu", "exception"), "error code is 507014",
          "error code is 507015", "error code is 507017", "error code is 507018", "error code is 507034",
          "error code is 507035"),
    _text("host", P, _w("shared memory is full", "共享内存已满"), _w("/dev/shm is too small", "/dev/shm 太小"),
          _w("enlarge /dev/shm (docker --shm-size), or use fewer data workers",
             "增大 /dev/shm（docker --shm-size），或减少数据进程"), "host",
          "bus error", "unable to open shared memory object", ("shm", "no space left on device"),
          ("shared memory", "no space left on device"), ("unable to allocate shared memory",),
          ("torch_", "no space left on device")),
    _text("host", P, _w("a disk is full", "磁盘已满"), _NOTHING,
          _w("free space, or write elsewhere (df -h, df -i)", "释放空间或换路径（df -h、df -i）"), "host",
          "no space left on device", "disk quota exceeded"),
    _text("host", P, _w("the system's C or C++ library is older than a package needs", "系统 C/C++ 库版本过低"), _NOTHING,
          _w("use the image or package version that fit each other", "使用互相匹配的镜像与软件包版本"), "host",
          ("version `glibc", "not found"), ("version `cxxabi", "not found"), ("version `glibcxx", "not found")),
    _text("host", P, _w("two packages do not fit each other", "软件包版本不匹配"),
          _w("torch and torch_npu, or framework and CANN, of different versions", "torch 与 torch_npu、框架与 CANN 的版本不一致"),
          _w("install versions that belong together", "安装配套版本"), "host", "undefined symbol:"),
    _text("host", P, _w("a limit of the system is reached", "达到系统限制"), _NOTHING,
          _w("raise it: ulimit -n, ulimit -u, the container's pids limit", "提高限制：ulimit -n、ulimit -u、容器 pids 限制"), "host",
          "too many open files", "can't start new thread", "resource temporarily unavailable"),
    _text("arguments", P, _w("the script does not know an option that its launcher passes", "脚本不认识启动器传入的参数"),
          _w("launchers pass --local-rank or --local_rank", "启动器传入 --local-rank 或 --local_rank"),
          _w("accept it in the script, or read LOCAL_RANK from the environment", "在脚本中接受该参数，或从环境变量读取 LOCAL_RANK"),
          "faultdiag", ("unrecognized arguments", "local-rank"), ("unrecognized arguments", "local_rank"),
          ("unrecognized arguments", "rank_id"), ("unrecognized arguments", "node_rank"),
          ("unrecognized arguments", "device_id")),
    _text("arguments", P, _w("the command line is wrong", "命令行参数有误"), _NOTHING,
          _w("correct the option or argument that the message names", "修正提示中的参数"), "faultdiag",
          "torchrun: error: unrecognized arguments:", "launch.py: error:", ("argument --node_rank", "invalid int value"),
          "error: unrecognized arguments", "error: the following arguments are required"),
    _text("storage", P, _w("a file system failed under the job", "作业所用的文件系统出错"),
          _w("a mount that was lost, or a disk or server in trouble", "挂载断开，或磁盘、存储服务异常"),
          _w("check on this node that the mount is alive (df, ls, dmesg), mount it again, then retry",
             "在该节点检查挂载是否正常（df、ls、dmesg），重新挂载后重试"), "host",
          "transport endpoint is not connected: '", "stale file handle", "read-only file system", "remote i/o error",
          "input/output error"),
    _text("host", P, _w("the host's operating system is in trouble", "主机操作系统异常"), _NOTHING,
          _w("look at dmesg; ask the administrator", "查看 dmesg，联系管理员"), "faultdiag",
          ("task", "blocked for more than"), "self-detected stall", "nf_conntrack: table full", "kernel panic",
          "i/o error"),
    _text("torch", P, _w("tensors are on different devices", "张量位于不同设备"), _NOTHING,
          _w("move them to one device; set the device before the first tensor is made",
             "移到同一设备；在创建张量前设置设备"), "host", "expected all tensors to be on the same device",
          ("tensor", "device", "mismatch")),
    _text("torch", P, _w("the number of workers that came is not the world size", "到达的进程数与 world size 不一致"),
          _w("WORLD_SIZE or --nproc-per-node differs between nodes or from the script",
             "各节点或脚本中的 WORLD_SIZE、进程数不一致"),
          _w("make world size and number of workers equal everywhere", "使 world size 与进程数处处一致"), "host",
          ("world_size", "worker_count", "barrier"), ("world size", "worker count"), ("store", "world_size", "worker_count")),

    # What any program can meet: whose fault it is, the sentence says.
    _text("Python", P, _w("a module is missing from this worker's Python environment", "该进程的 Python 环境缺少模块"),
          _w("another environment, or a package that is not on this node", "环境不对，或该节点没有安装"),
          _w("install it (pip install ...) in the environment that the worker runs in, on every node",
             "在进程所用的环境中安装（pip install ...），每个节点都要"), "host",
          "modulenotfounderror", "no module named", mild=True),
    _text("Python", P, _w("the script cannot be opened", "脚本无法打开"),
          _w("its path is seen from the work folder", "路径相对于工作目录"),
          _w("check the script path and --work-dir", "检查脚本路径与 --work-dir"), "host",
          "can't open file", mild=True),
    _text("shell", P, _w("a command that the script calls is not there", "脚本调用的命令不存在"), _NOTHING,
          _w("install it, or put its folder on PATH", "安装它，或将其目录加入 PATH"), "host",
          "command not found", (": not found", "sh: "), mild=True),
    _text("host", P, _w("a file or folder may not be used by this user", "当前用户无权使用该文件或目录"), _NOTHING,
          _w("check owner and permissions of the path, or write elsewhere", "检查路径的属主与权限，或换路径"), "host",
          "permission denied", "operation not permitted", mild=True),
    _text("host", P, _w("a file or folder is not there", "文件或目录不存在"), _NOTHING,
          _w("check the path: it exists and is mounted on this node, and is seen from the work folder",
             "检查路径：在该节点存在且已挂载，相对路径以工作目录为准"), "host",
          "no such file or directory", "filenotfounderror", mild=True),
    _text("host", P, _w("a file is damaged or was not written completely", "文件损坏或未写完"), _NOTHING,
          _w("write or copy it anew", "重新生成或复制该文件"), "host",
          "zlib.error", "crc check failed", "not a gzipped file", "image file is truncated", "cannot identify image file",
          "unpicklingerror", "ran out of input", "invalid load key", "badzipfile", "unexpected eof",
          "safetensorerror", mild=True),
    _text("torch", P, _w("the checkpoint does not fit the model", "检查点与模型不匹配"), _NOTHING,
          _w("use the configuration that the checkpoint was written with", "使用与检查点一致的配置"), "host",
          "error(s) in loading state_dict", ("size mismatch for", "checkpoint"), mild=True),

    _text("network", P, _w("a download failed: this node does not reach the site", "下载失败：该节点无法访问该站点"), _NOTHING,
          _w("download model and data beforehand and read them from disk (HF_HUB_OFFLINE=1), or set a mirror or proxy "
             "(HF_ENDPOINT, https_proxy)",
             "事先下载模型与数据并从磁盘读取（HF_HUB_OFFLINE=1），或设置镜像或代理（HF_ENDPOINT、https_proxy）"), "huggingface",
          ("couldn't connect to", "http"), "localentrynotfounderror", ("max retries exceeded with url", "http"), mild=True),
    _text("torch", P, _w("some parameters of the model got no gradient in this step", "本步中有参数没有梯度"),
          _w("a branch of the model that only some batches or ranks use", "只有部分数据或 rank 走到的模型分支"),
          _w("set find_unused_parameters=True, or let every part of the model take part in the loss on every rank",
             "设置 find_unused_parameters=True，或使模型每一部分在每个 rank 上都参与 loss"), "torch",
          "expected to have finished reduction in the prior iteration", mild=True),
    _text("training", P, _w("the loss or a gradient is no number any more", "loss 或梯度出现非数值（NaN/Inf）"), _NOTHING,
          _w("look at the data of this step, the learning rate and the loss scale; if it is always the same card, check that card",
             "检查该步的数据、学习率与 loss scale；若总是同一张卡，检查该卡"), "megatron",
          ("found nan in", "grad"), ("found inf in", "grad"), ("nan", "grad norm"), "loss is nan", "loss: nan", mild=True),

    # Kinds that HCCL writes into its own log from CANN 8.5 on.
    _text("HCCL", P, _w("HCCL refused a setting", "HCCL 拒绝了某项配置"), _NOTHING, _CORRECT, "hccl",
          ("[initgroupstage]", "[envconfig]"), ("[initgroupstage]", "[ranktableconfig]"),
          ("[initgroupstage]", "[ranktablecheck]")),
    _text("HCCL", P, _w("ranks disagree in parameters or versions", "各 rank 参数或版本不一致"), _NOTHING,
          _w("make them equal on every rank", "使所有 rank 保持一致"), "hccl",
          ("[initchannelstage]", "[parameterconflict]"), ("[initchannelstage]", "[versionconflict]")),
    _text("HCCL", P, _w("a collective operation got an argument that it does not take", "集合通信参数不被支持"), _NOTHING, _CORRECT,
          "hccl", ("[taskexecstage]", "[invalidargument]"), ("[taskexecstage]", "[not supported]")),
    _text("HCCL", U, _w("HCCL lacked a resource, or a task failed", "HCCL 资源不足或任务失败"), _NOTHING, _ABOVE, "hccl",
          ("[initgroupstage]", "[resource]"), ("[taskexecstage]", "[runfailed]")),
    _text("HCCL", S, _w("HCCL waited in vain for another rank", "HCCL 等待其他 rank 无果"), _WAIT_CAUSE, _OTHERS, "hccl",
          ("[initgroupstage]", "[ranktabledetect]"), ("[initchannelstage]", "[timeout]"),
          ("[taskexecstage]", "[timeout]"), ("[taskexecstage]", "[heartbeatabnormal]")),

    _text("NCCL", S, _w("a transfer to another rank failed", "与其他 rank 的传输失败"),
          _w("that rank ended, or the network between the two failed", "对端 rank 退出，或两者之间的网络故障"),
          _w("read the other end's log first, then check the network between the two hosts (ibstat, ping, NCCL_DEBUG=INFO)",
             "先看对端日志，再检查两台主机之间的网络（ibstat、ping、NCCL_DEBUG=INFO）"), "nccl",
          ("got completion from peer", "with error"), "ncclremoteerror", "remote process exited or there was a network error"),
    _text("HCCL", U, _w("a transfer between NPUs failed", "NPU 间传输失败"), _PEER_OR_NET, _NETWORK, "faultdiag",
          "cqe error status[12]", "[heartbeat]cqe err status", "error cqe", link=True),
    _text("HCCL", S, _w("links to another rank could not be made", "与其他 rank 建链失败"), _PEER_GONE, _OTHERS, "faultdiag",
          "wait links establish completed failed", "connected p2p timeout", "get qp status timeout_", "link_error_info"),
    _text("HCCL", S, _w("not every rank came to the exchange of addresses in time", "并非所有 rank 按时参加地址交换"), _PEER_GONE,
          _OTHERS, "faultdiag", "topo exchange agent get socket timeout", "topo exchange server get socket timeout"),
    _text("HCCL", S, _w("a wait for another rank timed out inside a collective operation", "集合通信中等待其他 rank 超时"),
          _WAIT_CAUSE, _WAITED, "faultdiag",
          ("task run failed", "notify wait"), "notify wait execute failed", "ffts+ run failed",
          "fftsplus task timeout", ("stuck notify", "timeout")),
    _text("torch", S, _w("a collective operation took longer than its time-out", "集合通信操作超时"),
          _WAIT_CAUSE,
          _w("look at the ranks without this error, or at another operation (OpType, SeqNum); if one only was slow, give "
             "init_process_group a longer timeout",
             "查看没有此错误、或处于不同操作（OpType、SeqNum）的 rank；若只是有 rank 较慢，增大 init_process_group 的 timeout"), "torch",
          "watchdog caught collective operation timeout"),
    _text("torch", S, _w("another rank did not come to make the communication group in time", "有 rank 未按时参加通信域创建"),
          _w("rank 0, or the one named, was busy, had died or never started", "rank 0 或被指出的 rank 忙、已退出或未启动"),
          _SLOW_START, "torch", ("is setting up", "communicator and retrieving"), ("store->get(", "timeout")),
    _text("torch", S, _w("the process that keeps the store of the job was not there", "保存作业 store 的进程不在"),
          _w("rank 0 keeps it: it had ended, had not started yet, or its address is wrong",
             "rank 0 负责 store：它已结束、尚未启动，或地址有误"),
          _w("read rank 0's log; let every rank wait (barrier) before rank 0 leaves; check MASTER_ADDR and MASTER_PORT",
             "查看 rank 0 的日志；rank 0 退出前让所有 rank 等待（barrier）；检查 MASTER_ADDR 与 MASTER_PORT"), "torch",
          "tcpstore server has shut down", ("failed to recv, got 0 bytes", "remote server"),
          ("client socket has", "while trying to connect"), ("client socket has failed to connect",)),
    _text("torch", S, _w("another rank closed its connection", "其他 rank 关闭了连接"),
          _w("it ended before", "它已先退出"), _w("read that rank's log", "查看该 rank 的日志"), "host",
          "connection closed by peer", "connection reset by peer"),
    _text("runtime", S, _w("waiting for the device timed out", "等待设备超时"),
          _w("an operator or another rank hangs", "算子或其他 rank 卡住"), _OTHERS_OR_SLOW, "faultdiag",
          "sync stream timeout", "stream sync timeout", "event wait timeout", "device synchronize failed",
          "error code is 107020"),
    _text("HCCL", S, _w("the communication group could not be made", "通信域创建失败"), _PEER_GONE, _OTHERS, "faultdiag",
          ("communicator of group", "inited failed"), vague=True),
    _text("HCCL", S, _w("a call of HCCL failed", "调用 HCCL 失败"), _WAIT_CAUSE, _OTHERS, "faultdiag", "hccl error in",
          vague=True),
    _text("Python", P, _w("a debugger was left, or it or a question in the script found no terminal",
                          "调试器被退出，或者脚本中的调试器或输入请求没有终端可用"),
          _w("only the rank of --debug has a terminal; any other worker's standard input is empty",
             "只有 --debug 指定的 rank 拥有终端，其他 worker 的标准输入为空"),
          _w("to debug a rank, give it the terminal with --debug RANK", "如需调试，用 --debug RANK 把终端交给该 rank"), "python",
          "bdb.bdbquit", "eoferror: eof when reading a line"),
    _text("torch_npu", U, _w("the NPU reports errors late, so the stack may point at a later line",
                             "NPU 错误是异步上报的，堆栈可能指向更晚的代码行"), _NOTHING,
          _w("rerun with ASCEND_LAUNCH_BLOCKING=1 to find the true place", "用 ASCEND_LAUNCH_BLOCKING=1 重跑以定位真实位置"),
          "faultdiag", "kernel errors might be asynchronously reported", "ascend_launch_blocking", vague=True, hedged=True,
          aside=True),
)  # fmt: skip
"""Most specific first: of two rows that fit one line equally well, the earlier is taken."""

SAME_ENDS = next(known for known in FRAGMENTS if known.meaning is _SAME_END)
"""For a line that shows it by its addresses instead of saying so."""

CODES: dict[str, Known] = {known.code: known for known in (*_HCCL, *_CANN, *_TORCH)}

# torch_npu builds its numbers from a part of itself and a kind of error.
TORCH_PARTS = {
    "00": _w("core", "框架核心"),
    "01": _w("operators", "算子"),
    "02": _w("communication", "通信"),
    "03": _w("graph", "图"),
    "04": _w("profiler", "性能分析"),
    "99": _w("unknown part", "未知部分"),
}
TORCH_KINDS = {
    "001": _w("bad parameter", "参数错误"),
    "002": _w("wrong type", "类型错误"),
    "003": _w("bad value", "取值错误"),
    "004": _w("bad pointer", "指针错误"),
    "005": _w("internal error", "内部错误"),
    "006": _w("no memory", "内存错误"),
    "007": _w("not supported", "不支持"),
    "008": _w("not found", "未找到"),
    "009": _w("not available", "不可用"),
    "010": _w("a system call failed", "系统调用失败"),
    "011": _w("time-out", "超时"),
    "012": _w("no permission", "没有权限"),
    "100": _w("AscendCL call failed", "调用 AscendCL 失败"),
    "200": _w("HCCL call failed", "调用 HCCL 失败"),
    "300": _w("graph engine call failed", "调用图引擎失败"),
    "999": _w("exception", "异常"),
}

_CANN_CODE = re.compile(r"(?<![\w/.-])(E[A-Z0-9]\d{4})(?=[):/\]\[]|$)", re.ASCII)
_TORCH_CODE = re.compile(r"(?<!\w)ERR(\d{2})(\d{3})(?!\w)", re.ASCII)
_NO_CAUSE = "99999"
"""torch_npu prints it for every exception that is not its own."""


def codes_in(line: str) -> list[Known]:
    """List the errors that a line names by code; an unknown code gets a row that guesses nothing."""
    found = [CODES.get(code) or _unknown(code) for code in dict.fromkeys(_CANN_CODE.findall(line))]
    for part, kind in dict.fromkeys(_TORCH_CODE.findall(line)):
        if part + kind != _NO_CAUSE:
            code = f"ERR{part}{kind}"
            found.append(CODES.get(code) or _unknown_torch(code, part, kind))
    return found


def fragments_in(lines: Iterable[str]) -> list[tuple[Known, tuple[str, ...]]]:
    """List the rows of which some alternative can be in these lines, with that alternative."""
    # Most tails hold hardly any fragment: one search in the whole keeps the loop over lines short.
    whole = "\n".join(lines).lower()
    return [
        (known, parts)
        for known in FRAGMENTS
        for parts in known.fragments
        if all(part in whole for part in parts)
    ]


def _unknown(code: str) -> Known:
    return Known(
        code=code,
        component="CANN",
        role=U,
        meaning=_w("a CANN error that this program does not know", "本程序不认识的 CANN 错误"),
        cause=_NOTHING,
        remedy=_ABOVE,
        source="",
        vague=True,
    )


def _unknown_torch(code: str, part: str, kind: str) -> Known:
    parts, kinds = TORCH_PARTS.get(part), TORCH_KINDS.get(kind)
    en = f"{parts.en if parts else 'unknown part'}, {kinds.en if kinds else 'unknown kind'}"
    zh = f"{parts.zh if parts else '未知部分'}，{kinds.zh if kinds else '未知类别'}"
    return Known(
        code=code,
        component="torch_npu",
        role=S if kind == "200" else U,
        meaning=_w(f"an error of torch_npu ({en})", f"torch_npu 错误（{zh}）"),
        cause=_NOTHING,
        remedy=_ABOVE,
        source="torch_npu",
        vague=True,
    )
