"""What `init_rank_table()` does: find, await, convert, write, and say what to set."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from platform_host import make_root, put_sample
from rank_table_samples import sample, table

from davincirunsdk.errors import PlatformError, RankTableError
from davincirunsdk.platforms import prepare_rank_table
from davincirunsdk.rank_table import dump, parse

if TYPE_CHECKING:
    from collections.abc import Mapping


async def prepared(root: Path, env: Mapping[str, str]) -> dict[str, str] | None:
    """Prepare below a folder."""
    return await prepare_rank_table({"TMPDIR": str(root), **env}, notify=lambda _: None, root=root)


def content(path: str) -> bytes:
    """Read a file."""
    return Path(path).read_bytes()


async def test_no_table(tmp_path: Path) -> None:
    """Without a table there is nothing to set."""
    assert await prepared(make_root(tmp_path), {}) is None


async def test_conversion(tmp_path: Path) -> None:
    """A v0.1 table is converted to the documented file; the four variables say where and who."""
    root = make_root(tmp_path)
    source = put_sample("v0_1_two_hosts", root / "config" / "jobstart_hccl.json")
    home = tmp_path / "home"
    env = {
        "RANK_TABLE_FILE": str(source.parent),
        "MA_HOME": str(home),
        "MA_MOUNT_PATH": str(tmp_path / "other"),
        "MA_CURRENT_INSTANCE_NAME": "job-7f-trainjob-1",
    }
    names = await prepared(root, env)
    target = home / "rank_table" / "jobstart_hccl.json"
    assert names == {
        "RANK_TABLE_FILE": str(target),
        "MA_CURRENT_HOST_IP": "192.0.2.12",
        "RANK_START": "2",
        "RANK_SIZE": "4",
    }
    assert target.read_text() == dump(table("v0_1_two_hosts"))
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert source.read_bytes() == sample("v0_1_two_hosts")


@pytest.mark.parametrize(
    "name", ["v0_1_two_hosts", "v0_1_two_pods_one_host", "v1_0_two_hosts", "lab_two_hosts"]
)
async def test_twice(tmp_path: Path, name: str) -> None:
    """With the variables set, a second call says the same, and the file keeps its bytes."""
    root = make_root(tmp_path)
    env = {
        "RANK_TABLE_FILE": str(put_sample(name, root / "config" / "jobstart_hccl.json").parent),
        "MA_HOME": str(tmp_path / "home"),
        "MA_CURRENT_INSTANCE_NAME": "job-2" if "one_host" in name else "job-7f-trainjob-0",
        "XDL_IP": "192.0.2.22" if name.startswith("lab") else "192.0.2.11",
    }
    first = await prepared(root, env)
    assert first is not None
    written = content(first["RANK_TABLE_FILE"])
    second = await prepared(root, {**env, **first})
    assert second == first
    assert content(first["RANK_TABLE_FILE"]) == written


async def test_v1_table_stays_where_it_is(tmp_path: Path) -> None:
    """A v1.0 table is used as it stands, and no file is written."""
    root = make_root(tmp_path)
    path = put_sample("v1_0_one_host", root / "table.json")
    env = {"RANK_TABLE_FILE_V_1_0": str(path), "MA_HOME": str(tmp_path / "home")}
    names = await prepared(root, env)
    assert names is not None
    assert names["RANK_TABLE_FILE"] == str(path)
    assert (names["RANK_START"], names["RANK_SIZE"]) == ("0", "8")
    assert not (tmp_path / "home").exists()


async def test_mount_path_and_default(tmp_path: Path) -> None:
    """Without MA_HOME the file goes below MA_MOUNT_PATH, without that below /home/ma-user."""
    root = make_root(tmp_path)
    env = {"RANK_TABLE_FILE": str(put_sample("v0_1_devices_4_to_7", root / "t.json"))}
    mounted = await prepared(root, {**env, "MA_MOUNT_PATH": str(tmp_path / "mount")})
    default = await prepared(root, env)
    assert mounted is not None
    assert default is not None
    assert mounted["RANK_TABLE_FILE"] == str(tmp_path / "mount/rank_table/jobstart_hccl.json")
    assert default["RANK_TABLE_FILE"] == str(root / "home/ma-user/rank_table/jobstart_hccl.json")


async def test_target_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the documented folder cannot be written a private one is used, with a warning."""
    root = make_root(tmp_path)
    home = tmp_path / "home"
    home.write_text("no folder")
    env = {
        "RANK_TABLE_FILE": str(put_sample("v0_1_devices_4_to_7", root / "t.json")),
        "MA_HOME": str(home),
    }
    names = await prepared(root, env)
    assert names is not None
    path = names["RANK_TABLE_FILE"]
    assert path.startswith(str(tmp_path / f"davincirun-{os.geteuid()}"))
    assert caplog.messages == [
        (
            f"the v1.x rank table cannot be written to {home}/rank_table/jobstart_hccl.json (Not a "
            f"directory), so "
            f"it is in {path}"
        )
    ]
    assert parse(content(path)).world_size == 4


