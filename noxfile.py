"""Sessions for development; without arguments, those that need nothing but pip and Python."""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.4"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint", "typing", "cli", "package", "lowest", "demo"]

PROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PROJECT)
# One version for all sessions that train on it; on some machines the newest one is several GB.
TORCH = "torch==2.13.0"
PYTEST = ("pytest>=8", "pytest-asyncio", "pytest-rerunfailures", "pytest-timeout")
# The parts that lean on a dependency: asyncio and processes, commands, terminal, files.
LOWEST = (
    "tests/api/test_manager.py",
    "tests/api/test_blocking.py",
    "tests/rank_table",
    "tests/output",
    "tests/ctl",
)
SOURCES = ("davincirunsdk", "tests", "benchmarks", "docs", ".ci", "noxfile.py")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the test suite: the same command as in README."""
    session.install(".[dev]")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format."""
    session.install("ruff>=0.6")
    session.run("ruff", "check", *SOURCES)
    session.run("ruff", "format", "--check", *SOURCES)


@nox.session
def typing(session: nox.Session) -> None:
    """Check types, tests included, and that the public names are fully typed."""
    session.install("-e", ".[dev]", "pyright")
    session.run("mypy")
    session.run("pyright", "--verifytypes", "davincirunsdk", "--ignoreexternal")


@nox.session
def cli(session: nox.Session) -> None:
    """Build the wheel, install it alone, and run its commands as a user would."""
    session.install("build")
    out = Path(session.create_tmp()) / "dist"
    shutil.rmtree(out, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(out), silent=True)
    session.install("--force-reinstall", *map(str, out.glob("*.whl")))
    session.install(*PYTEST)
    session.run("python", "-m", "pytest", "tests/cli/test_installed_cli.py", *session.posargs)


@nox.session
def package(session: nox.Session) -> None:
    """Build sdist and wheel, and check what an index and a user would get."""
    session.install("build", "twine", "check-wheel-contents")
    out = Path(session.create_tmp()) / "dist"
    shutil.rmtree(out, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(out), silent=True)
    files = sorted(map(str, out.iterdir()))
    session.run("twine", "check", "--strict", *files)
    session.run("check-wheel-contents", *(file for file in files if file.endswith(".whl")))


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """Run with the lowest version of each runtime dependency that pyproject.toml allows."""
    floors = [text.replace(">=", "==") for text in PROJECT["project"]["dependencies"]]
    session.install(".", *floors)
    session.install(*PYTEST, "hypothesis", "uvloop", *floors)
    session.run("python", "-m", "pytest", *(session.posargs or LOWEST))


@nox.session(python=PYTHONS[0])
def licences(session: nox.Session) -> None:
    """List the licences of what the package needs anew."""
    session.install(".", "packaging")
    session.run("python", "docs/licences.py")


@nox.session
def demo(session: nox.Session) -> None:
    """Train for real with README's first command."""
    session.install(".[demo]")
    session.chdir(session.create_tmp())
    session.run("davincirun", "--nproc-per-node", "4", "-m", "davincirunsdk.demo")


@nox.session(python=["3.11"])
@nox.parametrize("framework", ["torch", "mindspore"])
def frameworks(session: nox.Session, framework: str) -> None:
    """Train on torch with gloo, and on MindSpore with its dynamic cluster; both on CPU.

    MindSpore also over two network namespaces as two hosts, which needs root.
    """
    version = [TORCH] if framework == "torch" else []
    session.install(f".[{framework}]", *version, *PYTEST)
    files = (
        "tests/demo/test_frameworks.py",
        "tests/diagnosis/test_diagnosis_real.py",
        "tests/multinode/test_netns.py",
    )
    session.run("python", "-m", "pytest", "-m", framework, *files, *session.posargs)


