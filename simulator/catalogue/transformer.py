"""Sizes of a decoder-only transformer: parameters, bytes and FLOPs, computed from its shape.

Only matrices count. Norms and biases are left out (0.03 % of a model of 135 million parameters,
less of larger ones), and learned positions, which models since Llama do not have. A FLOP is one
addition or one multiplication; a product with a matrix of P numbers takes 2 P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from simulator.catalogue.linear_attention import LinearAttention, SlidingWindow, check_count

MXFP4_BYTES: Final = (32 * 4 + 8) / 32 / 8
"""Per number in MXFP4: blocks of 32 numbers of 4 bits with one scale of 8 bits, 4.25 bits each.

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
    """Whether the head is the input embedding."""
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
    """What these sizes do not cover; for reports."""
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
        """The same per attended token, in the layers with a window."""
        return 0.0 if self.window is None else self._pair_flops(self.window.layers)

    # --- parts -----------------------------------------------------------------------------------

    def _pair_flops(self, layers: int) -> float:
        """FLOPs of one pair of query and key in some layers."""
        if self.latent is None:
            score_dim = value_dim = self.head_dim
        else:
            score_dim = self.head_dim + self.latent.rope_head_dim
            value_dim = self.latent.value_head_dim
        return 2.0 * layers * self.heads * (score_dim + value_dim)

    @property
    def _cached_per_layer(self) -> int:
        """Numbers that a layer caches of a token."""
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
        """Attention parameters of one layer."""
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
