"""Errors in a worker's output as blocks: a traceback with its chain, a code with its text, an abort."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from davincirunsdk.diagnosis.lines import mask
from davincirunsdk.diagnosis.speech import is_carrier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from davincirunsdk.diagnosis.lines import Line

_MOST_CONTINUED = 400
"""Lines that one block may have; a deep recursion's traceback has a thousand frames."""


class Kind(Enum):
    """What sort of block it is."""

    TRACEBACK = "traceback"
    CODE = "code"
    ABORT = "abort"
    USAGE = "usage"
    EXCEPTION = "exception"
    LOG = "log"
    WORDS = "words"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Lines that tell of one error.

    Attributes:
        kind: See `Kind`.
        first: Index of its first line.
        last: Index of its last line.
        texts: Its lines.
        said: The lines that say what is wrong: exceptions of a chain oldest first, else its first line.
        thread: It was raised in a thread, so that the process lives on.
    """

    kind: Kind
    first: int
    last: int
    texts: tuple[str, ...]
    said: tuple[str, ...]
    thread: bool = False


_HEADER = re.compile(r"(?:Exception Group )?Traceback \(most recent call last\):?")
_FRAME = re.compile(r'\s*(?:\|\s*)*File "[^"]*", line \d+')
_JOINERS = (
    "During handling of the above exception, another exception occurred",
    "The above exception was the direct cause of the following exception",
)
_IGNORED = re.compile(
    r"Exception ignored (?:in|on|while)|--- Logging error ---|Error in atexit|Error in sys\.|"
    r"Exception in (?:callback|atexit)|Task exception was never retrieved|Future exception was never retrieved"
)
_THREAD = re.compile(r"Exception in thread|Unhandled exception in thread")
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Failure|Fault|Exit|Timeout|Empty|"
    r"Abort(?:ed)?)(?::|$|\(| \()",
    re.ASCII,
)
_CODE = re.compile(r"\s{0,3}(?:\[PID: ?\d+\] .{0,60}?)?(?:[\w-]{0,80}\()?(E[A-Z0-9]\d{4})\)?[:/\[]", re.ASCII)
_USAGE = re.compile(r"[\w./ -]{1,80}: error: |usage: ")
_ABORT = re.compile(
    r"terminate called|\s*what\(\):|Fatal Python error|\*\*\* (?:Aborted|SIG|Process received|Error in)|"
    r".{0,60}(?:Segmentation fault|segfault)|double free|free\(\): |malloc(?:_consolidate)?\(\): |realloc\(\): |"
    r"corrupted (?:size|double|unsorted)|munmap_chunk|.{0,200}: Assertion .{0,300} failed|Aborted\b|Bus error|"
    r"Killed$|Illegal instruction|Floating point exception|\*\*\* stack smashing|Check failed: "
)
_ANNOUNCED = re.compile(r"\*\*\* Process received|terminate called")
_STACK = re.compile(
    r"\s*#\d+\s|\s*frame #\d+|\s*@\s+0x|\s*\[?\S*\]?\s*\[\s*\d+\]\s|(?:Current t|T)hread 0x|Extension modules|"
    r"<no Python frame>|\S+\(\S*\+0x|\*\*\* |\s*\S+\.so"
)
_LEVEL_WORD = re.compile(
    r"\b(?:(ERROR|CRITICAL|FATAL|SEVERE)|(?:WARN|WARNING|INFO|DEBUG|EVENT|TRACE|NOTICE))\b"
)
_GLOG = re.compile(r"\[?([EFWI])(?:\d{3,4}[ \]]| \d\d:)")
_ERROR_START = re.compile(
    r"(?:[\w./-]{1,60}: )?(?:\[?error\]?|fatal(?: error)?|错误|致命错误)\s*[:：!]", re.IGNORECASE
)
_RULE = re.compile(r"-{20,}|={20,}")
_BOX = re.compile(r"-{20,}|- [A-Z].{0,80}[:)]?$|\(Please search|\[Error\]|={20,}")
_BOX_TITLE = re.compile(r"- [A-Z].{0,80}[:)]?\s*$")
_REPORTED = re.compile(
    r"\[ERROR\] [\d:. -]{8,40} \(PID:\d+, Device:-?\d+, RankID:-?\d+\) ERR(?!99999)|\[Error\]|"
    r"[hn]ccl\w{0,30}Error: |Last error:|NET/|(?:CUDA|NPU) (?:kernel )?errors? |For debugging|Compile with|Exception raised from"
)
"""What torch_npu, HCCL, NCCL and CUDA put into an exception's text below its first line."""
_RICH = ("╭", "│", "╰")
_LONGEST_LIST = 40
"""Lines of a list in brackets that an error's text may hold."""
_ADVICE = re.compile(
    r"\W*(?:possible causes?|solutions?|suggestions?|advice|please (?:refer|check|see)|for (?:details|more)|see\b|"
    r"hint|note|tip|可能原因|解决方法|解决方案|处理建议|建议)",
    re.IGNORECASE,
)
_SPEAKS = re.compile(
    r"\b(?:error|fail(?:ed|ure|s)?|fatal|cannot|can't|could not|couldn't|unable|denied|not found|no such|invalid|"
    r"unrecognized|abort(?:ed|ing)?|timed? ?out|timeout|killed|panic|refused|reason)\b|错误|失败|无法|异常|超时|找不到|不存在",
    re.IGNORECASE,
)
_SCANNED = 300


