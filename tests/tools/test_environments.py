"""What was found in other people's environments, and the page of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.pages.environments import FILE, PAGE, failure, page

FOUND = json.loads(FILE.read_text(encoding="utf-8"))


def test_the_page_is_what_was_found() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.pages"


def test_environments_that_fail_are_refused_and_no_others() -> None:
    tasks = FOUND["reasoning-gym"]["environments"]
    assert len(tasks) > 100
    for name, facts in tasks.items():
        assert bool(failure(facts)) == bool(facts["left_out"]), (name, failure(facts))
    games = FOUND["textarena"]["environments"]
    offered = {name: failure(facts) for name, facts in games.items() if not facts.get("refused")}
    assert not any(offered.values()), offered
    for facts in FOUND["math-verify"]["environments"].values():
        assert (facts["refused"], facts["not_right"]) == ([], [])
        # Both are the same answer.
        assert facts["others_right"] in ([], ["`x=5` for `5`"])


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"gold": 1.0, "others_right": 0.5, "constant": 0.89, "same_elsewhere": True}, ""),
        ({"gold": None, "same_elsewhere": None}, ""),
        ({"gold": 0.5}, "a right answer does not get 1"),
        ({"winner": 0.0}, "a right answer does not get 1"),
        ({"gold": 1.0, "failed": 2}, "its score fails"),
        ({"gold": 1.0, "others_right": 0.51}, "gold answers of other problems are right"),
        ({"gold": 1.0, "constant": 0.9}, "one answer wins"),
        ({"gold": 1.0, "different": 1}, "it is one problem for all seeds"),
        ({"gold": 1.0, "same_elsewhere": False}, "its problems change with the process"),
    ],
)
def test_what_fails(facts: dict[str, Any], reason: str) -> None:
    assert failure(facts) == reason
