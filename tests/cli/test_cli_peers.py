"""Command lines of torchrun and msrun: translated, left without effect, or refused with what to write."""

from __future__ import annotations

import os

import pytest

from davincirunsdk.cli.peers import PeerOptionError, translate

OWN = {
    "--nproc-per-node": True,
    "--nnodes": True,
    "--node-rank": True,
    "--master-addr": True,
    "--master-port": True,
    "--max-restarts": True,
    "--log-dir": True,
    "--framework": True,
    "--name": True,
    "--echo": True,
    "--module": False,
    "--quiet": False,
    "-m": False,
}
SCRIPT = ("train.py", "--nproc_per_node", "2", "--join=True")


def options(line: str, **env: str) -> str:
    """What becomes of a line's options; the script's own words stay as they are."""
    words = translate([*line.split(), *SCRIPT], OWN, env).words
    assert words[-len(SCRIPT) :] == SCRIPT
    return " ".join(words[: -len(SCRIPT)])


CPUS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("", ""),
        ("--quiet -m", "--quiet -m"),
        ("--nproc_per_node 4", "--nproc-per-node 4"),
        ("--nproc_per_node=4", "--nproc-per-node 4"),
        ("--nproc-per-node=auto", ""),
        ("--nproc-per-node npu", ""),
        ("--nproc-per-node gpu", ""),
        ("--nproc-per-node cpu", f"--nproc-per-node {CPUS}"),
        ("--standalone --nproc-per-node 2", "--nnodes 1 --nproc-per-node 2"),
        ("--nnodes 2:2", "--nnodes 2"),
        ("--nnodes 1:4", "--nnodes 1:4"),
        ("--nnodes=2 --node_rank=1 --master_addr=a --master_port=29500",
         "--nnodes 2 --node-rank 1 --master-addr a --master-port 29500"),
        ("--nnodes 2 --node-rank 1 --rdzv-backend c10d --rdzv_endpoint host:29400 --rdzv-id j7",
         "--nnodes 2 --node-rank 1 --master-addr host --master-port 29400 --name j7"),
        ("--rdzv-endpoint localhost:0", "--master-addr localhost"),
        ("--rdzv-endpoint [fe80::1]:5", "--master-addr fe80::1 --master-port 5"),
        ("--rdzv-endpoint h", "--master-addr h"),
        ("--rdzv-id none --rdzv-id=x --name y", "--name y"),
        ("--max_restarts 3", "--max-restarts 3"),
        ("--log_dir out", "--log-dir out"),
        ("--local-ranks-filter 0,2", "--echo 0,2"),
        ("--numa-binding node", "--bind node"),
        ("--numa_binding=exclusive", "--bind exclusive"),
        ("--shutdown-timeout 40", "--grace-period 40"),
        ("--virtual-local-rank", "--visible one"),
        ("--signals-to-handle SIGTERM,SIGINT", ""),
        ("--no-python", ""),
        ("-r 3 -t 1:2", ""),
        # msrun
        ("--worker_num 8 --local_worker_num 8 --join True",
         "--framework mindspore --nproc-per-node 8 --nnodes 1"),
        ("--worker_num=4", "--framework mindspore --nproc-per-node 4 --nnodes 1"),
        ("--worker_num=16 --local_worker_num=8 --node_rank=1 --master_addr=h --master_port=8118",
         ("--node-rank 1 --master-addr h --master-port 8118 --framework mindspore "
         "--nproc-per-node 8 --nnodes 2")),
        ("--worker_num 4 --local_worker_num 4 --node_rank -1 --log_dir=",
         "--log-dir . --framework mindspore --nproc-per-node 4 --nnodes 1"),
        ("--worker_num 2 --framework torch --local_worker_num 2",
         "--framework torch --nproc-per-node 2 --nnodes 1"),
        ("--cluster_time_out 300", "--env MS_TOPO_TIMEOUT=300 --framework mindspore"),
        ("--bind_core True", "--bind auto --framework mindspore"),
        ("--bind_core=False --bind_numa False", "--framework mindspore"),
        ("--rank_table_file t.json", "--rank-table t.json --framework mindspore"),
        ("--rank_table_file= --sim_level -1", "--framework mindspore"),
        ("--tail_worker_log -1", "--echo all --framework mindspore"),
        ("--tail_worker_log 0,3", "--echo 0,3 --framework mindspore"),
    ],
)  # fmt: skip
def test_a_line_of_a_peer_in_our_words(line: str, ours: str) -> None:
    """With the first word changed, the line means here what it meant there."""
    assert options(line) == ours


@pytest.mark.parametrize(
    ("line", "write"),
    [
        ("--rdzv-backend etcd", "--master-addr"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:1", "--node-rank"),
        ("--nnodes 1:2 --rdzv-endpoint h:1", "--node-rank"),
        ("--rdzv-endpoint a:b:c", "HOST:PORT"),
        ("--logs-specs x", "manager.logs()"),
        ("--local-addr 10.0.0.1", "--iface"),
        ("--numa-binding core-complex", "--bind"),
        ("--signals-to-handle SIGPIPE", "leave the option out"),
        ("--worker_num 16 --local_worker_num 8", "--node_rank"),
        ("--worker_num 9 --local_worker_num 8", "--rank-table"),
        ("--worker_num none", "--worker_num is 'none'"),
        ("--bind_core {\"device0\":[\"0-9\"]}", "--bind 0-9"),
        ("--sim_level 1", "MS_SIMULATION_LEVEL"),
        ("-np 4", "--nproc-per-node"),
        ("-n 4", "--nproc-per-node"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_with_the_words_to_write(line: str, write: str) -> None:
    """The error names the option of ours, or what to do without one."""
    with pytest.raises(PeerOptionError) as refused:
        options(line)
    assert write in str(refused.value)


@pytest.mark.parametrize("name", ["PET_NODE_RANK", "SLURM_NODEID"])
def test_a_platform_that_gives_the_place_is_enough(name: str) -> None:
    """A rendezvous on several nodes is no error where the platform says which node this is."""
    assert (
        options("--nnodes 2 --rdzv-endpoint h:1", **{name: "1"})
        == "--nnodes 2 --master-addr h --master-port 1"
    )


def test_options_without_meaning_make_one_line() -> None:
    """Whatever their number, one line names them; a quiet one is not named."""
    line = "--monitor-interval 1 --role trainer -t 3 --no-python --nproc-per-node 2"
    (note,) = translate([*line.split(), *SCRIPT], OWN, {}).notes
    assert note.startswith("without effect here: --monitor-interval (")
    assert "--role" in note
    assert "--tee" in note
    assert "--no-python" not in note


def test_another_default_is_said() -> None:
    """torchrun starts one worker without a number, davincirun one per device: said where torchrun is seen."""
    assert any("one worker per device" in note for note in translate(["--standalone", "t.py"], OWN, {}).notes)
    assert translate(["t.py"], OWN, {}).notes == ()


def test_what_nobody_knows_is_left_to_the_parser() -> None:
    """An unknown option stays, so that the error is about what was written."""
    assert translate(["--no-such", "t.py"], OWN, {}).words == ("--no-such", "t.py")
    assert translate(["--", "--worker_num"], OWN, {}).words == ("--", "--worker_num")
