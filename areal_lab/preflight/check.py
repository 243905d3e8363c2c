"""Find everything wrong with a run before any of its processes starts.

    settings, engines, ports, folder --all problems--> dataset, functions, model, disk space

Each problem is one line: the value, the bound and the fix. Cheap checks come first; the model comes
late, since a packaged one is converted at its first use.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from areal_lab.config.checkpoints import RESUMABLE
from areal_lab.config.offline import RunConfig
from areal_lab.config.problem import ConfigError, Kind, Problem, problems_of
from areal_lab.config.record import Record
from areal_lab.config.schema import TrainConfig
from areal_lab.config.suggest import nearest
from areal_lab.data.problems import ProblemSet
from areal_lab.data.sources import load_problems
from areal_lab.data.stop_strings import check_stop_strings
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.addresses import CannotAttach, check_addresses
from areal_lab.engines.launch.backends import (
    adapter_refusal,
    arguments_refusal,
    backend_of,
    transfer_refusal,
    truncation_refusal,
)
from areal_lab.engines.protocol import PauseMode
from areal_lab.engines.weights.records import Transfer
from areal_lab.engines.weights.root import ROOM_FACTOR
from areal_lab.host.home import expanded
from areal_lab.host.owned_folders import nearest_existing
from areal_lab.host.shared_memory import SHARED_MEMORY
from areal_lab.models.folder import ModelFacts, read_model_facts
from areal_lab.models.locate import (
    PACKAGED_MODELS,
    cache_folder,
    is_here,
    known_models,
    resolve_model_path,
)
from areal_lab.preflight.allocation import engine_plan
from areal_lab.preflight.division import check_division
from areal_lab.preflight.functions import (
    check_functions,
    check_objective,
    check_workflow_model,
)
from areal_lab.preflight.hosts import check_hosts
from areal_lab.preflight.limits import (
    limits_of,
    lora_of,
    schedule_of,
    usable_context,
    version_bytes,
)
from areal_lab.preflight.memory import estimate
from areal_lab.preflight.placement import (
    check_placement,
    machine_of,
    place_engines,
    place_trainer,
)
from areal_lab.preflight.scaling import check_scaling
from areal_lab.preflight.trainer import asks_for_values, models_of
from areal_lab.preflight.vision import check_images, check_vision_model
from areal_lab.sinks.start import check_sinks

_LOG_BYTES = 64 << 20  # events, metrics, trajectories, pictures: a few MB per day
_CONVERSION_BYTES = 1 << 30  # the largest packaged model in the cache, with a margin
_MASTER_BYTES = 4  # per parameter of a checkpoint's model: float32
_STATE_BYTES = 12  # per parameter of the trainer's state in it: master weight and two moments
_SPECIAL_TOKENS = 8  # upper bound of those that a tokenizer adds to a prompt


class DiskUsage(Protocol):
    """Free bytes on the device of a path, as in `shutil.disk_usage`."""

    def __call__(self, path: Path) -> Any:
        """An object with `free`."""


def check(
    config: TrainConfig,
    problems: ProblemSet | None = None,
    *,
    disk_usage: DiskUsage = shutil.disk_usage,
) -> ProblemSet:
    """Refuse a run that cannot work, and return its problems.

    Args:
        problems: replace `config.dataset`.
        disk_usage: tests replace it.

    Raises:
        ConfigError: with all problems; checks that need the model come last.
    """
    check_settings(config)  # refuses names and keywords, which `check_functions` then calls
    found = list(check_functions(config))
    try:
        problems = check_problems(config, problems)
    except ConfigError as error:
        found += error.problems
    try:
        folder = check_model(config, disk_usage)
        facts = read_model_facts(folder)
    except ValueError as error:
        raise ConfigError(*found, *problems_of(error, "actor.path")) from error
    others = list(check_other_models(config))
    found += others
    if not others:
        found += check_division(config)
    found += check_workflow_model(config, folder)
    found += check_vision_model(config, folder)
    version = version_bytes(config, folder, facts.parameters)
    found += check_space(config, facts, version, disk_usage)
    if problems is not None:
        asked = (*problems.train, *problems.held_out)
        found += check_tokens(config, [one.prompt for one in asked], folder, facts)
        found += check_images(config, asked, folder, facts.context_tokens)
    _refuse(found)
    assert problems is not None, "refused above"
    return problems


def check_settings(config: TrainConfig) -> None:
    """Make the checks that need neither dataset, functions nor model, as in `doctor --config`.

    Fast, except that an address that does not respond takes 5 s.

    Raises:
        ConfigError: with all problems.
    """
    found = [
        *check_limits(config),
        *check_batches(config),
        *check_objective(config),
        *check_evaluation(config),
        *check_sinks(config),
    ]
    engines = list(check_engines(config))
    found += engines
    if not engines:
        for one in (
            check_transfer,
            check_sampling,
            check_arguments,
            check_servers,
            check_ports,
            check_hosts,
            check_scaling,
        ):
            found += one(config)
    _refuse([*found, *check_run_folder(config)])


def _refuse(found: list[Problem]) -> None:
    if found:
        raise ConfigError(*found)


def notes(config: TrainConfig) -> list[str]:
    """Warn about valid settings that may not do what the user expects; call it after `check`."""
    schedule, eta = schedule_of(config), config.rollout.max_head_offpolicyness
    lines = []
    if schedule.eta != eta:
        if eta != TrainConfig().rollout.max_head_offpolicyness:
            lines.append(f"eta={eta:g} has no effect: {schedule.name} is eta={schedule.eta:g}")
    elif 0 < eta < math.inf and eta != int(eta):
        lines.append(
            f"eta={eta:g} is in versions: generation runs ahead by at most {eta:g} batches; "
            "AReaL's eta is an integer"
        )
    if not config.actor.use_lora and (unused := _changed_lora_settings(config)):
        lines.append(
            f"{', '.join(unused)} has no effect without actor.use_lora=true: "
            "the whole model is trained"
        )
    if config.actor.loss and (unused := _changed(config, "eps_clip", "behav_imp_weight_cap")):
        lines.append(
            f"{', '.join(unused)} has no effect with actor.loss, which has keywords of its own "
            "(clip_epsilon, correct)"
        )
    if config.actor.advantage and (unused := _changed(config, "adv_norm_std")):
        lines.append(f"{', '.join(unused)} has no effect with actor.advantage")
    lines += _unused_models(config)
    sampling = config.rollout.dynamic_sampling
    if not sampling.enabled and (unused := _changed_fields(sampling)):
        lines.append(
            f"rollout.dynamic_sampling.{', '.join(unused)} has no effect without "
            "rollout.dynamic_sampling.enabled=true"
        )
    lines += _unused_gpus(config)
    lines += _turn_notes(config)
    lines += _workflow_notes(config)
    lines += _evaluation_notes(config)
    if config.reward.sandbox == "unsafe":
        lines.append(
            "reward.sandbox=unsafe contains nothing: model code that the reward runs has your "
            "rights, files and network"
        )
    if _is_biased_in_place(config):
        lines.append(
            "rollout.pause_mode=in_place keeps the KV cache of the old weights: interrupted "
            "responses continue under a mixture of versions, which is no version's policy; the "
            "error is measured in docs/engines.md, 'What an interruption does'"
        )
    return lines


def _turn_notes(config: TrainConfig) -> list[str]:
    """What shared devices do to settings."""
    if config.rollout.schedule == "partial_rollout" and engine_plan(config).shared:
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


def _evaluation_notes(config: TrainConfig) -> list[str]:
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
    if engine_plan(config).shared:
        lines.append(
            "engines lose their weights in the trainer's turns, so that evaluations during "
            "training continue under newer ones, and their scores are of several versions"
        )
    elif (len(config.rollout.addresses) or engine_plan(config).servers) == 1:
        lines.append(
            "with one engine, weight updates interrupt evaluations during training, so that their "
            "scores are of several versions; with two, one keeps the evaluated weights "
            "(docs/train.md)"
        )
    return lines


def memory_notes(config: TrainConfig, problems: ProblemSet) -> list[str]:
    """Warn of a trainer on a CPU that may not fit into memory; call it after `check`."""
    machine = machine_of(config)
    if place_trainer(config, machine).device != "cpu":
        return []
    folder = resolve_model_path(config.actor.path)
    note = None
    # If full micro-batches fit, no prompt needs to be measured, which takes a tokenizer.
    for bounded_by in (None, problems):
        estimated = estimate(config, folder, bounded_by)
        note = None if estimated is None else estimated.note(machine.memory_bytes)
        if note is None:
            break
    return [] if note is None else [note]


def _unused_models(config: TrainConfig) -> list[str]:
    """Settings of a reference, a critic or a teacher that the run does not have."""
    lines = []
    if not config.teacher.path and (unused := _changed_fields(config.teacher)):
        lines.append(f"teacher.{', teacher.'.join(unused)} has no effect without teacher.path")
    if not config.actor.kl_loss_coef and (unused := _changed(config, "kl_estimator")):
        lines.append(f"{', '.join(unused)} has no effect without actor.kl_loss_coef")
    if not config.actor.kl_ctl:
        names = ("kl_ctl_estimator", "kl_ctl_target", "kl_ctl_horizon")
        if unused := _changed(config, *names):
            lines.append(f"{', '.join(unused)} has no effect without actor.kl_ctl")
        if not config.actor.kl_loss_coef and (unused := _changed_fields(config.ref)):
            named = ", ".join(f"ref.{name}" for name in unused)
            lines.append(f"{named} has no effect without actor.kl_loss_coef or actor.kl_ctl")
    return lines + _unused_critic(config)


def _unused_critic(config: TrainConfig) -> list[str]:
    changed = _changed_fields(config.critic)
    if not asks_for_values(config.actor):
        if not changed:
            return []
        return [
            f"critic.{', critic.'.join(changed)} has no effect without advantages that are made "
            "from values: actor.advantage=gae"
        ]
    if not config.critic.share_body:
        without = "critic.loss_coef has no effect without critic.share_body"
        return [without] if "loss_coef" in changed else []
    ignored = [name for name in _changed_fields(config.critic.optimizer) if name != "lr"]
    if not ignored:
        return []
    names = ", ".join(f"critic.optimizer.{name}" for name in ignored)
    return [f"{names} has no effect with critic.share_body: actor.optimizer is for both"]


def _unused_gpus(config: TrainConfig) -> Iterator[str]:
    """Say what computes on the CPU although a GPU is visible, unless it was asked for."""
    machine = machine_of(config)
    if not machine.gpus:
        return
    try:
        trainer = place_trainer(config, machine)
        engines = engine_plan(config).backend
    except (ConfigError, KeyError):  # `check` reports it
        return
    if trainer.device == "cpu" and config.actor.device != "cpu":
        why = (
            f"the engines leave too few for {trainer.ranks} trainer process(es); take fewer "
            "engines, or rollout.device=cpu"
            if machine.torch_has_cuda
            else "the installed torch was built without CUDA"
        )
        yield f"a GPU is visible, but the trainer computes on the CPU: {why}"
    if config.rollout.addresses or config.rollout.device == "cpu":
        return
    if place_engines(config, machine).device == "cpu":
        why = f"its CPU build is installed (areal-lab engine install {engines} --build gpu)"
        if not backend_of(engines).own_environment:
            why = (
                f"there are too few for {engine_plan(config).servers} engine(s)"
                if machine.torch_has_cuda
                else "the installed torch was built without CUDA"
            )
        yield f"a GPU is visible, but the engine {engines} computes on the CPU: {why}"


def _changed_lora_settings(config: TrainConfig) -> list[str]:
    return _changed(config, "lora_rank", "lora_alpha", "target_modules")


def _changed(config: TrainConfig, *names: str) -> list[str]:
    """Those of these settings of the actor that differ from their defaults."""
    changed = _changed_fields(config.actor)
    return [f"actor.{name}" for name in names if name in changed]


def _changed_fields(record: Record) -> list[str]:
    """Names of the settings of a record that differ from their defaults."""
    default = type(record)().model_dump()
    return [name for name, value in record.model_dump().items() if value != default[name]]


def check_batches(config: TrainConfig) -> Iterator[Problem]:
    """Check that a batch can be split into minibatches of whole groups."""
    minibatches, groups = config.actor.ppo_n_minibatches, config.dataset.batch_size
    if minibatches > groups:
        yield _wrong(
            "actor.ppo_n_minibatches",
            f"actor.ppo_n_minibatches is {minibatches}, but a batch has only {groups} groups "
            "(dataset.batch_size), which are not split; lower it",
        )


def check_evaluation(config: TrainConfig) -> Iterator[Problem]:
    """Check that responses to held-out problems differ where several are asked for."""
    evaluation = config.evaluation
    samples = evaluation.samples_per_problem
    if evaluation.temperature == 0 and samples > 1:
        yield _wrong(
            "evaluation.samples_per_problem",
            f"evaluation.samples_per_problem is {samples}, but responses at "
            "evaluation.temperature=0 are all equal; set it to 1, or raise the temperature",
        )
    if wrong := [k for k in evaluation.pass_at if not 1 <= k <= samples]:
        yield _wrong(
            "evaluation.pass_at",
            f"evaluation.pass_at has {wrong[0]}, but each k must be from 1 to "
            f"evaluation.samples_per_problem={samples}",
        )
    if config.eval_every_steps and not evaluation.max_problems:
        yield _wrong(
            "eval_every_steps",
            f"eval_every_steps is {config.eval_every_steps}, but evaluation.max_problems is 0, "
            "which switches evaluation off; set one of them",
        )


def check_limits(config: TrainConfig) -> Iterator[Problem]:
    """Check that the coordinator would not deadlock."""
    try:
        limits_of(config)
    except ValueError as error:
        yield _wrong("rollout", f"rollout.{error}")


def check_engines(config: TrainConfig) -> Iterator[Problem]:
    """Check that the engines are installed and their hardware is available."""
    try:
        check_placement(config, machine_of(config))
    except ValueError as error:
        yield from problems_of(error, "rollout.backend", named=True)


def check_transfer(config: TrainConfig) -> Iterator[Problem]:
    """Check that the engines support the transfer; running servers are checked when attached."""
    rollout = config.rollout
    backend = None if rollout.addresses else backend_of(engine_plan(config).backend)
    refusal = None if backend is None else transfer_refusal(backend, rollout.transfer)
    if refusal is None and Transfer(rollout.transfer) is Transfer.ADAPTER:
        refusal = adapter_refusal(
            backend,
            pause_mode=rollout.pause_mode,
            use_lora=config.actor.use_lora,
            lora=lora_of(config),
        )
    if refusal is not None:
        yield _wrong("rollout.transfer", refusal)
    elif backend is not None and Transfer(rollout.transfer) is Transfer.DISTRIBUTED:
        machine = machine_of(config)
        on_gpu = place_trainer(config, machine).device == "cuda"
        if on_gpu and place_engines(config, machine).device == "cpu":
            yield _wrong(
                "rollout.transfer",
                f"rollout.transfer is 'distributed', but the trainer computes on a GPU and "
                f"{backend.name} on the CPU, which cannot join one process group (NCCL); set "
                "rollout.transfer=folder, or actor.device=cpu",
            )


def check_sampling(config: TrainConfig) -> Iterator[Problem]:
    """Check that engines and trainer compute log-probs of the same distribution."""
    backend = backend_of(engine_plan(config).backend)
    sampling = config.gconfig
    refusal = truncation_refusal(backend, top_p=sampling.top_p, top_k=sampling.top_k)
    if refusal is not None:
        yield _wrong("gconfig", refusal)


def check_arguments(config: TrainConfig) -> Iterator[Problem]:
    """Check that no extra argument of the engines gives away or bypasses their keys."""
    backend = backend_of(engine_plan(config).backend)
    if (refusal := arguments_refusal(backend, config.rollout.engine_args)) is not None:
        yield _wrong("rollout.engine_args", refusal)


def check_servers(config: TrainConfig) -> Iterator[Problem]:
    """Check that servers respond at the given addresses."""
    try:
        check_addresses(config.rollout.addresses)
    except CannotAttach as error:
        yield _wrong("rollout.addresses", str(error), Kind.MACHINE)


def check_ports(config: TrainConfig) -> Iterator[Problem]:
    """Check that the engines' ports are free."""
    first = config.rollout.port
    if first == 0 or config.rollout.addresses:
        return
    fix = "choose another rollout.port, or rollout.port=0 for a free one"
    end = first + engine_plan(config).servers
    if end > 65536:
        text = f"rollout.port is {first}, but engine ports end at 65535; {fix}"
        yield _wrong("rollout.port", text)
        return
    for port in range(first, end):
        with socket.socket() as probe:
            # As the server does: a port whose last connections are just closing is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                text = f"rollout.port: port {port} cannot be used ({reason}); {fix}"
                yield _wrong("rollout.port", text, Kind.MACHINE)


