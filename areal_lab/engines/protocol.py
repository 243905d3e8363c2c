"""The interface of an inference engine: tokens in, tokens with log-probs and versions out.

    generate ... pause -> load_weights -> resume ... (the same generate calls return)

Engines run in separate processes and are called over HTTP only; `client.EngineClient` is the one
implementation, for the embedded engine, SGLang and vLLM alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

from areal_lab.config.sections import MOST_INT32, check_temperature, check_top_p, shown
from areal_lab.control.events import Version
from areal_lab.data.images import PlacedImage, check_places
from areal_lab.data.stop_strings import check_stop_strings
from areal_lab.data.trajectory import FinishReason, Segment

NEVER: Final = -1e9
"""Bias of logits that makes a token's probability 0, in every type of floating-point numbers."""


class PauseMode(StrEnum):
    """Handling of running requests during a pause (names and meaning as in SGLang)."""

    RETRACT = "retract"
    """Keep the tokens, drop the KV cache; it is recomputed under the new weights. Exact."""
    ABORT = "abort"
    """End every running request with its tokens so far; the client resubmits it."""
    IN_PLACE = "in_place"
    """Keep the KV cache of the old weights. Fast and biased."""


class MemoryTag(StrEnum):
    """Memory that an engine can give back for a while (names as in SGLang)."""

    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of token sampling.

    Reported log-probs are of softmax(logits / temperature); with top-p or top-k this is over the
    whole vocabulary or over the remaining tokens (`Backend.whole_logprobs`).
    """

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 is the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens besides the model's end-of-sequence token; part of the output."""
    stop: tuple[str, ...] = ()
    """Strings that end a response as soon as they appear in its decoded text, in which special
    tokens are written by name. The token that completes one is part of the output, with any text
    behind it."""
    ignore_eos: bool = False
    """Only the length ends a response. Not together with `stop_token_ids` or `stop`, which
    engines then treat in different ways."""
    never: tuple[int, ...] = ()
    """Tokens that are never sampled; log-probs are over the others."""
    json_schema: str = ""
    """JSON schema, as JSON text, that the response must match; empty for any text. Log-probs are
    over the tokens that the schema allows: not the distribution of the policy, so such tokens
    must not be trained on."""
    seed: int = 0
    """Random numbers of a request depend on this and the position only, not on its batch."""

    def __post_init__(self) -> None:
        for name, whole, least in (
            ("max_new_tokens", self.max_new_tokens, 1),
            ("top_k", self.top_k, -1),
            *(("stop_token_ids", token, 0) for token in self.stop_token_ids),
            *(("never", token, 0) for token in self.never),
        ):
            if not least <= whole <= MOST_INT32:
                raise ValueError(
                    f"{name} is {shown(whole)}, but must be from {least} to {MOST_INT32}"
                )
        if self.top_k == 0:
            raise ValueError("top_k is 0, but must be -1 (all) or >= 1")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed is {shown(self.seed)}, but must be an integer of 64 bits")
        check_temperature(self.temperature)
        check_top_p(self.top_p)
        check_stop_strings(self.stop)
        for name, stops in (("stop_token_ids", self.stop_token_ids), ("stop", self.stop)):
            if self.ignore_eos and stops:
                raise ValueError(
                    f"{name} is {stops}, but with ignore_eos nothing but the length ends a "
                    "response; set only one of the two"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sample to generate."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    """At least one: SGLang's server dies of an empty prompt in a batch."""
    sampling: SamplingParams
    continued_tokens: int = 0
    """Number of last tokens of the prompt that are part of the continued response: a stop string
    may start in them."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the prompt, whose tokens have all placeholders of each."""

    def __post_init__(self) -> None:
        if not self.prompt_tokens:
            raise ValueError(
                f"request {self.request_id} has an empty prompt, but needs at least one token"
            )
        check_places(len(self.prompt_tokens), self.images, f"request {self.request_id}")
        if not 0 <= self.continued_tokens <= len(self.prompt_tokens):
            raise ValueError(
                f"request {self.request_id} continues {self.continued_tokens} tokens, but its "
                f"prompt has {len(self.prompt_tokens)}"
            )
        if self.continued_tokens and self.sampling.json_schema:
            raise ValueError(
                f"request {self.request_id} continues a response with a json_schema, but engines "
                "match only whole responses; start it over"
            )

    @property
    def response_so_far(self) -> tuple[int, ...]:
        """Part of the prompt that is the beginning of the response."""
        return self.prompt_tokens[len(self.prompt_tokens) - self.continued_tokens :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One generated sample, split where the version changed."""

    request_id: str
    segments: tuple[Segment, ...]
    """Empty only if the request was aborted before its first token."""
    finish_reason: FinishReason
    retractions: int
    """Interruptions that dropped the request's KV cache."""
    cached_tokens: int
    """Prompt tokens whose KV cache was shared with another request."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The generated tokens, in order."""
        return tuple(token for segment in self.segments for token in segment.tokens)


Ranked: TypeAlias = tuple[tuple[int, float], ...]
"""Tokens with their log-probs, most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """Log-probs of given tokens, each after all tokens before it, at temperature 1."""

    version: Version
    """Version of the weights."""
    logprobs: tuple[float | None, ...]
    """One for each token from the first scored one; None for the first of a sequence."""
    top: tuple[Ranked, ...]
    """The most likely tokens at the same places; empty where the log-prob is None."""


ALL_LINEAR: Final = "all-linear"
"""Target of adapters: every linear layer except the output layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """Shape of a LoRA adapter, which an engine needs before it gets one."""

    rank: int
    target_modules: tuple[str, ...]
    """The layers with an adapter, by the last parts of their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFolder:
    """A complete set of weights, or an adapter, on disk or in shared memory, ready to load."""

    path: Path
    version: Version
    checksum: str
    """Over the tensors' names, shapes, types and bytes; the engine recomputes and compares it."""
    size_bytes: int
    adapter: LoraShape | None = None
    """Set if this is a LoRA adapter to the weights that the engine started with."""


class Engine(Protocol):
    """An inference server as its client sees it."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Generate one sample per request; returns when the last one ended, in the given order."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; requests sent meanwhile wait."""
        ...

    async def resume(self) -> None:
        """Resume decoding, including the waiting requests."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; their `generate` returns the tokens so far."""
        ...

    async def load_weights(self, weights: WeightsFolder, mode: PauseMode) -> Version:
        """Load the weights and return the version that the engine then reports."""
        ...

    async def version(self) -> Version:
        """The version that the engine reports now."""
        ...

    async def release_memory(self, tag: MemoryTag) -> None:
        """Give memory back to the device. The engine must be paused with `abort`; its weights
        are lost, and must be loaded again before `resume`.
        """
        ...

    async def resume_memory(self, tag: MemoryTag) -> None:
        """Allocate memory again: first for the weights, and once they are loaded for the cache."""
        ...

    async def close(self) -> None:
        """Close the connection; the server keeps running."""
        ...


_NOTHING: Mapping[str, Generated] = MappingProxyType({})


_MOST_TOLD = 500
"""Maximum characters of an error from outside."""


def described(error: Exception) -> str:
    """Describe an unexpected error in one line of limited length."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.{_MOST_TOLD}}"


class EngineError(RuntimeError):
    """An engine refused or failed; the message names the engine and the request."""


class EngineUnreachable(EngineError):
    """The engine's server is gone, or did not reply in time."""

    def __init__(
        self,
        message: str,
        partial: Mapping[str, Generated] = _NOTHING,
        *,
        discarded_tokens: int = 0,
    ) -> None:
        super().__init__(message)
        self.partial = partial
        """The part received of each sample of a `generate` call, by request id: tokens, log-probs
        and versions. Samples without a token are left out; unfinished ones end with `abort`."""
        self.discarded_tokens = discarded_tokens
        """Further received tokens, discarded because the weights behind them are unknown."""


class RequestRefused(EngineError, ValueError):
    """The engine refuses this request only; it serves others."""


class CannotScore(EngineError, ValueError):
    """The engine cannot report log-probs of given tokens."""


class VersionMismatch(EngineError):
    """An engine holds other weights than it was sent."""
