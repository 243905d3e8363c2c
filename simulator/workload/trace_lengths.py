"""Traces: observed response lengths, shipped with the package or from a CSV file of your own.

The shipped ones (`simulator/workload/data`) have one row per bin, and a header with their source
and license; `simulator.workload.length_table` says what your own file may look like.

Response lengths as observed: those of a histogram, scaled to a mean. Tokens.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.config.unknown import did_you_mean, plain
from areal_lab.host.foreign import read_table_text
from simulator.workload.histogram import (
    Histogram,
    check_mean,
    correlated_scores,
    increasing_root,
    normal_quantiles,
    rounded,
)
from simulator.workload.length_table import read_table

_DATA: Final = Path(__file__).parent / "data"
_TABLES: Final = {".csv", ".tsv", ".txt"}


def traces() -> dict[str, str]:
    """Names of the shipped traces, and what each has, in a sentence."""
    return {name: _shipped(path).source.splitlines()[0] for name, path in _files().items()}


def load_histogram(name: str) -> Histogram:
    """A shipped trace, or one from the user's CSV file."""
    if not name:
        raise ValueError(f"no trace is given; known names are {', '.join(_files())}")
    if Path(name).suffix.lower() in _TABLES:
        return read_histogram(Path(name))
    known = {plain(one): path for one, path in _files().items()}
    if plain(name) not in known:
        raise ValueError(
            f"unknown trace {name!r}; {did_you_mean(name, _files())} "
            "(the path of your own CSV file also works)"
        )
    return _shipped(known[plain(name)])


def read_histogram(path: Path) -> Histogram:
    """The lengths in a CSV file."""
    return _read(path, path.stat().st_mtime_ns if path.is_file() else 0)


def text_of(path: Path) -> str:
    """The text of a CSV file."""
    if not path.is_file():
        raise ValueError(f"trace {path} does not exist (looked in {Path.cwd()})")
    try:
        return read_table_text(path)
    except ValueError as error:
        raise ValueError(f"trace {error}") from error


def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_DATA.glob("*.csv"))}


@lru_cache(maxsize=8)
def _read(path: Path, changed_ns: int) -> Histogram:  # noqa: ARG001
    """Read a file once: every check of a config needs it, and `changed_ns` expires old ones."""
    return read_table(text_of(path), name=str(path)).histogram


@cache
def _shipped(path: Path) -> Histogram:
    return read_histogram(path)


class TraceLengths:
    """Observed lengths, all multiplied by one factor to reach the wanted mean.

    Lengths inside a group are correlated by rank (a Gaussian copula), which leaves the distribution
    of the trace unchanged.
    """

    def __init__(
        self,
        histogram: Histogram,
        *,
        wanted_mean_tokens: float,
        max_tokens: int,
        group_correlation: float = 0.0,
        drift_per_step: float = 0.0,
    ) -> None:
        """See `LengthConfig`; `wanted_mean_tokens` of 0 leaves the lengths unchanged."""
        self.max_tokens = max_tokens
        self._weights = histogram.weight / histogram.weight.sum()
        self._means = histogram.mean_tokens
        self._half_widths = histogram.half_width_tokens
        self._correlation = group_correlation
        self._drift = math.log1p(drift_per_step)
        # Scores at the edges between bins: drawing scores then needs no distribution function.
        shares = np.cumsum(self._weights)[:-1]
        self._edges = normal_quantiles(shares)
        # Beyond these, every length is 1, or the cap.
        self._lowest_scale = 0.5 / histogram.to_tokens[-1]
        self._highest_scale = 2 * max_tokens / histogram.from_tokens[0]
        self.scale = 1.0
        """Factor on the lengths of the trace."""
        if wanted_mean_tokens != 0:
            check_mean(wanted_mean_tokens, max_tokens)
            self.scale = increasing_root(
                self._scaled_mean, wanted_mean_tokens, self._lowest_scale, self._highest_scale
            )

    def draw(
        self, generator: np.random.Generator, groups: int, samples: int, *, step: float = 0.0
    ) -> NDArray[np.int64]:
        """[groups, samples] tokens."""
        bins = np.searchsorted(
            self._edges, correlated_scores(generator, groups, samples, self._correlation)
        )
        tokens = generator.random((groups, samples))
        tokens -= 0.5
        tokens *= (2 * self._half_widths)[bins]
        tokens += self._means[bins]
        tokens *= self._scale_at(step)
        np.clip(tokens, 1.0, self.max_tokens, out=tokens)
        return rounded(tokens, generator, self.max_tokens)

    def mean_tokens(self, step: float = 0.0) -> float:
        """Mean after the cap."""
        return self._scaled_mean(self._scale_at(step))

    def capped_share(self, step: float = 0.0) -> float:
        """Share of the responses that the cap cuts off."""
        scale = self._scale_at(step)
        low, high = self._bounds(scale)
        above = np.where(
            high > low, (high - self.max_tokens) / _width(low, high), low > self.max_tokens
        )
        return float(np.clip(above, 0.0, 1.0) @ self._weights)

    def share_up_to(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Distribution function at whole lengths, which stand for what is rounded to them."""
        low, high = self._bounds(self.scale)
        # A bin of one length is wholly below or above; the others are spread evenly.
        within = (np.asarray(tokens, np.float64)[..., None] + 0.5 - low) / _width(low, high)
        parts = np.where(high > low, np.clip(within, 0.0, 1.0), within > 0)
        below: NDArray[np.float64] = np.asarray(parts @ self._weights, np.float64)
        below[np.asarray(tokens) >= self.max_tokens] = 1.0
        return below

    def quantiles(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Lengths up to which these shares of the responses are, cut at the cap."""
        low, high = self._bounds(self.scale)
        ends = np.cumsum(self._weights)
        wanted = np.clip(np.asarray(shares, np.float64), 0.0, 1.0) * ends[-1]
        bins = np.minimum(np.searchsorted(ends, wanted), len(ends) - 1)
        weight = np.maximum(self._weights[bins], 1e-300)
        part = np.clip((wanted - ends[bins] + self._weights[bins]) / weight, 0.0, 1.0)
        tokens: NDArray[np.float64] = low[bins] + part * (high - low)[bins]
        return np.clip(tokens, 1.0, float(self.max_tokens), out=tokens)

    def _scale_at(self, step: float) -> float:
        scale = self.scale * math.exp(min(step * self._drift, 600.0))
        return float(min(max(scale, self._lowest_scale), self._highest_scale))

    def _bounds(self, scale: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        spread = self._half_widths
        return scale * (self._means - spread), scale * (self._means + spread)

    def _scaled_mean(self, scale: float) -> float:
        low, high = self._bounds(scale)
        middle, width, cap = (low + high) / 2, _width(low, high), float(self.max_tokens)
        over = np.where(low >= cap, middle - cap, np.maximum(high - cap, 0.0) ** 2 / (2 * width))
        under = np.where(high <= 1, 1 - middle, np.maximum(1 - low, 0.0) ** 2 / (2 * width))
        return float((middle - over + under) @ self._weights)


def _width(low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.float64]:
    """Width of a bin; 1 for a bin of one length, which only avoids a division by 0."""
    return np.where(high > low, high - low, 1.0)
