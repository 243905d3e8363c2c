"""The file of the admin key: made, found, and refused if others can read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lab.agents.hosting.admin_key import admin_key, check_admin_key_file
from areal_lab.engines.keys import key_file


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_a_key_of_its_own_is_gone_with_the_gateway() -> None:
    key_file(4000).parent.mkdir(parents=True)
    key_file(4000).write_text("one that a killed gateway left")
    with admin_key(4000) as first:
        assert first.file == key_file(4000)
        assert first.file.read_text() == first.key
        assert first.file.stat().st_mode & 0o777 == 0o600
        assert first.key not in repr(first)
    assert not first.file.exists()
    with admin_key(4000) as second:
        assert second.key != first.key


def test_a_named_file_is_made_once_and_stays(tmp_path: Path) -> None:
    file = tmp_path / "keys" / "admin"
    with admin_key(1, str(file)) as first:
        assert (first.file, file.stat().st_mode & 0o777) == (file, 0o600)
    file.write_text(f"{first.key}\n")
    with admin_key(2, str(file)) as second:
        assert second == first
    assert file.exists()


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        ("a-key", 0o644, r"others can read \(mode 644\); run: chmod 600"),
        ("a-key", 0o620, r"others can read \(mode 620\)"),
        ("", 0o600, "its content is not a key"),
        ("two words", 0o600, "its content is not a key"),
        ("schlüssel", 0o600, "it is no ASCII text"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    tmp_path: Path, content: str, mode: int, reason: str
) -> None:
    file = tmp_path / "admin"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(ValueError, match=reason) as raised:
        check_admin_key_file(str(file))
    assert content not in str(raised.value) or not content
    assert "\n" not in str(raised.value)


def test_a_place_where_no_file_can_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which is not a file; name a file"):
        check_admin_key_file(str(tmp_path))
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is not a writable folder; name another file"):
        check_admin_key_file(str(tmp_path / "file" / "key"))
    with pytest.raises(ValueError, match="no home folder is known"):
        check_admin_key_file("~nosuchuser/key")
    check_admin_key_file("")
    check_admin_key_file(str(tmp_path / "new" / "key"))
