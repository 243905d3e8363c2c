"""What can be found wrong with a run before any of its processes starts.

Each check raises `ConfigError` with one line: the value, the bound and the mend. Cheap checks come
first; the model comes last, since a packaged one is converted when it is first asked for.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

from areal_lab.config.functions import load_function
from areal_lab.config.load import nearest
from areal_lab.config.schema import TrainConfig
from areal_lab.data.problems import ProblemSet
from areal_lab.data.sources import load_problems
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.addresses import CannotAttach, check_addresses
from areal_lab.engines.launch.backends import (
    adapter_refusal,
    backend_of,
    transfer_refusal,
    truncation_refusal,
)
from areal_lab.engines.protocol import PauseMode
from areal_lab.engines.weights.records import Transfer
from areal_lab.engines.weights.root import ROOM_FACTOR
from areal_lab.host.gpus import visible_gpus
from areal_lab.host.home import expanded
from areal_lab.host.owned_folders import nearest_existing
from areal_lab.host.shared_memory import SHARED_MEMORY
from areal_lab.models.folder import ModelFacts, read_model_facts
from areal_lab.models.locate import (
    PACKAGED_MODELS,
    cache_folder,
    resolve_model_path,
)
from areal_lab.preflight.allocation import engine_plan
from areal_lab.preflight.limits import limits_of, lora_of, schedule_of, version_bytes
from areal_lab.preflight.placement import check_placement, this_machine
from areal_lab.preflight.values import check_choices, check_numbers

_IMPORT_TIMEOUT_S = 120.0
_LOG_BYTES = 64 << 20  # events, metrics, trajectories, pictures: some MB for a day's run
_CONVERSION_BYTES = 1 << 30  # what the largest packaged model takes in the cache, with a margin
_MASTER_BYTES = 4  # per parameter of a checkpoint: float32
_SPECIAL_TOKENS = 8  # that a tokenizer may put around a prompt, generously


class ConfigError(ValueError):
    """A setting that cannot work; one line with the value, the bound and the mend."""


class DiskUsage(Protocol):
    """Free bytes where a path lies, as `shutil.disk_usage` tells them."""

    def __call__(self, path: Path) -> Any:
        """An object with `free`."""


def check(
    config: TrainConfig,
    problems: ProblemSet | None = None,
    *,
    disk_usage: DiskUsage = shutil.disk_usage,
) -> None:
    """Refuse a run that cannot work.

    Args:
        problems: what is trained on instead of `config.dataset`.
        disk_usage: replaced by tests.

    Raises:
        ConfigError: for the first thing found wrong.
    """
    check_settings(config)
    problems = check_problems(config, problems)
    check_functions(config)
    folder = check_model(config, disk_usage)
    facts = _facts(folder)
    check_tokens(config, problems, folder, facts)
    check_space(config, facts, version_bytes(config, folder, facts.parameters), disk_usage)


def check_settings(config: TrainConfig) -> None:
    """Refuse what shows without problems, functions and model; `doctor --config` asks the same.

    Takes a moment, or 5 s where an address that leads nowhere is silent.

    Raises:
        ConfigError: for the first thing found wrong.
    """
    check_values(config)
    check_staleness(config)
    check_batches(config)
    check_limits(config)
    check_engines(config)
    check_transfer(config)
    check_sampling(config)
    check_servers(config)
    check_ports(config)
    check_run_folder(config)


def notes(config: TrainConfig) -> list[str]:
    """What is legal, but may not mean what the user thinks; call it after `check`."""
    schedule, eta = schedule_of(config), config.rollout.max_head_offpolicyness
    told = []
    if schedule.eta != eta:
        if eta != TrainConfig().rollout.max_head_offpolicyness:
            told.append(f"eta={eta:g} has no effect: {schedule.name} is eta={schedule.eta:g}")
    elif 0 < eta < math.inf and eta != int(eta):
        told.append(
            f"eta={eta:g} counts versions, so this is at most {eta:g} of a batch ahead; "
            "AReaL's eta is an integer"
        )
    if not config.actor.use_lora and (unused := _changed_lora_settings(config)):
        told.append(
            f"{', '.join(unused)} has no effect without actor.use_lora=true: "
            "the whole model is trained"
        )
    if visible_gpus():
        told.append(
            "a GPU is visible, but the trainer and the embedded engine compute on the CPU: only "
            "SGLang and vLLM use GPUs"
        )
    if _is_biased_in_place(config):
        told.append(
            "rollout.pause_mode=in_place keeps the cache of the old weights: what an interrupted "
            "answer goes on with is drawn from a mixture of versions, which is no version's "
            "policy; how far off is measured in docs/engines.md, 'What an interruption does'"
        )
    return told


def _changed_lora_settings(config: TrainConfig) -> list[str]:
    default = TrainConfig().actor
    names = ("lora_rank", "lora_alpha", "target_modules")
    return [f"actor.{n}" for n in names if getattr(config.actor, n) != getattr(default, n)]


def check_values(config: TrainConfig) -> None:
    """Names are known ones, and numbers lie within their bounds."""
    try:
        check_choices(config)
        check_numbers(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_staleness(config: TrainConfig) -> None:
    """Eta is a bound."""
    eta = config.rollout.max_head_offpolicyness
    if math.isnan(eta) or eta < 0:
        raise ConfigError(
            f"rollout.max_head_offpolicyness (eta) is {eta:g}, but must be >= 0 versions; "
            "eta=0 is synchronous, eta=inf has no bound"
        )


def check_batches(config: TrainConfig) -> None:
    """Groups can be compared, and a batch can be cut into its minibatches."""
    samples = config.gconfig.n_samples
    if samples < 2:
        raise ConfigError(
            f"gconfig.n_samples is {samples}, but advantages normalized within a group need at "
            "least 2 (a single sample's advantage is always 0); set gconfig.n_samples=8"
        )
    sequences = config.dataset.batch_size * samples
    if config.actor.ppo_n_minibatches > sequences:
        raise ConfigError(
            f"actor.ppo_n_minibatches is {config.actor.ppo_n_minibatches}, but a batch has only "
            f"{sequences} samples (dataset.batch_size * gconfig.n_samples); lower it"
        )


def check_limits(config: TrainConfig) -> None:
    """The coordinator would not come to a standstill."""
    try:
        limits_of(config)
    except ValueError as error:
        raise ConfigError(f"rollout.{error}") from error


def check_engines(config: TrainConfig) -> None:
    """The engines are installed, and what they are to run on is there."""
    try:
        check_placement(config, this_machine())
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_transfer(config: TrainConfig) -> None:
    """The engines take weights the way they are to be sent; servers of others are asked later."""
    rollout = config.rollout
    backend = None if rollout.addresses else backend_of(engine_plan(config).backend)
    refusal = None if backend is None else transfer_refusal(backend, rollout.transfer)
    if refusal is None and rollout.transfer == Transfer.ADAPTER:
        refusal = adapter_refusal(
            backend,
            pause_mode=rollout.pause_mode,
            use_lora=config.actor.use_lora,
            lora=lora_of(config),
        )
    if refusal is not None:
        raise ConfigError(refusal)


def check_sampling(config: TrainConfig) -> None:
    """The engines' log-probs are of the distribution that the trainer computes, too."""
    backend = backend_of(engine_plan(config).backend)
    drawn = config.gconfig
    if (refusal := truncation_refusal(backend, top_p=drawn.top_p, top_k=drawn.top_k)) is not None:
        raise ConfigError(refusal)