def is_error_level(text: str) -> bool | None:
    """Tell how a log line speaks: True as an error, False as a warning or less, None when it does not say."""
    text = text[:_SCANNED].lstrip()
    if word := _LEVEL_WORD.search(text[:200]):
        return bool(word[1])
    if glog := _GLOG.match(text):
        return glog[1] in "EF"
    return True if _ERROR_START.match(text) else None


def is_advice(text: str) -> bool:
    """Tell whether a line only advises what to look at."""
    return _ADVICE.match(text) is not None


def find_blocks(lines: Sequence[Line]) -> list[Block]:
    """Find the blocks that speak of an error, in the order of the output."""
    found: list[Block] = []
    texts = [line.text for line in lines]
    index = 0
    while index < len(texts):
        block = _block_at(texts, index)
        if block is None:
            index += 1
            continue
        if block.said:
            found.append(block)
        index = block.last + 1
    return found


def spoken_words(lines: Sequence[Line], count: int = 20) -> Block | None:
    """Choose the last plain line that speaks of an error, for output without any block."""
    start = max(0, len(lines) - count)
    for index in range(start, len(lines)):
        text = lines[index].text
        if _SPEAKS.search(text[:_SCANNED]) and is_error_level(text) is not False and not is_advice(text):
            rest = tuple(line.text for line in lines[index:])
            return Block(kind=Kind.WORDS, first=index, last=len(lines) - 1, texts=rest, said=(text.strip(),))
    return None


def _block_at(texts: Sequence[str], index: int) -> Block | None:
    text = texts[index]
    if _IGNORED.match(text) or "exception was never retrieved" in text:
        return _ignored(texts, index)
    if _THREAD.match(text) and index + 1 < len(texts) and _HEADER.search(texts[index + 1]):
        return _traceback(texts, index + 1, start=index, thread=True)
    if text.lstrip().startswith(_RICH[0]) and _HEADER.search(text):
        return _drawn(texts, index)
    if _HEADER.search(text) or _FRAME.match(text):
        return _traceback(texts, index, start=index)
    if _CODE.match(text):
        return _continued(Kind.CODE, texts, index)
    if _ABORT.match(text):
        return _abort(texts, index)
    if text.startswith(("Thread 0x", "Current thread 0x")) and "most recent call first" in text:
        # A stack that somebody asked for tells of no error.
        end = index + 1
        while end < len(texts) and (texts[end].startswith(" ") or _STACK.match(texts[end])):
            end += 1
        return Block(kind=Kind.LOG, first=index, last=end - 1, texts=(), said=())
    if _USAGE.match(text):
        return _usage(texts, index)
    if _EXCEPTION.match(text):
        return _continued(Kind.EXCEPTION, texts, index)
    if is_error_level(text) and not is_advice(text):
        return _continued(Kind.LOG, texts, index)
    return None


def _ignored(texts: Sequence[str], index: int) -> Block:
    """An exception that the interpreter or a logger swallowed: it is stepped over."""
    end = index + 1
    if end < len(texts) and (_HEADER.search(texts[end]) or _FRAME.match(texts[end])):
        inner = _traceback(texts, end, start=index)
        end = inner.last + 1
    elif end < len(texts) and _EXCEPTION.match(texts[end]):
        end += 1
    return Block(kind=Kind.LOG, first=index, last=end - 1, texts=(), said=())


