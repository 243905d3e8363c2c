"""Several reward functions as named components of one: `reward.weights` has their factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal_lab.config.functions import load_function
from areal_lab.host.isolation import LevelSetting
from areal_lab.rewards.usable import check_reward
from areal_lab.rewards.wire import TOLD, is_address
from areal_lab.rewards.worker import bound, is_async, reward_of


class Combined:
    """A reward function whose components are rewards of other functions.

        reward.fn=areal_lab.rewards.combined:Combined
        reward.kwargs={parts: {answer: 'areal_lab.rewards.exact:gsm8k',
                               form: {fn: 'areal_lab.rewards.text:form', pattern: '...'}}}
        reward.weights={form: 0.2}

    Args:
        parts: by name, `module:function`, or `fn` with its keyword arguments. Async functions are
            not supported.
        sandbox: containment of parts that run code of the model; `reward.sandbox`.

    Raises:
        ValueError: in one line: a part has a reserved name, or cannot be used.
    """

    def __init__(
        self, parts: Mapping[str, str | Mapping[str, Any]], *, sandbox: LevelSetting = "auto"
    ) -> None:
        self._parts = {name: _part(name, setting, sandbox) for name, setting in parts.items()}
        if not parts:
            raise ValueError("parts is empty, but must name at least one reward function")

    @classmethod
    def check(cls, parts: Mapping[str, str | Mapping[str, Any]], **_: object) -> None:
        """Create it once; `areal_lab.resolve` calls this."""
        cls(parts)

    def __call__(self, completion: str, example: Mapping[str, Any]) -> dict[str, float] | None:
        """Reward of each part, and its outcome components; None if a part has no reward."""
        rewards: dict[str, float] = {}
        for name, function in self._parts.items():
            value = function(completion, example)
            if value is None:
                return None
            rewards[name], named = reward_of(value)
            for told in TOLD:
                if told in named:
                    rewards[told] = max(rewards.get(told, 0.0), named[told])
        return rewards


def _part(name: str, setting: str | Mapping[str, Any], sandbox: LevelSetting) -> Callable[..., Any]:
    if name == "reward":
        raise ValueError("a part is named reward, which would be trained on alone; rename it")
    if name in TOLD:
        raise ValueError(f"a part is named {name}, which says what became of a sample; rename it")
    keywords = {"fn": setting} if isinstance(setting, str) else dict(setting)
    fn = str(keywords.pop("fn", ""))
    if is_address(fn):
        raise ValueError(f"the part {name} ({fn}) is a service, which cannot be a part")
    function = load_function(fn)
    level: Any = keywords.pop("sandbox", sandbox)
    try:
        check_reward(function, keywords, level)
        made = bound(function, keywords, level)
    except (TypeError, ValueError, RuntimeError) as error:  # the last one is of a sandbox
        raise ValueError(f"the part {name} ({fn}): {error}") from error
    if is_async(made):
        raise ValueError(f"the part {name} ({fn}) is async; parts must be sync functions")
    return made
