"""Losses and advantages by name: the same numbers as calls of the functional core, bit for bit."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_lab import functional as core
from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError
from areal_lab.config.schema import ActorConfig, TrainConfig
from areal_lab.config.shipped import recipes
from areal_lab.functional.segments import Segments
from areal_lab.resolve.functions import check_objective
from areal_lab.training.learner import make_learner
from areal_lab.training.model import load_policy
from areal_lab.training.objective.advantages import (
    AdvantageFacts,
    asked_of,
    check_signature,
    choose_advantages,
)
from areal_lab.training.objective.formula_index import formulas
from areal_lab.training.objective.formulas import FACTS, Formula, Keyword, Role, Value
from areal_lab.training.objective.loss import (
    BatchFacts,
    ChosenLoss,
    LossTokens,
    choose_loss,
)
from areal_lab.training.settings import TrainerSettings
from areal_lab.training.step import train_batch
from tests.training.tiny import random_batch, save_model

LOSSES = list(formulas(Role.LOSS).values())
ADVANTAGES = [one for one in formulas(Role.ADVANTAGE).values() if not one.refusal]
REQUIRED = {"max_tokens": 7, "beta": 0.3, "surrogate": {"name": "clip", "clip_epsilon": 0.1}}
TRUNCATE = {"name": "truncate", "cap": 1.2}


def settings(config: TrainConfig | None = None, **actor: Any) -> TrainerSettings:
    config = config or TrainConfig(actor=ActorConfig(**actor))
    return TrainerSettings(config=config, model_path="", weights_root="")


def batch(seed: int = 0) -> tuple[LossTokens, BatchFacts]:
    """Five responses to two prompts, two turns each; the third has advantage 0."""
    torch.manual_seed(seed)
    lengths = torch.tensor([3, 5, 2, 4, 6])
    ids = torch.repeat_interleave(torch.arange(5), lengths)
    groups = torch.tensor([0, 0, 0, 1, 1])[ids]
    behavior = -torch.rand(20) * 3 - 0.1
    proximal = behavior + 0.4 * torch.randn(20)
    logprobs = (proximal + 0.3 * torch.randn(20)).requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 0.0, 0.7, -1.2])[ids]
    facts = BatchFacts(
        token_count=20,
        sequences=Segments(ids, 5),
        sequence_count=5,
        turns=Segments(torch.arange(20) // 2, 10),
        groups=Segments(groups, 2),
        group_count=2,
        group_tokens=torch.tensor([10, 10]),
        versions=torch.arange(20) % 3,
        trainer_version=4,
    )
    mask = torch.ones(20, dtype=torch.bool)
    return LossTokens(logprobs, proximal, behavior, advantages, mask), facts


def part(tokens: LossTokens, facts: BatchFacts, kept: Tensor) -> tuple[LossTokens, BatchFacts]:
    """A micro-batch of the batch: some of its tokens, the counts of the whole."""
    cut = LossTokens(*(one[kept] for one in tokens))
    return cut, replace(
        facts,
        sequences=Segments(facts.sequences.ids[kept], facts.sequences.count),
        turns=Segments(facts.turns.ids[kept], facts.turns.count),
        groups=Segments(facts.groups.ids[kept], facts.groups.count),
        versions=facts.versions[kept],
    )


def value_and_gradient(call: Callable[[], Any], tokens: LossTokens) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)  # clip_cov draws
    tokens.logprobs.grad = None
    loss = call()
    loss.backward()
    assert tokens.logprobs.grad is not None
    return loss.detach(), tokens.logprobs.grad.clone()


def assert_equal_losses(chosen: ChosenLoss, direct: Callable[..., Any], *, at: str) -> None:
    """`direct` takes the five tensors and has its facts bound by name where it wants them."""
    tokens, facts = batch()
    given = tokens
    if at == "behavior":
        given = tokens._replace(proximal_logprobs=tokens.behavior_logprobs)
    ours = value_and_gradient(lambda: chosen(tokens, facts)[0], tokens)
    theirs = value_and_gradient(lambda: direct(given, facts), tokens)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert float(ours[1].abs().max()) > 0


def changed(keyword: Keyword) -> Any:
    """A value that is not the default."""
    if keyword.name == "correct":
        return TRUNCATE
    default = (keyword.default or "1").replace("math.inf", "1e3")
    if keyword.part is not None:
        return {"name": default}
    known = ast.literal_eval(default)
    if isinstance(known, bool) or known is None:
        return known
    factor = {"low": 0.5, "high": 2.0}.get(keyword.name, 0.9)  # a band with tokens in it
    return [one * factor for one in known] if isinstance(known, tuple) else known * factor


def mapping_of(formula: Formula) -> dict[str, Any]:
    given = {k: REQUIRED.get(k, changed(one)) for k, one in formula.settable.items()}
    return {"name": formula.short_name, **given}


def core_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a mapping, its parts looked up by hand."""
    found = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    del found["name"]
    if "correct" in found:
        found["correct"] = core.truncate(TRUNCATE["cap"])  # type: ignore[arg-type]
    if "surrogate" in found:
        found["surrogate"] = partial(core.clip_surrogate, clip_epsilon=0.1)
    for name in ("ratio", "baseline", "scale"):
        if isinstance(found.get(name), dict):
            found[name] = getattr(core, found[name]["name"])
    return found


