"""Frozen models of a run: a reference for KL penalties, and a teacher for distillation.

actor.kl_loss_coef, actor.kl_ctl = 0   no reference
ref.path                               a separate model, frozen
adapters                               the trained model with its adapters off: no second copy
otherwise                              a frozen copy of the initial weights of the run

teacher.path                           a separate model, frozen
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from areal_lab.data.batch import PackedBatch
from areal_lab.functional.aggregate import token_mean
from areal_lab.functional.divergences.kl import (
    KLEstimator,
    KLLoss,
    k2,
    k3,
    kl_loss,
    straight_through,
)
from areal_lab.functional.losses.distillation import (
    OnPolicyDistillationLoss,
    on_policy_distillation_loss,
)
from areal_lab.models.locate import resolve_model_path
from areal_lab.training.forward import PackedPolicy
from areal_lab.training.lora import has_lora
from areal_lab.training.model import check_same_vocabulary, load_policy
from areal_lab.training.ranks import Ranks
from areal_lab.training.settings import TrainerSettings

_ESTIMATORS: dict[str, KLEstimator] = {"k2": k2, "k3": k3, "straight_through": straight_through()}


@dataclass(frozen=True, slots=True)
class Reference:
    """A frozen policy and how much the distance from it costs."""

    policy: PackedPolicy
    switches_adapters_off: bool
    """True if it is the trained policy, whose adapters must be off."""
    coefficient: float
    estimator: KLEstimator

    def logprobs(self, packed: PackedBatch) -> Float[Tensor, " R"]:
        """Log-probs of the chosen tokens, without gradient."""
        model = self.policy.model
        off: AbstractContextManager[None] = nullcontext()
        if self.switches_adapters_off:
            off = without_adapters(model)
        with off:
            return _logprobs(self.policy, packed)

    def penalty(
        self,
        logprobs: Float[Tensor, " R"],
        reference_logprobs: Float[Tensor, " R"],
        mask: Bool[Tensor, " R"],
        *,
        token_count: int,
    ) -> KLLoss:
        """A micro-batch's share of the penalty on its minibatch: a mean over tokens."""
        return kl_loss(
            logprobs,
            reference_logprobs,
            mask,
            coefficient=self.coefficient,
            estimator=self.estimator,
            aggregate=partial(token_mean, token_count=token_count),
        )


def make_reference(
    policy: PackedPolicy, settings: TrainerSettings, ranks: Ranks
) -> Reference | None:
    """The reference of a run; None without `actor.kl_loss_coef` and `actor.kl_ctl`."""
    actor, path = settings.actor, settings.config.ref.path
    if not (actor.kl_loss_coef or actor.kl_ctl):
        return None
    own = bool(path) or not has_lora(policy.model)
    frozen = policy
    if own:
        folder = resolve_model_path(path) if path else Path(settings.model_path)
        frozen = _frozen("ref.path", folder, policy, settings, ranks)
    return Reference(
        policy=frozen,
        switches_adapters_off=not own,
        coefficient=actor.kl_loss_coef,
        estimator=_ESTIMATORS[actor.kl_estimator],
    )


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen policy, and how much of the loss is the distance from it."""

    policy: PackedPolicy
    rl_weight: float
    distill_weight: float

    def logprobs(self, packed: PackedBatch) -> Float[Tensor, " R"]:
        """Log-probs of the chosen tokens, without gradient."""
        return _logprobs(self.policy, packed)

    def mixed(
        self,
        rl_loss: Float[Tensor, ""],
        logprobs: Float[Tensor, " R"],
        behavior_logprobs: Float[Tensor, " R"],
        teacher_logprobs: Float[Tensor, " R"],
        *,
        token_count: int,
    ) -> OnPolicyDistillationLoss:
        """A micro-batch's share of both losses, as a mean over the tokens of its minibatch."""
        distance = on_policy_distillation_loss(
            logprobs,
            behavior_logprobs,
            teacher_logprobs,
            torch.ones_like(logprobs, dtype=torch.bool),
            coefficient=self.distill_weight,
            aggregate=partial(token_mean, token_count=token_count),
        )
        return distance._replace(loss=self.rl_weight * rl_loss + distance.loss)


def make_teacher(policy: PackedPolicy, settings: TrainerSettings, ranks: Ranks) -> Teacher | None:
    """The teacher of a run; None without `teacher.path`."""
    teacher = settings.config.teacher
    if not teacher.path:
        return None
    folder = resolve_model_path(teacher.path)
    return Teacher(
        policy=_frozen("teacher.path", folder, policy, settings, ranks),
        rl_weight=teacher.rl_loss_weight,
        distill_weight=teacher.distill_loss_weight,
    )


def _frozen(
    setting: str, folder: Path, policy: PackedPolicy, settings: TrainerSettings, ranks: Ranks
) -> PackedPolicy:
    """Frozen model with the same compute settings and sharding as the policy."""
    model = load_policy(folder, device=settings.load_device).requires_grad_(requires_grad=False)
    theirs, ours = (m.config.get_text_config().vocab_size for m in (model, policy.model))
    check_same_vocabulary(setting, str(folder), theirs, ours)
    frozen = PackedPolicy(
        model,
        temperature=policy.temperature,
        dtype=policy.dtype,
        param_dtype=policy.param_dtype,
        attention=policy.attention,
        pixels=policy.pixels,
    )
    ranks.shard(frozen, offload=settings.actor.offload)
    return frozen


def _logprobs(policy: PackedPolicy, packed: PackedBatch) -> Float[Tensor, " R"]:
    with torch.no_grad():
        logprobs: Tensor = policy(packed).logprobs
    return logprobs


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Compute with the frozen weights alone."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # most runs do not need peft

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # `enable_adapters` would also switch the gradients of the adapters off and on again, which a
    # sharded module does not notice.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
