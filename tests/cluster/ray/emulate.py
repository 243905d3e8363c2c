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
        if "ray_version" in asked:
            pretend(cluster, asked)
            print("{}", file=replies, flush=True)
            continue
        settings = {
            "node_ip_address": asked.pop("address"),
            "object_store_memory": STORE_BYTES,
            **asked,
        }
        if cluster.head_node is None:
            settings["include_dashboard"] = False
        node = cluster.add_node(**settings)
        raylet = node.all_processes["raylet"][0].process.pid
        print(json.dumps({"raylet": raylet, "cluster": cluster.address}), file=replies, flush=True)
    cluster.shutdown()


def pretend(cluster: Any, versions: dict[str, str]) -> None:
    """Change the versions that the cluster keeps of itself."""
    from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
    from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
    from ray._raylet import GcsClient

    content = json.dumps(versions).encode()
    GcsClient(address=cluster.address).internal_kv_put(
        CLUSTER_METADATA_KEY, content, True, KV_NAMESPACE_CLUSTER
    )


if __name__ == "__main__":
    main()
