"""The rows that a chart was given, layer by layer."""

from __future__ import annotations

import json
from typing import Any

import altair as alt


def rows_of(chart: alt.TopLevelMixin) -> list[list[dict[str, Any]]]:
    """One list of rows for each place of the chart that has data, in their order."""
    spec = chart.to_dict()
    found = []

    def look(part: Any) -> None:
        if isinstance(part, list):
            for each in part:
                look(each)
        elif isinstance(part, dict):
            data = part.get("data", {})
            text = spec.get("datasets", {}).get(data.get("name"), data.get("values"))
            if text is not None:
                found.append(json.loads(text))
            for key in ("layer", "spec", "concat", "hconcat"):
                look(part.get(key))

    look(spec)
    return found
