"""The examples of docs/pictures.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "pictures.md"


def test_the_examples_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    assert (tmp_path / "shares.png").stat().st_size > 10_000
    assert names["picture"].alt.startswith("Shares of time")
    assert names["tokens"].widget.rows[0].tolist() == names["samples"][0].lags.tolist()
