"""hccl-ranktable: check, show, convert, make, merge; exit codes and what is written where."""

from __future__ import annotations

import json
from inspect import signature
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from platform_host import make_root, put_sample
from rank_table_samples import SAMPLES, sample, table

from davincirunsdk.rank_table import dump
from davincirunsdk.rank_table.cli import main

if TYPE_CHECKING:
    from pathlib import Path


def run(*words: str | Path, stdin: bytes | None = None) -> Result:
    """Run the command."""
    # Before click 8.2 a runner mixes both streams unless it is told not to; since then it never does.
    apart: dict[str, Any] = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
    return CliRunner(**apart).invoke(main, [str(word) for word in words], input=stdin)


def at(name: str) -> str:
    """Path of a sample."""
    return str(SAMPLES / f"{name}.json")


def test_check_good() -> None:
    """Good tables give a line each and exit code 0."""
    result = run("check", at("v1_0_two_hosts"), at("v0_1_two_hosts"))
    assert (result.exit_code, result.stdout) == (
        0,
        (
            f"{at('v1_0_two_hosts')}: v1.0, 2 nodes, 16 devices; no fault\n"
            f"{at('v0_1_two_hosts')}: v0.1, 2 nodes, 4 devices; no fault\n"
        ),
    )


def test_check_lists_all_faults() -> None:
    """Every fault of every file is listed, with oddities of the good ones; the exit code is 1."""
    result = run("check", at("fault_masked_servers"), at("v1_0_devices_0_and_4"), at("broken_cut"))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith(
        f'{at("fault_masked_servers")}: fault: server_list[1].server_id: found "192.*.*.*"'
    )
    assert lines[1].startswith(
        f"{at('v1_0_devices_0_and_4')}: warning: server_list[0].device: found devices 0, 4"
    )
    assert lines[2] == f"{at('v1_0_devices_0_and_4')}: v1.0, 1 node, 2 devices; no fault"
    assert (
        lines[3]
        == f"{at('broken_cut')}: fault: found invalid JSON: text that ends early: this '[' is not closed at "
        "line 7, column 14 (\"device\": [); expected a ']' for it"
    )


@pytest.mark.parametrize("command", ["check", "show", "convert", "merge"])
def test_what_cannot_be_read(tmp_path: Path, command: str) -> None:
    """A file that cannot be read is exit code 3 and one line."""
    result = run(command, tmp_path / "no.json")
    assert result.exit_code == 3
    assert result.stderr == f"{tmp_path / 'no.json'} cannot be read: No such file or directory\n"


@pytest.mark.parametrize(
    "words",
    [["check"], ["convert"], ["explode"], ["make", "--devices", "x"], ["make", "--devices", "3-1"]],
)
def test_usage(words: list[str]) -> None:
    """Wrong usage is exit code 2."""
    assert run(*words).exit_code == 2


def test_the_bare_command_shows_its_help() -> None:
    """Whether that is wrong usage is click's own choice: it is since 8.2."""
    result = run()
    assert result.exit_code in (0, 2)
    assert "merge" in result.output


def test_standard_input() -> None:
    """`-` is standard input."""
    result = run("check", "-", stdin=sample("v1_2_super_pods"))
    assert (result.exit_code, result.stdout) == (0, "-: v1.2, 4 nodes, 8 devices; no fault\n")


def test_show() -> None:
    """A table is laid out for people: servers, ranks, devices, addresses, pods; then what is odd."""
    result = run("show", "-", stdin=sample("v0_1_orders_disagree"))
    assert result.exit_code == 0
    assert result.stdout == (
        "-: v0.1, 2 nodes, 4 devices\n"
        "\n"
        "192.0.2.9  ranks 0-1\n"
        "    rank  device  address\n"
        "       0       0  29.2.0.1         job-2\n"
        "       1       1  29.2.0.2         job-2\n"
        "\n"
        "192.0.2.10  ranks 2-3\n"
        "    rank  device  address\n"
        "       2       0  29.1.0.1         job-10\n"
        "       3       1  29.1.0.2         job-10\n"
        "\n"
        '-: warning: group_list: found server "192.0.2.10" ranked after server "192.0.2.9"; expected '
        "ranks in "
        "the text order of server_id, which MindSpore counts on with several servers (and HCCL in v0.1); the "
        "order of the table is kept\n"
    )