def _traceback(texts: Sequence[str], index: int, *, start: int, thread: bool = False) -> Block:
    """A traceback with everything that it is chained to, however a logger prefixes its lines."""
    said: list[str] = []
    quoted = False
    head = _HEADER.search(texts[index])
    prefix = texts[index][: head.start()] if head else ""
    grouped = prefix.strip(" +|") == "" and ("|" in prefix or "+" in prefix)
    shape = mask(prefix)
    if grouped:
        prefix = ""
    end = index + (1 if head else 0)
    while end < len(texts) and end - start < _MOST_CONTINUED * 5:
        text = _without(texts[end], prefix, shape)
        bare = text.lstrip(" |+")
        boxed = text.lstrip().startswith(("|", "+"))
        if _HEADER.search(bare) or bare.startswith(_JOINERS):
            end += 1
            continue
        if boxed:
            if _EXCEPTION.match(bare) and not text.startswith(" " * 40):
                said.append(bare)
            end += 1
            continue
        if grouped:
            break
        if text.startswith(" ") or not text:
            end += 1
            continue
        if not said or (quoted and _EXCEPTION.match(text)) or _follows_header(texts, end, prefix, shape):
            quoted = False
            said.append(text)
            end = _message_end(texts, end + 1, prefix, shape, text)
            if end < len(texts) and _FRAME.match(_without(texts[end], prefix, shape)):
                # Its text is the traceback of another process, which ends with an exception of its own.
                quoted = True
                continue
            chained = _chained_at(texts, end, prefix, shape)
            if chained is not None:
                end = chained
                continue
            break
        break
    if not said:
        # The process ended, or was ended, while it wrote.
        frames = [text.strip() for text in texts[index:end] if text.strip()]
        said = [f"{frames[-1]} (traceback cut off)"] if frames else []
    last = max(end - 1, index)
    return Block(
        kind=Kind.TRACEBACK,
        first=start,
        last=last,
        texts=tuple(_without(text, prefix, shape) for text in texts[start : last + 1]),
        said=tuple(said),
        thread=thread,
    )


def _chained_at(texts: Sequence[str], end: int, prefix: str, shape: str) -> int | None:
    """Where the traceback goes on that an exception is chained to, None where it does not."""
    joined = end
    while joined < len(texts) and not _without(texts[joined], prefix, shape).strip():
        # A blank line is one with a prefix only.
        joined += 1
    if joined == len(texts):
        return None
    following = _without(texts[joined], prefix, shape)
    goes_on = following.startswith(_JOINERS) or (
        _HEADER.match(following) and texts[joined - 1].startswith(_JOINERS)
    )
    return joined if goes_on else None


def _drawn(texts: Sequence[str], index: int) -> Block:
    """A traceback in a drawn frame, as the rich library prints it: the exception stands below the frame."""
    said: list[str] = []
    end = index
    while end < len(texts) and end - index < _MOST_CONTINUED:
        text = texts[end]
        if text.lstrip().startswith(_RICH) or text.startswith(_JOINERS):
            end += 1
            continue
        if texts[end - 1].lstrip().startswith(_RICH[-1]):
            said.append(text.strip())
            end = _message_end(texts, end + 1, "", "", text)
            continue
        break
    cut_off = f"{texts[end - 1].strip(' │')} (traceback cut off)"
    return Block(
        kind=Kind.TRACEBACK,
        first=index,
        last=end - 1,
        texts=tuple(texts[index:end]),
        said=tuple(said) or (cut_off,),
    )


def _follows_header(texts: Sequence[str], end: int, prefix: str, shape: str) -> bool:
    """Whether a chained traceback, or a frame of it, stands before this line."""
    for back in range(end - 1, max(-1, end - _MOST_CONTINUED), -1):
        text = _without(texts[back], prefix, shape)
        if _HEADER.search(text):
            return True
        if text and not text.startswith(" "):
            return False
    return False


