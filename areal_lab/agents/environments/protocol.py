"""What an environment of several turns has to have: two methods, async or not.

reset(data) --> text --> model --> step(completion) --> Step --> text --> ... --> close()
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an environment does with a turn of the model."""

    text: str = ""
    """What the model reads next; not used once it is done."""
    done: bool = False
    """Whether the sample is over."""
    reward: float | None = None
    """Of this turn, if it has one. The sum over turns is the sample's reward: the last step of an
    environment gives one, unless a step before did or the workflow has `scored: true`."""


class Environment(Protocol):
    """One sample; a factory makes a new one for each.

    Methods that are not async run in threads. It may have a method `close()`, which is called at
    the end, however the sample ended.
    """

    def reset(self, data: Mapping[str, Any]) -> str | Awaitable[str]:
        """Begin.

        Args:
            data: `prompt`, `answer` and the problem's other fields.

        Returns:
            What the model reads behind the problem's prompt; may be empty.
        """
        ...

    def step(self, completion: str) -> Step | Awaitable[Step]:
        """Take a turn of the model, without special tokens."""
        ...
