"""Build the loss and the advantages of a config and call them once, before a run starts.

A program, `python -m areal_lab.training.objective.trial_call SETTINGS` (the JSON of
`TrainerSettings`), because torch and the modules of custom functions may be heavy. It prints one
line per problem. Numbers that the functional core refuses (a cap of 0) are refused here, in the
same words.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from areal_lab.config.functions import main
from areal_lab.config.problem import Kind, Problem, problems_of
from areal_lab.functional.segments import Segments
from areal_lab.training.objective.advantages import (
    AdvantageFacts,
    asked_of,
    check_advantages,
    choose_advantages,
)
from areal_lab.training.objective.loss import (
    BatchFacts,
    LossTokens,
    choose_loss,
)
from areal_lab.training.settings import TrainerSettings


def try_objective(settings: TrainerSettings) -> list[Problem]:
    """The problems of the loss and of the advantages that settings ask for."""
    found: list[Problem] = []
    for setting, attempt in (("actor.loss", _try_loss), ("actor.advantage", _try_advantages)):
        try:
            attempt(settings)
        except (TypeError, ValueError) as error:
            found += problems_of(
                error if isinstance(error, ValueError) else ValueError(error), setting
            )
        except (
            Exception
        ) as error:  # whatever a custom function raises is what its author has to see
            message = f"{setting}: {type(error).__name__}: {' '.join(str(error).split())}"
            found.append(Problem(Kind.SETTINGS, setting, message))
    return found


def _try_loss(settings: TrainerSettings) -> None:
    """Call the loss on two responses of a prompt, of three tokens and one."""
    ids = torch.tensor([0, 0, 0, 1])
    logprobs = torch.tensor([-1.0, -0.5, -2.0, -0.7], requires_grad=True)
    proximal, behavior = logprobs.detach() - 0.1, logprobs.detach() - 0.2
    group = torch.zeros_like(ids)
    facts = BatchFacts(
        token_count=4,
        sequences=Segments(ids, 2),
        sequence_count=2,
        turns=Segments(ids, 2),
        groups=Segments(group, 1),
        group_count=1,
        group_tokens=torch.tensor([4]),
        versions=group,
        trainer_version=1,
    )
    advantages, mask = torch.tensor([1.0, 1.0, 1.0, -1.0]), torch.ones(4).bool()
    function, vanishes = choose_loss(settings), True
    # Stale tokens, and then fresh ones, whose three policies are one.
    for old, older in ((proximal, behavior), (logprobs.detach(), logprobs.detach())):
        loss, _ = function(LossTokens(logprobs, old, older, advantages, mask), facts)
        if loss.dim() > 0:
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)}, but must be one number: "
                "take its token_mean(value, mask)"
            )
        vanishes = vanishes and _has_no_gradient(loss, logprobs)
    if vanishes:
        raise ValueError(
            "the loss has no gradient for advantages of 1 and -1, so that nothing would be "
            "trained; check its bounds"
        )


def _has_no_gradient(loss: torch.Tensor, logprobs: torch.Tensor) -> bool:
    if not loss.requires_grad:
        return True
    gradient: torch.Tensor | None = torch.autograd.grad(loss, logprobs, allow_unused=True)[0]
    return gradient is None or not bool(gradient.any())


def _try_advantages(settings: TrainerSettings) -> None:
    """Call the advantages on two prompts with two responses each."""
    function = choose_advantages(settings)
    groups, vanish = torch.tensor([0, 0, 1, 1]), True
    lengths = torch.tensor([3, 1, 2, 2])
    facts = AdvantageFacts(
        length_tokens=lengths,
        mask=torch.ones(8, dtype=torch.bool),
        sequences=Segments(torch.arange(4).repeat_interleave(lengths), 4),
        token_rewards=torch.zeros(8) if settings.actor.kl_ctl else None,
        values=torch.zeros(8),
        bootstrap_values=torch.zeros(4),
    )
    for high in (1.0, 100.0, -100.0):  # whatever rewards a custom function is for
        rewards = torch.tensor([0.0, high, high, high])
        found = function(rewards, groups, **asked_of(function, facts))
        check_advantages(found, samples=4, tokens=8)
        advantages: Any = getattr(found, "advantages", found)
        vanish = vanish and not bool(advantages.any())
    if vanish:
        raise ValueError(
            "all advantages are 0, although rewards of a group differ, so that nothing would be "
            "trained; subtract a baseline that is not the reward itself"
        )


def _check(text: str) -> None:
    found = try_objective(TrainerSettings.from_json(text))
    if found:
        raise ValueError("\n".join(problem.message for problem in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _check))