@nox.session(python=["3.11"])
@nox.parametrize("ipykernel", ["6.29.5", "7"])
def notebook(session: nox.Session, ipykernel: str) -> None:
    """Run jobs in real notebook kernels, of the current major version and the one before."""
    session.install(
        ".[dev,notebook-tests]",
        f"ipykernel=={ipykernel}.*" if ipykernel == "7" else f"ipykernel=={ipykernel}",
    )
    session.run("python", "-m", "pytest", "-m", "notebook", *session.posargs)


@nox.session(python=["3.11"])
def beside(session: nox.Session) -> None:
    """Run documented scripts under 0.1.5 and under this package, and compare."""
    old = Path(session.create_tmp()) / "old"
    session.run("python", "-m", "venv", str(old), silent=True)
    # It imports both without asking for them.
    session.run(
        str(old / "bin" / "pip"), "install", "-q", "davincirunsdk==0.1.5", "ipython", "tornado", external=True
    )
    session.install(".", *PYTEST)
    session.env["DAVINCIRUN_OLD_PYTHON"] = str(old / "bin" / "python")
    session.run("python", "-m", "pytest", "-m", "beside", "tests/beside", *session.posargs)


@nox.session(python=["3.11"])
def browser(session: nox.Session) -> None:
    """Look at jobs in JupyterLab, Notebook 7 and the classic notebook; needs Debian's package chromium."""
    session.install(".[browser-tests]", *PYTEST, "psutil")
    session.run("python", "-m", "pytest", "-m", "browser", "tests/notebook/test_browser.py", *session.posargs)


@nox.session(python=["3.11"])
def ray(session: nox.Session) -> None:
    """Run jobs over a Ray cluster of four nodes on this machine."""
    session.install(".[dev,ray,torch]", "ray[client]", TORCH)
    session.run("python", "-m", "pytest", "-m", "ray", "tests/multinode", *session.posargs)


@nox.session(python=["3.11"])
def slurm(session: nox.Session) -> None:
    """Run jobs over a Slurm cluster on this machine; needs Debian's slurm-wlm and root."""
    session.install(".[dev,torch]", TORCH)
    session.run("python", "-m", "pytest", "-m", "slurm", "tests/multinode", *session.posargs)


@nox.session(python=["3.11"])
def netns(session: nox.Session) -> None:
    """Run jobs over network namespaces as hosts; needs root and Debian's openssh-server.

    MindSpore's: session frameworks.
    """
    session.install(".[dev,torch]", TORCH)
    session.run(
        "python", "-m", "pytest", "-m", "netns and not mindspore", "tests/multinode", *session.posargs
    )


@nox.session(python=["3.11"])
def pictures(session: nox.Session) -> None:
    """Make README's pictures from real runs; needs Debian's package chromium for what a browser shows."""
    session.install(".[notebook-tests,stacks]", "nbconvert", "pyte")
    session.run("python", "docs/pictures.py")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure beside peers, each in an environment of its own; `-- --quick` compares with the record only."""
    session.install(".[dev]")
    launchers = ["python", "benchmarks/launchers.py", *session.posargs]
    if "--quick" in session.posargs:
        session.run(*launchers)
        return
    for option, command, packages in (
        ("--old", "davincirun", ["davincirunsdk==0.1.5", "ipython", "tornado"]),
        ("--torchrun", "torchrun", [TORCH]),
        ("--msrun", "msrun", ["mindspore", "numpy<2"]),
    ):
        peer = Path(session.create_tmp()) / option.strip("-")
        if not peer.exists():
            session.run("python", "-m", "venv", str(peer))
        # What cannot be installed is listed as missing by the run itself.
        pip = [str(peer / "bin" / "pip"), "install", "-q", *packages]
        session.run(*pip, external=True, success_codes=[0, 1])
        launchers += [option, str(peer / "bin" / command)]
    session.run(*launchers, success_codes=[0, 1])
    session.run("python", "benchmarks/logs.py")
    session.run("python", "benchmarks/rank_tables.py")
