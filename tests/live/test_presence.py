"""process.json: who runs a folder, and that the file alone proves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from areal_lab.live.presence import (
    FILE,
    Present,
    identity_of,
    is_alive,
    mark_ended,
    new_presence,
    read_presence,
    write_presence,
)


def test_a_run_is_alive_from_enter_to_leave(tmp_path: Path) -> None:
    assert read_presence(tmp_path) is None
    present = Present(tmp_path)
    present.enter("starting")
    found = read_presence(tmp_path)
    assert found is not None
    assert (found.alive, found.phase, found.ended) == (True, "starting", False)
    assert found.key == present.key
    present.phase("training")
    found = read_presence(tmp_path)
    assert found is not None
    assert found.phase == "training"
    present.leave()
    present.leave()
    present.phase("a phase after the end")
    found = read_presence(tmp_path)
    assert found is not None
    assert (found.alive, found.phase, found.ended) == (False, "training", True)


def test_a_run_that_could_not_say_that_it_ended_is_marked(tmp_path: Path) -> None:
    mark_ended(tmp_path)
    assert read_presence(tmp_path) is None
    present = Present(tmp_path)
    present.enter("starting")
    mark_ended(tmp_path)
    found = read_presence(tmp_path)
    assert found is not None
    assert (found.alive, found.phase) == (False, "starting")
    mark_ended(tmp_path)
    assert read_presence(tmp_path) == found
    earlier = replace(found.process, started_ticks=found.process.started_ticks - 1)
    another = replace(found, process=earlier, ended=False)
    write_presence(tmp_path, another)
    mark_ended(tmp_path)
    assert read_presence(tmp_path) == another, "of another process"


def test_the_key_stays_if_the_parent_has_announced_the_process_and_not_otherwise(
    tmp_path: Path,
) -> None:
    announced = new_presence(os.getpid(), "loading the program")
    write_presence(tmp_path, announced)
    present = Present(tmp_path)
    present.enter("starting")
    assert present.key == announced.key
    earlier = replace(announced.process, started_ticks=announced.process.started_ticks - 1)
    for stale in (replace(announced, process=earlier), replace(announced, ended=True)):
        write_presence(tmp_path, stale)
        present = Present(tmp_path)
        present.enter("starting")
        assert present.key != stale.key


def test_the_file_of_a_killed_run_is_not_alive(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_presence(tmp_path, new_presence(process.pid, "training"))
    found = read_presence(tmp_path)
    assert found is not None
    assert found.alive is True
    process.kill()
    process.communicate()
    assert found.alive is False
    with pytest.raises(ProcessLookupError):
        new_presence(process.pid, "training")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"process": 3}', '{"process": {}}'])
def test_a_damaged_file_says_so(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ValueError, match=rf"{FILE} cannot be read"):
        read_presence(tmp_path)


def test_this_process_is_alive_and_another_with_its_id_is_not() -> None:
    mine = identity_of(os.getpid())
    assert mine.pid == os.getpid()
    assert is_alive(mine) is True
    assert is_alive(replace(mine, started_ticks=mine.started_ticks - 1)) is False


def test_a_process_that_ended_is_not_alive_even_before_its_parent_noticed() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identity_of(process.pid)
    assert is_alive(identity) is True
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended; now it is a zombie
    assert is_alive(identity) is False
    with pytest.raises(ProcessLookupError, match="has ended"):
        identity_of(process.pid)
    process.communicate()
    assert is_alive(identity) is False


def test_a_machine_that_was_restarted_has_lost_it_and_another_one_cannot_say() -> None:
    mine = identity_of(os.getpid())
    boot, namespace = mine.boot.split(" ")
    assert is_alive(replace(mine, boot=f"an-earlier-boot {namespace}")) is False
    elsewhere = replace(mine, host="elsewhere", boot=f"another-boot {namespace}")
    assert is_alive(elsewhere) is None
    assert is_alive(replace(mine, boot=f"{boot} pid:[1]")) is None  # a container on this machine
    assert is_alive(replace(mine, boot="")) is None  # a machine that does not say
