"""Agent in a separate process: the function that a worker of `RewardService` calls (`agent.Agent`).

`python -m areal_lab.agents.process module:function` checks that the function is usable.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from areal_lab.config.functions import Form, check_call, load_function, main

FORM: Final = Form("agent(data)")


class AgentFunction:
    """Call `run_agent_return_reward` with the environment that clients of OpenAI and Anthropic
    read.
    """

    def __init__(self, fn: str) -> None:
        self._function = agent_function(fn)

    def __call__(self, completion: str, data: Mapping[str, Any]) -> Any:
        """Reward of one sample; the completion is ignored."""
        del completion
        url, key = str(data["base_url"]), str(data["api_key"])
        os.environ |= {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": key,
            # Its client adds the version itself.
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
        }
        value = self._function(dict(data))
        return asyncio.run(value) if inspect.iscoroutine(value) else value


def agent_function(fn: str) -> Callable[..., Any]:
    """Return the agent `module:function`."""
    function = load_function(fn)
    try:
        check_call(function, FORM)
    except ValueError as error:
        raise ValueError(f"{fn} {error}") from error
    return function


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], agent_function))
