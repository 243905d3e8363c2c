"""The benchmark of installations: what it measures, in an environment that is there already."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import packaging
from benchmarks.packaging import IMPORTS, ROOT, Installation, disk_bytes


@pytest.fixture
def here(tmp_path: Path) -> Installation:
    """This environment, under the name of the command."""
    command = tmp_path / "areal-lab"
    command.write_text(f"#!{sys.executable}\nfrom areal_lab.cli.app import main\nmain()\n")
    command.chmod(0o755)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    return Installation(bin=tmp_path, packages=tmp_path)


def test_an_installation_is_measured(here: Installation) -> None:
    assert here.import_s("simulator") > 0
    assert here.help_cpu_s() > 0
    assert here.first_line_s() > 0


def test_a_command_that_fails_is_no_measurement(here: Installation) -> None:
    (here.bin / "areal-lab").write_text("#!/bin/sh\nexit 2\n")
    with pytest.raises(RuntimeError, match="ended with 2"):
        here.first_line_s()
    with pytest.raises(subprocess.CalledProcessError):
        here.help_cpu_s()


def test_blocks_are_counted_and_hard_links_once(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    data = tmp_path / "package" / "data"
    data.write_bytes(b"x" * 10_000)
    once = disk_bytes(data)
    assert once >= 10_000
    assert once % 512 == 0
    os.link(data, tmp_path / "package" / "again")
    assert disk_bytes(tmp_path) == once
    assert Installation(tmp_path, tmp_path).largest() == {"package": once / 1e6}


def test_every_extra_is_measured() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(IMPORTS) == {"base", *project["optional-dependencies"]}


def test_a_long_command_prints_progress_and_a_failed_one_its_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packaging, "_TELL_S", 0.01)
    waits = [sys.executable, "-c", "print('no such package'); raise SystemExit(1)"]
    with pytest.raises(RuntimeError, match="installing failed:\nno such package"):
        packaging._run(waits, "installing")
    assert "installing: 0 s so far" in capsys.readouterr().err
