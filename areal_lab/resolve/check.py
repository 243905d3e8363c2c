"""Check the parts of a run: settings, engines, ports, folder, dataset, model, disk space.

Each problem is one line: the value, the bound and the fix. `resolved` says in which order they are
checked.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from areal_lab.config.offline import RunConfig
from areal_lab.config.problem import ConfigError, Kind, Problem, attempt, problems_of, refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.config.sections import RESUMABLE
from areal_lab.config.unknown import nearest
from areal_lab.data.problems import ProblemSet
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
from areal_lab.engines.weights.records import Transfer
from areal_lab.engines.weights.root import ROOM_FACTOR
from areal_lab.host.durable import expanded
from areal_lab.host.owned_folders import nearest_existing
from areal_lab.host.process_groups import SHARED_MEMORY
from areal_lab.models.folder import ModelFacts
from areal_lab.models.locate import (
    PACKAGED_MODELS,
    cache_folder,
    is_converted_first,
    is_here,
    known_models,
    sound_model_path,
)
from areal_lab.resolve.allocation import EnginePlan
from areal_lab.resolve.functions import check_objective
from areal_lab.resolve.hosts import check_hosts, check_scaling
from areal_lab.resolve.learning import cannot_learn
from areal_lab.resolve.limits import limits_of, lora_of, usable_context
from areal_lab.resolve.placement import Placed, place_run
from areal_lab.resolve.problems import run_problems
from areal_lab.resolve.trainer import asks_for_values, models_of
from areal_lab.resolve.unread import TRAIN
from areal_lab.sinks.start import check_sinks

_LOG_BYTES = 64 << 20  # events, metrics, trajectories, pictures: a few MB per day
_CONVERSION_BYTES = 1 << 30  # the largest packaged model in the cache, with a margin
_MASTER_BYTES = 4  # per parameter of a checkpoint's model: float32
_STATE_BYTES = 12  # per parameter of the trainer's state in it: master weight and two moments
_ENCODED = 16
"""Prompts whose tokens are compared with the model's."""
_SPECIAL_TOKENS = 8  # upper bound of those that a tokenizer adds to a prompt


class DiskUsage(Protocol):
    """Free bytes on the device of a path, as in `shutil.disk_usage`."""

    def __call__(self, path: Path) -> Any:
        """An object with `free`."""


def check_settings(config: TrainConfig, *, own_problems: bool = False) -> Placed:
    """Make the checks that need neither dataset, functions nor model, as in `doctor --config`.

    Fast, except that an address that does not respond takes 5 s.

    Args:
        own_problems: whether a program gives the problems, so that nothing reads `dataset`.

    Raises:
        ConfigError: with all problems.
    """
    unread = TRAIN.refusals(config)
    found = [
        *(one for one in unread if not (own_problems and one.setting.startswith("dataset."))),
        *cannot_learn(config),
        *check_limits(config),
        *check_batches(config),
        *check_profile(config),
        *check_objective(config),
        *check_evaluation(config),
        *check_sinks(config),
    ]
    placed = check_engines(
        config,
        found,
        check_transfer,
        check_sampling,
        check_arguments,
        check_servers,
        check_ports,
        check_hosts,
        check_scaling,
    )
    refuse([*found, *check_run_folder(config)])
    assert placed is not None, "refused above"
    return placed


def refuse(found: Sequence[Problem]) -> None:
    """Raise a ConfigError with all problems, if there are any."""
    if found:
        raise ConfigError(*found)


def check_batches(config: TrainConfig) -> Iterator[Problem]:
    """Check that a batch can be split into minibatches of whole groups."""
    minibatches, groups = config.actor.ppo_n_minibatches, config.dataset.batch_size
    if minibatches > groups:
        yield _wrong(
            "actor.ppo_n_minibatches",
            f"actor.ppo_n_minibatches is {minibatches}, but a batch has only {groups} groups "
            "(dataset.batch_size), which are not split; lower it",
        )


