"""The engines of the contract, and where they differ: data, each line with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from areal_lab.engines.protocol import PauseMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What may be expected of one engine."""

    name: str
    seeded: bool
    """Whether a seed decides the draws of a request."""
    error: float
    """Largest difference of a log-prob from a plain forward pass, both in float32, tiny model."""
    smollm2_error: float
    """The same for SmolLM2-135M-Instruct."""
    counts_shared_tokens: bool
    """Whether it tells how many prompt tokens were found in its cache."""
    whole_digest: bool
    """Whether its digest covers all weights."""
    same_draws_after: tuple[PauseMode, ...]
    """Interruptions after which a seeded sample goes on with the draws that it would have had."""


EMBEDDED: Final = Facts(
    name="embedded",
    seeded=True,
    error=1e-5,
    smollm2_error=1e-4,
    counts_shared_tokens=True,
    whole_digest=True,
    same_draws_after=tuple(PauseMode),
)
SGLANG: Final = Facts(
    name="sglang",
    # Seeds count with --enable-deterministic-inference only, which needs other attention kernels
    # than a CPU has.
    seeded=False,
    error=1e-5,
    smollm2_error=1e-4,
    counts_shared_tokens=True,
    whole_digest=True,
    same_draws_after=(),
)
VLLM: Final = Facts(
    name="vllm",
    seeded=True,
    error=1e-5,
    smollm2_error=1e-4,
    counts_shared_tokens=False,
    # On a CPU it repacks the weights of linear layers and takes the digest of an empty tensor.
    whole_digest=False,
    # Its generator of a request goes on from where it is, so a request sent again starts over.
    same_draws_after=(PauseMode.RETRACT, PauseMode.IN_PLACE),
)
ENGINES: Final = {facts.name: facts for facts in (EMBEDDED, SGLANG, VLLM)}
