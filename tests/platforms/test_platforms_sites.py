"""What ModelArts, Volcano and MindCluster say in their variables; environments as recorded there."""

from __future__ import annotations

from pathlib import Path

import pytest

from davincirunsdk.platforms import ascendjob, detect, modelarts, volcano

MODELARTS = {
    "MA_NUM_HOSTS": "2",
    "VC_TASK_INDEX": "1",
    "VC_WORKER_NUM": "2",
    "VC_WORKER_HOSTS": "job-7f-worker-0.job-7f,job-7f-worker-1.job-7f",
    "MA_VJ_NAME": "ma-job-7f",
    "MA_TASK_NAME": "worker",
    "MA_CURRENT_IP": "192.0.2.12",
    "MA_JOB_DIR": "/home/ma-user/modelarts/user-job-dir",
    "MA_HOME": "/home/ma-user",
    "MA_MOUNT_PATH": "/home/ma-user/modelarts",
    "MA_LOG_DIR": "/home/ma-user/modelarts/log",
}
OLD_MODELARTS = {
    "DLS_TASK_INDEX": "1",
    "DLS_TASK_NUMBER": "2",
    "BATCH_CUSTOM0_HOSTS": "job-0.default:6666",
    "BATCH_CUSTOM1_HOSTS": "job-1.default:6666",
    "RANK_TABLE_FILE": "/user/config",
}
VOLCANO = {
    "VC_TASK_INDEX": "1",
    "VK_TASK_INDEX": "1",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
    "VC_WORKER_NUM": "2",
    "HOSTNAME": "job-worker-1",
}
OPERATOR = {
    "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "2222",
    "RANK": "1",
    "LOCAL_RANK": "0,1,2,3,4,5,6,7",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "XDL_IP": "192.0.2.12",
    "REPLICA_TYPE": "Worker",
    "MINDX_TASK_ID": "abc",
}


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (MODELARTS, "modelarts"),
        (OLD_MODELARTS, "modelarts"),
        ({"RANK_TABLE_FILE_V_1_0": "/x.json"}, "modelarts"),
        ({"BATCH_JOB_ID": "7"}, "modelarts"),
        (VOLCANO, "volcano"),
        (OPERATOR, "ascendjob"),
        ({"SLURM_JOB_ID": "1"}, "slurm"),
        ({}, "host"),
        ({"MA_HOME": "/home/me", "RANK_TABLE_FILE": "/x.json"}, "host"),
        ({"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "GROUP_RANK": "0"}, "host"),
    ],
)
def test_detection(env: dict[str, str], name: str) -> None:
    """Each platform is known by what it alone sets."""
    assert detect(env).NAME == name


def test_modelarts() -> None:
    """A new job lists its hosts, the first of which is the master."""
    site = modelarts.site(MODELARTS)
    assert (site.nnodes, site.node_rank, site.writes_table) == (2, 1, True)
    assert site.master_addr == "job-7f-worker-0.job-7f"
    assert site.master_port == modelarts.site({**MODELARTS, "VC_TASK_INDEX": "0"}).master_port
    assert site.log_dir == Path("/home/ma-user/modelarts/log")


def test_modelarts_with_a_route_plan() -> None:
    """With a route plan the platform numbers its nodes anew, and another host is the master."""
    env = {**MODELARTS, "ROUTE_PLAN": "true", "RANK_AFTER_ACC": "0", "MA_MASTER_INDEX": "1"}
    site = modelarts.site(env)
    assert (site.nnodes, site.node_rank, site.hosts) == (2, 0, ())
    assert site.master_addr == "job-7f-worker-1.job-7f"


def test_old_modelarts() -> None:
    """An old job has DLS_* and one variable per host."""
    site = modelarts.site(OLD_MODELARTS)
    assert (site.nnodes, site.node_rank, site.hosts) == (2, 1, ("job-0.default", "job-1.default"))


def test_volcano() -> None:
    """Hosts come from the service plugin, the own place from the pod's name among them."""
    site = volcano.site(VOLCANO)
    assert (site.nnodes, site.node_rank, site.master_addr) == (2, 1, "job-worker-0.job")


def test_volcano_masters_and_workers() -> None:
    """With several tasks the masters come first, and the index within the task settles nothing."""
    env = {**VOLCANO, "VC_MASTER_HOSTS": "job-master-0.job", "VC_TASK_INDEX": "0", "VK_TASK_INDEX": "0"}
    assert volcano.site(env).hosts == ("job-master-0.job", "job-worker-0.job", "job-worker-1.job")
    assert volcano.site(env).node_rank == 2
    del env["HOSTNAME"]
    assert volcano.site(env).node_rank is None
    assert volcano.site({**env, "RANK": "1", "WORLD_SIZE": "3"}).node_rank == 1


def test_operator() -> None:
    """The operator's RANK is the node's, as LOCAL_RANK lists all devices of the pod."""
    site = ascendjob.site(OPERATOR)
    assert (site.nnodes, site.node_rank) == (2, 1)