def check_run_folder(config: RunConfig) -> Iterator[Problem]:
    """Check that the run folder can be created and its name is valid."""
    name = config.experiment_name
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        yield _wrong(
            "experiment_name",
            f"experiment_name is {name!r}, but must be a folder name: not empty, without '/'",
        )
    try:
        parent = nearest_existing(expanded(config.run_dir, "run_dir"))
    except ValueError as error:
        yield _wrong("run_dir", str(error))
        return
    if not parent.is_dir():
        yield _wrong("run_dir", f"run_dir is {config.run_dir}, but {parent} is not a folder")
    elif not os.access(parent, os.W_OK | os.X_OK):
        text = f"run_dir is {config.run_dir}, but {parent} is not writable; choose another run_dir"
        yield _wrong("run_dir", text, Kind.MACHINE)


def check_problems(config: TrainConfig, problems: ProblemSet | None = None) -> ProblemSet:
    """Check that the problems can be read and suffice for a batch."""
    if problems is None:
        try:
            problems = load_problems(config.dataset, seed=config.seed)
        except ValueError as error:
            raise ConfigError(*problems_of(error, "dataset")) from error
    if config.dataset.batch_size > len(problems.train):
        text = (
            f"dataset.batch_size is {config.dataset.batch_size}, but there are "
            f"{len(problems.train)} problems to train on (and {len(problems.held_out)} held out); "
            f"lower it to at most {len(problems.train)}, or lower dataset.eval_size"
        )
        raise ConfigError(_wrong("dataset.batch_size", text))
    return problems


