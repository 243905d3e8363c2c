"""A user's agent, unchanged, trains: it speaks to the run's gateway and returns a reward."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from areal_lab.resolve.resolved import resolve
from areal_lab.rewards.service import RewardError
from areal_lab.shell.display import Lines
from tests.pipeline.kept_keys import keep_keys
from tests.pipeline.tiny_run import (
    checkpoints,
    do_run,
    metrics,
    rescored_difference,
    tiny_config,
    trained_samples,
)

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}={{ m.content }}<end>{% else %}{{ m.content }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def workflow(fn: str, **keywords: object) -> str:
    more = "".join(f", {name}: {value}" for name, value in keywords.items())
    return f"rollout.workflow={{name: agent, fn: 'tests.pipeline.programs:{fn}'{more}}}"


def config_with_template(folder: Path, *overrides: str):  # type: ignore[no-untyped-def]
    config = tiny_config(folder, *overrides)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return config


def test_a_conversation_is_trained_on_as_it_was_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = keep_keys(monkeypatch)
    config = config_with_template(
        tmp_path,
        "total_train_steps=3",
        "eta=2",
        "save_every_steps=1",
        workflow("two_questions"),
    )
    folder = do_run(config, on_step=keys.look, display=Lines(Console(stderr=True))).folder
    assert keys.of_sessions >= 3 * 3 * 4
    keys.assert_not_in(folder)
    out, err = capfd.readouterr()
    assert "training" in err
    keys.assert_not_in_text(out + err)
    models, worst = checkpoints(folder), 0.0
    for step in trained_samples(folder):
        for sample in step:
            assert len(sample["turns"]) == 2
            assert "row" not in sample, "the second prompt continues the first one's tokens"
            worst = max(worst, rescored_difference(models, sample)[0])
            assert sample["reward"] in (0.0, 1.0)
    assert worst < 1e-4
    assert all(line["rows_per_sample"] == 1 for line in metrics(folder))
    assert all(line["turns_mean"] == 2 for line in metrics(folder))


def test_an_agent_in_processes_reads_the_environment(tmp_path: Path) -> None:
    setting = workflow("reads_the_environment", mode="subprocess", workers=2)
    config = config_with_template(tmp_path, "total_train_steps=1", setting)
    (step,) = trained_samples(do_run(config).folder)
    assert {sample["reward"] for sample in step} <= {0.0, 1.0}


def test_a_turn_without_a_reward_is_context(tmp_path: Path) -> None:
    config = config_with_template(
        tmp_path, "total_train_steps=1", workflow("rewards_of_replies", turn_discount=0.5)
    )
    (step,) = trained_samples(do_run(config).folder)
    for sample in step:
        first, second = sample["turns"]
        trained = sum(len(part["tokens"]) for part in sample["parts"] if "tokens" in part)
        seen = sum(len(part["observation"]) for part in sample["parts"] if "observation" in part)
        assert trained == first["tokens"], "the second turn has no reward, which is no reward of 0"
        assert seen > second["tokens"]
        assert sample["turn_returns"] == [first["reward"]]


@pytest.mark.parametrize(
    ("fn", "reason"), [("asks_nothing", "asked the model for nothing"), ("crashes", "no such page")]
)
def test_an_agent_that_cannot_be_trained_on_ends_the_run_with_the_reason(
    tmp_path: Path, fn: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keep_keys(monkeypatch)
    config = config_with_template(tmp_path, "total_train_steps=1", workflow(fn))
    with pytest.raises(RewardError, match=reason) as ended:
        do_run(config)
    keys.assert_not_in_text(str(ended.value))
    (folder,) = (tmp_path / "runs").iterdir()
    keys.assert_not_in(folder)


def test_what_cannot_work_is_refused_first(tmp_path: Path) -> None:
    config = config_with_template(tmp_path, workflow("nothing_like_that"))
    with pytest.raises(ValueError, match=r"rollout\.workflow: .*nothing_like_that"):
        resolve(config)
    config = config_with_template(tmp_path, workflow("two_questions", mode="remote"))
    with pytest.raises(ValueError, match="mode is 'remote'"):
        resolve(config)
    config = tiny_config(tmp_path / "other", workflow("two_questions"))
    with pytest.raises(ValueError, match=r"rollout\.workflow: .*has no chat template"):
        resolve(config)


def test_a_template_whose_calls_cannot_be_read_is_refused_first(tmp_path: Path) -> None:
    config = config_with_template(tmp_path, workflow("two_questions"))
    template = tmp_path / "model" / "chat_template.jinja"
    call = "{% for c in m.tool_calls or [] %}[{{ c.function.arguments }}]{% endfor %}"
    template.write_text(TEMPLATE.replace("<end>", f"{call}<end>"))
    with pytest.raises(
        ValueError, match=r"rollout\.workflow: .*no grammar reads; set tool_call"
    ) as no:
        resolve(config)
    assert "\n" not in str(no.value)
    resolve(tiny_config(tmp_path, workflow("two_questions", tool_call_parser="none")))


def test_a_number_and_a_reward_of_a_reply_are_no_rewards_of_one_run(tmp_path: Path) -> None:
    config = config_with_template(tmp_path, workflow("rewards_in_two_ways"))
    with pytest.raises(RewardError, match=r"sample \d of group \d has .*, but sample \d of group"):
        do_run(config)
