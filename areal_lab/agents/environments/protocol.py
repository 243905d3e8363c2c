"""Protocol of environments with several turns: two methods, async or not.

reset(data) --> text --> model --> step(completion) --> Step --> text --> ... --> close()
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Result of an environment for one turn of the model."""

    text: str = ""
    """Text that the model reads next; ignored once the environment is done."""
    done: bool = False
    """True if the sample is over."""
    reward: float | None = None
    """Reward of this turn, if any. The sum over turns is the sample's reward: the last step must
    give one, unless an earlier step did or the workflow has `scored: true`."""


class Environment(Protocol):
    """One sample; a factory creates one for each.

    Sync methods run in threads. An optional method `close()` is called at the end, however the
    sample ended.
    """

    def reset(self, data: Mapping[str, Any]) -> str | Awaitable[str]:
        """Start the sample.

        Args:
            data: `prompt`, `answer` and the problem's other fields.

        Returns:
            Text behind the problem's prompt; may be empty.
        """
        ...

    def step(self, completion: str) -> Step | Awaitable[Step]:
        """Respond to a turn of the model, which has no special tokens."""
        ...