def check_model(config: RunConfig, disk_usage: DiskUsage = shutil.disk_usage) -> Path:
    """Check that the model exists, convert it if it is a packaged one, and return its folder."""
    name = config.actor.path
    try:
        cache = cache_folder()
    except ValueError as error:
        raise ConfigError(_wrong("AREAL_LAB_CACHE", str(error))) from error
    if name in PACKAGED_MODELS and not is_here(name):
        fix = "free some space, or set AREAL_LAB_CACHE to another folder"
        needed, what = _CONVERSION_BYTES, "the converted model"
        _refuse([*_room("AREAL_LAB_CACHE", cache, needed, what, fix=fix, disk_usage=disk_usage)])
    try:
        return resolve_model_path(name)
    except ValueError as error:
        reason = " ".join(str(error).split())
        hint = "" if name in PACKAGED_MODELS else nearest(name, known_models())
        raise ConfigError(_wrong("actor.path", f"actor.path: {reason}{hint}")) from error


def check_other_models(config: TrainConfig) -> Iterator[Problem]:
    """Check that the other models are there that the run has from elsewhere."""
    for setting, path in models_of(config):
        if setting != "actor.path":
            yield from _check_model(setting, path)
    critic = config.critic
    if asks_for_values(config.actor) and critic.share_body and critic.path:
        yield _wrong(
            "critic.path",
            f"critic.path is {critic.path}, but critic.share_body reads the values from the "
            "policy's own body; remove one of them",
        )


