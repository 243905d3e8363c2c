"""Check a gateway of its own before any of its processes starts: every problem at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from areal_lab.agents.gateway.server import bind
from areal_lab.agents.hosting.admin_key import check_admin_key_file
from areal_lab.agents.hosting.conversations import Serving
from areal_lab.config.problem import ConfigError, Kind, Problem, problems_of
from areal_lab.config.schema import TrainConfig
from areal_lab.host.owned_folders import nearest_existing
from areal_lab.models.folder import read_model_facts
from areal_lab.pipeline.gateway.session_lines import FILE
from areal_lab.preflight import check as preflight

_CHECKS: Final = (
    preflight.check_sampling,
    preflight.check_arguments,
    preflight.check_servers,
    preflight.check_ports,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPlan:
    """What is served, checked by `prepare_gateway`."""

    config: TrainConfig
    """Of which `actor.path`, `gconfig` and `rollout` count."""
    model: Path
    serving: Serving
    seed: int
    """Of sampling."""
    host: str
    port: int
    admin_key_file: str
    """Empty for a new key."""
    folder: Path
    """For sessions that nothing has exported when the gateway ends, or for all."""
    writes_all: bool
    """Whether each session is written when it ends."""


def prepare_gateway(
    config: TrainConfig,
    serving: Serving,
    *,
    seed: int,
    host: str,
    port: int,
    admin_key_file: str,
    folder: Path,
    writes_all: bool,
    fits_length: bool,
) -> GatewayPlan:
    """Check a gateway.

    Args:
        config: its `actor.path` is a model folder or name, or a run, whose last checkpoint counts.
        serving: how sessions are served.
        seed: of sampling.
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        admin_key_file: file with the key, or to be made; empty is a new one.
        folder: for the file of sessions.
        writes_all: whether each session is written when it ends.
        fits_length: whether a `gconfig.max_new_tokens` that the model's context has no room for is
            lowered.

    Raises:
        ConfigError: one line per problem.
    """
    if (Path(config.actor.path) / "model").is_dir():
        # A run folder, whose link is its last checkpoint; of `best`, RUN/best is given.
        config = config.with_settings({"actor.path": str(Path(config.actor.path, "model"))})
    found = [*_workflow(config), *_fault("host", lambda: bind(port, host).close())]
    found += _fault("admin_key_file", lambda: check_admin_key_file(admin_key_file))
    found += _fault("export", lambda: _check_folder(folder))
    engines = list(preflight.check_engines(config))
    found += engines
    if not engines:
        for one in _CHECKS:
            found += one(config)
    if found:
        raise ConfigError(*found)
    model = preflight.check_model(config)
    try:
        facts = read_model_facts(model)
    except ValueError as error:
        raise ConfigError(*problems_of(error, "actor.path")) from error
    if fits_length and facts.context_tokens is not None:
        most = min(config.gconfig.max_new_tokens, max(1, facts.context_tokens - 1))
        config = config.with_settings({"gconfig.max_new_tokens": most})
    found += preflight.check_tokens(config, (), model, facts)
    found += _fault("actor.path", lambda: serving.check_model(model))
    if found:
        raise ConfigError(*found)
    return GatewayPlan(
        config=config,
        model=model,
        serving=serving,
        seed=seed,
        host=host,
        port=port,
        admin_key_file=admin_key_file,
        folder=folder,
        writes_all=writes_all,
    )


def _workflow(config: TrainConfig) -> list[Problem]:
    """A workflow makes the samples of a run; sessions are made by clients."""
    if not config.rollout.workflow:
        return []
    name = config.rollout.workflow.get("name")
    text = (
        f"rollout.workflow is {name!r}, but a gateway serves the sessions of clients; "
        "set rollout.workflow={}"
    )
    return [Problem(Kind.SETTINGS, "rollout.workflow", text)]


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"export is {folder}, which is a file; name a folder")
    if (folder / FILE).exists():
        raise ValueError(f"export is {folder}, which has {FILE} already; name another folder")
    existing = nearest_existing(folder)
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise ValueError(
            f"export is {folder}, but {existing} is not a writable folder; name another one"
        )


def _fault(setting: str, check: Callable[[], None]) -> tuple[Problem, ...]:
    """The problem that a check raises, if it does."""
    try:
        check()
    except ValueError as error:
        return problems_of(error, setting)
    return ()
