"""The glossary has every metric that runs write, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lab.metrics.glossary import GLOSSARY, WrittenBy
from tests.cosim.small import run as run_cosim
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import do_run, metrics, tiny_config
from tools.pages import metrics as page

OPTIONAL = (
    *("actor.overlong_share=0.2", "actor.mask_truncated=true", "actor.kl_loss_coef=0.01"),
    *("actor.kl_ctl=0.01", "actor.advantage=gae"),
)
"""Some metrics are those of settings that are off by default."""


def check(lines: list[dict[str, float]], command: WrittenBy) -> None:
    known = {one.name: one for one in GLOSSARY if one.written_by in (command, "train and cosim")}
    written = {name for line in lines for name in line}
    assert written == known.keys()
    for line in lines:
        missing = known.keys() - line.keys()
        assert all(not known[name].always for name in missing)


@pytest.mark.parametrize("eta", [2])
def test_a_co_simulated_run_writes_what_the_glossary_says(tmp_path: Path, eta: int) -> None:
    teacher = "teacher.path=Adder-75K"
    recorded = run_cosim(tmp_path, f"eta={eta}", "eval_every_steps=2", teacher, *OPTIONAL)
    check([dict(one) for one in recorded.metrics], "cosim")
    assert recorded.summary["alarms"] == []


def test_a_tiny_run_writes_what_the_glossary_says(tmp_path: Path) -> None:
    off = "alarms.off=[equal_rewards]"
    teacher = f"teacher.path={tmp_path / 'model'}"
    config = tiny_config(tmp_path, "total_train_steps=2", off, teacher, *OPTIONAL)
    result = do_run(config, reward_fn=even_digits)
    turns = "rollout.workflow={name: multi_turn, feedback: ' = 9 = ', correct: 9}"
    agents = do_run(tiny_config(tmp_path, "total_train_steps=1", off, turns), reward_fn=even_digits)
    check([*metrics(result.folder), *metrics(agents.folder)], "train")
    assert result.summary["alarms"] == []
    assert len((result.folder / "held_out.jsonl").read_text().splitlines()) == 2


def test_names_are_unique_and_the_page_is_current() -> None:
    names = [one.name for one in GLOSSARY]
    assert len(set(names)) == len(names)
    assert page.PAGE.read_text(encoding="utf-8") == page.page()
