"""Looks for a module as `python -m` would, without running a line of it or of its packages.

A program of its own, run by the Python that the workers are to have: another one than ours may have other
paths, other finders, another syntax. It writes a word for what is wrong, a tab and a text; nothing where all
is well, or where only running the packages would tell. It imports only what is built in: the folder of the
workers may have a module of any other name.
"""

from __future__ import annotations

import posix
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

_LARGEST = 1 << 20
"""Bytes of the largest module that is compiled: it must not delay the start."""

_BRINGING = (b"__path__", b"sys", b"declare_namespace")
"""What a package's code contains that may bring modules which no finder sees before it has run; of a module
that is no package, only the first one makes it one."""


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        look = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = look(name, path) if look else None
        if spec is not None:
            return spec
    return None


def _source(spec: ModuleSpec) -> bytes | None:
    read = getattr(spec.loader, "get_data", None)
    if read is None or not (spec.origin or "").endswith(".py"):
        return None
    data: bytes = read(spec.origin)
    return data


def _may_bring(spec: ModuleSpec, missing: str) -> bool:
    """Tell whether a package's code, once it has run, may let a module be found that is not found now."""
    if spec.origin in (None, "namespace"):
        return False  # it has no code
    source = _source(spec)
    folders = spec.submodule_search_locations
    if source is None or any(word in source for word in _BRINGING[: 1 if folders is None else None]):
        return True
    # A file of another kind, which an import hook may know.
    return any(name.split(".")[0] == missing for folder in folders or () for name in posix.listdir(folder))


def _syntax_error(spec: ModuleSpec) -> str:
    source = _source(spec)
    if source is None or len(source) > _LARGEST:
        return ""
    try:
        compile(source, str(spec.origin), "exec", 0, True)
    except SyntaxError as error:
        line = (error.text or "").strip()[:80]
        place = f", line {error.lineno}" if error.lineno else ""
        return f"{error.filename}{place}: {type(error).__name__}: {error.msg}{f' ({line})' if line else ''}"
    return ""


def judge(module: str) -> tuple[str, str] | None:
    """Say what is wrong with a module that is to be run: a word for it, and a text."""
    parts = module.split(".")
    if "" in parts:
        return None
    path: Sequence[str] | None = None
    packages: list[ModuleSpec] = []
    name = ""
    for part in (*parts, "__main__"):
        name = f"{name}.{part}" if name else part
        if packages and path is None:
            if part == "__main__":
                break
            spec = None  # in a module that is no package
        elif name in sys.modules:  # a `.pth` file may have brought it, with a path of its own
            spec = sys.modules[name].__spec__
            if spec is None:
                return None
        else:
            spec = _find(name, path)
        if spec is None:
            if any(_may_bring(package, part) for package in packages):
                return None
            return ("package" if part == "__main__" else "missing", module)
        if name not in sys.modules:
            # The search in a package that is only a folder asks for the one around it.
            sys.modules[name] = type(sys)(name)
            if spec.submodule_search_locations is not None:
                sys.modules[name].__path__ = spec.submodule_search_locations
        path = getattr(sys.modules[name], "__path__", None)
        packages.append(spec)
    wrong = _syntax_error(packages[-1])
    return ("syntax", wrong) if wrong else None


if __name__ == "__main__":
    _found = judge(sys.argv[1])
    if _found is not None:
        sys.stdout.buffer.write("\t".join(_found).encode("utf-8", "backslashreplace"))
