"""The cases of the training benchmark do the same work in different ways."""

from __future__ import annotations

import pytest

from benchmarks import training


def test_layouts_learn_the_same_from_fewer_tokens() -> None:
    packed, rows, padded = (
        training.measure(case, training.QUICK_MODEL) for case in ("packed", "rows", "padded")
    )
    assert rows["loss"] == pytest.approx(packed["loss"], abs=1e-3)
    assert padded["loss"] == pytest.approx(packed["loss"], abs=1e-3)
    assert packed["computed_tokens"] < rows["computed_tokens"] < padded["computed_tokens"]
    for one in (packed, rows, padded):
        assert one["peak_mib"] > 0
        assert min(one["parts"].values()) > 0
