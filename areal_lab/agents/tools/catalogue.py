"""Tools by name, or your own by `module:name`, with their keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from areal_lab.agents.tools.box import CallableTool
from areal_lab.agents.tools.calculator import Calculator, ScrambledCalculator
from areal_lab.agents.tools.own import own_tool
from areal_lab.config.functions import load_function
from areal_lab.config.suggest import nearest
from areal_lab.host.isolation import LevelSetting
from areal_lab.rewards.sandbox.levels import takes_sandbox


def _python(**keywords: Any) -> CallableTool:
    from areal_lab.agents.tools.python import Python  # brings the sandbox

    return Python(**keywords)


def _search(**keywords: Any) -> CallableTool:
    from areal_lab.agents.tools.search import Search  # its package is an extra

    return Search(**keywords)


TOOLS: Final[Mapping[str, Callable[..., CallableTool]]] = {
    "calculator": Calculator,
    "python": _python,
    "scrambled_calculator": ScrambledCalculator,
    "search": _search,
}


def make_tool(
    setting: str | Mapping[str, Any],
    *,
    sandbox: LevelSetting = "auto",
    timeout_s: float | None = None,
) -> CallableTool:
    """A tool by its name, or `{name: search, corpus: corpus.jsonl}`.

    Args:
        setting: name and keywords.
        sandbox: of `python`, and of a class of yours with a parameter of this name, unless its
            keywords say otherwise.
        timeout_s: of `python` and of such a class, likewise; None takes their default.

    Raises:
        ValueError: in one line: the name or a keyword is unknown, or a value is out of its bounds.
        NoSandbox: programs cannot be contained like that here.
    """
    keywords = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = str(keywords.pop("name", ""))
    if ":" not in name and name not in TOOLS:
        raise ValueError(
            f"the tool is {name!r}, but must be module:name or one of {', '.join(TOOLS)}"
            f"{nearest(name, list(TOOLS))}"
        )
    made = load_function(name) if ":" in name else None
    if name == "python" or (isinstance(made, type) and takes_sandbox(made)):
        takes_limit = made is None or "timeout_s" in inspect.signature(made).parameters
        limit = {"timeout_s": timeout_s} if takes_limit and timeout_s is not None else {}
        keywords = {"sandbox": sandbox, **limit, **keywords}
    try:
        return own_tool(name, **keywords) if ":" in name else TOOLS[name](**keywords)
    except TypeError as error:
        raise ValueError(f"the tool {name}: {error}") from error
