"""Names of other frameworks' settings: one table on the page and in the code."""

from __future__ import annotations

from pathlib import Path

from areal_lab.foreign.readers import READERS
from areal_lab.foreign.setting_names import SETTING_NAMES, translated

PAGE = Path(__file__).parents[2] / "docs" / "from_areal.md"


def test_the_page_has_the_same_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = text.split("## Names in the remedies of imported logs\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    frameworks = [one.strip().lower() for one in rows[0][1:]]
    told: dict[str, dict[str, str]] = {name: {} for name in frameworks}
    for row in rows[2:]:
        for name, cell in zip(frameworks, row[1:], strict=True):
            if cell.strip():
                told[name][row[0].strip().strip("`")] = cell.strip().strip("`")
    assert told == SETTING_NAMES


def test_every_framework_of_the_table_has_a_reader() -> None:
    known = {name for one in READERS for name in (one.name, *one.also)}
    assert set(SETTING_NAMES) <= known


def test_names_are_replaced_whole_and_once() -> None:
    text = "Lower actor.optimizer.lr or eta, or set top_p=1; beta and actor.eta stay, reward.fn."
    assert translated(text, "nemo-rl") == (
        "Lower policy.optimizer.kwargs.lr or grpo.async_grpo.max_trajectory_age_steps, or set "
        "policy.generation.top_p=1; beta and actor.eta stay, reward.fn."
    )
    assert translated("Raise gconfig.n_samples", "unsloth") == "Raise num_generations"
    assert translated("Lower actor.optimizer.lr", "areal") == "Lower actor.optimizer.lr"
    assert translated("Raise gconfig.max_new_tokens, or eta", None).endswith("new_tokens, or eta")
