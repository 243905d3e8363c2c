"""An agent in a process of its own: what a worker of `RewardService` calls (`agent.Agent`)."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Mapping
from typing import Any

from areal_lab.config.functions import load_function


class AgentFunction:
    """`run_agent_return_reward`, with the environment that clients of OpenAI and Anthropic read.

    Args:
        fn: `module:function` of `data`.
    """

    def __init__(self, fn: str) -> None:
        self._function = load_function(fn)

    def __call__(self, completion: str, data: Mapping[str, Any]) -> Any:
        """The reward of one sample; there is no completion to score."""
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
