"""A Ray cluster on loopback: a head, and nodes with 8 pretended NPUs each, until stdin closes.

    ray_cluster.py NODES

It prints a line of JSON with the address, the pid of the head's server and of each node's raylet; every
line on stdin adds a node and has the JSON printed anew.
"""

from __future__ import annotations

import json
import sys

from ray.cluster_utils import Cluster

MEMORY = 80 << 20


def main(count: int) -> None:
    # The head takes no part in jobs, so that every node may be lost.
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [
        cluster.add_node(num_cpus=4, resources={"NPU": 8}, object_store_memory=MEMORY) for _ in range(count)
    ]
    while True:
        raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
        head = cluster.head_node.all_processes["gcs_server"][0].process.pid
        sys.stdout.write(json.dumps({"address": cluster.address, "raylets": raylets, "head": head}) + "\n")
        sys.stdout.flush()
        if not sys.stdin.readline():
            return
        nodes.append(cluster.add_node(num_cpus=4, resources={"NPU": 8}, object_store_memory=MEMORY))


if __name__ == "__main__":
    main(int(sys.argv[1]))
