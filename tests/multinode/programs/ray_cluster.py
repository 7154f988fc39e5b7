"""A Ray cluster on loopback: one head and several nodes with 8 pretended NPUs each, until stdin closes.

    ray_cluster.py NODES

It prints one line of JSON: the address, and the pid of each node's raylet by node id.
"""

from __future__ import annotations

import json
import os
import sys

# Whatever the name says, on Linux too it makes Ray use 127.0.0.1.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

from ray.cluster_utils import Cluster

MEMORY = 80 << 20

if __name__ == "__main__":
    # The head takes no part, so that every node may be lost.
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [
        cluster.add_node(num_cpus=4, resources={"NPU": 8}, object_store_memory=MEMORY)
        for _ in range(int(sys.argv[1]))
    ]
    raylets = {node.node_id: node.all_processes["raylet"][0].process.pid for node in nodes}
    sys.stdout.write(json.dumps({"address": cluster.address, "raylets": raylets}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    cluster.shutdown()
