"""Activity spans of the engine, for the timeline of a run; seconds since the epoch.

Steps are short and many, so adjacent ones of the same activity and similar batch size are merged:
hours take a few thousand spans. Their counts are added up, so that costs can be fitted to them:

    steps           forward passes
    sequences       sampled tokens: the running sequences, summed over the steps
    context_tokens  tokens whose keys and values were read, summed over sequences and steps
    prompt_tokens   tokens computed, not copied, for prompts and interrupted responses
    prompt_pairs    (query, key) pairs of their attention
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

ActivityName: TypeAlias = Literal[
    "prefill", "decode", "prefill_and_decode", "paused", "idle", "load_weights", "released"
]

JOIN_GAP_S = 0.02
"""Adjacent spans closer than this are merged; shorter idle times are not recorded."""
KEPT_SPANS = 200_000

_NO_COUNTS: Mapping[str, float] = MappingProxyType({})


@dataclass(slots=True)
class ActivitySpan:
    """A stretch of one activity."""

    id: int
    name: ActivityName
    start_s: float
    end_s: float
    counts: dict[str, float] = field(default_factory=dict)
    """Counts by the names above."""

    def extends_with(self, name: ActivityName, counts: Mapping[str, float]) -> bool:
        """Whether the activity extends this span instead of starting a new one: batches of 32 to
        63 sequences are one size, those of 16 to 31 another."""
        return name == self.name and _batch_size(counts) == _batch_size(self.counts)


class ActivityLog:
    """Written by the scheduler's thread, read by HTTP handlers."""

    def __init__(self) -> None:
        self._spans: deque[ActivitySpan] = deque(maxlen=KEPT_SPANS)
        self._lock = threading.Lock()

    def add(
        self,
        name: ActivityName,
        start_s: float,
        end_s: float,
        counts: Mapping[str, float] = _NO_COUNTS,
    ) -> None:
        """Record a finished activity; `start_s` must not be before the end of the last one."""
        if name == "idle" and end_s - start_s < JOIN_GAP_S:
            return
        with self._lock:
            last = self._spans[-1] if self._spans else None
            near = last is not None and start_s - last.end_s < JOIN_GAP_S
            if last is not None and near and last.extends_with(name, counts):
                last.end_s = end_s
                for what, count in counts.items():
                    last.counts[what] += count
            else:
                number = last.id + 1 if last is not None else 0
                self._spans.append(ActivitySpan(number, name, start_s, end_s, dict(counts)))

    def since(self, first_id: int) -> list[ActivitySpan]:
        """Spans from this id on. The newest may still grow: request it again and replace it."""
        with self._lock:
            return [
                replace(span, counts=dict(span.counts))
                for span in self._spans
                if span.id >= first_id
            ]


def _batch_size(counts: Mapping[str, float]) -> int:
    """Sequences per step, as the exponent of a power of two."""
    return int(counts.get("sequences", 0) / counts.get("steps", 1)).bit_length()
