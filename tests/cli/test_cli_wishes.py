"""What a person asks of the command: defaults, names, variables, patience; and what it says about itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import is_alive, wait_until

from davincirunsdk import PlatformError, start_and_wait_distributed_train
from davincirunsdk.cli.spelling import with_options

PY = sys.executable
COMMAND = [PY, "-m", "davincirunsdk"]

pytestmark = pytest.mark.usefixtures("job_folder")


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, **variables},
        check=False,
    )


def test_help_has_groups_and_examples() -> None:
    """In groups, with metavars that say what is meant, also as -h."""
    said = run("-h").stdout
    assert said == run("--help").stdout
    places = [said.index(f"\n{group}:\n") for group in ("Workers", "Several nodes", "Output", "Clusters")]
    assert places == sorted(places)
    assert "--master-port PORT" in said
    examples = said.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) == 3


def test_help_explains_common_options_names_all_and_help_all_explains_all() -> None:
    """Who looks for one word finds it; rare options do not hide the others."""
    short, long = run("--help").stdout, run("--help-all").stdout
    explained = [set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", said, re.MULTILINE)) for said in (short, long)]
    assert explained[0] < explained[1]
    assert {"--nproc-per-node", "--stall-timeout", "--engine", "--help-all"} <= explained[0]
    assert {"--leave-after", "--warn-before", "--volume"} <= explained[1] - explained[0]
    assert explained[1] <= set(re.findall(r"--[a-z-]+(?<!-)", short))
    assert len(short.splitlines()) < 0.6 * len(long.splitlines())


def test_help_all_is_no_default() -> None:
    """Neither by a variable nor by a file: no job would start."""
    assert run("--nproc-per-node", "1", "true", DAVINCIRUN_HELP_ALL="1").stdout == ""
    Path("d.json").write_text('{"help-all": true}')
    done = run("--config", "d.json", "--nproc-per-node", "1", "true")
    assert "'help-all', which is not an option" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nproc-per-node", "two"), "'two' is not a whole number"),
        (("--nproc-per-node", "0"), "--nproc-per-node is 0: expected 1 or more"),
        (("--grace-period", "-1"), "--grace-period is -1.0: expected seconds, 0 or more"),
        (("--master-port", "70000"), "--master-port is 70000: expected 1 to 65535"),
        (("--rank-table", ""), "--rank-table is '': expected a path"),
        (("--name", "a/b"), "--name is 'a/b': expected a name for log files"),
        (("--env", "NO_SUCH_NAME"), "NO_SUCH_NAME is not set here"),
        (("--image", "x"), "--image has no effect without --manifest"),
        (("--resource", "CPU"), "--resource has no use without --engine ray"),
        (("--config", "missing.toml"), "missing.toml cannot be read"),
        (
            ("--on-stall", "restart", "--stall-timeout", "5"),
            "--on-stall is 'restart', but --max-restarts is 0: say how often",
        ),
        (
            ("--warn-signal", "USR1"),
            "--timeout is not given: --warn-signal and --warn-before have no use without it",
        ),
        (("--keep-going", "--max-restarts", "1"), "--keep-going lets the others go on and --max-restarts "),
    ],
)
def test_wrong_options_are_named_as_they_were_written(words: tuple[str, ...], said: str) -> None:
    """Usage errors: exit code 2, plain words, nothing started."""
    done = run(*words, "touch", "ran")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert not Path("ran").exists()


def test_errors_name_options_where_the_calls_name_keywords() -> None:
    """Who typed an option is told of an option; the same error in Python names the keyword, too."""
    said = run("--devices", "0-1", "--nproc-per-node", "3", "true").stderr
    assert "--devices" in said
    assert "(devices)" not in said
    with pytest.raises(PlatformError, match=r"\(devices\)"):
        start_and_wait_distributed_train(["true"], devices="0-1", nproc_per_node=3)
    with pytest.raises(ValueError, match=r"^on_stall is 'restart', but max_restarts is 0: say how often$"):
        start_and_wait_distributed_train(["true"], stall_timeout=5, on_stall="restart")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name is 'a/b': expected a name", "--name is 'a/b': expected a name"),
        ("give --node-rank (node_rank), and --nnodes (nnodes)", "give --node-rank, and --nnodes"),
        ("or --nnodes 1 (nnodes=1) to use", "or --nnodes 1 to use"),
        ("at least 4, the nproc_per_node asked for", "at least 4, the --nproc-per-node asked for"),
        ("work_dir /a/work_dir is not a folder", "--work-dir /a/work_dir is not a folder"),
        ("--report 'max_restarts' (see /x/log_dir)", "--report 'max_restarts' (see /x/log_dir)"),
        ("hosts have different slots", "hosts have different slots"),
    ],
)
def test_options_are_spelled_as_options(text: str, said: str) -> None:
    """Keywords become options; what a user wrote stays."""
    assert with_options(text) == said


def test_a_work_dir_that_is_a_file_is_blamed_itself(job_folder: Path) -> None:
    """Not the script in it."""
    (job_folder / "file").write_text("")
    done = run("--work-dir", "file", "--nproc-per-node", "1", "train.py")
    assert done.returncode == 3
    assert "is not a folder" in done.stderr


def test_name_and_variables() -> None:
    """`--name` names the files; `--env` gives a value, or hands on the one that is here."""
    options = ["--nproc-per-node", "1", "--name", "mine", "--env", "A=x=y", "--env", "B"]
    done = run(*options, "sh", "-c", "echo $A $B", B="here")
    assert done.stdout == "[rank 0] x=y here\n"
    assert Path("log/mine-proc-rank-0-device-0.txt").exists()


@pytest.mark.parametrize("form", ["json", "toml"])
def test_defaults_come_from_a_named_file_and_the_environment(form: str, job_folder: Path) -> None:
    """The command line wins over DAVINCIRUN_*, that over the file; one that merely lies there is nothing."""
    if form == "toml" and sys.version_info < (3, 11):
        pytest.skip("no TOML in this Python")
    (job_folder / "davincirun.toml").write_text('name = "trap"\n')
    if form == "json":
        text = json.dumps({"nproc-per-node": 2, "name": "file", "prefix": "none", "env": {"A": "b"}})
    else:
        text = '[tool.davincirun]\nnproc_per_node = 2\nname = "file"\nprefix = "none"\nenv = {A = "b"}\n'
    (job_folder / f"mine.{form}").write_text(text)
    options = ["--config", f"mine.{form}", "--verbose", "--nproc-per-node", "1"]
    done = run(*options, "sh", "-c", "echo $A", DAVINCIRUN_NAME="variable")
    assert done.stdout == "b\n"
    assert Path("log/variable-proc-rank-0-device-0.txt").exists()
    assert "from the environment: --name" in done.stderr
    assert "from --config: " in done.stderr


@pytest.mark.parametrize("text", ['{"nproc": 2}', "[1]", '{"name": ["a"]}', '{"live": "yes"}', "{"])
def test_a_wrong_file_of_defaults_is_an_error(text: str, job_folder: Path) -> None:
    """It says which file, and what in it."""
    (job_folder / "mine.json").write_text(text)
    done = run("--config", "mine.json", "true")
    assert done.returncode == 2
    assert "mine.json" in done.stderr


def test_verbose_says_every_end() -> None:
    """With pid and exit code or signal, in the moment in which it ends."""
    done = run("--nproc-per-node", "2", "--verbose", "sh", "-c", "[ $RANK = 0 ] || kill -9 $$")
    ends = [line for line in done.stderr.splitlines() if ", ended: " in line]
    assert len(ends) == 2
    assert any(line.startswith("davincirun: rank 1, pid ") and "SIGKILL" in line for line in ends)


def start(*words: str) -> subprocess.Popen[str]:
    """Start the command, its words in a pipe."""
    return subprocess.Popen(
        [*COMMAND, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def read_until(process: subprocess.Popen[str], said: str) -> str:
    """Read a process's words until these come."""
    assert process.stderr is not None
    lines = []
    while line := process.stderr.readline():
        lines.append(line)
        if said in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


