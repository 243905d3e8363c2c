"""The share of recent calls that failed, above which a run ends instead of losing its samples."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW = 100
"""Number of recent calls over which the share is computed."""


class RewardError(RuntimeError):
    """A reward function or workflow failed too often, or could not be loaded; has a traceback."""


@dataclass(slots=True)
class FailureRate:
    """Counts failures among the last 100 calls; missing calls count as successful."""

    what: str = "the workflow"
    """Of the error's message."""
    largest: float = 0.1
    """Share above which `add` raises."""
    failed: int = 0
    """Since the start."""
    first: str = ""
    """Detail of the first failure."""
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, failure: str) -> None:
        """Count a call.

        Args:
            failure: why it failed; empty if it did not.

        Raises:
            RewardError: if too many of the last calls failed; includes the first failure.
        """
        self._recent.append(bool(failure))
        if failure:
            self.failed += 1
            self.first = self.first or failure
        failed = sum(self._recent)
        if failed > self.largest * WINDOW:
            raise RewardError(
                f"{self.what} failed or timed out in {failed} of the last "
                f"{len(self._recent)} calls (max_error_rate {self.largest:g} allows "
                f"{self.largest * WINDOW:g} of {WINDOW}); "
                f"first failure: {self.first}"
            )
