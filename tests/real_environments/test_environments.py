"""Installation of environments that need another Python; without the network."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.environments import Environments, MissingPythonError


def test_an_environment_without_its_python_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    ours = ".".join(platform.python_version_tuple()[:2])
    (requirements / "future.txt").write_text("# Python: 9.98 or 9.99\n")
    (requirements / "named.txt").write_text(f"# Python: 9.99 or {ours}\n")
    (requirements / "plain.txt").write_text("# none\n")
    found = Environments(
        what="things", folder=tmp_path / "made", requirements=requirements, target="t", takes="none"
    )
    assert found.install_missing() == 0
    assert [name for name in found.names if found.is_ready(name)] == ["named", "plain"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4, lines
    assert "left out: future needs Python 9.98 or 9.99, which is not on PATH" in lines[1]
    with pytest.raises(MissingPythonError):
        found.install("future")
    for name in ("named", "plain"):
        stamp = found.folder / name / ".requirements"
        stamp.write_text(stamp.read_text().replace(platform.python_version(), "3.1.4"))
    assert not any(found.is_ready(name) for name in found.names)
