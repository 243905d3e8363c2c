"""Workflows by name, or your own by `module:class`, with their keyword arguments.

rollout:
  workflow: {name: tool_use, max_turns: 3}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from areal_lab.agents.environments.play import Play
from areal_lab.agents.multi_turn import MultiTurn
from areal_lab.agents.tool_use import ToolUse
from areal_lab.agents.workflow import Workflow
from areal_lab.config.functions import Form, check_call, load_function
from areal_lab.config.unknown import nearest
from areal_lab.host.isolation import LevelSetting

GAMES: Final = "areal_lab.agents.environments.textarena:Game"
OPENENV: Final = "areal_lab.agents.environments.openenv:OpenEnv"


def _textarena(*, game: str, options: Mapping[str, Any] | None = None, **keywords: Any) -> Workflow:
    return Play(fn=GAMES, kwargs={"game": game, "options": options}, **keywords)


def _openenv(
    *,
    url: str = "",
    command: Sequence[str] = (),
    action: str = "",
    observation: str = "",
    reset: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Workflow:
    def at(url: str) -> Play:
        kwargs = {"url": url, "action": action, "observation": observation, "reset": reset}
        return Play(fn=OPENENV, kwargs=kwargs, **keywords)

    if not command:
        return at(url)
    if url:
        raise ValueError(
            f"openenv has the url {url!r} and a command; give url for a server that runs, or "
            "command for one that the run starts"
        )
    from areal_lab.agents.environments.openenv_server import PlayServed

    return PlayServed(command, at)


def _agent(*, mode: str = "inline", **keywords: Any) -> Workflow:
    from areal_lab.agents.agent import Agent  # its server takes a while to import
    from areal_lab.agents.hosting.online import Online

    if mode == "online":
        _check_keywords("agent with mode online", Online, keywords)
        return Online(**keywords)
    _check_keywords(f"agent with mode {mode}", Agent, keywords)
    if mode == "environment":
        for name in ("fn", "workers", "timeout_s"):
            if name in keywords:
                raise ValueError(
                    f"agent with mode environment has no keyword {name!r}; environment.name, "
                    "environment.workers and environment.timeout_s replace it"
                )
    return Agent(mode=mode, **keywords)  # type: ignore[arg-type]  # which it checks


WORKFLOWS: Final[Mapping[str, Callable[..., Workflow]]] = {
    "agent": _agent,
    "environment": Play,
    "multi_turn": MultiTurn,
    "openenv": _openenv,
    "textarena": _textarena,
    "tool_use": ToolUse,
}


def make_workflow(setting: Mapping[str, Any], *, sandbox: LevelSetting = "auto") -> Workflow | None:
    """Create the workflow of a setting; None if it is empty."""
    if not setting:
        return None
    keywords = dict(setting)
    name = str(keywords.pop("name", ""))
    make = load_function(name) if ":" in name else WORKFLOWS.get(name)
    if make is None:
        known = ", ".join(WORKFLOWS)
        raise ValueError(
            f"name is {name!r}, but must be module:class or one of {known}"
            f"{nearest(name, list(WORKFLOWS))}"
        )
    _check_keywords(name, make, keywords)
    if "sandbox" in inspect.signature(make).parameters:
        keywords = {"sandbox": sandbox, **keywords}
    try:
        made: Workflow = make(**keywords)
    except (TypeError, AttributeError) as error:
        # A keyword is missing, or its value has the wrong type.
        takes = ", ".join(map(str, inspect.signature(make).parameters.values()))
        given = ", ".join(f"{key}={value!r:.40}" for key, value in keywords.items())
        raise ValueError(f"{name} cannot be made of {given}: {error}; it takes {takes}") from error
    if not inspect.iscoroutinefunction(getattr(made, "run", None)):
        raise ValueError(f"{name} has no method `async def run(self, engine, data)`")
    try:
        check_call(made.run, Form("run(engine, data)"))
    except ValueError as error:
        raise ValueError(f"the method run of {name} {error}") from error
    return made


def _check_keywords(
    name: str, make: Callable[..., Workflow], keywords: Mapping[str, object]
) -> None:
    """Reject keywords that the workflow does not take."""
    parameters = inspect.signature(make).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [keyword for keyword in keywords if keyword not in parameters]
    if unknown and not takes_any:
        raise ValueError(
            f"{name} has no keyword {unknown[0]!r}; it takes {', '.join(parameters) or 'none'}"
        )
