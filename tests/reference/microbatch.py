"""Algorithm 1 of AReaL (arXiv:2505.24298) as printed, O(sequences * batches), and equal parts."""

from __future__ import annotations

from collections.abc import Sequence


def dynamic_batches(
    lengths: Sequence[int], *, max_tokens: int, min_batches: int
) -> list[list[int]]:
    """Micro-batches as lists of indices."""
    by_length = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    batches: list[list[int]] = []
    for item in by_length:
        with_room = [
            batch
            for batch in batches
            if sum(lengths[other] for other in batch) + lengths[item] <= max_tokens
        ]
        if len(batches) < min_batches or not with_room:
            batches.append([item])
        else:
            min(with_room, key=len).append(item)
    return batches


def parts_of_equal_size(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Longest first, each to the part with the fewest tokens among those with room."""
    result: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        with_room = [part for part in result if len(part) < len(lengths) // parts]
        min(with_room, key=lambda part: sum(lengths[other] for other in part)).append(item)
    return result
