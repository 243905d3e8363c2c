"""Build the loss and the advantages of a config and call them once, before a run starts.

A program, `python -m areal_lab.training.objective.trial_call SETTINGS` (the JSON of
`TrainerSettings`), for torch and the modules of custom functions may be heavy. It prints one line
per problem. Numbers that the functional core refuses (a cap of 0) are refused here, with its own
words.
"""

from __future__ import annotations

import sys

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
    tokens = LossTokens(
        logprobs, proximal, behavior, torch.tensor([1.0, 1.0, 1.0, -1.0]), torch.ones(4).bool()
    )
    loss, _ = choose_loss(settings)(tokens, facts)
    if loss.dim() > 0:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}, but must be one number: "
            "take its token_mean(value, mask)"
        )


def _try_advantages(settings: TrainerSettings) -> None:
    """Call the advantages on two prompts with two responses each."""
    function = choose_advantages(settings)
    rewards, groups = torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    lengths = torch.tensor([3, 1, 2, 2])
    facts = AdvantageFacts(
        length_tokens=lengths,
        mask=torch.ones(8, dtype=torch.bool),
        sequences=Segments(torch.arange(4).repeat_interleave(lengths), 4),
        token_rewards=torch.zeros(8) if settings.actor.kl_ctl else None,
        values=torch.zeros(8),
        bootstrap_values=torch.zeros(4),
    )
    check_advantages(function(rewards, groups, **asked_of(function, facts)), samples=4, tokens=8)


def _check(text: str) -> None:
    found = try_objective(TrainerSettings.from_json(text))
    if found:
        raise ValueError("\n".join(problem.message for problem in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _check))