@pytest.mark.parametrize("at", ["proximal", "behavior"])
@pytest.mark.parametrize("formula", LOSSES, ids=lambda one: one.name)
def test_a_loss_by_name_is_a_call_of_the_functional_core(formula: Formula, at: str) -> None:
    given = mapping_of(formula)
    keywords = core_keywords(given)
    function = getattr(core, formula.name)

    def direct(tokens: LossTokens, facts: BatchFacts) -> Tensor:
        own = keywords | {name: getattr(facts, name) for name in formula.facts}
        if "aggregate" in own:
            own["aggregate"] = partial(core.token_mean, token_count=facts.token_count)
        if formula.name == "ppo":
            return function(tokens[0], *tokens[2:], **own).loss
        return function(*tokens, **own).loss

    chosen = choose_loss(settings(loss=given, use_decoupled_loss=at == "proximal"))
    assert_equal_losses(chosen, direct, at=at)
    assert not list(check_objective(TrainConfig(actor=ActorConfig(loss=given))))


@pytest.mark.parametrize("formula", ADVANTAGES, ids=lambda one: one.name)
def test_advantages_by_name_are_a_call_of_the_functional_core(formula: Formula) -> None:
    given = mapping_of(formula)
    if "gamma" in given:
        given["gamma"] = 1
    if "baseline" in given:
        given |= {"baseline": {"name": "mean_of_others"}, "scale": "std_of_batch"}
    config = TrainConfig(actor=ActorConfig(advantage=given))
    assert not list(check_objective(config))
    rewards, groups = (
        torch.tensor([0.0, 1.0, 1.0, 0.5, 0.25, 1.0]),
        torch.tensor([3, 3, 3, 9, 9, 9]),
    )
    lengths = torch.tensor([2, 1, 4, 3, 2, 5])
    function, keywords = choose_advantages(settings(config)), core_keywords(given)
    if given.get("scale") == "std_of_batch":
        keywords["scale"] = core.std_of_batch
    if "gamma" in keywords:
        keywords["gamma"] = 1.0
    direct = getattr(core, formula.name)
    if "mask" not in formula.facts:
        lengths_too = [lengths] * ("length_tokens" in formula.facts)
        named = {"length_tokens": lengths} if lengths_too else {}
        found = function(rewards, groups, **named)
        assert torch.equal(found, direct(rewards, groups, *lengths_too, **keywords))
        return
    ids = torch.repeat_interleave(torch.arange(6), lengths)
    facts = AdvantageFacts(
        length_tokens=lengths,
        mask=torch.rand(17) < 0.8,
        sequences=Segments(ids, 6),
        token_rewards=torch.randn(17),
        values=torch.randn(17),
        bootstrap_values=torch.randn(6),
    )
    own = dict(asked_of(function, facts))
    assert set(own) == set(formula.facts) - {"rewards", "groups"}
    found = function(rewards, groups, **own)
    own |= {"groups": groups} if "groups" in formula.facts else {}
    torch.testing.assert_close(found, direct(rewards, **own, **keywords), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"eps_clip": 0.1, "use_decoupled_loss": False},
            {"loss": {"name": "ppo", "clip_epsilon": 0.1}},
        ),
        (
            {"eps_clip": 0.3, "behav_imp_weight_cap": 1.5},
            {
                "loss": {
                    "name": "decoupled_ppo",
                    "clip_epsilon": 0.3,
                    "correct": {"name": "truncate", "cap": 1.5},
                }
            },
        ),
        ({"loss_fn": "areal_lab.functional:gspo"}, {"loss": "gspo"}),
    ],
)
def test_old_settings_are_what_the_new_form_says(old: dict[str, Any], new: dict[str, Any]) -> None:
    before, after = choose_loss(settings(**old)), choose_loss(settings(**new))
    assert_equal_losses(after, lambda tokens, facts: before(tokens, facts)[0], at="proximal")
    if "loss_fn" not in old:  # of a custom loss nothing is known
        assert before.vanishes_without_advantage == after.vanishes_without_advantage
    assert type(getattr(before.function, "func", None)) is type(
        getattr(after.function, "func", None)
    )


