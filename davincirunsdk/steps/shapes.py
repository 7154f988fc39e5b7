"""The lines in which frameworks print their steps, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_LONGEST_LINE = 4096
"""Characters of a line that are looked at, from its end."""
_TERMINAL = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|\x08"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)\b"
_NUMERAL = rf"['\"]?(?:np\.float\d+\()?(?P<{{}}>{_NUMBER})"
_CLOCK = r"(?:\d+ days?, )?(?:\d+:)+\d\d"
_LENGTHS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

_EVALUATION = r"val|valid|validation|validating|eval|evaluat\w+|test|testing|predict\w*"
_ASIDE_LINE = rf"(?i)\b(?:{_EVALUATION})\b"
_ASIDE_BAR = (
    rf"(?i)\b(?:{_EVALUATION}|sanity|infer\w*|generat\w*|sampling|map|filter|tokeniz\w*|load\w*|download\w*"
    r"|upload\w*|fetch\w*|sav(?:e|ing)|cach\w*|convert\w*|prepar\w*|flatten\w*|extract\w*|compil\w*"
    r"|captur\w*|rollout\w*|class\s+images)\b"
)
"""What a bar is called that is not about training steps."""
_TRAINING = r"(?i)\btrain"
_EPOCH_LABEL = r"(?i)\bepochs?\b[\s=:#\[(]{0,3}(?P<epoch>\d+)(?:\s*/\s*(?P<epochs>\d+))?"

_compiled = cache(re.compile)
# Only when a line has the clue: to compile all of them takes longer than to start a worker.


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one line says.

    Attributes:
        shape: Name of its shape.
        trust: The higher, the more its step is worth; see `Shape`.
        label: What the counter calls itself, such as a bar's description without its numbers.
        absolute: The step counts from the run's beginning, not from the epoch's.
        step: None where the line only adds to others.
        total: Of the same count as `step`.
        epoch: As printed.
        epochs: As printed.
        first_epoch: Number of the first epoch where the shape fixes it, else None.
        loss: May be nan or inf.
        step_seconds: Seconds per step.
        eta: Seconds left, of the same count as `step`.
        values: What else was given.
    """

    shape: str
    trust: int
    label: str = ""
    absolute: bool = False
    step: int | None = None
    total: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    first_epoch: int | None = None
    loss: float | None = None
    step_seconds: float | None = None
    eta: float | None = None
    values: tuple[tuple[str, float], ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One framework's line.

    The first of `patterns` decides whether a line is of this shape, its last match in the line counts;
    each further one adds what its groups are called. Groups: `step total epoch epochs last_epoch loss
    seconds ms per unit rate inverse eta`.

    Attributes:
        name: Of the framework.
        clue: Lower-case text that every such line has, so that most lines cost one search.
        patterns: See above.
        trust: 4 for a line that the user described, 3 for a framework's own, 2 for one of unknown origin, 1
            for a bar: where lines stand beside it, it may count micro-batches or files.
        absolute: See `Reading`.
        first_epoch: See `Reading`.
        checked: The line may be about evaluation or preparation: its words decide, of a bar those before it.
    """

    name: str
    clue: str
    patterns: tuple[str, ...]
    trust: int = 3
    absolute: bool = False
    first_epoch: int | None = None
    checked: bool = False


def _number(name: str, before: str) -> str:
    return _re(rf"{before}\s*{_NUMERAL.format(name)}")


def _re(pattern: str) -> str:
    return f"(?i){pattern}"


_LOSS = _re(
    r"(?<![\w/.])(?:total_|train(?:ing)?[_/ ])?loss(?:_step|_epoch)?\b['\"]?[\s=:\[(]*"
    + _NUMERAL.format("loss")
)

SHAPES: tuple[Shape, ...] = (
    Shape(
        name="Megatron",
        clue="iteration",
        patterns=(
            _re(r"\biteration\s+(?P<step>\d+)\s*/\s*(?P<total>\d+)\s*\|"),
            _number("loss", r"\|\s*(?:lm )?loss:"),
            _number("ms", r"elapsed time per iteration \(ms\):"),
        ),
        absolute=True,
    ),
    Shape(
        name="MindFormers",
        clue="step:[",
        patterns=(
            _re(r"\bstep:\[\s*(?P<step>\d+)\s*/\s*(?P<total>\d+)\s*\]"),
            _re(r"\bepoch:\[\s*(?P<epoch>\d+)\s*/\s*(?P<epochs>\d+)\s*\]"),
            _number("loss", r"\bloss:\s*\[?"),
            _number("ms", r"\b(?:per_step_)?time:"),
        ),
        first_epoch=1,
    ),
    Shape(
        name="MindSpore LossMonitor",
        clue="loss is",
        patterns=(
            _re(r"\bepoch:\s*(?P<epoch>\d+)\s+step:\s*(?P<step>\d+),\s*loss is"),
            _number("loss", r"\bloss is\s*[\[(]*"),
        ),
        first_epoch=1,
    ),
    Shape(
        name="MindSpore TimeMonitor",
        clue="per step time",
        patterns=(_number("ms", r"\bepoch time:.*\bper step time:"),),
    ),
    Shape(
        name="DeepSpeed",
        clue="skipped=",
        patterns=(_re(r"\bstep=(?P<step>\d+), skipped=\d+, lr="),),
        absolute=True,
    ),
    Shape(
        name="DeepSpeed timer",
        clue="global_step=",
        patterns=(_re(r"\bglobal_step=(?P<step>\d+), RunningAvgSamplesPerSec"),),
        absolute=True,
    ),
    Shape(
        name="verl",
        clue="step:",
        patterns=(
            _re(r"\bstep:(?P<step>\d+) - "),
            _number("loss", r"\b(?:actor/(?:\w*_)?|train/)loss:"),
            _number("seconds", r"\btiming_s/step:"),
        ),
        absolute=True,
    ),
    Shape(
        name="mmengine",
        clue="iter",
        patterns=(
            _re(r"\bIter(?:\(train\))?\s*\[\s*(?P<step>\d+)\s*/\s*(?P<total>\d+)\]"),
            _number("loss", r"\bloss:"),
            _number("seconds", r"(?<!_)\btime:"),
            _re(rf"\beta:\s*(?P<eta>{_CLOCK})"),
        ),
        absolute=True,
    ),
    Shape(
        name="mmengine by epoch",
        clue="epoch",
        patterns=(
            _re(r"\bEpoch(?:\(train\))?\s*\[(?P<epoch>\d+)\]\[\s*(?P<step>\d+)\s*/\s*(?P<total>\d+)\]"),
            _number("loss", r"\bloss:"),
            _number("seconds", r"(?<!_)\btime:"),
        ),
        first_epoch=1,
    ),
    Shape(
        name="LLaMA-Factory",
        clue='"current_steps"',
        patterns=(
            _re(r'"current_steps":\s*(?P<step>\d+),\s*"total_steps":\s*(?P<total>\d+)'),
            _number("loss", r'"loss":'),
            _re(rf'"remaining_time":\s*"(?P<eta>{_CLOCK})"'),
        ),
        absolute=True,
    ),
    Shape(
        name="ultralytics",
        clue="%",
        patterns=(
            _re(
                r"(?<!\S)(?P<epoch>\d+)/(?P<epochs>\d+)\s+[\d.]+[GM]?B?\s.*:\s*\d+%\s*(?:\|[^|]*\||[━╸╺─ ]*)"
                r"\s*(?P<step>\d+)/(?P<total>\d+)\b"
            ),
            _number("loss", r"(?<!\S)\d+/\d+\s+[\d.]+[GM]?B?\s"),
            _re(r"(?P<rate>[\d.]+)it/s"),
        ),
        first_epoch=1,
    ),
    Shape(
        name="Lightning",
        clue="epoch",
        patterns=(
            _re(
                r"\bEpoch (?P<epoch>\d+)(?:/(?P<last_epoch>\d+))?\s+[━╸╺ ]*[━╸╺][━╸╺ ]*"
                r"(?P<step>\d+)/(?P<total>\d+)\s"
            ),
            _LOSS,
            _re(r"(?P<rate>[\d.]+)it/s"),
        ),
        first_epoch=0,
    ),
    Shape(
        name="Keras",
        clue="/step",
        patterns=(
            _re(
                r"(?<!\S)(?P<step>\d+)/(?P<total>\d+)\s+(?:━+\s+|\[[=>.]+\] - |- )"
                r"(?:(?P<eta>(?:\d+:)*\d+s?) (?:- )?)?(?P<per>\d+)(?P<unit>us|ms|s|min|h)/step"
            ),
            _LOSS,
        ),
    ),
    Shape(
        name="Keras",
        clue="eta: ",
        patterns=(
            _re(r"(?<!\S)(?P<step>\d+)/(?P<total>\d+)\s+\[[=>.]+\]\s+- ETA: (?P<eta>(?:\d+:)*\d+s?)"),
            _LOSS,
        ),
    ),
    Shape(
        name="epoch",
        clue="epoch",
        patterns=(_re(r"(?<!\S)Epoch (?P<epoch>\d+)/(?P<epochs>\d+)\s*$"),),
        first_epoch=1,
    ),
    Shape(
        name="Hugging Face",
        clue="'loss':",
        patterns=(_number("loss", r"\{'loss':"),),
    ),
    Shape(
        name="bar",
        clue="|",
        patterns=(
            _re(
                r"(?:\d{1,3}%|:\s)\|[^|]*\|\s*(?P<step>[\d.]+[kMGT]?)/(?P<total>[\d.]+[kMGT]?|\?)"
                rf"\s*\[[\d:]+<(?P<eta>{_CLOCK}|\?),\s*(?:\?|(?P<rate>[\d.]+))\s*(?!\d*[kMGT]?i?B/s)"
                r"(?P<inverse>s/)?\s*[^\],|]*"
            ),
            _LOSS,
        ),
        trust=1,
        checked=True,
    ),
    Shape(
        name="bar without a total",
        clue=" [",
        patterns=(
            _re(
                r"\b(?P<step>\d+)[a-z]+ \[[\d:]+,\s*(?:\?|(?P<rate>[\d.]+))\s*"
                r"(?!\d*[kMGT]?i?B/s)(?P<inverse>s/)?[^\],|]*"
            ),
            _LOSS,
        ),
        trust=1,
        checked=True,
    ),
    Shape(
        name="loop",
        clue="loss",
        patterns=(
            _re(
                r"(?<![a-z])(?:global[_ ]?step|steps?|iter(?:ation)?s?|batch)\b[\s=:#\[(]{1,4}"
                r"(?P<step>\d+)(?![\d.])(?:\s*(?:/|of)\s*(?P<total>\d+))?"
            ),
            _LOSS,
            _re(r"(?<![a-z])epoch\b[\s=:#\[(]{1,4}(?P<epoch>\d+)(?:\s*/\s*(?P<epochs>\d+))?"),
        ),
        trust=2,
        checked=True,
    ),
    Shape(
        name="loop by epoch",
        clue="loss",
        patterns=(
            _re(
                r"\b(?:epoch|train)\b[\s:#\[(]{1,4}(?P<epoch>\d+)\]?[\s,:]*[\[(]?\s*(?P<step>\d+)\s*/\s*"
                r"(?P<total>\d+)"
            ),
            _LOSS,
        ),
        trust=2,
        checked=True,
    ),
    Shape(
        name="loop with a total",
        clue="step",
        patterns=(
            _re(r"(?<![a-z])(?:global[_ ]?)?step\b[\s=:\[(]{1,4}(?P<step>\d+)\s*(?:/|of)\s*(?P<total>\d+)"),
        ),
        trust=2,
        checked=True,
    ),
)
"""Most special first: the first that fits a line counts."""


def parse_pattern(text: str) -> Shape:
    """Make a shape of a user's regular expression.

    Args:
        text: With a group named `step`, and `total`, `epoch`, `epochs`, `loss`, `seconds`, `ms` or `eta` as
            wanted; without names the first group is the step and the second, if any, the total.

    Raises:
        ValueError: It is not a regular expression, or has no group for the step.
    """
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ValueError(
            f"progress pattern {text!r} is not a regular expression: {error}; "
            r"give one such as 'iter (?P<step>\d+)/(?P<total>\d+) loss (?P<loss>\S+)'"
        ) from None
    if not pattern.groupindex and 1 <= pattern.groups <= 2:
        named = iter(("step", "total"))
        pattern = re.compile(re.sub(r"(?<!\\)\((?!\?)", lambda _: f"(?P<{next(named)}>", text))
    if "step" not in pattern.groupindex:
        raise ValueError(
            f"progress pattern {text!r} has no group named step: "
            r"give one such as 'iter (?P<step>\d+)/(?P<total>\d+) loss (?P<loss>\S+)'"
        )
    return Shape(name="given", clue="", patterns=(pattern.pattern,), trust=4)


def read_line(line: str, shapes: Iterable[Shape] = SHAPES) -> Reading | None:
    """Read one line, or one state of a bar.

    Args:
        line: May hold what colours it on a terminal.
        shapes: In the order in which they are tried.

    Returns:
        What it says, None where it is not about training steps.
    """
    text = line[-_LONGEST_LINE:].rstrip()
    if "\x1b" in text or "\b" in text:
        text = _compiled(_TERMINAL).sub("", text).rstrip()
    lower = text.lower()
    for shape in shapes:
        if shape.clue in lower and (reading := _read(shape, text)) is not None:
            return reading
    return None


def _read(shape: Shape, text: str) -> Reading | None:
    first, *further = map(_compiled, shape.patterns)
    # A line may hold several states of a bar: the last one counts.
    states = list(first.finditer(text))
    if not states:
        return None
    found = states[-1]
    groups = _groups(found)
    for pattern in further:
        if more := pattern.search(text):
            groups |= _groups(more)
    label = ""
    if shape.trust == 1:
        label = text[states[-2].end() if len(states) > 1 else 0 : found.start()]
    if shape.checked and _is_aside(shape, label or text):
        return None
    if epoch := _compiled(_EPOCH_LABEL).search(label):
        groups |= _groups(epoch)
    step, total = _count(groups.get("step")), _count(groups.get("total"))
    if total is not None and step is not None and step > total:
        total = None
    epochs = _count(groups.get("epochs"))
    if epochs is None and (last := _count(groups.get("last_epoch"))) is not None:
        epochs = last + 1
    return Reading(
        shape=shape.name,
        trust=shape.trust,
        label=re.sub(r"[\d\W]+", " ", label).strip().lower(),
        absolute=shape.absolute,
        step=step,
        total=total,
        epoch=_count(groups.get("epoch")),
        epochs=epochs,
        first_epoch=0 if "v_num=" in text else shape.first_epoch,
        loss=_float(groups.get("loss")),
        step_seconds=_step_seconds(groups),
        # At its end a bar of Keras shows the time it took.
        eta=None if step is not None and step == total else _seconds(groups.get("eta")),
    )


def _groups(found: re.Match[str]) -> dict[str, str]:
    return {name: value for name, value in found.groupdict().items() if value is not None}


def _is_aside(shape: Shape, text: str) -> bool:
    words = _ASIDE_BAR if shape.trust == 1 else _ASIDE_LINE
    return _compiled(words).search(text) is not None and _compiled(_TRAINING).search(text) is None


def _count(text: str | None) -> int | None:
    """Read a number of steps, which tqdm may write as `1.20k`."""
    if text is None:
        return None
    scale = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}.get(text[-1:], 1)
    value = _float(text.rstrip("kMGT"))
    return None if value is None or not abs(value) < 1e18 else round(value * scale)


def _float(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _step_seconds(groups: dict[str, str]) -> float | None:
    readers: Sequence[tuple[str, Callable[[float], float]]] = (
        ("seconds", lambda value: value),
        ("ms", lambda value: value / 1000),
        ("per", lambda value: value * _LENGTHS[groups.get("unit", "s").lower()]),
        ("rate", lambda value: value if "inverse" in groups else 1 / value),
    )
    for name, reader in readers:
        value = _float(groups.get(name))
        if value is not None and 0 < value < 1e9:
            return reader(value)
    return None


def _seconds(text: str | None) -> float | None:
    """Read a length of time such as `2:52`, `1 day, 2:03:04`, `3s`."""
    if text is None or not (numbers := re.findall(r"\d+", text)):
        return None
    if text.endswith("s"):
        return float(numbers[-1]) if len(numbers) == 1 else None
    total = 0.0
    if "day" in text:
        total, numbers = 86400.0 * int(numbers[0]), numbers[1:]
    clock = 0.0
    for number in numbers:
        clock = clock * 60 + int(number)
    return total + clock
