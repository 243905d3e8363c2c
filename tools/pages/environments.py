"""`docs/environments_checked.md`: offered environments of others, and what was checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

PAGE: Final = Path(__file__).parents[2] / "docs" / "environments_checked.md"
FILE: Final = Path(__file__).parents[1] / "environments" / "checked.json"
_WINS: Final = 0.9
"""Average reward from which on one repeated answer wins."""
_OTHERS: Final = 0.5
"""Share of other problems' gold answers from which on a score does not look at the problem."""
_HEAD: Final = """# Checked environments

`python -m tools.environments` plays every environment that [can be trained
on](agents.md#environments), through this project's adapters, and `python -m tools.pages` writes
this page. It needs the extras `reasoning-gym`, `textarena` and `math`.

- **Gold** is the smallest reward of a right answer; it must be 1.
- **Others** is the share of gold answers of other problems, different from the gold answer, that
  get 1; it must be at most 0.5.
- **Constant** is the largest average reward of one answer for all problems; at 0.9 it wins. Some is
  unavoidable: of yes and no, one is right for half of the problems. Compare a trained model with
  this number, not with 0.
- **Same** says whether another process with another `PYTHONHASHSEED` makes the same problems from
  the same seed.

Environments that fail are refused by name. A dash is a number that could not be measured.
"""


def page() -> str:
    """The page as it should be."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    parts = [
        _HEAD.strip(),
        *_reasoning(found["reasoning-gym"]),
        *_games(found["textarena"]),
        *_mathematics(found["math-verify"]),
    ]
    return "\n\n".join(parts) + "\n"


def failure(facts: Mapping[str, Any]) -> str:
    """Why an environment cannot be offered; empty if it can."""
    failures = {
        "a right answer does not get 1": any(
            facts.get(name) is not None and facts[name] < 1 for name in _MUST_BE_1
        ),
        "its score fails": bool(facts.get("failed")),
        "gold answers of other problems are right": (facts.get("others_right") or 0.0) > _OTHERS,
        "one answer wins": (facts.get("constant") or 0.0) >= _WINS,
        "it is one problem for all seeds": facts.get("different") == 1,
        "its problems change with the process": facts.get("same_elsewhere") is False,
    }
    return next((reason for reason, fails in failures.items() if fails), "")


_MUST_BE_1: Final = ("gold", "gold_after_json", "winner")


def _reasoning(found: Mapping[str, Any]) -> Iterator[str]:
    tasks: Mapping[str, Any] = found["environments"]
    yield f"## Reasoning Gym {found['version']}"
    out = {name: facts for name, facts in tasks.items() if facts["left_out"]}
    yield f"{len(tasks) - len(out)} tasks are offered, with their default options. Refused:"
    yield "\n".join(f"- `{name}`: {facts['left_out']}." for name, facts in out.items())
    lines = ["| task | gold | others | constant | its answer | same |", "|---|---|---|---|---|---|"]
    for name, facts in tasks.items():
        if name not in out:
            cells = (
                _number(facts["gold"]),
                _number(facts["others_right"]),
                _number(facts["constant"]),
                _code(facts["constant_answer"]) if facts["constant"] else "",
                _same(facts),
            )
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    yield "\n".join(lines)
    raising = [f"`{name}`" for name, facts in tasks.items() if facts.get("unreadable")]
    yield (
        f"Some answers make the score of {_and(raising)} raise; they get 0 and the component "
        "`unreadable`."
    )


def _games(found: Mapping[str, Any]) -> Iterator[str]:
    games: Mapping[str, Any] = found["environments"]
    offered = {name: facts for name, facts in games.items() if not facts.get("refused")}
    yield f"## TextArena {found['version']}"
    yield (
        f"{len(offered)} of {len(games)} games are offered with Python {found['python']}. Gold is "
        "known for games whose winner can be read from their state."
    )
    lines = ["| game | gold | constant | its answer | same |", "|---|---|---|---|---|"]
    for name, facts in offered.items():
        cells = (
            _number(facts.get("winner")),
            _number(facts.get("constant")),
            _code(facts["constant_answer"]) if facts.get("constant") else "",
            _same(facts),
        )
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    yield "\n".join(lines)
    yield "Refused, by the kind of game:"
    reasons: dict[str, list[str]] = {}
    for name, facts in games.items():
        if reason := facts.get("refused"):
            kind = f"`{re.split('-v[0-9]', name)[0]}`"
            names = reasons.setdefault(_short(reason), [])
            names += [] if kind in names else [kind]
    yield "\n".join(f"- {reason}: {', '.join(names)}." for reason, names in sorted(reasons.items()))


def _mathematics(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"## math-verify {found['version']}"
    yield (
        "Notations and their limits are in [Numbers and mathematics]"
        "(rewards.md#numbers-and-mathematics). Gold answers of test sets, each in a box:"
    )
    lines = ["| test set | gold answers | refused | not right | another's is right |"]
    lines.append("|---|---|---|---|---|")
    for name, facts in found["environments"].items():
        counts = (facts["golds"], len(facts["refused"]), len(facts["not_right"]))
        others = ", ".join(facts["others_right"]) or "0"
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {others} |")
    yield "\n".join(lines)


def _short(refused: str) -> str:
    """The reason of a refusal without the name of its game and its details."""
    if "opponents" in refused:
        return "opponents"
    reason = re.sub(r"^.*?(is refused|cannot be made|cannot be started): ", "", refused)
    reason = re.sub(r"not found: \S+", "not found", reason)
    return reason.removesuffix(" (textarena 0.7.4); choose another").rstrip(".")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _same(facts: Mapping[str, Any]) -> str:
    return {True: "yes", False: "**no**", None: "-"}[facts.get("same_elsewhere")]


def _code(text: str) -> str:
    shown = json.dumps(text, ensure_ascii=False).replace("|", "\\|")
    return f"`{shown}`" if "`" not in shown else f"`` {shown} ``"


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
