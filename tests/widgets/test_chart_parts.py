"""What charts are to displays."""

from __future__ import annotations

import json
from typing import Any

import altair as alt
import marimo as mo
import pytest

from areal_lab.widgets.chart_parts import on_page, table


def chart() -> alt.TopLevelMixin:
    rows = alt.Chart(table([{"x": 1, "y": 2}]))
    return on_page(rows.mark_point().encode(x="x:Q", y="y:Q"))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What altair checks against its schema."""
    done: list[object] = []
    check = alt.TopLevelUnitSpec.validate

    def noted(_cls: type, instance: Any, schema: Any = None) -> None:
        done.append(instance)
        check(instance, schema)

    monkeypatch.setattr(alt.TopLevelUnitSpec, "validate", classmethod(noted))
    monkeypatch.setattr(alt.Chart, "validate", classmethod(noted))
    return done


def test_a_notebook_shows_the_same_chart_without_a_check_of_its_schema(
    monkeypatch: pytest.MonkeyPatch, checked: list[object]
) -> None:
    slow = mo.as_html(chart()).text
    assert checked
    checked.clear()
    monkeypatch.setattr(mo, "running_in_notebook", lambda: True)
    assert mo.as_html(chart()).text == slow
    assert checked == []


def test_other_displays_get_their_forms_and_the_chart_has_no_new_part() -> None:
    made = chart()
    assert "text/html" in made._repr_mimebundle_()
    assert "_repr_mimebundle_" not in json.dumps(made.to_dict())