def test_show_a_faulty_table() -> None:
    """Of a faulty table is shown what could be read, then the faults; control characters are left out."""
    text = sample("v1_0_names_and_ports").replace(b'"rank_id": "1"', b'"rank_id": "one"')
    result = run("show", "-", stdin=text.replace(b'"node_0"', b'"node\\u001b[31m"'))
    assert result.exit_code == 1
    assert "\x1b" not in result.stdout
    assert "       ?       1  29.1.0.2" in result.stdout
    assert '-: fault: server_list[0].device[1].rank_id: found "one"' in result.stdout


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.json")), ids=lambda path: path.stem)
def test_every_sample(path: Path) -> None:
    """Every sample is shown, checked and converted to a clear end, whatever it is."""
    for command in ("show", "check", "convert"):
        result = run(command, path)
        assert result.exit_code in (0, 1), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        if path.stem.startswith(("broken", "fault")):
            assert result.exit_code == 1


def test_convert(tmp_path: Path) -> None:
    """Converted text goes to standard output or, whole, into a file; warnings go to standard error."""
    wanted = dump(table("v0_1_orders_disagree")) + "\n"
    result = run("convert", at("v0_1_orders_disagree"))
    assert (result.exit_code, result.stdout) == (0, wanted)
    assert result.stderr.startswith(f"{at('v0_1_orders_disagree')}: warning: group_list: found server")
    out = tmp_path / "out.json"
    assert run("convert", at("v0_1_orders_disagree"), "-o", out).stdout == ""
    assert out.read_text() == wanted
    assert run("convert", out).stdout == wanted


def test_convert_a_faulty_table(tmp_path: Path) -> None:
    """A faulty table is not converted, and no file is left."""
    out = tmp_path / "out.json"
    result = run("convert", at("fault_duplicate_address"), "-o", out)
    assert result.exit_code == 1
    assert "server_list[0].device[1].device_ip" in result.stderr
    assert not out.exists()


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    """An output that cannot be written is exit code 3 and one line."""
    result = run("convert", at("v1_0_one_host"), "-o", tmp_path / "no" / "out.json")
    assert result.exit_code == 3
    assert result.stderr == f"{tmp_path / 'no' / 'out.json'} cannot be written: No such file or directory\n"


def test_make(tmp_path: Path) -> None:
    """A host's table is made of its device files and hccn.conf, below another root as well."""
    root = make_root(tmp_path, range(4))
    (root / "etc").mkdir()
    (root / "etc/hostname").write_text("node-a\n")
    (root / "etc/hccn.conf").write_text(
        "address_0=29.0.0.1\nnetmask_0=255.255.255.0\naddress_1 = 29.0.0.2\naddress_3=nonsense\n"
    )
    result = run("make", "--root", root)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {
        "status": "completed",
        "version": "1.0",
        "server_count": "1",
        "server_list": [
            {
                "server_id": "node-a",
                "device": [
                    {"device_id": "0", "device_ip": "29.0.0.1", "rank_id": "0"},
                    {"device_id": "1", "device_ip": "29.0.0.2", "rank_id": "1"},
                    {"device_id": "2", "rank_id": "2"},
                    {"device_id": "3", "rank_id": "3"},
                ],
            }
        ],
    }


HCCN_TOOL = """#!/bin/sh
# -i N -ip -g, or -i N -ip -inet6 -g
case "$2 $4" in
    "5 -g") printf 'ipaddr:29.0.0.6\\nnetmask:255.255.255.0\\n' ;;
    "6 -inet6") printf 'ipv6_address: fd00::6\\nprefix_length: 64\\n' ;;
    *) echo 'hccn_tool: no address is set'; exit 1 ;;
esac
"""


def test_make_asks_hccn_tool(tmp_path: Path) -> None:
    """Addresses are what hccn_tool says, and what hccn.conf says where the tool has none."""
    root = make_root(tmp_path, range(8))
    tool = root / "usr/local/Ascend/driver/tools/hccn_tool"
    tool.parent.mkdir(parents=True)
    tool.write_text(HCCN_TOOL)
    tool.chmod(0o755)
    (root / "etc").mkdir()
    (root / "etc/hccn.conf").write_text("address_4=29.0.0.5\naddress_5=29.9.9.9\n")
    result = run("make", "--root", root, "--devices", "5,4", "--server-id", "192.0.2.11")
    assert result.exit_code == 0, result.stderr
    (server,) = json.loads(result.stdout)["server_list"]
    assert server["server_id"] == "192.0.2.11"
    assert [(d["device_id"], d["device_ip"], d["rank_id"]) for d in server["device"]] == [
        ("4", "29.0.0.5", "0"),
        ("5", "29.0.0.6", "1"),
    ]
    ipv6 = run("make", "--root", root, "--devices", "6", "--server-id", "a")
    assert json.loads(ipv6.stdout)["server_list"][0]["device"][0]["device_ip"] == "fd00::6"


