"""The command line of bubblewrap, 0.8 or newer: the same file system as `confine.make_root`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from areal_lab.rewards.sandbox.confine import DEVICES, USER, WORK
from areal_lab.rewards.sandbox.visible import Visible


def command(
    visible: Visible, disk_bytes: int, environment: Mapping[str, str], inner: Sequence[str]
) -> list[str]:
    """Run `inner`, which is init, in namespaces of its own.

    Raises:
        FileNotFoundError: there is no `bwrap`.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("bwrap is not installed")
    shown = [word for path in visible.readable for word in ("--ro-bind", path, path)]
    links = [word for path, target in visible.links for word in ("--symlink", target, path)]
    devices = [f"/dev/{name}" for name in DEVICES]
    variables = [word for pair in environment.items() for word in ("--setenv", *pair)]
    return [
        program,
        *("--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *("--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox"),
        *shown,
        *(word for device in devices for word in ("--dev-bind", device, device)),
        *links,
        *("--size", str(disk_bytes), "--perms", "0700", "--tmpfs", WORK),
        *("--remount-ro", "/", "--chdir", WORK),
        *variables,
        "--",
        *inner,
    ]
