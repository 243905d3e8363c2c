"""Seconds of a refit: new weights from the trainer's layout into the engine on the same GPUs.

    seconds = start + bytes of the weights / rate + matrices of experts x seconds of one

Gathering over ranks, converting names and layouts, handles to the engine, copies inside the GPU.
Sending each matrix of the experts alone takes most of the time of a mixture; packing many into one
buffer saves it (48 to 6 s and 60 to 7 s for Qwen3-30B-A3B).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import Refit
from simulator.costs.colocation.published import relative_fit, rows_of
from simulator.costs.lora.adapters import Sent
from simulator.costs.precision.numbers import BF16


class RefitSpeed(NamedTuple):
    """Coefficients of a way to refit."""

    start_s: float
    bytes_per_s: float
    expert_matrix_s: float
    error: float
    """Mean absolute relative error on the published rows: of dense models, or of mixtures."""

    def seconds(self, weight_bytes: float, expert_matrices: int) -> float:
        """Seconds for one model."""
        copied_s = self.start_s + weight_bytes / self.bytes_per_s
        return copied_s + expert_matrices * self.expert_matrix_s


@cache
def refit_speed(refit: Refit, *, mixture: bool) -> RefitSpeed:
    """Start and rate fitted to dense models, and the time of an expert's matrix to mixtures."""
    dense = rows_of("refit dense")
    (start_s, byte_s), error = relative_fit(
        [[1.0] * len(dense), [row.bytes for row in dense]], [row.seconds for row in dense]
    )
    plain = RefitSpeed(float(start_s), float(1 / byte_s), 0.0, error)
    if not mixture:
        return plain
    rows = rows_of("refit packed" if refit == "packed" else "refit by tensor")
    # What the dense model leaves, as a share of each row.
    left = [1 - plain.seconds(row.bytes, 0) / row.seconds for row in rows]
    per_matrix = [row.tensors / row.seconds for row in rows]
    matrix_s = sum(a * b for a, b in zip(per_matrix, left, strict=True)) / sum(
        a * a for a in per_matrix
    )
    speed = plain._replace(expert_matrix_s=max(0.0, matrix_s))
    errors = [abs(speed.seconds(row.bytes, row.tensors) / row.seconds - 1) for row in rows]
    return speed._replace(error=sum(errors) / len(errors))


def expert_matrices(model: ModelShape) -> int:
    """Matrices of all routed experts of a model."""
    return model.moe_layers * model.experts * (3 if model.gated else 2)


def refit_s(refit: Refit, model: ModelShape, sent: Sent = BF16) -> float:
    """Seconds of one refit of a model of which this travels."""
    speed = refit_speed(refit, mixture=bool(model.experts))
    return speed.seconds(sent.weight_bytes(model), expert_matrices(model))
