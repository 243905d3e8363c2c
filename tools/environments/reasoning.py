"""Check tasks of Reasoning Gym: gold answers, answers of other problems, constant answers.

Every problem is scored by the product's reward, so that corrections of the library count.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from areal_lab.data.reasoning_gym import LEFT_OUT, generated_entries
from areal_lab.rewards.reasoning_gym import ReasoningGym

PROBLEMS: Final = 40
_SLOW: Final[Mapping[str, int]] = {"knight_swap": 6, "rubiks_cube": 6}
"""Problems of tasks whose generator takes seconds for each."""
_BUDGET_S: Final = 20.0
"""Time for the constant answers of a task."""
_CONSTANTS: Final = (
    *("", "x", "hello world", "0", "1", "-1", "2", "10", "123456789", "1.5", "1/2", "1/0", "nan"),
    *("[]", "[[]]", "[[1]]", "[1, 2]", "{}", '{"a": 1}', "true", "True", "False", "yes", "Yes"),
    *("No", "None", "null", "1 2 3", "(", "a\nb", "A", "\u221e", "0x0", "9" * 5000, "a" * 500),
)
_REFERENCE: Final = ("possible_answer", "example_answer", "example_correct_answer")
"""Fields of a problem without a gold answer that have a right one."""


def names() -> list[str]:
    """All tasks of the installed package."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def digests(tasks: Sequence[str]) -> dict[str, str]:
    """Digest of the problems of each task, as this process generates them."""
    return {
        name: hashlib.sha256(
            json.dumps([[one["question"], one["answer"]] for one in entries]).encode()
        ).hexdigest()
        for name, entries in generated_entries(_sized(tasks), size=PROBLEMS, seed=1).items()
    }


def check(tasks: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and facts of each task."""
    for name, entries in generated_entries(_sized(tasks), size=PROBLEMS, seed=1).items():
        yield name, _facts(name, entries)


def _sized(tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options of each task. A mix needs tasks, and is refused for that."""
    return {
        name: {"size": _SLOW[name]} if name in _SLOW else {}
        for name in tasks
        if name != "composite"
    }


def _facts(name: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    started_s = time.monotonic()
    reward = ReasoningGym("", sandbox="unsafe")
    counts = {"unreadable": 0, "failed": 0}

    def score(answer: str, entry: Mapping[str, Any]) -> float:
        try:
            found = reward(answer, {"task": name, "options": {}, "entry": entry})
        except Exception:
            counts["failed"] += 1
            return 0.0
        counts["unreadable"] += int(found["unreadable"])
        return found["reward"]

    golds = [_gold(entry) for entry in entries]
    known = [(gold, entry) for gold, entry in zip(golds, entries, strict=True) if gold is not None]
    right = [score(gold, entry) for gold, entry in known]
    stored = [score(gold, json.loads(json.dumps(entry))) for gold, entry in known]
    others = [
        score(other, entry)
        for place, (gold, entry) in enumerate(known)
        for other, _ in [*known[place + 1 :], *known[:place]][:5]
        if other != gold
    ]
    best, answer = 0.0, ""
    # Gold answers of some problems are constants, too.
    for constant in dict.fromkeys([*[gold for gold, _ in known[:10]], *_CONSTANTS]):
        mean = sum(score(constant, entry) for entry in entries) / len(entries)
        if mean > best:
            best, answer = mean, constant
        if time.monotonic() - started_s > _BUDGET_S:
            break
    return {
        "problems": len(entries),
        "different": len({entry["question"] for entry in entries}),
        "gold": min(right) if right else None,
        "gold_after_json": min(stored) if stored else None,
        "others_right": sum(one >= 1 for one in others) / len(others) if others else None,
        "constant": round(best, 3),
        "constant_answer": answer[:40],
        **counts,
        "left_out": LEFT_OUT.get(name, ""),
    }


def _gold(entry: Mapping[str, Any]) -> str | None:
    if entry["answer"] is not None:
        return str(entry["answer"])
    for field in _REFERENCE:
        found = entry["metadata"].get(field)
        if found is not None:
            return found if isinstance(found, str) else json.dumps(found)
    return None
