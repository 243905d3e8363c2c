"""A process is recognized later, and another one with its id is not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from areal_lab.host.identity import identity_of, is_alive


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
