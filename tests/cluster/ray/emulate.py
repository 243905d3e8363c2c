"""Ray nodes on this machine, each at a loopback address of its own.

    {"address": "127.0.0.2", "num_cpus": 1} --stdin--> a node --stdout--> {"raylet": 4711}

The first one is the head and replies with its address, too. All of them end with this process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

STORE_BYTES = 80 << 20


def main() -> None:
    # Ray prints to the standard output, too.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        settings = {
            "node_ip_address": asked.pop("address"),
            "object_store_memory": STORE_BYTES,
            **asked,
        }
        if cluster.head_node is None:
            settings["include_dashboard"] = False
        node = cluster.add_node(**settings)
        raylet = node.all_processes["raylet"][0].process.pid
        replies.write(json.dumps({"raylet": raylet, "cluster": cluster.address}) + "\n")
        replies.flush()
    cluster.shutdown()


if __name__ == "__main__":
    main()
