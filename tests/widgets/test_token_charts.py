"""Charts of tokens: what is drawn, and where."""

from __future__ import annotations

import pandas as pd
import pytest

from areal_lab.widgets.token_charts import clipping_chart, parting_chart
from tests.widgets.chart_rows import rows_of


def by_lag(*shares: float) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "tokens": [10] * len(shares),
            "decoupled_ppo": [0.01] * len(shares),
            "standard_ppo": list(shares),
            "weight_change": [0.1] * len(shares),
        },
        index=pd.RangeIndex(len(shares), name="lag"),
    )


def test_there_is_a_bar_for_each_lag_and_loss_and_a_pale_mark_of_the_reference() -> None:
    chart = clipping_chart(by_lag(0.1, 0.2), by_lag(0.05, 0.1))
    before, now, _ = rows_of(chart)
    assert [row["share"] for row in now] == [0.1, 0.01, 0.2, 0.01]
    assert [row["share"] for row in before] == [0.05, 0.01, 0.1, 0.01]
    spec = chart.to_dict()
    pale, bars, numbers = spec["layer"]
    assert [layer["mark"]["type"] for layer in (pale, bars, numbers)] == ["tick", "bar", "text"]
    assert bars["encoding"]["y"]["scale"]["domain"] == [0, 0.5]
    assert spec["background"] == "transparent"


@pytest.mark.parametrize("count", [0, 3])
def test_there_is_a_point_for_each_pair(count: int) -> None:
    pairs = pd.DataFrame(
        {
            "group_first": range(count),
            "about": ["rain"] * count,
            "sample": [0] * count,
            "same_tokens": range(count),
            "tokens_first": [9] * count,
            "tokens_second": [8] * count,
        }
    )
    (points,) = rows_of(parting_chart(pairs))
    assert len(points) == count
