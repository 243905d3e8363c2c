"""Duration of a matrix product: reading the weights or computing, with a smooth knee in between.

seconds
  |                    / computing: FLOPs / (peak * efficiency)
  |                  /
  |               _-'
  |___________--'        reading: bytes / (bandwidth / slack)
  +------------------------------ rows
"""

from __future__ import annotations


def smooth_max(first: float, second: float, sharpness: float) -> float:
    r"""The maximum of two times, smoothed: larger than it where they are close.

    $$ (a^p + b^p)^{1/p} $$

    Kernels near the knee reach neither the peak bandwidth nor the peak of the matrix units. An
    infinite p gives the hard maximum of a roofline, p = 1 the sum.

    Args:
        first: seconds, >= 0.
        second: seconds, >= 0.
        sharpness: p, >= 1.
    """
    large, small = (first, second) if first > second else (second, first)
    if small <= 0:
        return large
    # Computed from the ratio: a^p of microseconds would underflow for a sharp knee.
    return float(large * (1 + (small / large) ** sharpness) ** (1 / sharpness))
