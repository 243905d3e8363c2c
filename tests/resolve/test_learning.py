"""Settings with which nothing is learned are refused before a run starts, or told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from areal_lab.config.load import load_config
from areal_lab.config.offline import DPOConfig, load_offline
from areal_lab.config.problem import ConfigError
from areal_lab.config.shipped import offline_configs, recipes, training_configs
from areal_lab.offline.start import resolve_offline
from areal_lab.resolve.check import check_settings
from areal_lab.resolve.learning import cannot_learn, rates_without_effect, unlikely_to_learn
from areal_lab.resolve.notes import notes
from areal_lab.resolve.placement import place_run
from areal_lab.training.objective.trial_call import try_objective
from areal_lab.training.settings import TrainerSettings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["gconfig.temperature=0"], "gconfig.temperature is 0, so that the responses to a prompt"),
        (["gconfig.temperature=0.0001"], "set it to 1.0 (at least 0.01)"),
        (
            ["gconfig.top_k=1"],
            "gconfig.top_k is 1, so that the responses to a prompt are all equal",
        ),
        (["gconfig.top_p=1e-9"], "gconfig.top_p is 1e-09, which keeps the most likely token alone"),
        (
            ["teacher.path=Adder-75K", "teacher.rl_loss_weight=0", "teacher.distill_loss_weight=0"],
            "are both 0, so that the loss is 0 and nothing is trained",
        ),
        (["actor.use_lora=true", "actor.target_modules=[]"], "no layer gets an adapter"),
        (
            ["rollout.dynamic_sampling.enabled=true", "rollout.dynamic_sampling.tolerance=1"],
            "every group counts as equal and is filtered; set it below 1",
        ),
        (["actor.optimizer.lr=1e-30"], "actor.optimizer.lr is 1e-30, but float32 weights do not"),
        (["actor.optimizer.weight_decay=1e6"], "removes the weights in one step; set it below"),
    ],
)
def test_a_run_that_cannot_learn_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(load_config("tiny", given))
    (problem,) = caught.value.problems
    assert message in str(problem)
    assert problem.setting in given[-1] or problem.setting.startswith("teacher.")


def test_greedy_evaluation_beside_training_is_fine() -> None:
    given = ["evaluation.temperature=0", "evaluation.samples_per_problem=1"]
    check_settings(load_config("tiny", given))


def test_settings_that_hardly_learn_are_told() -> None:
    for given, message in (
        ("gconfig.temperature=0.05", "gconfig.temperature=0.05 makes most responses"),
        ("gconfig.top_p=0.1", "gconfig.top_p=0.1 makes most responses"),
        ("gconfig.max_new_tokens=1", "ends each response after its first token"),
        ("reward.weights={format: 0}", "the reward is 0 but for components"),
        ("actor.optimizer.warmup_steps=5000", "only reaches 1.2% of lr"),
        ("actor.optimizer.gradient_clipping=1e-9", "steps are at most 0.091 of lr"),
    ):
        (line,) = [one for one in notes(place_run(load_config("tiny", [given]))) if message in one]
        assert "\n" not in line


def test_no_shipped_config_is_refused_or_told() -> None:
    for name in (*training_configs(), *(["tiny", one] for one in recipes())):
        config = load_config(name)
        assert not [*cannot_learn(config), *unlikely_to_learn(config)], name
    for name in offline_configs():
        config = load_offline(name.partition("_")[0], name)
        assert not list(rates_without_effect("actor.optimizer", config.actor.optimizer))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (f"actor.advantage={__name__}:nothing", "actor.advantage: all advantages are 0, although"),
        (f"actor.loss={__name__}:constant", "actor.loss: the loss has no gradient for advantages"),
        ("actor.loss={name: icepop, low: 2, high: 5}", "the loss has no gradient for advantages"),
        ("actor.loss={name: kl_cov, fraction: 0.5}", ""),
        (f"actor.advantage={__name__}:large_rewards_only", ""),
    ],
)
def test_an_objective_that_vanishes_is_refused(given: str, message: str) -> None:
    settings = TrainerSettings(config=load_config("tiny", [given]), model_path="", weights_root="")
    found = "".join(map(str, try_objective(settings)))
    assert message in found
    assert bool(message) == bool(found)


def nothing(rewards, groups):
    return 0 * rewards * groups


def large_rewards_only(rewards, groups):
    return (rewards.abs() > 50).float() * rewards * (1 + groups)


def constant(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):
    fixed = proximal_logprobs + behavior_logprobs + advantages + mask + logprobs.detach()
    return SimpleNamespace(loss=fixed.sum())


def test_preferences_that_cancel_are_refused() -> None:
    config = DPOConfig().with_settings(
        {"label_smoothing": 0.5, "dataset.type": "arithmetic", "actor.path": "Adder-75K"}
    )
    with pytest.raises(ConfigError, match=r"label_smoothing is 0\.5, which makes both responses"):
        resolve_offline(config)
    config = config.with_settings({"label_smoothing": 0.1, "actor.optimizer.lr": 1e-30})
    with pytest.raises(ConfigError, match="lr is 1e-30, but float32 weights do not change"):
        resolve_offline(config)
