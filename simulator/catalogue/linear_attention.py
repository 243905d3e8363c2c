"""Layers whose memory of the context does not grow: linear attention, and sliding windows."""

from __future__ import annotations

from dataclasses import dataclass

_STATE_BYTES = 4
"""Per number of a state: fp32 (`mamba_ssm_dtype` in Qwen3.5's config.json, 2026)."""
_CONV_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """Layers that attend to the last tokens only."""

    layers: int
    tokens: int

    def __post_init__(self) -> None:
        for name in ("layers", "tokens"):
            check_count(name, getattr(self, name), 1, "a sliding window")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Layers with one matrix per head as their state: Gated DeltaNet, Kimi Delta Attention.

    A token changes the state by its key and value, and reads it by its query. Before that, queries,
    keys and values pass a short convolution. Sources: Gated DeltaNet (arXiv:2412.06464), Kimi
    Linear (arXiv:2510.26692), and their implementations in transformers 5.23.
    """

    layers: int
    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    """Tokens that the convolution sees."""
    gate_rank: int = 0
    """Rank of the gates, which are per channel (Kimi Delta Attention); 0 gates the output by a full
    matrix, and forgets per head (Gated DeltaNet)."""

    def __post_init__(self) -> None:
        for name in (
            *("layers", "key_heads", "value_heads", "key_head_dim", "value_head_dim"),
            "conv_width",
        ):
            check_count(name, getattr(self, name), 1, "linear attention")
        check_count("gate_rank", self.gate_rank, 0, "linear attention")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads of linear attention is {self.value_heads}, but must be a multiple of "
                f"its key_heads ({self.key_heads})"
            )

    @property
    def key_width(self) -> int:
        """Of all heads."""
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Of all heads."""
        return self.value_heads * self.value_head_dim

    def layer_parameters(self, hidden: int) -> int:
        """Parameters of the matrices of one layer, without its MLP."""
        mixed = 2 * self.key_width + self.value_width
        shared = hidden * (mixed + self.value_width) + self.conv_width * mixed
        if not self.gate_rank:
            # The gate of the output; forgetting and learning rate per head.
            return shared + hidden * (self.value_width + 2 * self.value_heads)
        gates = self.gate_rank * (2 * hidden + self.key_width + self.value_width)
        return shared + gates + hidden * self.value_heads

    def state_bytes(self) -> float:
        """Of one sequence, over all of these layers: matrices, and inputs of the convolution."""
        matrices = self.value_heads * self.key_head_dim * self.value_head_dim * _STATE_BYTES
        mixed = 2 * self.key_width + self.value_width
        kept = mixed * (self.conv_width - 1) * _CONV_BYTES
        return float(self.layers * (matrices + kept))

    def flops_per_token(self) -> float:
        """FLOPs of the states of one token, token by token: read by key, changed, read by query.

        Kernels that take many tokens at once compute more; their efficiency includes it.
        """
        one = 3 * 2.0 * self.key_head_dim * self.value_head_dim
        return self.layers * self.value_heads * one


def check_count(name: str, value: object, least: int, what: str) -> None:
    """Refuse a count that is no whole number, or too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} of {what} is {value!r}, but must be a whole number >= {least}")
