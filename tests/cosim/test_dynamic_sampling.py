"""Dynamic sampling of a model that generates: its own rewards decide what is replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_lab.config.problem import ConfigError
from areal_lab.control.sampling import ALL_CUT_OFF
from areal_lab.runlog.replay import check_replay
from tests.cosim.small import Learned, metrics, run, written

LIVE = ("mode=live", "rollout.dynamic_sampling.enabled=true")


def test_live_batches_have_only_groups_whose_rewards_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = Learned(monkeypatch)
    first = run(tmp_path, *LIVE)
    for step in learned.take():
        groups = {t.group for t in step}
        assert len(groups) == 4
        assert all(len({t.reward for t in step if t.group == group}) > 1 for group in groups)
    filtered = [line["filtered_groups"] for line in metrics(first)]
    assert first.summary["filtered"] >= sum(filtered) > 0
    assert check_replay(first.log).agrees
    assert written(first) == written(run(tmp_path, *LIVE))


def test_a_live_run_that_finds_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dynamic_sampling: step 1 needs 4 groups"):
        run(tmp_path, *LIVE, "reward.fn=tests.pipeline.rewards:nothing")
    (summary,) = tmp_path.glob("*/summary.json")
    assert json.loads(summary.read_text())["status"] == "failed"


def test_along_a_schedule_it_has_no_effect(tmp_path: Path) -> None:
    lines = metrics(run(tmp_path, LIVE[1]))
    assert [line["trained_groups"] for line in lines] == [4] * 6
    assert {line["filtered_groups"] for line in lines} == {0}


def two_components(completion: str, example: dict[str, str]) -> dict[str, float]:
    """Whether the response is right, and whether it begins with a 1."""
    first_line = completion.split("\n", 1)[0]
    return {
        "answer": float(first_line.strip() == example["answer"]),
        "one": float(first_line.strip().startswith("1")),
    }


def test_components_have_weights_and_means(tmp_path: Path) -> None:
    lines = metrics(
        run(
            tmp_path,
            "total_train_steps=2",
            f"reward.fn={__name__}:two_components",
            "gconfig.max_new_tokens=4",
            "reward.weights={answer: 2, one: -0.5}",
        )
    )
    for line in lines:
        weighted = 2 * line["reward_answer_mean"] - 0.5 * line["reward_one_mean"]
        assert line["reward_mean"] == pytest.approx(weighted)
    assert any(line["reward_one_mean"] > 0 for line in lines)


def test_groups_of_masked_responses_only_are_replaced_too(tmp_path: Path) -> None:
    recorded = run(
        tmp_path,
        *LIVE,
        *("actor.mask_truncated=true", "actor.ppo_n_minibatches=1", "total_train_steps=1"),
        *(
            f"reward.fn={__name__}:two_components",
            "gconfig.max_new_tokens=4",
            "rollout.dynamic_sampling.on_exhausted=smaller_batch",
        ),
    )
    for line in metrics(recorded):
        assert line["masked_samples"] < line["trained_samples"]
    groups = [group for group in recorded.log.groups if set(group.finish_reasons) == {"length"}]
    assert recorded.summary["filtered_by_reason"][ALL_CUT_OFF] > 0
    frame = recorded.groups
    assert all(frame.loc[group.group, "outcome"] != "trained" for group in groups)
