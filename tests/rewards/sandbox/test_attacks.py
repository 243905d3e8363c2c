"""Every attack and every cheat, at every level that works here, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from areal_lab.host.isolation import Level
from areal_lab.rewards.sandbox.levels import CONTAINED, refusal
from tests.rewards.sandbox.attacks import ATTACKS, CHEATS

ROOT = Path(__file__).parents[3]
NEEDED = (
    "areal_lab/__init__.py",
    "areal_lab/host/__init__.py",
    "areal_lab/host/isolation.py",
    "areal_lab/host/owned_folders.py",
    "areal_lab/rewards",
    "tests/rewards/sandbox",
)
ORDINARY = 4242
"""An id without an account, for a root that has no user at hand."""
LEVELS: tuple[Level, ...] = tuple(level for level in CONTAINED if not refusal(level))
USERS = ("root", "ordinary") if os.geteuid() == 0 else ("ordinary",)
CASES = [(user, level) for user in USERS for level in LEVELS]
each_case = pytest.mark.parametrize(("user", "level"), CASES)


@cache
def copied() -> Path:
    """A copy of the packages that any user can read."""
    folder = Path(tempfile.mkdtemp(prefix="areal-lab-attacks-"))
    for name in NEEDED:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _cleaned_up() -> Iterator[None]:
    yield
    if copied.cache_info().currsize:
        shutil.rmtree(copied())


@cache
def report(user: str, level: Level) -> dict[str, Any]:
    """What `attacker.py` found."""
    become: list[str] = []
    if user == "ordinary" and os.geteuid() == 0:
        number = str(ORDINARY)
        become = ["setpriv", "--reuid", number, "--regid", number, "--clear-groups", "--"]
    script = [str(copied() / "tests/rewards/sandbox/attacker.py"), level, str(copied())]
    ended = subprocess.run(
        [*become, interpreter(tuple(become)), "-I", "-B", *script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@cache
def interpreter(become: tuple[str, ...]) -> str:
    """An interpreter that the user can reach: this one may lie in root's home."""
    asks = (
        "import subprocess, sys\n"
        "assert sys.version_info >= (3, 11)\n"
        "subprocess.run([sys.executable, '-c', ''], check=True)"  # setpriv itself reaches more
    )
    for path in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        command = [*become, path, "-c", asks]
        if subprocess.run(command, capture_output=True, check=False, cwd="/").returncode == 0:
            return path
    raise AssertionError("no Python 3.11 or newer that an ordinary user can start")


def test_model_code_can_be_contained_here() -> None:
    assert LEVELS, {level: refusal(level) for level in CONTAINED}


@each_case
def test_it_ran_as_that_user(user: str, level: Level) -> None:
    assert (report(user, level)["user"] == 0) == (user == "root")


@each_case
@pytest.mark.parametrize("attack", [one.name for one in ATTACKS])
def test_an_attack_is_held(user: str, level: Level, attack: str) -> None:
    assert report(user, level)["attacks"][attack] == ""


@each_case
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_has_no_reward(user: str, level: Level, cheat: str) -> None:
    assert report(user, level)["cheats"][cheat]["reward"] == 0


@each_case
def test_an_honest_solution_has_its_reward(user: str, level: Level) -> None:
    good = dict(report(user, level)["cheats"]["good"])
    assert good.pop("reward") == 1
    assert set(good.values()) == {0}


@each_case
def test_nothing_is_left_behind(user: str, level: Level) -> None:
    found = report(user, level)
    assert found["left"] == []
    assert found["victim_lives"]
