"""Notes on a run that can start: valid settings that may not do what the user expects."""

from __future__ import annotations

import math
from collections.abc import Iterator

from areal_lab.config.schema import TrainConfig
from areal_lab.engines.launch.backends import backend_of
from areal_lab.engines.protocol import PauseMode
from areal_lab.resolve.learning import unlikely_to_learn
from areal_lab.resolve.limits import schedule_of
from areal_lab.resolve.placement import Placed
from areal_lab.resolve.unread import TRAIN


def notes(placed: Placed) -> list[str]:
    """Warn about valid settings that may not do what the user expects."""
    config = placed.config
    schedule, eta = schedule_of(config), config.rollout.max_head_offpolicyness
    lines = [*TRAIN.notes(config), *unlikely_to_learn(config)]
    if schedule.largest_eta == eta and 0 < eta < math.inf and eta != int(eta):
        lines.append(
            f"eta={eta:g} is in versions: generation runs ahead by at most {eta:g} batches; "
            "AReaL's eta is an integer"
        )
    lines += _unused_gpus(placed)
    lines += _turn_notes(placed)
    lines += _workflow_notes(config)
    lines += _evaluation_notes(placed)
    if config.reward.sandbox == "unsafe":
        lines.append(
            "reward.sandbox=unsafe contains nothing: model code that the reward runs has your "
            "rights, files and network"
        )
    if _is_biased_in_place(placed):
        lines.append(
            "rollout.pause_mode=in_place keeps the KV cache of the old weights: interrupted "
            "responses continue under a mixture of versions, which is no version's policy; the "
            "error is measured in docs/engines.md, 'What an interruption does'"
        )
    return lines


def _turn_notes(placed: Placed) -> list[str]:
    """What shared devices do to settings."""
    if placed.config.rollout.schedule == "partial_rollout" and placed.engines.shared:
        return [
            "engines that share devices with the trainer end running responses before its turn, "
            "and get them again with their tokens, as with rollout.pause_mode=abort"
        ]
    return []


def _workflow_notes(config: TrainConfig) -> list[str]:
    workflow, evaluation = config.rollout.workflow, config.evaluation
    online = workflow.get("name") == "agent" and workflow.get("mode") == "online"
    if not online or not evaluation.max_problems:
        return []
    return [
        "held-out problems wait for sessions from outside, too, before and after training: "
        f"{evaluation.samples_per_problem} for each of up to {evaluation.max_problems} problems; "
        "evaluation.max_problems=0 switches them off"
    ]


def _evaluation_notes(placed: Placed) -> list[str]:
    config = placed.config
    every, save = config.eval_every_steps, config.save_every_steps
    if not every:
        return []
    if every >= config.total_train_steps:
        return [
            f"eval_every_steps={every} has no effect in {config.total_train_steps} steps: the last "
            "one is evaluated after training"
        ]
    lines = []
    if not save or math.lcm(every, save) != every:
        common = math.lcm(every, save) if save else config.total_train_steps
        which = "the last step" if common >= config.total_train_steps else f"every {common} steps"
        lines.append(
            f"the best checkpoint is chosen among those of {which}: eval_every_steps={every}, "
            f"save_every_steps={save}; an evaluated step is a candidate if it is saved, too"
        )
    if placed.engines.shared:
        lines.append(
            "engines lose their weights in the trainer's turns, so that evaluations during "
            "training continue under newer ones, and their scores are of several versions"
        )
    elif placed.engine_count == 1:
        lines.append(
            "with one engine, weight updates interrupt evaluations during training, so that their "
            "scores are of several versions; with two, one keeps the evaluated weights "
            "(docs/train.md)"
        )
    return lines


def _unused_gpus(placed: Placed) -> Iterator[str]:
    """Say what computes on the CPU although a GPU is visible, unless it was asked for."""
    config, machine, engines = placed.config, placed.machine, placed.engines
    if not machine.gpus:
        return
    if placed.trainer.device == "cpu" and config.actor.device != "cpu":
        why = (
            f"the engines leave too few for {placed.trainer.ranks} trainer process(es); take fewer "
            "engines, rollout.device=cpu, or rollout.share_gpu=true to share the GPUs of embedded "
            "engines"
            if machine.torch_has_cuda
            else "the installed torch was built without CUDA"
        )
        yield f"a GPU is visible, but the trainer computes on the CPU: {why}"
    if config.rollout.addresses or config.rollout.device == "cpu":
        return
    if engines.device == "cpu":
        name = engines.backend
        why = f"its CPU build is installed (areal-lab engine install {name} --build gpu)"
        if not backend_of(name).own_environment:
            why = (
                f"there are too few for {engines.servers} engine(s)"
                if machine.torch_has_cuda
                else "the installed torch was built without CUDA"
            )
        yield f"a GPU is visible, but the engine {name} computes on the CPU: {why}"


def _is_biased_in_place(placed: Placed) -> bool:
    """Whether interrupted responses of this run continue with the KV cache of old weights."""
    in_place = PauseMode(placed.config.rollout.pause_mode) is PauseMode.IN_PLACE
    interrupts = in_place and schedule_of(placed.config).interrupts
    return interrupts and backend_of(placed.engines.backend).biased_in_place
