"""Errors of measured runs that tests choose: intervals must not depend on the packaged ones."""

from __future__ import annotations

from simulator.report.measured_errors import Kind, MeasuredErrors, MeasuredRow

DENSE = Kind(mixture=False, colocated=False)


def row(
    step: float,
    *,
    group: str = "a",
    gain: float | None = None,
    kind: Kind = DENSE,
    fitted: tuple[str, ...] = (),
    family: str = "",
) -> MeasuredRow:
    """A measured row with ln(predicted / measured) of its step."""
    return MeasuredRow(
        row=f"{group} {step}",
        family=family or group,
        group=group,
        kind=kind,
        gpu="H100",
        fitted=fitted,
        step=step,
        gain=gain,
    )


def errors_of(size: float) -> MeasuredErrors:
    """Six systems with two rows each, dense and disaggregated, whose errors have one size."""
    return MeasuredErrors(
        [row(sign * size, group=group, gain=-sign * size) for group in "abcdef" for sign in (1, -1)]
    )


EXACT = errors_of(0.0)
"""Of a model without an error: its intervals are those of the seeds."""
