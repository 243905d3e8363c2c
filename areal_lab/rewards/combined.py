"""Several reward functions as named components of one: `reward.weights` weighs them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from areal_lab.config.functions import load_function
from areal_lab.rewards.worker import bound, reward_of


class Combined:
    """A reward function whose components are rewards of other functions.

        reward.fn=areal_lab.rewards.combined:Combined
        reward.kwargs={parts: {answer: 'areal_lab.rewards.exact:gsm8k',
                               form: {fn: 'areal_lab.rewards.text:form', pattern: '...'}}}
        reward.weights={form: 0.2}

    Args:
        parts: by name, `module:function`, or `fn` with its keyword arguments. They are not async.

    Raises:
        ValueError: in one line: a part has a name that means something else, or cannot be used.
    """

    def __init__(self, parts: Mapping[str, str | Mapping[str, Any]]) -> None:
        self._parts = {name: _part(name, setting) for name, setting in parts.items()}
        if not parts:
            raise ValueError("parts is empty, but must name at least one reward function")

    @classmethod
    def check(cls, parts: Mapping[str, str | Mapping[str, Any]], **_: object) -> None:
        """Make it once; preflight calls this.

        Raises:
            ValueError: in one line.
        """
        cls(parts)

    def __call__(self, completion: str, example: Mapping[str, Any]) -> dict[str, float] | None:
        """The reward of each part; None if one of them has none."""
        rewards = {}
        for name, function in self._parts.items():
            value = function(completion, example)
            if value is None:
                return None
            rewards[name] = reward_of(value)[0]
        return rewards


def _part(name: str, setting: str | Mapping[str, Any]) -> Callable[..., Any]:
    if name == "reward":
        raise ValueError("a part is named reward, which would be trained on alone; rename it")
    keywords = {"fn": setting} if isinstance(setting, str) else dict(setting)
    fn = str(keywords.pop("fn", ""))
    function = load_function(fn)
    sandbox: Any = keywords.pop("sandbox", "auto")
    try:
        inspect.signature(function).bind(
            *(() if isinstance(function, type) else ("", {})), **keywords
        )
        made = bound(function, keywords, sandbox)
    except (TypeError, RuntimeError) as error:  # the second one is of a sandbox
        raise ValueError(f"the part {name} ({fn}): {error}") from error
    if inspect.iscoroutinefunction(made) or inspect.iscoroutinefunction(
        getattr(made, "__call__", None)  # noqa: B004 -- not whether it can be called, but how
    ):
        raise ValueError(f"the part {name} ({fn}) is async; parts are called one after the other")
    return made