def test_old_advantages_are_what_the_new_form_says() -> None:
    rewards, groups = torch.rand(12), torch.arange(12) // 4
    for deviation, name in ((True, "grpo"), (False, "dr_grpo")):
        before = choose_advantages(settings(adv_norm_std=deviation))
        after = choose_advantages(settings(advantage=name))
        assert torch.equal(before(rewards, groups), after(rewards, groups))


@pytest.mark.parametrize("formula", LOSSES, ids=lambda one: one.name)
def test_a_response_without_advantage_is_left_out_where_that_changes_nothing(
    formula: Formula,
) -> None:
    given = mapping_of(formula)
    tokens, facts = batch()
    kept = facts.sequences.ids != 2

    def results(chosen: ChosenLoss) -> tuple[Tensor, Tensor]:
        whole = value_and_gradient(lambda: chosen(tokens, facts)[0], tokens)
        rest = value_and_gradient(lambda: chosen(*part(tokens, facts, kept))[0], tokens)
        return whole[0] - rest[0], whole[1] - rest[1]

    chosen = choose_loss(settings(loss=given))
    if chosen.vanishes_without_advantage:
        for difference in results(chosen):
            torch.testing.assert_close(difference, torch.zeros_like(difference), atol=1e-7, rtol=0)
    elif formula.name in ("kl_cov", "prime_rl", "kimi", "dro", "r2vpo"):  # which have a penalty
        given |= {"fraction": 1.0} if formula.name == "kl_cov" else {}
        assert max(float(one.abs().max()) for one in results(choose_loss(settings(loss=given)))) > 0
    else:
        assert formula.name in ("policy_loss", "clip_cov", "m2po", "sat")


COMPOSED: list[dict[str, Any]] = [
    {"aggregate": {"name": name, **more}}
    for name, more in [
        ("token_mean", {}),
        ("token_sum", {}),
        ("sequence_mean", {}),
        ("sequence_sum_mean", {}),
        ("fixed_length_mean", {"max_tokens": 9}),
        ("prompt_mean", {}),
    ]
] + [
    {"ratio": "segment"},
    {"correct": [TRUNCATE, {"name": "mask_outside", "low": 0.5, "high": 2}]},
    {"correct": {"name": "over_segments", "segments": "turns", "correct": "sequence_product"}},
    {
        "correct": {
            "name": "reject",
            "divergence": "k3",
            "high": 0.5,
            "statistic": "mean_of_sequence",
        }
    },
]


@pytest.mark.parametrize("parts", COMPOSED, ids=str)
def test_a_composed_loss_adds_up_over_micro_batches(parts: dict[str, Any]) -> None:
    chosen = choose_loss(settings(loss={"name": "policy_loss", "surrogate": "cispo", **parts}))
    tokens, facts = batch()
    first = facts.sequences.ids < 2
    whole = chosen(tokens, facts)[0]
    halves = [chosen(*part(tokens, facts, kept))[0] for kept in (first, ~first)]
    torch.testing.assert_close(sum(halves), whole)


def test_parts_are_those_of_the_functional_core() -> None:
    given = {
        "name": "policy_loss",
        "surrogate": {"name": "cispo", "clip_epsilon": [0.3, 0.4]},
        "ratio": "segment",
        "correct": [
            {"name": "over_segments", "segments": "turns", "correct": "sequence_product"},
            TRUNCATE,
        ],
        "aggregate": "prompt_mean",
    }

    def direct(tokens: LossTokens, facts: BatchFacts) -> Tensor:
        return core.policy_loss(
            *tokens,
            surrogate=partial(core.cispo_surrogate, clip_epsilon=(0.3, 0.4)),
            ratio=partial(core.segment_ratio, turns=facts.turns),
            correct=core.chain(
                core.over_segments(facts.turns, core.sequence_product), core.truncate(1.2)
            ),
            aggregate=partial(
                core.prompt_mean,
                groups=facts.groups,
                group_count=facts.group_count,
                group_tokens=facts.group_tokens,
            ),
            sequences=facts.sequences,
        ).loss

    assert_equal_losses(choose_loss(settings(loss=given)), direct, at="proximal")


def test_the_trainer_fills_what_the_index_says() -> None:
    assert [field.name for field in fields(BatchFacts)] == list(FACTS)
    returned = {
        name
        for name in core.__all__
        if str(_returns(getattr(core, name))) in ("PolicyLossResult", "ConstrainedLossResult")
    }
    assert {one.name for one in LOSSES} == returned
    for one in (*LOSSES, *ADVANTAGES):
        assert one.summary
        assert one.source
        assert all(k.value is not Value.ANY for k in one.settable.values() if k.part is None)


def _returns(function: object) -> object:
    return getattr(function, "__annotations__", {}).get("return")


def my_loss(
    logprobs: Tensor,
    proximal: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    width: float = 1.0,
    token_count: float | None = None,
) -> core.PlainLoss:
    """A custom loss with a keyword of its own."""
    value = width * torch.exp(logprobs - behavior) * advantages + 0 * proximal
    return core.PlainLoss(-core.token_mean(value, mask, token_count=token_count))


