"""The page about the sandbox says what is tested."""

from __future__ import annotations

from pathlib import Path

from tests.rewards.sandbox.attacks import ATTACKS, CHEATS

TEXT = (Path(__file__).parents[3] / "docs" / "sandbox.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_the_table_of_attacks_is_that_of_the_tests() -> None:
    rows = [line for line in section("Attacks").splitlines() if line.startswith("| ")]
    assert rows[2:] == [f"| {attack.name} | {attack.outcome} |" for attack in ATTACKS]


def test_the_list_of_cheats_is_that_of_the_tests() -> None:
    items = [line for line in section("Verdicts").splitlines() if line.startswith("- ")]
    assert items == [f"- {cheat}" for cheat in CHEATS]