def check_servers(config: TrainConfig) -> None:
    """Something answers at the addresses of servers that somebody else runs."""
    try:
        check_addresses(config.rollout.addresses)
    except CannotAttach as error:
        raise ConfigError(str(error)) from error


def check_ports(config: TrainConfig) -> None:
    """The engines' ports are free."""
    first = config.rollout.port
    if first == 0 or config.rollout.addresses:
        return
    mend = "choose another rollout.port, or rollout.port=0 for a free one"
    end = first + engine_plan(config).servers
    if end > 65536:
        raise ConfigError(f"rollout.port is {first}, but engine ports end at 65535; {mend}")
    for port in range(first, end):
        with socket.socket() as probe:
            # As the server does: a port whose last connections are just ending is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise ConfigError(
                    f"rollout.port: port {port} cannot be used ({reason}); {mend}"
                ) from error


def check_run_folder(config: TrainConfig) -> None:
    """The run folder can be made, and its name is a name."""
    name = config.experiment_name
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise ConfigError(
            f"experiment_name is {name!r}, but must be a folder name: not empty, without '/'"
        )
    try:
        place = nearest_existing(expanded(config.run_dir, "run_dir"))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not place.is_dir():
        raise ConfigError(f"run_dir is {config.run_dir}, but {place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"run_dir is {config.run_dir}, but {place} is not writable; set run_dir")


def check_problems(config: TrainConfig, problems: ProblemSet | None = None) -> ProblemSet:
    """The problems can be read, and there are enough for a batch."""
    if problems is None:
        try:
            problems = load_problems(config.dataset, seed=config.seed)
        except ValueError as error:
            raise ConfigError(f"dataset: {error}") from error
    if config.dataset.batch_size > len(problems.train):
        raise ConfigError(
            f"dataset.batch_size is {config.dataset.batch_size}, but there are "
            f"{len(problems.train)} problems to train on (and {len(problems.held_out)} held out); "
            f"lower it to at most {len(problems.train)}, or lower dataset.eval_size"
        )
    return problems


def check_functions(config: TrainConfig) -> None:
    """The reward function, and own loss and advantages where they are named, can be used."""
    _check_function("reward.fn", config.reward.fn)
    if config.actor.loss_fn:
        _check_function("actor.loss_fn", config.actor.loss_fn, "areal_lab.training.loss")
    if config.actor.advantage_fn:
        _check_function("actor.advantage_fn", config.actor.advantage_fn)


def check_model(config: TrainConfig, disk_usage: DiskUsage = shutil.disk_usage) -> Path:
    """The model is there, converted if it is a packaged one; returns its folder."""
    name = config.actor.path
    try:
        cache = cache_folder()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if name in PACKAGED_MODELS and not any((cache / "models").glob(f"{name}-*")):
        _require(
            cache, _CONVERSION_BYTES, "the converted model",
            "free some space, or set the variable AREAL_LAB_CACHE to another place", disk_usage,
        )  # fmt: skip
    try:
        return resolve_model_path(name)
    except ValueError as error:
        reason = " ".join(str(error).split())
        hint = "" if name in PACKAGED_MODELS else nearest(name, list(PACKAGED_MODELS))
        raise ConfigError(f"actor.path: {reason}{hint}") from error


def check_tokens(
    config: TrainConfig, problems: ProblemSet, folder: Path, facts: ModelFacts
) -> None:
    """Stop strings are tokens, and every prompt with its answer fits the model's context."""
    try:
        codec = TextCodec.load(folder)
        codec.stop_token_ids(config.gconfig.stop)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if facts.context_tokens is None:
        return
    room = facts.context_tokens - config.gconfig.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"gconfig.max_new_tokens is {config.gconfig.max_new_tokens}, but the model's context "
            f"is {facts.context_tokens} tokens, prompt included; lower it"
        )
    # A token spells at least one byte, so what is short in bytes need not be tokenized.
    prompts = [problem.prompt for problem in (*problems.train, *problems.held_out)]
    doubtful = [p for p in prompts if len(p.encode()) + _SPECIAL_TOKENS > room]
    lengths = [len(tokens) for tokens in codec.encode_all(doubtful)]
    if lengths and max(lengths) > room:
        worst = doubtful[lengths.index(max(lengths))]
        raise ConfigError(
            f"a prompt has {max(lengths)} tokens ({worst[:40]!r}...), but the model's context of "
            f"{facts.context_tokens} less gconfig.max_new_tokens={config.gconfig.max_new_tokens} "
            f"leaves {room}; {sum(length > room for length in lengths)} of {len(prompts)} prompts "
            "are too long: shorten them, or lower gconfig.max_new_tokens"
        )