def _check_model(setting: str, path: str) -> Iterator[Problem]:
    if not path:
        return
    try:
        resolve_model_path(path)
    except ValueError as error:
        reason = " ".join(str(error).split())
        yield _wrong(setting, f"{setting}: {reason}{nearest(path, known_models())}")


def check_tokens(
    config: TrainConfig, prompts: Sequence[str], folder: Path, facts: ModelFacts
) -> Iterator[Problem]:
    """Check that every prompt and response fits the context, and the stop strings."""
    try:
        codec = TextCodec.load(folder)
        check_stop_strings(codec.stops(config.gconfig.stop).strings)
    except ValueError as error:
        yield _wrong("gconfig.stop", f"gconfig.stop: {error}")
        return
    if facts.context_tokens is None:
        return
    usable = usable_context(config, facts.context_tokens)
    if config.gconfig.max_tokens > usable:
        reserved = facts.context_tokens - usable
        less = f" less {reserved}, which the engine reserves" if reserved else ""
        yield _wrong(
            "gconfig.max_tokens",
            f"gconfig.max_tokens is {config.gconfig.max_tokens}, but the model's context is "
            f"{facts.context_tokens} tokens{less}; lower it, or set it to 0 to take all of that",
        )
        return
    context = config.gconfig.max_tokens or usable
    room = context - config.gconfig.max_new_tokens
    if room < 1:
        yield _wrong(
            "gconfig.max_new_tokens",
            f"gconfig.max_new_tokens is {config.gconfig.max_new_tokens}, but the model's context "
            f"is {context} tokens, prompt included; lower it",
        )
        return
    # A token has at least one byte, so prompts that are short in bytes need no tokenization.
    doubtful = [p for p in prompts if len(p.encode()) + _SPECIAL_TOKENS > room]
    lengths = [len(tokens) for tokens in codec.encode_all(doubtful)]
    if lengths and max(lengths) > room:
        worst = doubtful[lengths.index(max(lengths))]
        yield _wrong(
            "gconfig.max_new_tokens",
            f"a prompt has {max(lengths)} tokens ({worst[:40]!r}...), but the model's context of "
            f"{context} less gconfig.max_new_tokens={config.gconfig.max_new_tokens} "
            f"leaves {room}; {sum(length > room for length in lengths)} of {len(prompts)} prompts "
            "are too long: shorten them, or lower gconfig.max_new_tokens",
        )