def check_profile(config: TrainConfig) -> Iterator[Problem]:
    """Check that the steps to be profiled exist."""
    steps = config.total_train_steps
    if beyond := [step for step in config.actor.profile_steps if step > steps]:
        yield _wrong(
            "actor.profile_steps",
            f"actor.profile_steps has {beyond[0]}, but the run has {steps} steps "
            "(total_train_steps); name steps from 1 to that",
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


def check_engines(
    config: TrainConfig, found: list[Problem], *checks: Callable[[Placed], Iterable[Problem]]
) -> Placed | None:
    """Place the engines and the trainer, and make checks of where they are.

    Args:
        found: problems are added here; None is returned if they cannot be placed.
    """
    placed = attempt(found, lambda: place_run(config), "rollout.backend", named=True)
    if placed is not None:
        for check in checks:
            found += check(placed)
    return placed


def check_transfer(placed: Placed) -> Iterator[Problem]:
    """Check that the engines support the transfer; running servers are checked when attached."""
    config, engines, rollout = placed.config, placed.engines, placed.config.rollout
    backend = None if rollout.addresses else backend_of(engines.backend)
    why = None if backend is None else transfer_refusal(backend, rollout.transfer)
    if why is None and Transfer(rollout.transfer) is Transfer.ADAPTER:
        why = adapter_refusal(
            backend,
            pause_mode=rollout.pause_mode,
            use_lora=config.actor.use_lora,
            lora=lora_of(config),
        )
    shares = engines.together and placed.trainer.ranks == 1
    if why is None and Transfer(rollout.transfer) is Transfer.CUDA_IPC and not shares:
        why = (
            "rollout.transfer is 'cuda_ipc', but only one engine and one trainer process on the "
            "same GPU can open the handles; set rollout.share_gpu=true with one of each, or "
            "rollout.transfer=folder"
        )
    if why is not None:
        yield _wrong("rollout.transfer", why)
    elif (
        backend is not None
        and Transfer(rollout.transfer) is Transfer.DISTRIBUTED
        and (placed.trainer.device, engines.device) == ("cuda", "cpu")
    ):
        yield _wrong(
            "rollout.transfer",
            f"rollout.transfer is 'distributed', but the trainer computes on a GPU and "
            f"{backend.name} on the CPU, which cannot join one process group (NCCL); set "
            "rollout.transfer=folder, or actor.device=cpu",
        )


def check_sampling(placed: Placed) -> Iterator[Problem]:
    """Check that engines and trainer compute log-probs of the same distribution."""
    backend, sampling = backend_of(placed.engines.backend), placed.config.gconfig
    why = truncation_refusal(backend, top_p=sampling.top_p, top_k=sampling.top_k)
    if why is not None:
        yield _wrong("gconfig", why)


def check_arguments(placed: Placed) -> Iterator[Problem]:
    """Check that no extra argument of the engines gives away or bypasses their keys."""
    backend, arguments = backend_of(placed.engines.backend), placed.config.rollout.engine_args
    if (why := arguments_refusal(backend, arguments)) is not None:
        yield _wrong("rollout.engine_args", why)


def check_servers(placed: Placed) -> Iterator[Problem]:
    """Check that servers respond at the given addresses."""
    try:
        check_addresses(placed.config.rollout.addresses)
    except CannotAttach as error:
        yield _wrong("rollout.addresses", str(error), Kind.MACHINE)


def check_ports(placed: Placed) -> Iterator[Problem]:
    """Check that the engines' ports are free."""
    first = placed.config.rollout.port
    if first == 0 or placed.config.rollout.addresses:
        return
    fix = "choose another rollout.port, or rollout.port=0 for a free one"
    end = first + placed.engines.servers
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
    """Check that the run folder can be created."""
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


def check_problems(config: TrainConfig, given: object = None) -> ProblemSet:
    """Check that the problems can be read and suffice for a batch."""
    try:
        problems = run_problems(config, given)
    except ValueError as error:
        setting = "dataset" if given is None else "problems"
        raise ConfigError(*problems_of(error, setting, named=given is not None)) from error
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
    if is_converted_first(name):
        fix = "free some space, or set AREAL_LAB_CACHE to another folder"
        needed, what = _CONVERSION_BYTES, "the converted model"
        refuse([*_room("AREAL_LAB_CACHE", cache, needed, what, fix=fix, disk_usage=disk_usage)])
    try:
        return sound_model_path(name)
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


def check_models_here(config: TrainConfig) -> Iterator[Problem]:
    """Check the models that can be read at once; nothing is converted for it."""
    for setting, path in models_of(config):
        yield from _check_model(setting, path, only_here=True)


def _check_model(setting: str, path: str, *, only_here: bool = False) -> Iterator[Problem]:
    try:
        if path and (is_here(path) or not only_here):
            sound_model_path(path)
    except ValueError as error:
        reason = " ".join(str(error).split())
        yield _wrong(setting, f"{setting}: {reason}{nearest(path, known_models())}")


def check_tokens(
    config: TrainConfig,
    engines: EnginePlan | None,
    prompts: Sequence[str],
    folder: Path,
    facts: ModelFacts,
) -> TextCodec:
    """Load the tokenizer; check that every prompt and response fits the context, and the stop
    strings.

    Args:
        engines: None if they are not known.
        folder: of the model.

    Raises:
        ConfigError: with one problem.
    """
    try:
        codec = TextCodec.load(folder)
        codec.encode_all(prompts[:_ENCODED])
    except ValueError as error:
        raise refusal("actor.path", f"actor.path: {error}") from error
    try:
        check_stop_strings(codec.stops(config.gconfig.stop).strings)
    except ValueError as error:
        raise refusal("gconfig.stop", f"gconfig.stop: {error}") from error
    if facts.context_tokens is None:
        return codec
    usable = usable_context(engines, facts.context_tokens)
    if config.gconfig.max_tokens > usable:
        reserved = facts.context_tokens - usable
        less = f" less {reserved}, which the engine reserves" if reserved else ""
        raise refusal(
            "gconfig.max_tokens",
            f"gconfig.max_tokens is {config.gconfig.max_tokens}, but the model's context is "
            f"{facts.context_tokens} tokens{less}; lower it, or set it to 0 to take all of that",
        )
    context = config.gconfig.max_tokens or usable
    room = context - config.gconfig.max_new_tokens
    if room < 1:
        raise refusal(
            "gconfig.max_new_tokens",
            f"gconfig.max_new_tokens is {config.gconfig.max_new_tokens}, but the model's context "
            f"is {context} tokens, prompt included; lower it",
        )
    # A token has at least one byte, so prompts that are short in bytes need no tokenization.
    doubtful = [p for p in prompts if len(p.encode()) + _SPECIAL_TOKENS > room]
    lengths = [len(tokens) for tokens in codec.encode_all(doubtful)]
    if lengths and max(lengths) > room:
        worst = doubtful[lengths.index(max(lengths))]
        raise refusal(
            "gconfig.max_new_tokens",
            f"a prompt has {max(lengths)} tokens ({worst[:40]!r}...), but the model's context of "
            f"{context} less gconfig.max_new_tokens={config.gconfig.max_new_tokens} "
            f"leaves {room}; {sum(length > room for length in lengths)} of {len(prompts)} prompts "
            "are too long: shorten them, or lower gconfig.max_new_tokens",
        )
    return codec


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