def after_a_second() -> None:
    """Wait until another signal counts."""
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 1.1)


def test_what_still_ran_is_said_after_a_stop() -> None:
    """Who had ended well before the signal is not counted as stopped."""
    code = "[ $RANK = 0 ] && exit 0; touch ready; exec sleep 600"
    with start("--nproc-per-node", "2", "sh", "-c", code) as process:
        wait_until(lambda: Path("ready").exists())
        events = next(Path("log").glob("*-events.jsonl"))
        wait_until(lambda: '"exited"' in events.read_text())
        process.terminate()
        said = read_until(process, "stopped by SIGTERM")
        assert process.wait(30) == 143
    assert "rank 1 ended in time; rank 0 had ended well before" in said
    assert "another signal counts from 1 s from now on and kills at once" in said


@pytest.mark.parametrize("third", [True, False])
def test_a_start_that_hangs_can_be_left(third: bool, job_folder: Path) -> None:
    """After the second signal that counts, at a third or when nothing moves for two seconds."""
    code = (
        "import sys, time\nfrom davincirunsdk.supervision import attempt\n"
        # Whatever it is that hangs: the stop never comes to its end.
        "attempt.Attempt.stop = lambda *_, **__: None\n"
        "sys.argv = ['davincirun', '--nproc-per-node', '1', 'sh', '-c', 'touch began; exec sleep 600']\n"
        "from davincirunsdk.cli import main\nmain()\n"
    )
    words = [PY, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: (job_folder / "began").exists())
        process.send_signal(signal.SIGINT)
        read_until(process, "SIGINT: stopping")
        after_a_second()
        process.send_signal(signal.SIGTERM)
        read_until(process, "killing at once")
        if third:
            after_a_second()
            process.send_signal(signal.SIGINT)
        read_until(process, "leaving at once" if third else "nothing has moved for 2 s: leaving")
        assert process.wait(30) == 130


