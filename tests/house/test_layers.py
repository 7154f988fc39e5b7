"""Who may import whom: one direction, as the order below says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "davincirunsdk"

# A module may import from further down only; modules of one line do not know each other, but for
# the exceptions named behind them.
ORDER: list[dict[str, set[str]]] = [
    {"__main__": set()},
    {"ctl": set(), "cli": {"ctl"}, "notebook": {"cli"}},
    {"blocking": {"aio"}, "aio": set(), "engines": set()},
    {"manager": {"engines"}, "background": set()},
    {"job": set()},
    {
        "channels": set(),
        "own_loop": set(),
        "outcome": set(),
        "protocol": set(),
        "documents": set(),
        "metrics": {"documents"},
    },
    {"options": set()},
    {"arguments": set()},
    {"supervision": set(), "platforms": set(), "output": set()},
    {"diagnosis": set(), "manifests": set(), "environment": set()},
    {"logs": set(), "steps": set(), "leftovers": set(), "rank_table": set()},
    {"cluster": set(), "host": set()},
    {"errors": set(), "findings": set(), "concurrency": {"errors"}, "script": set()},
    {"types": set(), "phrases": set(), "columns": set(), "ending": set(), "__init__": set()},
]
DEMO = "demo"  # a program of its own
ONLY_IN = {
    "anyio.from_thread": {"background"},
    "add_signal_handler": {"cli", "engines"},
    "killpg": {"supervision"},
    "Popen(": {"supervision", "leftovers", "engines"},
}


def _modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != DEMO)


def _unit(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def _imports(path: Path) -> set[str]:
    """Names of our units that a module imports when it runs, also inside functions."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "davincirunsdk" and len(parts) > 1:
                unit = parts[1]
                if (PACKAGE / unit).is_dir() or (PACKAGE / f"{unit}.py").exists():
                    found.add(unit)
    return found


def _level(unit: str) -> int:
    for level, units in enumerate(ORDER):
        if unit in units:
            return level
    raise AssertionError(f"module {unit} has no place in the order of tests/house/test_layers.py")


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    """No module imports from its own line or from above."""
    unit = _unit(path)
    allowed = ORDER[_level(unit)][unit]
    wrong = {
        other for other in _imports(path) - {unit, "__init__"} - allowed if _level(other) <= _level(unit)
    }
    assert not wrong, f"{path.name} imports {sorted(wrong)}, which stand above it or beside it"


@pytest.mark.parametrize("text", sorted(ONLY_IN))
def test_some_calls_stand_in_one_place(text: str) -> None:
    """What touches processes, signals and threads of others stands where the plan puts it."""
    users = {_unit(path) for path in _modules() if text in path.read_text()}
    assert users <= ONLY_IN[text]


def test_nobody_imports_the_demo() -> None:
    """The demo is a program, not a part."""
    assert not [
        path
        for path in _modules()
        if "davincirunsdk.demo" in path.read_text().replace("-m davincirunsdk.demo", "")
    ]