@pytest.mark.parametrize(
    ("npus", "words", "message"),
    [
        (
            [],
            [],
            (
                "found no NPU (no device file such as {root}/dev/davinci0); expected at least one: run this "
                "on a host with NPUs, or say which it has with --devices"
            ),
        ),
        (
            [0, 1],
            ["--devices", "0-3", "--server-id", "a"],
            "found NPUs 0, 1; expected 2, 3 as well, as asked for with --devices",
        ),
        ([0], [], "found no host name in {root}/etc/hostname; expected one: give --server-id"),
    ],
)
def test_make_what_cannot_be_made(tmp_path: Path, npus: list[int], words: list[str], message: str) -> None:
    """What is missing for a table is told with the option that helps."""
    result = run("make", "--root", make_root(tmp_path, npus), *words)
    assert (result.exit_code, result.stderr) == (1, message.format(root=tmp_path) + "\n")


def test_make_on_this_machine() -> None:
    """On a real machine the name that it is known by is found."""
    result = run("make", "--devices", "0,1")
    if result.exit_code == 0:
        assert json.loads(result.stdout)["server_list"][0]["server_id"]
    else:
        assert "found NPUs" in result.stderr  # a host with NPUs, but none of these


def host_table(tmp_path: Path, name: str, server: int) -> Path:
    """The table of one host, as `make` writes it."""
    path = tmp_path / f"{name}.json"
    devices = [
        {"device_id": str(i), "device_ip": f"29.{server}.0.{i + 1}", "rank_id": str(i)} for i in range(2)
    ]
    path.write_text(
        json.dumps(
            {
                "status": "completed",
                "version": "1.0",
                "server_count": "1",
                "server_list": [{"server_id": name, "device": devices}],
            }
        )
    )
    return path


def test_merge(tmp_path: Path) -> None:
    """The same table for any order of the arguments; the order given only if asked for."""
    b, a = host_table(tmp_path, "node_b", 2), host_table(tmp_path, "node_a", 1)
    merged = run("merge", b, a)
    assert merged.exit_code == 0, merged.stderr
    assert run("merge", a, b).stdout == merged.stdout
    document = json.loads(merged.stdout)
    assert document["server_count"] == "2"
    assert [s["server_id"] for s in document["server_list"]] == ["node_a", "node_b"]
    assert [d["rank_id"] for s in document["server_list"] for d in s["device"]] == ["0", "1", "2", "3"]
    kept = json.loads(run("merge", "--keep-order", b, a).stdout)
    assert [s["server_id"] for s in kept["server_list"]] == ["node_b", "node_a"]