def test_control_z_is_answered_and_changes_nothing() -> None:
    """Stopped, the launcher would supervise nothing while the workers went on."""
    code = "touch ready$RANK; while [ ! -e go ]; do sleep 0.1; done; exit 4"
    with start("--nproc-per-node", "2", "sh", "-c", code) as process:
        wait_until(lambda: Path("ready0").exists() and Path("ready1").exists())
        process.send_signal(signal.SIGTSTP)
        read_until(process, "SIGTSTP (Ctrl-Z) changes nothing")
        Path("go").touch()
        assert process.wait(30) == 4


def test_an_error_of_our_own_is_told(job_folder: Path) -> None:
    """Exit code 70, its traceback on stderr, the workers gone."""
    code = (
        "import sys\n"
        "from davincirunsdk.supervision import attempt\n"
        "def broken(*_): raise ZeroDivisionError('ours')\n"
        "attempt.Attempt._judge_exit = broken\n"
        "sys.argv = ['davincirun', '--nproc-per-node', '2', 'sh', '-c', "
        "'echo $$ > pid$RANK; [ $RANK = 0 ] || exec sleep 600; sleep 1']\n"
        "from davincirunsdk.cli import main\nmain()\n"
    )
    done = subprocess.run([PY, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 70
    assert "ZeroDivisionError: ours" in done.stderr
    assert "Traceback" in done.stderr
    pids = [int(path.read_text()) for path in job_folder.glob("pid*")]
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_control_c_while_it_imports_shows_no_traceback() -> None:
    """Whenever it comes: from the first line of ours on it ends with 130 or by the signal, in silence."""
    for delay in (0.01, 0.02, 0.05, 0.1, 0.15, 0.2):
        code = (
            "import os, signal, threading\nfrom davincirunsdk.cli import main\nimport sys\n"
            f"threading.Timer({delay}, os.kill, [os.getpid(), signal.SIGINT]).start()\n"
            "sys.argv = ['davincirun', '--nproc-per-node', '1', '--grace-period', '1', 'sleep', '600']\n"
            "main()\n"
        )
        done = subprocess.run([PY, "-c", code], capture_output=True, text=True, timeout=50, check=False)
        assert done.returncode == 130, (delay, done.stderr)
        assert "Traceback" not in done.stderr


def test_a_full_terminal_loses_no_report() -> None:
    """Standard error that is non-blocking and full for a moment gets the whole report later."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        pass
    words = [*COMMAND, "--nproc-per-node", "1", "--quiet", "sh", "-c", "echo reason; exit 9"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=write) as process:
        os.close(write)
        wait_until(lambda: any('"finished"' in one.read_text() for one in Path("log").glob("*-events.jsonl")))
        with open(read, "rb") as file:
            said = file.read().decode()
        assert process.wait(30) == 9
    assert "root cause" in said
    assert "reason" in said


def test_a_range_of_nodes_is_refused_in_words() -> None:
    """torchrun's MIN:MAX has no meaning here; the error says what to write."""
    said = run("--nproc-per-node", "1", "--nnodes", "1:3", "--node-rank", "0", "true")
    assert said.returncode == 2
    assert "write --nnodes 3" in said.stderr


@pytest.mark.parametrize("option", ["--report", "--html", "--metrics"])
@pytest.mark.parametrize("parent", ["/proc", "file"])
def test_a_file_that_cannot_be_written_is_an_error_before_the_start(option: str, parent: str) -> None:
    """At the end, hours later, it would be too late to give another."""
    Path("file").touch()
    said = run("--nproc-per-node", "1", option, f"{parent}/wanted", "touch", "started")
    assert said.returncode == 3
    assert option in said.stderr
    assert "Traceback" not in said.stderr
    assert not Path("started").exists()
