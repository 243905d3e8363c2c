"""Time spans of one training step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from areal_lab.training.protocol import Span


@dataclass(slots=True)
class Timeline:
    """Spans of one step, in the order in which they ended."""

    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def span(self, name: str, **args: float) -> Iterator[None]:
        """Time what happens inside."""
        start_s = time.time()
        yield
        self.spans.append(Span(name, start_s, time.time(), args))
