"""Check the settings of a standalone gateway before any process starts, and report all problems."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from areal_lab.agents.gateway.server import bind
from areal_lab.agents.gateway.sessions import Limits
from areal_lab.agents.hosting.admin_key import check_admin_key_file
from areal_lab.agents.hosting.conversations import Serving
from areal_lab.config.problem import Kind, Problem, attempt
from areal_lab.config.schema import TrainConfig
from areal_lab.config.serving import GatewayConfig
from areal_lab.host.owned_folders import nearest_existing
from areal_lab.pipeline.gateway.session_lines import FILE
from areal_lab.resolve import check as checks
from areal_lab.resolve.resolved import Served, read_model, serve

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPlan:
    """Checked settings of a gateway, made by `prepare_gateway`."""

    served: Served
    """Model and engines; only `actor.path`, `gconfig` and `rollout` of the config are used."""
    options: GatewayConfig
    serving: Serving
    """Rules of sessions, taken from `options`."""
    seed: int
    """Seed of sampling."""
    folder: Path
    """Folder of the file of sessions: those that were not exported, or all of them."""

    @property
    def writes_all(self) -> bool:
        """True if each session is written when it ends."""
        return bool(self.options.export)


def prepare_gateway(
    config: TrainConfig, options: GatewayConfig, *, folder: Path, fits_length: bool
) -> GatewayPlan:
    """Check a gateway.

    Args:
        config: `actor.path` is a model folder or name, or a run, whose last checkpoint is served.
        options: options of the gateway; without a seed it gets a random one.
        folder: folder for the file of sessions, unless `export` names one.
        fits_length: lower `gconfig.max_new_tokens` to fit the model's context, instead of refusing
            it.

    Raises:
        ConfigError: one line per problem.
    """
    folder = Path(options.export or folder)
    serving = _part(Serving, options, limits=_part(Limits, options))
    if (Path(config.actor.path) / "model").is_dir():
        # A run folder: its link `model` is the last checkpoint. RUN/best selects the best one.
        config = config.with_settings({"actor.path": str(Path(config.actor.path, "model"))})
    found = [*_workflow(config), *_fault("host", lambda: bind(options.port, options.host).close())]
    found += _fault("admin_key_file", lambda: check_admin_key_file(options.admin_key_file))
    found += _fault("export", lambda: _check_folder(folder))
    placed = checks.check_engines(
        config,
        found,
        checks.check_sampling,
        checks.check_arguments,
        checks.check_servers,
        checks.check_ports,
    )
    checks.refuse(found)
    assert placed is not None, "refused above"
    model, facts = read_model(config, ())
    if fits_length and facts.context_tokens is not None:
        most = min(config.gconfig.max_new_tokens, max(1, facts.context_tokens - 1))
        placed = replace(placed, config=config.with_settings({"gconfig.max_new_tokens": most}))
    codec = attempt(
        found,
        lambda: checks.check_tokens(placed.config, placed.engines, (), model, facts),
        "actor.path",
    )
    found += _fault("actor.path", lambda: serving.check_model(model))
    checks.refuse(found)
    assert codec is not None, "refused above"
    return GatewayPlan(
        served=serve(placed, model, facts, codec, None),
        options=options,
        serving=serving,
        seed=secrets.randbits(31) if options.seed is None else options.seed,
        folder=folder,
    )


def _part(kind: Callable[..., _T], options: GatewayConfig, **others: Any) -> _T:
    """Make a record from the options that have the names of its fields."""
    known = {name: getattr(options, name) for name in type(options).model_fields}
    named = signature(kind).parameters.keys() & known
    return kind(**{name: known[name] for name in named}, **others)


def _workflow(config: TrainConfig) -> list[Problem]:
    """Refuse a workflow: in a gateway, clients make the sessions."""
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


def _fault(setting: str, check: Callable[[], None]) -> list[Problem]:
    """Return the problem that a check raises, if any."""
    found: list[Problem] = []
    attempt(found, check, setting)
    return found
