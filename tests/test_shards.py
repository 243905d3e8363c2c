"""Division of the tests among plain pytest processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import shards


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_file_is_in_one_shard_and_shards_take_equally_long(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []
    for index in range(count):
        monkeypatch.setenv(shards.SHARD, f"{index}/{count}")
        shards.files_of_this_shard.cache_clear()
        files = shards.files_of_this_shard()
        assert files is not None
        parts.append(files)
    monkeypatch.undo()
    shards.files_of_this_shard.cache_clear()
    assert sum(map(len, parts)) == len(frozenset[Path]().union(*parts))
    assert frozenset[Path]().union(*parts) == {*shards.TESTS.rglob("test_*.py")}
    recorded = json.loads(shards.SECONDS.read_text())
    loads = [
        sum(recorded.get(str(path.relative_to(shards.TESTS)), 3.0) for path in part)
        for part in parts
    ]
    assert max(loads) <= 1.05 * min(loads)


def test_the_summary_adds_up_the_last_lines() -> None:
    ends = [
        "= 1 failed, 30 passed, 1 deselected, 2 warnings in 71.20s (0:01:11) =",
        "\x1b[32m= 12 passed, 1 error in 3.00s =\x1b[0m",
    ]
    assert shards.total(ends) == "1 failed, 42 passed, 1 deselected, 2 warning, 1 error"
    assert shards.total([]) == "no tests ran"


def test_seconds_are_recorded_of_files_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SECONDS", tmp_path / "seconds.json")
    report = tmp_path / "report.xml"
    report.write_text(
        '<a><testcase classname="tests.test_shards" time="1.25"/>'
        '<testcase classname="tests.test_shards" time="0.5"/>'
        '<testcase classname="tests.gone.test_it" time="9"/></a>'
    )
    shards.record(report)
    assert json.loads(shards.SECONDS.read_text()) == {"test_shards.py": 1.8}