def check_space(
    config: TrainConfig,
    facts: ModelFacts,
    version: int,
    disk_usage: DiskUsage = shutil.disk_usage,
) -> Iterator[Problem]:
    """Check the disk space for checkpoints, and the space to transfer versions (of `version` bytes)
    to the engines."""
    every = config.save_every_steps
    steps = config.total_train_steps
    saved = 1 if every == 0 else math.ceil(steps / every)
    keep = config.checkpoint.keep
    # A new checkpoint is written before an old one is removed; the best one is kept, too, and with
    # evaluations during training one that is being measured, and the best by exact scores.
    more = 4 if config.eval_every_steps else 2
    checkpoints = min(saved, keep + more) if keep else saved
    states = min(saved, RESUMABLE + 1) * config.checkpoint.resumable
    state_bytes = 0 if config.actor.use_lora else _STATE_BYTES  # of adapters alone: little
    needed = facts.parameters * (checkpoints * _MASTER_BYTES + states * state_bytes) + _LOG_BYTES
    transfer = int(ROOM_FACTOR * version)
    what = f"{checkpoints} checkpoint{'s' if checkpoints > 1 else ''}"
    if not SHARED_MEMORY.is_dir() or disk_usage(SHARED_MEMORY).free < transfer:
        needed += transfer
        what += f" and the weights for the engines (no room in {SHARED_MEMORY})"
    fix = "free some space, or set run_dir" + (
        ", save_every_steps or checkpoint.keep" if every > 0 else " or checkpoint.resumable"
    )
    folder = Path(config.run_dir)
    yield from _room("run_dir", folder, needed, what, fix=fix, disk_usage=disk_usage)


def _wrong(setting: str, message: str, kind: Kind = Kind.SETTINGS) -> Problem:
    return Problem(kind, setting, message)


def _room(
    setting: str, folder: Path, needed_bytes: int, what: str, *, fix: str, disk_usage: DiskUsage
) -> Iterator[Problem]:
    free = disk_usage(nearest_existing(folder.expanduser())).free
    if free < needed_bytes:
        text = (
            f"no space on the device of {folder}: {what} need {needed_bytes / 2**30:.2f} GiB, but "
            f"{free / 2**30:.2f} GiB are free; {fix}"
        )
        yield _wrong(setting, text, Kind.MACHINE)


def _is_biased_in_place(config: TrainConfig) -> bool:
    """Whether interrupted responses of this run continue with the KV cache of old weights."""
    in_place = PauseMode(config.rollout.pause_mode) is PauseMode.IN_PLACE
    if not in_place or not schedule_of(config).interrupts:
        return False
    try:
        return backend_of(engine_plan(config).backend).biased_in_place
    except ValueError:  # no engine has this name; `check` reports it
        return False