def test_a_custom_loss_has_keywords_too() -> None:
    path = f"{__name__}:my_loss"
    tokens, facts = batch()
    once = choose_loss(settings(loss=path))(tokens, facts)[0]
    twice = choose_loss(settings(loss={"name": path, "width": 2}))(tokens, facts)[0]
    assert torch.equal(2 * once, twice)
    with pytest.raises(ConfigError, match=r"widt is no keyword of .*my_loss; did you mean 'width'"):
        choose_loss(settings(loss={"name": path, "widt": 2}))
    with pytest.raises(ConfigError, match="token_count is filled by the trainer"):
        choose_loss(settings(loss={"name": path, "token_count": 2}))


def test_overlong_responses_lose_reward_before_advantages_are_taken() -> None:
    config = TrainConfig().with_settings(
        {"gconfig.max_new_tokens": 10, "actor.overlong_share": 0.2, "actor.advantage": "rloo"}
    )
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    lengths = torch.tensor([8, 9, 10, 3])
    found = choose_advantages(settings(config))(rewards, groups, length_tokens=lengths)
    shaped = torch.tensor([1.0, 0.5, -1.0, 1.0])  # DAPO, eq. 13: none to 8, half at 9, all at 10
    assert torch.equal(found, core.rloo_advantages(shaped, groups))


# --- recipes -------------------------------------------------------------------------------------

CAPPED = {"correct": core.truncate(5.0)}
DIRECT: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "ppo": (core.ppo, {"clip_epsilon": 0.2}, "behavior"),
    "grpo": (core.grpo, {"clip_epsilon": 0.2}, "behavior"),
    "dr_grpo": (core.dr_grpo, {"max_tokens": 6}, "behavior"),
    "dapo": (core.dapo, {"clip_epsilon": (0.2, 0.28)}, "behavior"),
    "reinforce_plus_plus": (core.ppo, {}, "behavior"),
    "reinforce_plus_plus_baseline": (core.ppo, {}, "behavior"),
    "rloo": (core.reinforce, {}, "behavior"),
    "lite_ppo": (core.ppo, {}, "behavior"),
    "gspo": (core.gspo, {"clip_epsilon": (3e-4, 4e-4)}, "behavior"),
    "cispo": (core.cispo, {"clip_epsilon": (1.0, 4.0)}, "behavior"),
    "decoupled_ppo": (core.decoupled_ppo, CAPPED, "proximal"),
    "decoupled_grpo": (core.grpo, CAPPED, "proximal"),
    "decoupled_dapo": (core.dapo, CAPPED, "proximal"),
    "decoupled_gspo": (core.gspo, CAPPED, "proximal"),
    "decoupled_cispo": (core.cispo, CAPPED, "proximal"),
}
"""The loss of each recipe as a call of the functional core."""


@pytest.mark.parametrize("name", sorted(recipes().keys() - {"distill"}))
def test_a_recipe_is_a_call_of_the_functional_core(name: str) -> None:
    config = load_config(["tiny", name])
    assert config.experiment_name == "tiny"  # a recipe says nothing of the task
    assert not list(check_objective(config))
    function, keywords, at = DIRECT[name]

    def direct(tokens: LossTokens, facts: BatchFacts) -> Tensor:
        known = formulas(Role.LOSS)[function.__name__].facts
        own = keywords | {fact: getattr(facts, fact) for fact in known}
        given = (tokens[0], *tokens[2:]) if function is core.ppo else tokens
        return function(*given, **own).loss

    assert_equal_losses(choose_loss(settings(config)), direct, at=at)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_recipe_trains(name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    config = load_config(["tiny", name], ["actor.ppo_n_minibatches=2", "gconfig.max_new_tokens=12"])
    learner = make_learner(
        load_policy(folder), replace(settings(config), model_path=str(folder), threads=1)
    )
    for seed in (0, 1):
        metrics = train_batch(learner, random_batch(seed)).metrics
        assert math.isfinite(metrics["loss"])
        assert metrics["grad_norm"] > 0


def test_advantages_that_cannot_be_called_are_refused() -> None:
    async def late(rewards: Tensor, groups: Tensor) -> Tensor:
        return rewards + groups

    def alone(rewards: Tensor) -> Tensor:
        return rewards

    def more(rewards: Tensor, groups: Tensor, *, length_tokens: Tensor, scale: float) -> Tensor:
        return rewards * groups * length_tokens * scale

    check_signature(partial(more, scale=2.0))
    for function, message in (
        (late, "is async, but nothing waits for it"),
        (alone, "but is called as advantages(rewards, groups): too many positional arguments"),
        (more, "missing a required argument: 'scale'. By name it may take any of length_tokens"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            check_signature(function)
