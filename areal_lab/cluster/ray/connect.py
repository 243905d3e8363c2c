"""Connect this process to a Ray cluster, or explain in one sentence why that fails."""

from __future__ import annotations

import re
import socket
import tempfile
from pathlib import Path
from typing import Any, Final

import ray

from areal_lab.host.owned_folders import make_owned_folder

_CONNECT_S: Final = 5.0
_STORE_BYTES: Final = 100 << 20
"""Object store of a private cluster, near Ray's minimum: no tensor passes through it."""
_VERSIONS: Final = re.compile(
    r"cluster was started with:\s+Ray: (\S+)\s+Python: (\S+)\s+"
    r"This process.* was started with:\s+Ray: (\S+)\s+Python: (\S+)"
)


def connect(address: str, hosts: int) -> None:
    """Connect to a cluster.

    `address` is `auto`, `local` for a private cluster that ends with this process, or HOST:PORT.
    `hosts` is the size of a private cluster.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if address == "local":
        # Ray would leave the session's folder in /tmp/ray.
        folder = make_owned_folder(Path(tempfile.gettempdir()), mode=0o700)
        ray.init(
            address="local",
            num_cpus=hosts,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            _temp_dir=str(folder),
            **quiet,
        )
        return
    if address != "auto":
        _check_listens(address)
    try:
        ray.init(address=address, **quiet)
    except Exception as error:  # one of six types, including RuntimeError
        raise ValueError(explained(error, address)) from error


def _check_listens(address: str) -> None:
    """Check the port; Ray itself would try for half a minute."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal():
        raise ValueError(
            f"scheduler.ray_address is {address!r}, but must be auto, local or HOST:PORT, as in "
            "10.0.0.1:6379 (the address that `ray start --head` has printed)"
        )
    tried = host
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        if host in ("127.0.0.1", "localhost"):  # Ray takes the outer address of the machine instead
            tried = ray.util.get_node_ip_address()
            socket.create_connection((tried, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ValueError(
            f"scheduler.ray_address is {address}, but nothing replies at {tried}:{port} ({error}); "
            "is the head running (`ray start --head --node-ip-address=ADDRESS`, with an address "
            "that all nodes reach), and does a firewall let its port through?"
        ) from error


def explained(error: Exception, address: str) -> str:
    """Error of `ray.init` in one sentence, with a fix."""
    cause = error.__cause__ or error  # the message often omits it
    text = f"{error}\n{cause}"
    if found := _VERSIONS.search(text):
        their_ray, their_python, our_ray, our_python = found.groups()
        return (
            f"the Ray cluster has Ray {their_ray} and Python {their_python}, but this machine has "
            f"Ray {our_ray} and Python {our_python}; Ray needs the same on both: change one of them"
        )
    first = str(cause).strip().partition("\n")[0]
    if re.search("(?i)authentication|auth.?token", text):
        return (
            f"the Ray cluster does not accept this machine's token ({first}); set RAY_AUTH_TOKEN "
            "to that of the cluster (on its head: ~/.ray/auth_token)"
        )
    if "Could not find any running Ray" in text:
        return (
            "scheduler.ray_address is auto, but no Ray cluster runs on this machine; start one "
            "with `ray start --head` here and `ray start --address=HOST:6379` on the others"
        )
    return (
        f"Ray does not connect to {address} ({first}); this machine must be a node of the cluster "
        "(`ray start --address=HOST:PORT`), or the run be submitted to it (`ray job submit`)"
    )
