"""Time of a matrix product: reading the weights or computing, and a smooth knee between the two.

seconds
  |                    / computing: FLOPs / (peak * efficiency)
  |                  /
  |               _-'
  |___________--'        reading: bytes / (bandwidth / slack)
  +------------------------------ rows
"""

from __future__ import annotations


def smooth_max(first: float, second: float, sharpness: float) -> float:
    r"""The larger of two times, and more where they are close.

    $$ (a^p + b^p)^{1/p} $$

    Kernels near the knee reach neither the peak bandwidth nor the peak of the matrix units. An
    infinite p is the hard maximum of a roofline, p = 1 does one after the other.

    Args:
        first: seconds, >= 0.
        second: seconds, >= 0.
        sharpness: p, >= 1.
    """
    large, small = (first, second) if first > second else (second, first)
    if small <= 0:
        return large
    # Through the ratio: a^p of microseconds would underflow for a sharp knee.
    return float(large * (1 + (small / large) ** sharpness) ** (1 / sharpness))