def test_merge_super_pods(tmp_path: Path) -> None:
    """Super pods of several tables are joined by their id."""
    whole = json.loads(sample("v1_2_super_pods"))
    paths = []
    for place, server in enumerate(whole["server_list"]):
        part = {
            **whole,
            "server_count": "1",
            "server_list": [
                {
                    **server,
                    "device": [{**d, "rank_id": str(i)} for i, d in enumerate(server["device"])],
                }
            ],
            "super_pod_list": [
                {"super_pod_id": str(place // 2), "server_list": [{"server_id": server["server_id"]}]}
            ],
        }
        paths.append(tmp_path / f"{place}.json")
        paths[-1].write_text(json.dumps(part))
    merged = run("merge", *reversed(paths))
    assert merged.exit_code == 0, merged.stderr
    assert json.loads(merged.stdout) == whole


def test_merge_what_cannot_be_merged(tmp_path: Path) -> None:
    """A server in two tables, addresses that repeat, and v2.0 are refused."""
    a = host_table(tmp_path, "node_a", 1)
    twice = run("merge", a, a)
    assert (twice.exit_code, twice.stderr) == (
        1,
        f'rank table {a}: found server "node_a", which is in {a} as well; expected each server once\n',
    )
    same = run("merge", a, host_table(tmp_path, "node_b", 1))
    assert same.exit_code == 1
    assert "rank table (merged) has 2 faults" in same.stderr
    v2 = put_sample("v2_0_two_hosts", tmp_path / "v2.json")
    assert "found version 2.0; expected v0.1 or v1.x to merge" in run("merge", a, v2).stderr


MAP = """
        NPU ID             Chip ID             Chip Logic ID             Chip Name
        {0}             0             0             Ascend910
        {0}             1             1             Ascend910
        {0}             2             -             Mcu
        {1}             0             2             Ascend910
        {1}             1             3             Ascend910
"""
NEW_MAP = """\
NPU ID      Chip ID      Chip Logic ID      Chip Phy-ID      Chip Name
3           0            0                  6                Ascend910
3           1            1                  7                Ascend910
"""
NPU_SMI = """#!/bin/sh
# info -m, or info -t spod-info -i NPU -c CHIP
if [ "$2" = -m ]; then cat {map}; exit; fi
case "$5$7" in
    {unknown}) echo 'This device does not support querying spod-info.'; exit 1 ;;
    *) printf '\\tSDID                           : %s\\n' $((1000 + $5 * 10 + $7))
       printf '\\tSuper Pod Size                 : 384\\n\\tSuper Pod ID                   : %s\\n' {pod}
       printf '\\tServer Index                   : 4\\n' ;;
esac
"""


def make_super_pod_root(
    root: Path, npus: list[int], chips: str, *, unknown: str = "none", pod: str = "7"
) -> Path:
    """The tree of a host whose npu-smi knows a super pod."""
    make_root(root, npus)
    (root / "map").write_text(chips)
    tool = root / "usr/local/sbin/npu-smi"
    tool.parent.mkdir(parents=True)
    tool.write_text(NPU_SMI.format(map=root / "map", unknown=unknown, pod=pod))
    tool.chmod(0o755)
    return root


@pytest.mark.parametrize(
    ("npus", "chips", "sdids"),
    [
        ([0, 1, 2, 3], MAP.format(0, 1), ["1000", "1001", "1010", "1011"]),
        ([4, 5, 6, 7], MAP.format(2, 3), ["1020", "1021", "1030", "1031"]),
        ([6, 7], NEW_MAP, ["1030", "1031"]),
    ],
    ids=["all", "a container's", "physical numbers told"],
)
def test_make_on_a_super_pod(tmp_path: Path, npus: list[int], chips: str, sdids: list[str]) -> None:
    """Where npu-smi knows of a super pod the table is v1.2, with each device's own number."""
    root = make_super_pod_root(tmp_path, npus, chips)
    result = run("make", "--root", root, "--server-id", "a")
    assert result.exit_code == 0, result.stderr
    table = json.loads(result.stdout)
    assert table["version"] == "1.2"
    assert table["super_pod_list"] == [{"super_pod_id": "7", "server_list": [{"server_id": "a"}]}]
    devices = table["server_list"][0]["device"]
    assert [int(device["device_id"]) for device in devices] == npus
    assert [device["super_device_id"] for device in devices] == sdids
    (tmp_path / "table.json").write_text(result.stdout)
    assert run("check", tmp_path / "table.json").exit_code == 0


@pytest.mark.parametrize(
    ("unknown", "pod", "chips"),
    [
        ("*", "7", MAP.format(0, 1)),
        ("none", "4294967295", MAP.format(0, 1)),
        ("none", "7", "no such option\n"),
    ],
    ids=["not supported", "in no super pod", "older tool"],
)
def test_make_without_a_super_pod(tmp_path: Path, unknown: str, pod: str, chips: str) -> None:
    """A machine without a super pod, or with a tool that does not know, gets a plain v1.0 table."""
    root = make_super_pod_root(tmp_path, [0, 1, 2, 3], chips, unknown=unknown, pod=pod)
    result = run("make", "--root", root, "--server-id", "a")
    assert result.exit_code == 0, result.stderr
    table = json.loads(result.stdout)
    assert (table["version"], "super_pod_list" in table) == ("1.0", False)


@pytest.mark.parametrize(
    ("unknown", "pod", "message"),
    [
        ("10", "7", "found no super pod facts for NPU 2 but for others of this host"),
        ("none", "$((1 + $5))", "found NPUs of super pods 1, 2 on this host; expected one"),
    ],
)
def test_make_with_half_a_super_pod(tmp_path: Path, unknown: str, pod: str, message: str) -> None:
    """Facts that contradict each other are an error, not a table that HCCL refuses later."""
    root = make_super_pod_root(tmp_path, [0, 1, 2, 3], MAP.format(0, 1), unknown=unknown, pod=pod)
    result = run("make", "--root", root, "--server-id", "a")
    assert result.exit_code == 1
    assert message in result.stderr
