"""A step that drafts tokens, verifies them together, and keeps those that are accepted.

    draft      a small model runs once per pass: some layers like those of the model, and its head
    verify     one step of the model over 1 + k tokens of each sequence; weights and cache are read
               once, products and experts have 1 + k times the rows
    accept     a tokens per sequence on average, 1 <= a <= 1 + k

A step's seconds divided by a are the seconds of a token. While reading bounds the step, verifying
costs hardly more than one token; when products bound it, at large batches, it costs 1 + k times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from areal_lab.config.problem import refusal
from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import SimulationConfig
from simulator.costs.coefficients import KernelCoefficients, smooth_max
from simulator.costs.weight_bytes import EngineNumbers

ROUND_S: Final = 0.65e-3
"""Seconds of a step with drafts besides its kernels and the engine's CPU: choosing and checking
tokens. Fitted, see `PASS_S`."""
PASS_S: Final = 0.55e-3
"""Seconds of a draft's pass besides its kernels: launches and sampling.

Both by least squares of the relative error on six published rounds of one sequence on H100s
(`data/speculative_rounds.csv`: SGLang and vLLM, 2025-03 to 2025-04), mean error 7 % and 21 % for
70B; a test repeats the fit."""
CHAIN_ERROR: Final = 0.2
"""Least error of a step that drafts a chain: the largest of the fit."""
TREE_ERROR: Final = 0.5
"""Error of a tree. In batches its verification takes longer than that of a chain: Qwen3-8B in
fp8 with a tree of 16 on an H100 gains 2.7 times over bf16 without drafts for one request and 1.6
for eight (GPUStack performance lab, SGLang 0.5.3, vLLM 0.11, read 2026-11); here 2.7 and 2.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Tokens that one step drafts and keeps, per sequence."""

    tokens: int
    """k, drafted and verified together with the next token."""
    accepted: float
    """a, tokens that a step adds on average."""
    passes: int
    """Runs of the draft: k in a chain, fewer in a tree."""
    layers: int = 1
    """Layers of the draft, each like one of the model."""
    pass_s: float | None = None
    """Measured seconds of a pass; None takes the cost model."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 1 <= self.passes <= self.tokens or self.layers < 1:
            raise ValueError(
                f"speculation of {self.tokens} tokens in {self.passes} passes of {self.layers} "
                "layers is impossible; need tokens >= passes >= 1 and layers >= 1"
            )
        if not 1 <= self.accepted <= 1 + self.tokens:
            raise ValueError(
                f"accepted is {self.accepted}, but must be from 1 to {1 + self.tokens}: drafted "
                "tokens and the next one"
            )

    @property
    def error(self) -> float:
        """Least relative error of a step."""
        return CHAIN_ERROR if self.passes == self.tokens else TREE_ERROR

    @property
    def rows(self) -> int:
        """Tokens of a sequence that a step verifies."""
        return 1 + self.tokens

    def pass_seconds(
        self,
        model: ModelShape,
        gpu: GPU,
        at: KernelCoefficients,
        numbers: EngineNumbers,
        *,
        tensor_parallel: int,
        sequences: int,
    ) -> float:
        """Seconds of one pass of the draft over one token of each sequence."""
        if self.pass_s is not None:
            return self.pass_s
        head = model.embedding_parameters
        share = self.layers / model.layers
        read = numbers.decode_weight_bytes(model, sequences=sequences)
        read = share * (read - 2 * head) + 2 * head
        reading_s = at.weight_reading * read / tensor_parallel / gpu.memory_bytes_per_s
        flops = share * (model.linear_flops_per_token() - 2.0 * head) + 2.0 * head
        computing_s = flops * sequences / tensor_parallel / gpu.flops_per_s / at.matrix_efficiency
        return smooth_max(reading_s, computing_s, at.knee) + at.layer_s * self.layers + PASS_S

    def drafting_s(
        self,
        model: ModelShape,
        gpu: GPU,
        at: KernelCoefficients,
        numbers: EngineNumbers,
        *,
        tensor_parallel: int,
        sequences: int,
    ) -> float:
        """Seconds of all passes of a step, and of choosing and checking."""
        one_s = self.pass_seconds(
            model, gpu, at, numbers, tensor_parallel=tensor_parallel, sequences=sequences
        )
        return self.passes * one_s + ROUND_S

    def more_cache(self, model: ModelShape) -> float:
        """Cache of a token with that of the draft's layers, relative to the model's own."""
        return 1 + self.layers / model.full_layers

    def more_reading(self, model: ModelShape) -> float:
        """Cache that a step reads, with the draft's passes, relative to the model's own."""
        return 1 + self.passes * self.layers / model.full_layers

    def weight_bytes(self, model: ModelShape, numbers: EngineNumbers) -> float:
        """Memory of the draft's layers; it uses the embedding and the head of the model."""
        tables = 1 if model.tied_embeddings else 2
        layers = numbers.weight_bytes(model) - 2 * tables * model.embedding_parameters
        return layers * self.layers / model.layers


def speculation_of(config: SimulationConfig) -> Speculation | None:
    """The speculation of a config; None without."""
    rollout = config.rollout
    tokens, accepted = rollout.speculative_tokens, rollout.acceptance_length
    if not tokens:
        plain = {"acceptance_length": None, "draft_passes": None, "draft_pass_s": None}
        for name, unset in {**plain, "draft_layers": 1}.items():
            if getattr(rollout, name) != unset:
                raise refusal(
                    f"rollout.{name}",
                    f"rollout.{name} is {getattr(rollout, name)}, but nothing is drafted; set "
                    "rollout.speculative_tokens",
                )
        return None
    if accepted is None:
        raise refusal(
            "rollout.acceptance_length",
            f"rollout.speculative_tokens is {tokens}, but rollout.acceptance_length is null; set "
            f"it to the mean tokens of a step, from 1 to {1 + tokens}, which engines log",
        )
    if accepted > 1 + tokens:
        raise refusal(
            "rollout.acceptance_length",
            f"rollout.acceptance_length is {accepted:g}, but a step adds at most the "
            f"{tokens} rollout.speculative_tokens and the next one; lower it to {1 + tokens}",
        )
    passes = tokens if rollout.draft_passes is None else rollout.draft_passes
    if passes > tokens:
        raise refusal(
            "rollout.draft_passes",
            f"rollout.draft_passes is {passes}, but must be <= rollout.speculative_tokens "
            f"({tokens}): every pass drafts at least one token",
        )
    if rollout.decode_step_s is not None:
        raise refusal(
            "rollout.speculative_tokens",
            f"rollout.speculative_tokens is {tokens}, but rollout.decode_step_s is a measured step "
            "of one token; give the measured seconds of a token there, and leave this at 0",
        )
    return Speculation(
        tokens=tokens,
        accepted=accepted,
        passes=passes,
        layers=rollout.draft_layers,
        pass_s=rollout.draft_pass_s,
    )
