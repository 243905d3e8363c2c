"""Check gold answers under math-verify: each is right for its problem, another's is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_lab.rewards.math_answer import math_answer


def check(name: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and facts of the rows of a file with a gold answer each, in the field `answer`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    golds = [row["answer"].rsplit("####", 1)[-1].strip() for row in rows]
    facts: dict[str, Any] = {"golds": len(golds)}
    facts |= {"refused": [], "not_right": [], "others_right": []}
    for gold, other in zip(golds, [*golds[1:], golds[0]], strict=True):
        try:
            if math_answer(rf"So it is $\boxed{{{gold}}}$.", {"answer": gold}) < 1:
                facts["not_right"].append(gold)
            if other != gold and math_answer(rf"\boxed{{{other}}}", {"answer": gold}) == 1:
                facts["others_right"].append(f"`{other}` for `{gold}`")
        except ValueError:
            facts["refused"].append(gold)
    yield name, facts
