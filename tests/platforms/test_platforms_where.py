"""Where we are, told as data, with nothing started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from platform_host import make_root, put_sample

from davincirunsdk.options import Wish
from davincirunsdk.platforms.where import where

if TYPE_CHECKING:
    from pathlib import Path


async def test_each_source_is_listed(tmp_path: Path) -> None:
    """All that speak are listed in order of trust, and who is believed."""
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
        "SLURM_NODEID": "1",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
    }
    found = await where(env, Wish(nproc_per_node=2, node_rank=1), root=make_root(tmp_path))
    assert (found.platform, found.problem, found.rank_table) == ("slurm", "", None)
    assert found.cluster is not None
    assert (found.cluster.node_rank, found.cluster.world_size) == (1, 4)
    assert [str(fact) for fact in found.facts if fact.name == "node rank"] == [
        "node rank: 1, from --node-rank (node_rank)",
        "node rank: 1, from Slurm (SLURM_NODEID) (as well)",
        "node rank: 1, from Kubeflow (PET_NODE_RANK) (as well)",
    ]


async def test_a_problem_is_data(tmp_path: Path) -> None:
    """A contradiction is told beside the facts, and a table that is not complete is not waited for."""
    root = make_root(tmp_path, range(2))
    env = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "192.0.2.1"}
    found = await where(env, Wish(node_rank=0), root=root)
    assert "found node rank 0 from --node-rank (node_rank), but node rank 1 from Kubeflow" in found.problem
    assert found.cluster is None
    assert {fact.source for fact in found.facts} > {"Kubeflow (PET_NODE_RANK)", "MASTER_ADDR"}
    path = put_sample("initializing", root / "t.json")
    table = await where({"RANK_TABLE_FILE": str(path)}, Wish(), root=root)
    assert (table.rank_table, table.named_by) == (path, "RANK_TABLE_FILE")
    assert "is not complete after 0 s" in table.problem
