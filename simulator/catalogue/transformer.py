"""Sizes of a decoder-only transformer: parameters, bytes and FLOPs, computed from its shape.

Only matrices count. Norms and biases are left out (0.03 % of a model of 135 million parameters,
less of larger ones), and learned positions, which models since Llama do not have. A FLOP is one
addition or one multiplication; a product with a matrix of P numbers takes 2 P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_STATE_BYTES = 4
"""Bytes per number of a state: fp32 (`mamba_ssm_dtype` in Qwen3.5's config.json, 2026)."""
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
        """Width of the keys of all heads."""
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of the values of all heads."""
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
        """Bytes of one sequence, over all of these layers: matrices, and inputs of the
        convolution."""
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


MXFP4_BYTES: Final = (32 * 4 + 8) / 32 / 8
"""Bytes per number in MXFP4: blocks of 32 numbers of 4 bits with one scale of 8 bits, 4.25 bits
each.

Source: OCP Microscaling Formats (MX) 1.0, table 1; gpt-oss model card (arXiv:2508.10925), section
2.1, for the experts of that model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: one compressed vector is cached instead of keys and values.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; names of `config.json` in parentheses.
    """

    cached_rank: int
    """Width of the compressed keys and values (`kv_lora_rank`)."""
    rope_head_dim: int
    """Width of the rotated part of keys, shared by all heads and cached (`qk_rope_head_dim`)."""
    value_head_dim: int
    """`v_head_dim`."""
    query_rank: int = 0
    """Width of the compressed queries (`q_lora_rank`); 0 does not compress them."""

    def __post_init__(self) -> None:
        for name, least in (
            *(("cached_rank", 1), ("rope_head_dim", 0), ("value_head_dim", 1)),
            ("query_rank", 0),
        ):
            check_count(name, getattr(self, name), least, "latent attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Widths and counts of a model, dense or mixture of experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Heads of keys and values; fewer than `heads` with grouped-query attention."""
    head_dim: int
    """Width of a head; with latent attention, of its part without rotation."""
    intermediate: int
    """Width of a dense MLP."""
    vocabulary: int
    """Rows of the embedding, including padding."""
    tied_embeddings: bool
    """True if the head is the input embedding."""
    experts: int = 0
    """Routed experts per layer; 0 for a dense model."""
    active_experts: int = 0
    """Routed experts that a token uses."""
    moe_intermediate: int = 0
    """Width of one routed expert."""
    shared_intermediate: int = 0
    """Sum of the widths of all shared experts of a layer."""
    mxfp4_experts: bool = False
    """The checkpoint has its routed experts in MXFP4 and everything else in bf16."""
    first_dense_layers: int = 0
    """Layers of a mixture of experts that have a dense MLP; usually the first."""
    gated: bool = True
    """The MLP multiplies with a gate: three matrices instead of two."""
    latent: LatentAttention | None = None
    window: SlidingWindow | None = None
    """Some layers attend to the last tokens only."""
    linear: LinearAttention | None = None
    """Some layers have a state instead of attention."""
    gated_attention: bool = False
    """Attention multiplies its output with a gate, as wide as its queries."""
    caveats: tuple[str, ...] = ()
    """Parts that these sizes do not cover, for reports."""
    source: str = ""

    def __post_init__(self) -> None:
        for name in (
            *("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate"),
            "vocabulary",
        ):
            check_count(name, getattr(self, name), 1, self.name)
        for name in ("experts", "shared_intermediate", "first_dense_layers"):
            check_count(name, getattr(self, name), 0, self.name)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.name} has {self.heads} heads and {self.kv_heads} key-value heads, but the "
                "first must be a multiple of the second"
            )
        if self.full_layers < 1:
            raise ValueError(
                f"{self.name} has {self.layers} layers, of which {self.layers - self.full_layers} "
                "have a window or a state, but at least one must attend to the whole context"
            )
        if self.first_dense_layers > self.layers:
            raise ValueError(
                f"first_dense_layers of {self.name} is {self.first_dense_layers}, "
                f"but must be <= layers ({self.layers})"
            )
        if self.experts:
            check_count("active_experts", self.active_experts, 1, self.name)
            check_count("moe_intermediate", self.moe_intermediate, 1, self.name)
            if self.active_experts > self.experts:
                raise ValueError(
                    f"active_experts of {self.name} is {self.active_experts}, "
                    f"but must be <= experts ({self.experts})"
                )

    # --- parameters ------------------------------------------------------------------------------

    @property
    def parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        tables = 1 if self.tied_embeddings else 2
        return tables * self.embedding_parameters + self._layer_parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """Parameters used by one token, with only its own routed experts."""
        tables = 1 if self.tied_embeddings else 2
        return tables * self.embedding_parameters + self._layer_parameters(self.active_experts)

    @property
    def decode_parameters(self) -> int:
        """Parameters that a decode step reads if it uses every expert: all but the input embedding.

        A step reads one row of it per sequence. If tied, the table counts once, as the head.
        """
        return self.embedding_parameters + self._layer_parameters(self.experts)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of one table: the input embedding, or the head."""
        return self.vocabulary * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert in one layer."""
        return self._mlp_matrices * self.hidden * self.moe_intermediate

    @property
    def moe_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return self.layers - self.first_dense_layers if self.experts else 0

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values."""
        return self.layers - (self.linear.layers if self.linear else 0)

    @property
    def full_layers(self) -> int:
        """Layers that attend to the whole context."""
        return self.attention_layers - (self.window.layers if self.window else 0)

    # --- bytes -----------------------------------------------------------------------------------

    def weight_bytes(self, bytes_per_parameter: float = 2) -> float:
        """Memory of the weights."""
        return self.parameters * bytes_per_parameter

    def decode_weight_bytes(
        self, bytes_per_parameter: float = 2, *, sequences: float | None = None
    ) -> float:
        """Weights that one decode step reads.

        Args:
            bytes_per_parameter: 2 for bf16.
            sequences: number of sequences, which determines how many experts are read; None reads
                all experts.
        """
        read = self.experts if sequences is None else self.experts_read(sequences)
        unread = self.moe_layers * (self.experts - read) * self.expert_parameters
        return (self.decode_parameters - unread) * bytes_per_parameter

    def checkpoint_bytes(self) -> float:
        """Weights in the precision of the published checkpoint: bf16, or experts in MXFP4."""
        return self.weight_bytes() - self.experts * self._saved_per_expert

    def decode_checkpoint_bytes(self, *, sequences: float | None = None) -> float:
        """`decode_weight_bytes` in the precision of the published checkpoint."""
        read = self.experts if sequences is None else self.experts_read(sequences)
        in_bf16 = self.decode_weight_bytes(sequences=sequences)
        return in_bf16 - read * self._saved_per_expert

    def experts_read(self, sequences: float) -> float:
        """Expected number of different experts of one layer that a step of `sequences` uses.

        $$ E (1 - (1 - k / E)^n) $$

        assuming that each token chooses its k of the E experts uniformly and independently. Real
        routers favor some experts and read fewer.
        """
        if not self.experts:
            return 0.0
        untaken = float((1 - self.active_experts / self.experts) ** sequences)
        return self.experts * (1 - untaken)

    def cache_bytes_per_token(self, bytes_per_number: float = 2) -> float:
        """Cache of one token: keys and values, or the latent vector.

        Over all layers that attend to the whole context; windows and states do not grow with it.
        """
        return self.full_layers * self._cached_per_layer * bytes_per_number

    def window_bytes(self, bytes_per_number: float = 2) -> float:
        """Cache of one sequence in the layers with a window, when it is full."""
        if self.window is None:
            return 0.0
        return self.window.layers * self.window.tokens * self._cached_per_layer * bytes_per_number

    def state_bytes(self) -> float:
        """States of one sequence."""
        return 0.0 if self.linear is None else self.linear.state_bytes()

    def cache_shards(self, tensor_parallel: int) -> int:
        """Parts that tensor parallelism cuts the cache of a token into.

        A GPU holds at least one key-value head, or a whole latent vector: further GPUs hold copies.
        """
        return 1 if self.latent is not None else min(tensor_parallel, self.kv_heads)

    # --- FLOPs -----------------------------------------------------------------------------------

    def linear_flops_per_token(self) -> float:
        """FLOPs of one token's forward pass through the matrices; backward takes twice as many."""
        return 2.0 * (self.embedding_parameters + self._layer_parameters(self.active_experts))

    def attention_flops(self, context_tokens: float) -> float:
        """FLOPs of one new token's scores against a context, and of the weighted sum of its values.

        In the layers that attend to all of it. For latent attention, as in training and prefill,
        with expanded keys and values.
        """
        return self._pair_flops(self.full_layers) * context_tokens

    def window_flops(self) -> float:
        """FLOPs per attended token, in the layers with a window."""
        return 0.0 if self.window is None else self._pair_flops(self.window.layers)

    # --- parts -----------------------------------------------------------------------------------

    def _pair_flops(self, layers: int) -> float:
        if self.latent is None:
            score_dim = value_dim = self.head_dim
        else:
            score_dim = self.head_dim + self.latent.rope_head_dim
            value_dim = self.latent.value_head_dim
        return 2.0 * layers * self.heads * (score_dim + value_dim)

    @property
    def _cached_per_layer(self) -> int:
        if self.latent is not None:
            return self.latent.cached_rank + self.latent.rope_head_dim
        return 2 * self.kv_heads * self.head_dim

    @property
    def _saved_per_expert(self) -> float:
        """Bytes that one expert of every layer is smaller in the checkpoint than in bf16."""
        if not self.mxfp4_experts:
            return 0.0
        return (2 - MXFP4_BYTES) * self.moe_layers * self.expert_parameters

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    def _layer_parameters(self, experts: int) -> int:
        """Parameters of all layers, with `experts` routed experts in each mixture."""
        dense = self._mlp_matrices * self.hidden * self.intermediate
        shared = self._mlp_matrices * self.hidden * self.shared_intermediate
        router = self.hidden * self.experts
        mixture = experts * self.expert_parameters + shared + router
        stateful = (
            self.linear.layers * self.linear.layer_parameters(self.hidden) if self.linear else 0
        )
        return (
            stateful
            + self.attention_layers * self._attention_parameters
            + (self.layers - self.moe_layers) * dense
            + self.moe_layers * mixture
        )

    @property
    def _attention_parameters(self) -> int:
        if self.latent is None:
            gate = self.hidden * self.heads * self.head_dim if self.gated_attention else 0
            return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim + gate
        latent = self.latent
        query_width = self.heads * (self.head_dim + latent.rope_head_dim)
        if latent.query_rank:
            queries = (self.hidden + query_width) * latent.query_rank
        else:
            queries = self.hidden * query_width
        compress = self.hidden * (latent.cached_rank + latent.rope_head_dim)
        expand = latent.cached_rank * self.heads * (self.head_dim + latent.value_head_dim)
        output = self.heads * latent.value_head_dim * self.hidden
        return queries + compress + expand + output