def check_space(
    config: TrainConfig,
    facts: ModelFacts,
    version: int,
    disk_usage: DiskUsage = shutil.disk_usage,
) -> None:
    """There is room for the checkpoints, and for versions (of so many bytes) on their way to the
    engines."""
    every = config.save_every_steps
    steps = config.total_train_steps
    checkpoints = 1 if every == 0 else math.ceil(steps / every)
    needed = checkpoints * facts.parameters * _MASTER_BYTES + _LOG_BYTES
    transfer = int(ROOM_FACTOR * version)
    what = f"{checkpoints} checkpoint{'s' if checkpoints > 1 else ''}"
    if not SHARED_MEMORY.is_dir() or disk_usage(SHARED_MEMORY).free < transfer:
        needed += transfer
        what += f" and the weights for the engines (no room in {SHARED_MEMORY})"
    mend = "free some space, or set run_dir"
    _require(Path(config.run_dir), needed, what, mend + (" or save_every_steps" * (every > 0)),
             disk_usage)  # fmt: skip


def _require(place: Path, needed_bytes: int, what: str, mend: str, disk_usage: DiskUsage) -> None:
    free = disk_usage(nearest_existing(place.expanduser())).free
    if free < needed_bytes:
        raise ConfigError(
            f"no space on the device of {place}: {what} need {needed_bytes / 2**30:.2f} GiB, but "
            f"{free / 2**30:.2f} GiB are free; {mend}"
        )


def _check_function(setting: str, name: str, by: str = "areal_lab.config.functions") -> None:
    if name.startswith("areal_lab.rewards."):  # light, and our own
        try:
            load_function(name)
        except ValueError as error:
            raise ConfigError(f"{setting}: {error}") from error
        return
    # Elsewhere: what it imports may be heavy, and stays out of this process.
    try:
        ended = subprocess.run(
            [sys.executable, "-m", by, name],
            capture_output=True, text=True, check=False, timeout=_IMPORT_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{setting}: importing {name!r} took longer than {_IMPORT_TIMEOUT_S:g} s"
        ) from error
    if ended.returncode != 0:
        lines = (ended.stdout.strip() or ended.stderr.strip() or "no reason given").splitlines()
        raise ConfigError(f"{setting}: {name!r} cannot be used: {lines[-1]}")


def _facts(folder: Path) -> ModelFacts:
    try:
        return read_model_facts(folder)
    except ValueError as error:
        raise ConfigError(f"actor.path: {error}") from error


def _is_biased_in_place(config: TrainConfig) -> bool:
    """Whether answers are interrupted in this run, and go on with what old weights have cached."""
    in_place = config.rollout.pause_mode == PauseMode.IN_PLACE
    if not in_place or not schedule_of(config).interrupts:
        return False
    try:
        return backend_of(engine_plan(config).backend).biased_in_place
    except ValueError:  # no engine has this name; `check` says so
        return False
