"""Observed response lengths with the distribution fitted to them, and what can be asked of it.

LengthFit --> quantiles, distances, samples
          --> settings and YAML of `areal-lab simulate`
"""

from __future__ import annotations

import atexit
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from areal_lab.host.durable import replace_text
from areal_lab.host.terminal import printable
from simulator.calibrate.length_source import Observed
from simulator.stats.format import number
from simulator.workload.histogram import Histogram
from simulator.workload.lengths import ConstantLengths, Distribution, LogNormalLengths
from simulator.workload.trace_lengths import TraceLengths

Family: TypeAlias = Literal["lognormal", "trace", "constant"]
"""Distribution of `workload.answers.kind`: fitted, as observed, or all of the mean length."""


class WithinPrompts(NamedTuple):
    """Similarity of the responses to one prompt, in ln(tokens)."""

    correlation: float
    """Correlation between two responses to one prompt, 0 to 1."""
    interval: tuple[float, float]
    """95 % interval of the correlation, over prompts."""
    sigma: float
    """Standard deviation among the responses to one prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFit:
    """Observed response lengths and the distribution fitted to them. Tokens."""

    kind: Family
    """`lognormal`, or `constant` if all lengths are equal."""
    mean_tokens: float
    """Mean after the cap, observed and fitted."""
    sigma: float
    """Standard deviation of ln(tokens) before the cap; 0 for `constant`."""
    max_tokens: int
    """The cap; without one, the longest observed length."""
    capped_share: float
    """Share of the observed lengths that reached the cap; 0 if there is no cap."""
    within_prompts: WithinPrompts | None
    """None if the lengths do not say which responses have the same prompt."""
    answers: int
    """Responses that were fitted to."""
    held_out_answers: int
    distance: float
    """Kolmogorov-Smirnov distance of the fitted distribution, 0 to 1: the largest difference
    between its distribution function and that of the held-out responses, or, if there are none, of
    the responses that it was fitted to."""
    notes: tuple[str, ...] = ()
    """Assumptions of the fit, and gaps of the lengths; a sentence each."""
    observed: Observed = field(repr=False)

    @property
    def group_correlation(self) -> float | None:
        """Correlation of ln(tokens) between two responses to one prompt; None if not known."""
        return None if self.within_prompts is None else self.within_prompts.correlation

    @property
    def families(self) -> tuple[Family, ...]:
        """The distributions that can be compared: a log-normal needs lengths that differ."""
        return tuple(one for one in get_args(Family) if one in {self.kind, "trace", "constant"})

    @property
    def distances(self) -> dict[Family, float]:
        """Kolmogorov-Smirnov distance of each family from the responses that were fitted to."""
        return {kind: distance(self.observed.histogram, self.model(kind)) for kind in self.families}

    @property
    def chance_distance(self) -> float:
        """Distance that only 5 of 100 samples of this size would exceed by chance (asymptotic)."""
        return 1.36 / math.sqrt(self.answers)

    def model(
        self,
        kind: Family | None = None,
        *,
        max_tokens: int | None = None,
        group_correlation: float | None = None,
    ) -> Distribution:
        """A distribution, as a simulation has it.

        Args:
            kind: a family; None takes the fitted one.
            max_tokens: another cap; None keeps it.
            group_correlation: within a prompt; None takes the observed one, or 0 if not known.

        Raises:
            ValueError: one line: a family that there is not, or a cap above that of a trace.
        """
        kind, cap = self._checked(kind, max_tokens)
        correlation = self.group_correlation if group_correlation is None else group_correlation
        if kind == "constant":
            return ConstantLengths(tokens=self._constant(cap), max_tokens=cap)
        if kind == "trace":
            return TraceLengths(
                self.observed.histogram,
                wanted_mean_tokens=0.0,
                max_tokens=cap,
                group_correlation=correlation or 0.0,
            )
        return LogNormalLengths(
            wanted_mean_tokens=self._mean_with(cap),
            sigma=self.sigma,
            max_tokens=cap,
            group_correlation=correlation or 0.0,
        )

    def quantiles(
        self, shares: Sequence[float] | NDArray[np.float64], kind: Family | None = "trace"
    ) -> NDArray[np.float64]:
        """Lengths up to which these shares of the responses are.

        Args:
            shares: from 0 to 1, such as `[0.5, 0.9, 0.99]`.
            kind: `trace` for the observed lengths, another family, or None for the fitted one.
        """
        return self.model(kind).quantiles(np.asarray(shares, np.float64))

    def sample(
        self, groups: int, samples: int = 1, *, seed: int = 1, kind: Family | None = None
    ) -> NDArray[np.int64]:
        """Random lengths, [groups, samples] tokens; those of one group are correlated."""
        return self.model(kind).draw(np.random.default_rng(seed), groups, samples)

    def settings(
        self, kind: Family | Literal["recorded"] | None = None, *, max_tokens: int | None = None
    ) -> dict[str, str | float]:
        """Settings of a simulation with these lengths, by dotted name.

        Args:
            kind: a family, or `recorded` for the lengths of a run prompt by prompt; None takes the
                fitted family.
            max_tokens: another cap; None keeps it.

        Raises:
            ValueError: one line: a cap above that of a trace, or lengths that no simulation can
                read.
        """
        if kind == "recorded":
            if not self.observed.recorded:
                raise ValueError(f"{self.observed.source} is no run; `recorded` needs a run folder")
            cap = self.max_tokens if max_tokens is None else max_tokens
            return _dotted(kind=kind, trace=self.observed.recorded, max_tokens=cap)
        kind, cap = self._checked(kind, max_tokens)
        if kind == "constant":
            return _dotted(kind=kind, mean_tokens=self._constant(cap), max_tokens=cap)
        within: dict[str, float] = {}
        if self.group_correlation is not None:
            within = {"group_correlation": self.group_correlation}
        if kind == "trace":
            if not self.observed.trace:
                raise ValueError(
                    "a simulation reads a trace from a file; write it first: "
                    "fit.save('lengths.csv').settings('trace')"
                )
            trace = self.observed.trace
            return _dotted(kind=kind, trace=trace, mean_tokens=0.0, **within, max_tokens=cap)
        mean = self._mean_with(cap)
        return _dotted(kind=kind, mean_tokens=mean, sigma=self.sigma, **within, max_tokens=cap)

    def to_yaml(
        self, kind: Family | Literal["recorded"] | None = None, *, max_tokens: int | None = None
    ) -> str:
        """The `workload` block of a file for `areal-lab simulate`; see `settings`."""
        lines = [*(f"# {line}" for line in self.summary), "workload:", "  answers:"]
        for name, value in self.settings(kind, max_tokens=max_tokens).items():
            lines.append(f"    {name.rpartition('.')[2]}: {json.dumps(_rounded(value))}")
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path | None = None) -> LengthFit:
        """Write the observed lengths to a CSV file, from which a simulation reads a trace.

        Args:
            path: None takes a temporary file, which is removed when Python ends.

        Returns:
            The same fit, which knows the file.

        Raises:
            ValueError: the name does not end in .csv.
        """
        path = _temporary() / "lengths.csv" if path is None else Path(path)
        if path.suffix.lower() != ".csv":
            raise ValueError(f"{path} must end in .csv, so that a simulation takes it for a table")
        replace_text(path, self.to_csv())
        return self.stored_as(path)

    def to_csv(self) -> str:
        """The observed lengths as the text of a CSV file."""
        return self.observed.histogram.to_csv()

    def stored_as(self, path: str | Path) -> LengthFit:
        """Return this fit with its observed lengths in this file; nothing is written."""
        return replace(self, observed=replace(self.observed, trace=str(path)))

    @property
    def summary(self) -> list[str]:
        """The fit in two or three lines."""
        source = " ".join(printable(self.observed.source).split())  # a line of YAML, as a comment
        lines = [f"Lengths of {self.answers:,} responses: {source}."]
        if self.kind == "constant":
            return [*lines, f"All have {self.mean_tokens:,.0f} tokens."]
        held_out = f"{self.held_out_answers:,} held-out responses"
        return [
            *lines,
            f"Log-normal: {number(self.mean_tokens)} tokens on average, sigma {self.sigma:.3g}, "
            f"Kolmogorov-Smirnov distance {self.distance:.3f} from "
            f"{held_out if self.held_out_answers else 'them'}.",
            f"Cap: {self.max_tokens:,} tokens, which {self.capped_share:.2%} of them reached, and "
            f"{self.model().capped_share():.2%} in the log-normal.",
        ]

    def _checked(self, kind: Family | None, max_tokens: int | None) -> tuple[Family, int]:
        kind = kind or self.kind
        if kind not in self.families:
            raise ValueError(f"kind is {kind!r}, but must be one of {', '.join(self.families)}")
        cap = self.max_tokens if max_tokens is None else max_tokens
        if cap < 1:
            raise ValueError(f"max_tokens is {cap}, but must be at least 1 token")
        if kind == "trace" and cap > self.max_tokens and self.capped_share > 0:
            raise ValueError(
                f"max_tokens is {cap}, but {self.capped_share:.2%} of the lengths were cut off at "
                f"{self.max_tokens}: how long they would have become is not known; use a cap of at "
                "most that, or kind='lognormal', which extrapolates"
            )
        return kind, cap

    def _constant(self, cap: int) -> float:
        """Mean of the observed lengths after a cap; one above all of them changes nothing."""
        if cap >= self.max_tokens:
            return float(round(self.mean_tokens))
        return float(round(self.model("trace", max_tokens=cap).mean_tokens()))

    def _mean_with(self, cap: int) -> float:
        if cap == self.max_tokens:
            return self.mean_tokens
        return lognormal(self.mean_tokens, self.sigma, self.max_tokens).mean_with_cap(cap)


def lognormal(mean: float, sigma: float, cap: int) -> LogNormalLengths:
    """The log-normal with this mean after the cap."""
    return LogNormalLengths(wanted_mean_tokens=mean, sigma=sigma, max_tokens=cap)


def distance(observed: Histogram, model: Distribution) -> float:
    """Kolmogorov-Smirnov distance: largest difference of the distribution functions, 0 to 1."""
    ends, place = np.unique(observed.to_tokens, return_inverse=True)
    shares = (
        np.cumsum(np.bincount(place.astype(np.intp, copy=False), weights=observed.weight))
        / observed.weight.sum()
    )
    return float(np.abs(shares - model.share_up_to(ends)).max())


def _temporary() -> Path:
    """A new folder that is removed when Python ends."""
    folder = tempfile.mkdtemp(prefix="lengths-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _dotted(**values: str | float) -> dict[str, str | float]:
    return {f"workload.answers.{name}": value for name, value in values.items()}


def _rounded(value: str | float) -> str | float:
    return float(f"{value:.6g}") if isinstance(value, float) else value