async def test_nowhere_to_write(tmp_path: Path) -> None:
    """Where nothing at all can be written, the error says what would help."""
    root = make_root(tmp_path)
    env = {
        "RANK_TABLE_FILE": str(put_sample("v0_1_devices_4_to_7", root / "t.json")),
        "MA_HOME": "/proc/none",
        "TMPDIR": "/proc",
    }
    with pytest.raises(PlatformError, match="expected a folder that this user may write: set TMPDIR"):
        await prepared(root, env)


async def test_source_is_the_target(tmp_path: Path) -> None:
    """A v0.1 source that lies where the target belongs is left alone; the result goes beside it."""
    root = make_root(tmp_path)
    source = put_sample("v0_1_devices_4_to_7", tmp_path / "home/rank_table/jobstart_hccl.json")
    names = await prepared(root, {"RANK_TABLE_FILE": str(source), "MA_HOME": str(tmp_path / "home")})
    assert names is not None
    assert names["RANK_TABLE_FILE"] != str(source)
    assert source.read_bytes() == sample("v0_1_devices_4_to_7")


async def test_not_complete_yet(tmp_path: Path) -> None:
    """A table that is not complete is awaited, as the platform writes it while the job starts."""
    root = make_root(tmp_path)
    path = put_sample("initializing", root / "t.json")
    env = {"RANK_TABLE_FILE": str(path), "MA_HOME": str(tmp_path / "home")}
    task = asyncio.create_task(prepared(root, env))
    await asyncio.sleep(0.3)
    assert not task.done()
    put_sample("v0_1_devices_4_to_7", path)
    names = await asyncio.wait_for(task, 20)
    assert names is not None
    assert names["RANK_SIZE"] == "4"


async def test_wrong_table(tmp_path: Path) -> None:
    """A wrong table is an error, and nothing is written."""
    root = make_root(tmp_path)
    env = {
        "RANK_TABLE_FILE": str(put_sample("fault_masked_servers", root / "t.json")),
        "MA_HOME": str(tmp_path / "home"),
    }
    with pytest.raises(RankTableError):
        await prepared(root, env)
    assert not (tmp_path / "home").exists()


PREPARE_FOR_EVER = """
import asyncio, sys
from pathlib import Path
from davincirunsdk.platforms import prepare_rank_table

root = Path(sys.argv[1])
env = {"RANK_TABLE_FILE": str(root / "t.json"), "MA_HOME": str(root / "home")}
while True:
    asyncio.run(prepare_rank_table(env, notify=print, root=root))
    (root / "home/rank_table/jobstart_hccl.json").unlink()
"""


def test_killed_in_the_middle(tmp_path: Path) -> None:
    """Killed at any moment, the conversion leaves a complete target or none."""
    root = make_root(tmp_path)
    put_sample("v0_1_devices_4_to_7", root / "t.json")
    target = tmp_path / "home/rank_table/jobstart_hccl.json"
    for delay in (0.0, 0.003, 0.007):
        with subprocess.Popen([sys.executable, "-c", PREPARE_FOR_EVER, str(root)]) as child:
            deadline = time.monotonic() + 20
            while not target.exists():
                assert time.monotonic() < deadline
                assert child.poll() is None
                time.sleep(0.001)
            time.sleep(delay)
            child.kill()
        if target.exists():
            assert target.read_text() == dump(table("v0_1_devices_4_to_7"))
            target.unlink()
