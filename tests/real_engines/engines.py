"""The engines of the contract, and where they differ: data, each line with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from areal_lab.engines.launch import backends
from areal_lab.engines.launch.backends import Backend
from areal_lab.engines.protocol import PauseMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What may be expected of one engine."""

    backend: Backend
    """What the code expects of it, which is tested too."""
    error: float
    """Largest difference of a log-prob from a plain forward pass, both in float32, tiny model."""
    smollm2_ratio: float
    """SmolLM2-135M-Instruct: its largest error from float64, in those of transformers' float32."""
    counts_shared_tokens: bool
    """Whether it tells how many prompt tokens were found in its cache."""
    whole_digest: bool
    """Whether its digest covers all weights."""
    same_draws_after: tuple[PauseMode, ...]
    """Interruptions after which a seeded sample continues as it would have without them."""

    @property
    def name(self) -> str:
        """The name in `BACKENDS`."""
        return self.backend.name


EMBEDDED: Final = Facts(
    backend=backends.EMBEDDED,
    error=1e-5,
    smollm2_ratio=2,
    counts_shared_tokens=True,
    whole_digest=True,
    same_draws_after=tuple(PauseMode),
)
SGLANG: Final = Facts(
    backend=backends.SGLANG,
    error=1e-5,
    smollm2_ratio=2,
    counts_shared_tokens=True,
    whole_digest=True,
    same_draws_after=(),
)
VLLM: Final = Facts(
    backend=backends.VLLM,
    error=1e-5,
    smollm2_ratio=3,
    counts_shared_tokens=False,
    # On a CPU it repacks the weights of linear layers and takes the digest of an empty tensor.
    whole_digest=False,
    # Its random generator belongs to the request, so a resubmitted request starts over.
    same_draws_after=(PauseMode.RETRACT, PauseMode.IN_PLACE),
)
ENGINES: Final = {facts.name: facts for facts in (EMBEDDED, SGLANG, VLLM)}


def as_table() -> str:
    """The table of differences in `docs/engines.md`."""
    names = list(ENGINES)
    rows = [
        (
            "the seed alone decides the sampled tokens of a request",
            [_yes(f.backend.own_seeds) for f in _ALL],
        ),
        (
            "interruptions after which a seeded response continues with the same tokens",
            [", ".join(f"`{mode}`" for mode in f.same_draws_after) or "none" for f in _ALL],
        ),
        (
            "log-probs after top-k or top-p are of",
            ["all tokens" if f.backend.whole_logprobs else "the remaining tokens" for f in _ALL],
        ),
        (
            "log-probs of top-k 1 are at",
            ["the temperature" if f.backend.tempered_top_1 else "temperature 1" for f in _ALL],
        ),
        (
            "largest difference of a log-prob from transformers, float32, two layers",
            [f"{f.error:.0e}" for f in _ALL],
        ),
        (
            "SmolLM2-135M: largest error from float64, relative to transformers in float32",
            [f"{f.smollm2_ratio:g}" for f in _ALL],
        ),
        (
            "reports the number of cached prompt tokens",
            [_yes(f.counts_shared_tokens) for f in _ALL],
        ),
        (
            "reserved tokens of a model's context",
            [str(f.backend.reserved_tokens) for f in _ALL],
        ),
        ("`in_place` keeps old keys and values", [_yes(f.backend.biased_in_place) for f in _ALL]),
        ("its digest covers all weights", [_yes(f.whole_digest) for f in _ALL]),
    ]
    lines = [f"| | {' | '.join(f'`{name}`' for name in names)} |"]
    lines.append("| --- " * (len(names) + 1) + "|")
    return "\n".join([*lines, *(f"| {what} | {' | '.join(cells)} |" for what, cells in rows)])


def _yes(value: bool) -> str:
    return "yes" if value else "no"


_ALL: Final = tuple(ENGINES.values())
