"""What a sentence of an error is about: the rank's own doing, or its waiting for others."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_I = re.IGNORECASE

_WAIT = re.compile(
    r"time[ds]?[ -]?out|timeout|deadline|\bwait(?:ed|ing|s)?\b|"
    r"(?:\bnot|n't|\bnever)(?: yet)?(?: been)? (?:join|arriv|respond|reach|report|connect|sen[dt]|c[oa]me|load|ready|"
    r"start|appear|answer|call|show|enter|regist|writ|receiv|creat|check)\w*|"
    r"\bnot (?:all|every)\b|too few|only \d+ (?:of|/)|\d+/\d+ \w+ (?:joined|arrived|ready)|missing rank|gave up|expired|"
    r"\bno (?:response|answer|reply|heartbeat|notify|record)|"
    r"failed to (?:pass|join|reach|connect|rendezvous|receive|recv)|超时|等待|未(?:到达|响应|加入|连接)",
    _I,
)
_PEER = re.compile(
    r"\bpeers?\b|\bremote\b|\b(?:an)?other (?:end|rank|process|worker|node|host|side|party|trainer|member|proc)\w*|"
    r"\b(?:one|some|all|not all|every) (?:of the )?(?:other )?(?:rank|process|worker|node|client|agent|member|participant)\w*|"
    r"\b(?:rank|worker|node|agent|participant|process)s?[ _#:\[(]*\d+|heartbeat|\bclients?\b|\b(?:local |main |group )?leader\b|"
    r"\bmaster\b|\bcoordinator\b|\bchief\b|\b(?:main|parent|leader|root|driver) (?:process|rank|node)\b|对端|其他|对方|主节点|主进程|心跳",
    _I,
)
_TOGETHER = re.compile(
    r"collective|all_?-?(?:reduce|gather|to_?-?all)|\bbroadcast|reduce_?scatter|\bbarrier|monitoredbarrier|"
    r"\b[hnmrux]?ccl\b|[hn]ccl|\bgloo\b|process ?group|rendezvous|\b\w*store\b|\bnotify\b|watchdog|"
    r"communicat(?:or|ion)|\bcomm\b|cluster|topo exchange|socket|集合通信|通信|建链",
    _I,
)
_GONE = re.compile(
    r"closed by|reset by|connection[ -]?(?:was |is |has been )?(?:\w+ly )?(?:closed|reset|refused|aborted|lost|broken)|broken ?pipe|"
    r"lost (?:contact|connection|heartbeat)|(?:heartbeat|contact|connection) (?:was |is )?lost|disconnect|unreachable|"
    r"(?:has|have|was|were|been|had|is|are|it|may|might)(?: \w+)? (?:died|dead|lost|exited|terminated|gone|aborted|killed|crashed|failed|exit)\b|"
    r"\b(?:process|rank|peer|worker|node|server|end)(?: \d+)?(?: has)? (?:died|exited|exiting|crashed|terminated|shut ?down)\b|"
    r"\b(?:died|crashed|exited|terminated|aborted|vanished|left) (?:unexpectedly|before|early|already|with)|"
    r"no longer|not alive|eof\b|end of file|hung up|abort(?:ed|ing)\b|退出|断开|丢失|关闭",
    _I,
)
_ALONE = re.compile(
    r"connection (?:closed|reset) by (?:remote )?peer|socket closed|peer (?:is |has )?(?:gone|dead|lost|closed)|"
    r"connection reset|connection aborted|software caused connection abort|transport (?:endpoint|retry)",
    _I,
)
_LOCAL = re.compile(
    r"data ?loader|dataset|get_?next|data worker|prefetch|https?://|\burl\b|download|\bs3\b|\bobs\b|hugging ?face|"
    r"database|sqlite|\bredis\b|tokenizer|dtype|shape|size mismatch|valueerror|typeerror|keyerror|attributeerror|"
    r"indexerror|\bsubprocess\b|compil|invalid (?:argument|value|rank)|unsupported|not supported|should be|must be|"
    r"expected|数据",
    _I,
)
_TOLD = re.compile(
    r"KeyboardInterrupt|SystemExit|SIGTERM|SIGINT|SIGHUP|SignalException|got signal|received signal|"
    r"received (?:a )?(?:stop|termination|shutdown)|signal 15|\bsignal: Terminated|(?-i:\bTerminated\b)|preempt|being stopped|"
    r"终止信号|抢占",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"\be\.?g\.|\bi\.?e\.|for example|for instance|such as|\blikely\b|\bmaybe\b|\bmight\b|\bmay\b|possib(?:le|ly)|perhaps|"
    r"probably|check (?:whether|if|that|the|your|for)?|make sure|ensure|please|in case|could be|can be caused|"
    r"suggest|consider|try (?:to|setting|running)|if (?:the|you|it|there|another|this)|"
    r"例如|比如|可能|或许|请|检查|是否|确认|建议",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!etc)[.;!?](?=\s)|[。；！？]|\d+\.\s")

# A failed call of a communication library reaches Python as one of these, so they prove no fault of the rank's own.
_CARRIERS = re.compile(
    r"(?:[\w.]+\.)?(?:RuntimeError|SystemError|Dist\w*Error|ConnectionError|Connection\w+Error|BrokenPipeError|"
    r"TimeoutError|OSError|Exception|Empty|EOFError|Rendezvous\w+|InternalError|CommError|\w*Hccl\w*|\w*Timeout\w*)\b",
    re.ASCII,
)


# Servers outside the job go away, too, and no rank of it is to blame for that.
_SERVICE = re.compile(
    r"\b(?:requests|urllib3|httpx|aiohttp|botocore|boto3|redis|pymongo|wandb|huggingface_hub|modelscope|oss2)\.|"
    r"RemoteDisconnected",
)


def is_about_waiting(text: str) -> bool:
    """Tell whether a sentence says that others did not come, or went away."""
    if _SERVICE.search(text):
        return False
    if _ALONE.search(text):
        return not re.search(r"https?|download|\burl\b|\bs3\b|\bobs\b", text, _I)
    if _LOCAL.search(text) and not (_PEER.search(text) and (_GONE.search(text) or _WAIT.search(text))):
        return False
    if _LOCAL.search(text) and re.search(
        r"data ?loader|dataset|get_?next|data worker|prefetch|https?://|download", text, _I
    ):
        return False
    waits, peer, together, gone = (bool(one.search(text)) for one in (_WAIT, _PEER, _TOGETHER, _GONE))
    return (waits and (peer or together)) or (gone and (peer or together))


def is_about_communication(text: str) -> bool:
    """Tell whether an exception comes from a communication library and does not say whose fault it is."""
    return bool(is_carrier(text) and _TOGETHER.search(text) and not _LOCAL.search(text))


_IN_COLLECTIVE = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|\bbarrier\(|\bbroadcast\w*\(|init_process_group|"
    r"torch/distributed|mindspore/communication|\bhccl|\bnccl|\bgloo|unbound_buffer|\bdist\.\w+\(",
    _I,
)


def is_in_collective(texts: Sequence[str]) -> bool:
    """Tell whether the last frames of a traceback are in a call in which ranks wait for each other."""
    return any(_IN_COLLECTIVE.search(text) for text in texts)


def is_carrier(text: str) -> bool:
    """Tell whether an exception's class is one in which libraries hand on the troubles of others."""
    return _CARRIERS.match(text) is not None