def _message_end(texts: Sequence[str], end: int, prefix: str, shape: str, said: str) -> int:
    """Step over what belongs to an exception's text below its first line.

    That is indented lines, MindSpore's boxes, and, under an exception with which libraries hand on the
    troubles of others, what these have reported.
    """
    hands_on = is_carrier(said)
    code = ""
    brackets = _Brackets()
    limit = min(len(texts), end + _MOST_CONTINUED)
    while end < limit:
        text = _without(texts[end], prefix, shape)
        found = _CODE.match(text)
        if _FRAME.match(text) or _HEADER.search(text):
            break
        if found is not None:
            if not hands_on and not _in_box(texts, end):
                break
            code = found[1]
        elif not (
            text.startswith(" ")
            or _BOX.match(text)
            or brackets.open
            or _in_box(texts, end)
            or (hands_on and _REPORTED.match(text))
            or (code and (text.startswith((code, "TraceBack")) or is_advice(text)))
        ):
            break
        brackets.read(text)
        end += 1
    return end


def _in_box(texts: Sequence[str], index: int) -> bool:
    """Whether a line is the first below the title of one of MindSpore's boxes."""
    return (
        index >= 2
        and _RULE.match(texts[index - 1].lstrip()) is not None
        and _BOX_TITLE.match(texts[index - 2].lstrip()) is not None
    )


class _Brackets:
    """Whether the lines read so far have opened a list that goes on in the next one."""

    def __init__(self) -> None:
        self._left = 0

    @property
    def open(self) -> bool:
        return self._left > 0

    def read(self, text: str) -> None:
        bare = text.strip()
        if bare.endswith("["):
            self._left = _LONGEST_LIST
        elif bare.startswith("]"):
            self._left = 0
        else:
            self._left = max(0, self._left - 1)


def _without(text: str, prefix: str, shape: str) -> str:
    if not prefix:
        return text
    if text.startswith(prefix):
        return text[len(prefix) :]
    # A logger's prefix holds a time that moves on, and a blank line is nothing but a prefix.
    head = text[: len(prefix)]
    if shape and mask(head) == shape:
        return text[len(prefix) :] if len(text) > len(prefix.rstrip()) else ""
    return text


def _continued(kind: Kind, texts: Sequence[str], index: int) -> Block:
    """A first line and what belongs to it: indented lines, and lines that start with the same code."""
    code = _CODE.match(texts[index])
    indent = len(texts[index]) - len(texts[index].lstrip())
    brackets = _Brackets()
    brackets.read(texts[index])
    end = index + 1
    if kind is Kind.EXCEPTION:
        end = _message_end(texts, end, "", "", texts[index])
    limit = min(len(texts), index + _MOST_CONTINUED)
    while end < limit:
        text = texts[end]
        deeper = len(text) - len(text.lstrip()) > indent
        again = _CODE.match(text)
        if again is not None and (code is None or again[1] != code[1]):
            break
        if _FRAME.match(text):
            break
        explains = is_error_level(text) is False and text.lstrip().startswith(("[WARN", "W"))
        if (
            deeper
            or again is not None
            or (explains and end == index + 1)
            or _BOX.match(text)
            or brackets.open
        ):
            end += 1
        elif kind is Kind.CODE and (
            is_advice(text)
            or text.startswith(("TraceBack", "[FUNC"))
            or (code is not None and text.lstrip().startswith(code[1]))
        ):
            end += 1
        else:
            break
        brackets.read(text)
    return Block(
        kind=kind, first=index, last=end - 1, texts=tuple(texts[index:end]), said=(texts[index].strip(),)
    )


def _abort(texts: Sequence[str], index: int) -> Block:
    end = index + 1
    said = [texts[index].strip()]
    limit = min(len(texts), index + _MOST_CONTINUED)
    while end < limit:
        text = texts[end]
        if _ABORT.match(text):
            said.append(text.strip())
        elif not (text.startswith(" ") or _STACK.match(text) or "most recent call first" in text):
            carried = _message_end(texts, end, "", "", "RuntimeError")
            if carried == end:
                break
            end = carried
            continue
        end += 1
    told = [one for one in said if one.startswith("what()")]
    told = told or [one for one in said if not _ANNOUNCED.match(one)] or said
    return Block(
        kind=Kind.ABORT,
        first=index,
        last=end - 1,
        texts=tuple(texts[index:end]),
        said=tuple(told[:1] + [one for one in said if one not in told[:1]][:2]),
    )


def _usage(texts: Sequence[str], index: int) -> Block | None:
    end = index
    while end < min(len(texts), index + 60):
        if ": error: " in texts[end]:
            block = tuple(texts[index : end + 1])
            return Block(kind=Kind.USAGE, first=index, last=end, texts=block, said=(texts[end].strip(),))
        if end > index and not texts[end].startswith((" ", "[")):
            return None
        end += 1
    return None
