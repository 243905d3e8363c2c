"""Whether a run's problems with images, its model, engines and trainer fit together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from areal_lab.config.problem import Kind, Problem
from areal_lab.config.schema import TrainConfig
from areal_lab.data.images import encode_prompt
from areal_lab.data.problems import Problem as Asked
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.launch.backends import BACKENDS, backend_of
from areal_lab.engines.protocol import PauseMode
from areal_lab.engines.weights.records import Transfer
from areal_lab.models.locate import is_here, resolve_model_path
from areal_lab.models.vision import VISION_KINDS, is_vision_model, read_vision_facts
from areal_lab.resolve.allocation import EnginePlan
from areal_lab.resolve.limits import usable_context
from areal_lab.resolve.placement import Placed
from areal_lab.resolve.trainer import asks_for_values, models_of

_WORKFLOWS = ("multi_turn",)
"""Those whose first turn is the problem's prompt as it is."""


def check_vision_model(placed: Placed, folder: Path) -> Iterator[Problem]:
    """Check what a vision-language model needs of the engines and the trainer.

    Args:
        placed: of the run.
        folder: of the model; nothing is checked of another kind.
    """
    if not is_vision_model(folder):
        return
    yield from check_vision_engine(placed, folder)
    config, sizes = placed.config, placed.trainer.sizes
    rollout, actor = config.rollout, config.actor
    if Transfer(rollout.transfer) is Transfer.ADAPTER:
        yield _wrong(
            "rollout.transfer",
            "rollout.transfer is adapter, which has not been tried with vision-language models; "
            "set rollout.transfer=folder, which sends merged weights",
        )
    if sizes.tensor * sizes.context > 1:
        yield _wrong(
            "allocation_mode",
            f"allocation_mode {config.allocation_mode} trains with {sizes}, but neither the layers "
            "(t) nor the sequences (c) of vision-language models are divided; write "
            f"fsdp:d{sizes.devices}",
        )
    if actor.compile:
        yield _wrong(
            "actor.compile",
            "actor.compile is true, but has not been tried with vision-language models; leave it "
            "out",
        )
    if asks_for_values(actor) and not config.critic.share_body:
        yield _wrong(
            "critic.share_body",
            "the advantages need a critic, but transformers has no vision-language model with one "
            "output per token; set critic.share_body=true",
        )
    for setting, path in models_of(config):
        if path and is_here(path) and not is_vision_model(resolve_model_path(path)):
            yield _wrong(
                setting,
                f"{setting} {path} is no vision-language model, so it cannot score responses to "
                f"images; choose one of {', '.join(VISION_KINDS)}",
            )


def check_vision_engine(placed: Placed, folder: Path) -> Iterator[Problem]:
    """Check that the engines of a run, or an evaluation, can have a vision-language model."""
    if not is_vision_model(folder):
        return
    rollout, engines = placed.config.rollout, placed.engines
    if rollout.addresses:
        yield _wrong(
            "rollout.addresses",
            "rollout.addresses names running servers, but an SGLang server keeps the features of "
            "images over weight updates unless it was started with SGLANG_VLM_CACHE_SIZE_MB=0, "
            "which it does not tell; let the run start its engines (rollout.backend)",
        )
        return
    backend = backend_of(engines.backend)
    if backend.images_refusal:
        able = " or ".join(name for name, one in BACKENDS.items() if not one.images_refusal)
        yield _wrong(
            "rollout.backend",
            f"rollout.backend is {backend.name}, but actor.path is a vision-language model: "
            f"{backend.images_refusal}; set it to {able}",
        )
    aborts = PauseMode(rollout.pause_mode) is PauseMode.ABORT or engines.shared
    if backend.images_as_text and aborts:
        yield _wrong(
            "rollout.pause_mode",
            f"{backend.name} turns prompts with images into text and back, so a response that was "
            "aborted cannot be sent to it again token by token; set rollout.pause_mode=retract, "
            "and write + instead of | in allocation_mode",
        )


def check_images(
    config: TrainConfig,
    engines: EnginePlan | None,
    problems: Sequence[Asked],
    folder: Path,
    context_tokens: int | None,
) -> Iterator[Problem]:
    """Check that every prompt with images can be made and fits the context.

    Args:
        config: of the run.
        engines: None if they are not known.
        problems: trained and held-out ones; those without images are checked elsewhere.
        folder: of the model.
        context_tokens: of the model; None if it is not known.
    """
    shown = [problem for problem in problems if problem.images]
    if not shown:
        return
    workflow = config.rollout.workflow.get("name", "")
    if config.rollout.workflow and workflow not in _WORKFLOWS:
        yield _wrong(
            "rollout.workflow",
            f"rollout.workflow is {workflow!r}, but problems with images need none, or "
            f"{' or '.join(_WORKFLOWS)}: others write prompts of their own",
        )
    room = None
    if context_tokens is not None:
        context = config.gconfig.max_tokens or usable_context(engines, context_tokens)
        room = context - config.gconfig.max_new_tokens
    try:
        codec, vision = TextCodec.load(folder), read_vision_facts(folder)
        lengths = [
            len(encode_prompt(codec, vision, one.prompt, one.images).tokens) for one in shown
        ]
    except ValueError as error:
        yield _wrong("dataset", f"dataset: {error}")
        return
    if room is not None and max(lengths) > room:
        yield _wrong(
            "gconfig.max_new_tokens",
            f"a prompt has {max(lengths)} tokens with its images, but the model's context less "
            f"gconfig.max_new_tokens={config.gconfig.max_new_tokens} leaves {room}; take smaller "
            "images (max_pixels in preprocessor_config.json), or lower gconfig.max_new_tokens",
        )


def _wrong(setting: str, message: str) -> Problem:
    return Problem(Kind.SETTINGS, setting, message)
