"""Test the levels of containment on this machine, and choose one.

A level is tested once per process, with a program that looks for things it must not find. `unsafe`
is never a fallback: it has to be named.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from areal_lab.host.isolation import Level, LevelSetting
from areal_lab.rewards.sandbox.run import Limits, Sandbox, SandboxError

CONTAINED: Final[tuple[Level, ...]] = ("bubblewrap", "namespaces")
"""In the order in which `auto` tries them."""

FIX: Final = (
    "install bubblewrap (apt-get install bubblewrap), or let users make namespaces "
    "(user.max_user_namespaces > 0, kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in Docker --security-opt seccomp=unconfined)"
)
UNSAFE: Final = "write reward.sandbox=unsafe to run model code with your rights"

_PROBE: Final = """
import os, socket
assert os.getpid() < 4, "it sees other processes"
assert not os.path.exists("/etc/passwd"), "it sees files of the system"
assert not os.path.exists("/proc/1"), "it sees processes"
try:
    socket.socket(socket.AF_INET)
except PermissionError:
    pass
else:
    raise AssertionError("it has a network")
try:
    open("/usr/areal-lab-probe", "w")
except OSError:
    pass
else:
    raise AssertionError("it can write to /usr")
open("file", "w").close()
if not (child := os.fork()):
    os._exit(0)
os.waitpid(child, 0)
print("contained")
"""


class NoSandbox(SandboxError):
    """No requested level works here; the message has the reasons and a fix."""


def choose(setting: LevelSetting) -> Sandbox:
    """Sandbox of a setting: that level, or with `auto` the first contained one that works."""
    if setting == "unsafe":
        return Sandbox("unsafe")
    asked: tuple[Level, ...] = CONTAINED if setting == "auto" else (setting,)
    reasons = []
    for level in asked:
        reason = refusal(level)
        if not reason:
            return Sandbox(level)
        reasons.append(f"{level}: {reason}")
    raise NoSandbox(
        f"sandbox is {setting}, but programs cannot be contained here ({'; '.join(reasons)}); "
        f"{FIX}, or {UNSAFE}"
    )


def takes_sandbox(function: Callable[..., Any]) -> bool:
    """Return whether a reward function has a parameter for `reward.sandbox`."""
    try:
        return "sandbox" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False


def runs_programs(function: Callable[..., Any]) -> bool:
    """Return whether a reward function needs a working level: it has a parameter `sandbox`, and
    no attribute `runs_programs` that is False.
    """
    return takes_sandbox(function) and bool(getattr(function, "runs_programs", True))


@cache
def refusal(level: Level) -> str:
    """Why a level does not work here; empty if it does."""
    try:
        found = Sandbox(level).run(_PROBE, limits=Limits(timeout_s=20.0))
    except (SandboxError, OSError) as error:
        return " ".join(str(error).split())
    if found.passed and found.stdout.strip() == "contained":
        return ""
    lines = found.stderr.strip().splitlines() or [f"its test ended by {found.end}"]
    return f"its test failed: {lines[-1]}"
