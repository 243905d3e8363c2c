"""The policy loss that the settings ask for, as one callable."""

from __future__ import annotations

import importlib
from functools import partial
from typing import cast

from areal_lab.functional.corrections import truncate
from areal_lab.functional.losses import PolicyLoss, anchored_at_behavior, decoupled_ppo, ppo
from areal_lab.training.settings import TrainerSettings


def choose_loss(settings: TrainerSettings) -> PolicyLoss:
    """Decoupled PPO with a truncated weight, standard PPO, or the user's own function.

    Raises:
        ValueError: if the import path of an own loss leads nowhere.
    """
    if settings.loss_fn:
        return load_loss(settings.loss_fn)
    if not settings.decoupled:
        return anchored_at_behavior(ppo, clip_epsilon=settings.clip_epsilon)
    return partial(
        decoupled_ppo,
        clip_epsilon=settings.clip_epsilon,
        correct=truncate(settings.behavior_weight_cap),
    )


def vanishes_without_advantage(settings: TrainerSettings) -> bool:
    """Whether a token of advantage 0 is known to contribute neither loss nor gradient.

    True of our own losses, which are a sum of advantages times something bounded; an own loss may
    hold a penalty or a bonus, so nothing is left out for it.
    """
    return not settings.loss_fn


def load_loss(import_path: str) -> PolicyLoss:
    """Import `module:function`.

    Raises:
        ValueError: if it is not such a path, or the module or function does not exist.
    """
    module_name, separator, name = import_path.partition(":")
    if not separator or not module_name or not name:
        raise ValueError(f"loss_fn is {import_path!r}, but must read 'module:function'")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"loss_fn {import_path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"loss_fn {import_path!r} is a {type(function).__name__}, not a function")
    return cast(PolicyLoss, function)