def is_about_being_told(text: str) -> bool:
    """Tell whether an error only says that the process was asked to end."""
    return _TOLD.search(text) is not None


def is_hedged(text: str, at: int) -> bool:
    """Tell whether the sentence around a place in a text gives an example or advice, not a finding."""
    start = 0
    for end in _SENTENCE.finditer(text, 0, at):
        start = end.end()
    return _HEDGE.search(text, start, at) is not None


_NAMED = re.compile(
    r"(?P<before>\b(?:local|own|my|self|this|current|cur|src|source|from|world|by)[ _]?(?:user)?[ _]?)?"
    r"(?P<word>ranks?|agents?|workers?|peers?|process(?:es)?|trainers?|node|participants?|user_?rank|remoterank|"
    r"rank_?id|remote_?rank|dst_?rank|dest_?rank|节点|进程)"
    r"(?:\(s\))?(?:[ _-]?(?:ids?|no\.?|num(?:ber)?|list))?\s?[:=#]?\s?[\[({]?\s?"
    r"(?P<numbers>\d{1,6}(?:\s?(?:,|and|or|&|、|和|-)\s?\d{1,6})*)(?![\w.%]*[/%])",
    _I,
)
_ADDRESSED = re.compile(r"\d+\.\d+\.\d+\.\d+\((\d{1,6})\)")
_LOCATED = re.compile(r"cluster exception location\[ip/id\]: ?((?:\[[\w.:/-]{1,80}\](?:, ?)?)+)", _I)
_RELAY = re.compile(
    r"check|see|look|refer|original|root|more|details|log of|logs? (?:for|on|of|from)|查看|检查", _I
)


def ranks_named(text: str) -> tuple[list[int], list[int]]:
    """List the ranks that a text names as the ones to look at.

    Returns:
        Those named as a finding, and those that the text only sends the reader to.
    """
    findings: list[int] = []
    relays: list[int] = []
    for found in _NAMED.finditer(text):
        before = (found["before"] or "").lower()
        if before.startswith(("local", "own", "my", "self", "this", "cur", "src", "source", "world")):
            continue
        start = max(0, found.start() - 40)
        into = relays if _RELAY.search(text, start, found.start()) else findings
        for part in re.split(r"\s?(?:,|and|or|&|、|和)\s?", found["numbers"]):
            low, _, high = part.partition("-")
            first, last = int(low), int(high.strip() or low)
            into += range(first, min(last, first + 64) + 1)
    findings += [int(number) for number in _ADDRESSED.findall(text)]
    return findings, relays


def places_named(text: str) -> list[tuple[str, str]]:
    """List the addresses and devices that HCCL's own finding names."""
    return [
        (place.rpartition("/")[0], place.rpartition("/")[2])
        for found in _LOCATED.finditer(text)
        for place in re.findall(r"\[([\w.:/-]{1,80})\]", found[1])
    ]
