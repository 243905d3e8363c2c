"""Folders of strangers are removed: whatever their depth, modes and names."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from areal_lab.host.owned_folders import remove_tree


def filled(folder: Path, depth: int, name: bytes) -> Path:
    """A folder with a chain of folders, a file in each, made without long paths."""
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        os.mkdir(name, dir_fd=here)
        inside = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inside
    os.close(here)
    return folder


def test_no_depth_name_or_mode_keeps_a_folder() -> None:
    base = Path(f"/dev/shm/areal-lab-remove-{os.getpid()}")  # folders on a disk take milliseconds
    for depth, name in ((1500, b"d"), (40, b"\xff" * 255), (3, b"-rf \n")):
        assert remove_tree(filled(base, depth, name)) == []
        assert not base.exists()
    for folder in filled(base, 3, b"d"), base / "d", base / "d/d":
        folder.chmod(0)
    assert remove_tree(base) == []
    assert not base.exists()


def test_modes_do_not_stop_an_ordinary_user() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:  # which other users can reach
        os.chmod(place, 0o777)
        child = os.fork()
        if child == 0:
            gone = False
            try:
                if os.geteuid() == 0:
                    os.setresuid(4242, 4242, 4242)
                folder = filled(Path(place, "folder"), 3, b"d")
                for path in (folder / "d/d", folder / "d", folder):
                    path.chmod(0)
                gone = remove_tree(folder) == [] and not folder.exists()
            finally:
                os._exit(not gone)
        assert os.waitpid(child, 0)[1] == 0


def test_nothing_behind_a_link_is_removed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    folder = filled(tmp_path / "folder", 2, b"d")
    (folder / "link").symlink_to(tmp_path / "kept")
    (folder / "d" / "up").symlink_to("..")
    assert remove_tree(folder) == []
    (tmp_path / "link").symlink_to("kept")
    assert remove_tree(tmp_path / "link") == []
    assert remove_tree(tmp_path / "none" / "none") == []
    assert remove_tree(tmp_path / "kept" / "file") == []
    assert {one.name for one in tmp_path.rglob("*")} == {"kept", "link", "file"}


def test_what_stays_is_named_and_the_rest_is_removed(tmp_path: Path) -> None:
    assert "no time left" in remove_tree(filled(tmp_path / "a", 2, b"d"), timeout_s=0)[-1]
    program = (
        "import os; from areal_lab.host.owned_folders import remove_tree\n"
        "from areal_lab.rewards.sandbox import kernel\n"
        "os.makedirs('top/a/mounted'); os.makedirs('top/b'); os.mkdir('kept')\n"
        "os.chmod('kept', 0o751)\n"
        "for path in ('kept/file', 'top/a/file', 'top/b/file'): open(path, 'w').close()\n"
        "kernel.mount('kept', 'top/a/mounted', flags=kernel.BIND)\n"
        "print(remove_tree('top'), os.listdir('top'), os.listdir('top/a'), os.listdir('kept'))\n"
        "print(oct(os.stat('kept').st_mode))"
    )
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    assert ended.stderr == ""
    told, left = ended.stdout.split("] ", 1)
    assert "'mounted': something is mounted there" in told
    assert left.splitlines() == ["['a'] ['mounted'] ['file']", "0o40751"]


def test_a_folder_that_is_filled_meanwhile_is_given_up(tmp_path: Path) -> None:
    folder = filled(tmp_path / "folder", 1, b"d")
    listed = os.listdir

    def filling(place: int) -> list[str]:
        names = listed(place)
        (folder / os.urandom(4).hex()).touch()
        return names

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "listdir", filling)
        assert remove_tree(folder) == [f"{folder}: something still writes there"]
    assert remove_tree(folder) == []
