"""Continuous batching: who runs, what one forward pass computes, when a request ends.

    waiting --admit--> running: rows 0 .. n-1 of the cache --finish--> gone, last row fills the gap
       ^------retract------'

A step is one forward pass over the last token of every running request and the prompts of those
admitted with it. Of an admitted prompt only what no running request has computed under the same
weights is computed; the rest is copied. Not thread-safe: the scheduler's thread owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from areal_lab.data.trajectory import FinishReason
from areal_lab.engines.embedded.attention import (
    Chunk,
    Pack,
    PrefixCopy,
    chunk_mask,
    decode_blocks,
)
from areal_lab.engines.embedded.cache import KVCache
from areal_lab.engines.embedded.loading import end_token_ids, replace_parameters
from areal_lab.engines.embedded.sampler import sample_tokens
from areal_lab.engines.protocol import GenerateRequest, PauseMode

PREFILL_TOKENS = 4096
"""Prompt tokens admitted into one step, so that a flood of prompts does not hold up those that
run; a single longer prompt is taken whole."""


class Refused(ValueError):
    """What was asked for cannot be done; the message is for whoever asked."""


@dataclass(slots=True)
class VersionSpan:
    """Output tokens `start` .. `end - 1` were computed by these weights."""

    version: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Sample:
    """One request on its way."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    retractions: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that were copied at the first admission."""
    prefilled: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The tokens computed at the last admission, which others may share."""
    row: int = -1
    length: int = 0
    """Tokens in the cache: all but the last one."""
    prefix_era: int = -1
    """Others may copy from this row while the batcher's era is the same."""

    @property
    def last_token(self) -> int:
        """What the next step computes."""
        return self.tokens[-1]

    def record(self, token: int, logprob: float, version: str) -> None:
        """Append a drawn token, stamped with the version that computed it."""
        index = len(self.tokens)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = index + 1
        else:
            self.spans.append(VersionSpan(version, index, index + 1))


class Batcher:
    """The running batch, its cache and the model."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        version: str,
        max_running_requests: int = 64,
        context_length: int | None = None,
    ) -> None:
        config = model.config
        heads = config.num_attention_heads
        self.model = model
        self._device = model.device
        self._end_tokens = end_token_ids(model)
        self._cache = KVCache(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=model.dtype,
            device=model.device,
        )
        self._era = 0
        self.version = version
        """Version of the weights in the model."""
        self.vocabulary: int = config.vocab_size
        self.context_length: int = min(
            context_length or config.max_position_embeddings, config.max_position_embeddings
        )
        self.max_running_requests = max_running_requests
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        """In the order of their rows."""
        self.paused = False
        self.generated_tokens = 0
        """Since the start."""
        self.prompt_tokens = 0
        """Computed, not copied, since the start."""
        self.prompt_pairs = 0
        """(query, key) pairs of their attention, since the start."""
        self.context_tokens = 0
        """Read by the steps since the start: the sum of what the sequences of each had."""

    @property
    def cache_bytes(self) -> int:
        """Memory held for keys and values."""
        return self._cache.size_bytes

    # --- requests ---

    def check(self, request: GenerateRequest) -> None:
        """Say in one line why a request cannot be served.

        Raises:
            Refused: if so.
        """
        prompt, new_tokens = request.prompt_tokens, request.sampling.max_new_tokens
        worst = max(prompt) if min(prompt) >= 0 else min(prompt)
        if not 0 <= worst < self.vocabulary:
            raise Refused(
                f"request {request.request_id} has token {worst}, "
                f"but the vocabulary is 0 .. {self.vocabulary - 1}"
            )
        if len(prompt) + new_tokens > self.context_length:
            raise Refused(
                f"request {request.request_id} needs {len(prompt)} + {new_tokens} tokens "
                f"(prompt and max_new_tokens), but the context is {self.context_length}"
            )

    def add(self, request: GenerateRequest) -> Sample:
        """Queue a checked request."""
        sample = Sample(request)
        self.waiting.append(sample)
        return sample

    def abort(self, request_ids: Iterable[str] | None = None) -> list[Sample]:
        """End these requests (all if `None`) with what they have; returns them."""
        selected = None if request_ids is None else set(request_ids)
        ended = [
            sample
            for sample in (*self.running, *self.waiting)
            if selected is None or sample.request.request_id in selected
        ]
        for sample in ended:
            sample.finish_reason = "abort"
        self.waiting = deque(s for s in self.waiting if s.finish_reason is None)
        self._drop_finished()
        return ended

    # --- pauses and weights ---

    def pause(self, mode: PauseMode) -> list[Sample]:
        """Stop decoding; returns the requests that this ended (`abort` only)."""
        self.paused = True
        match mode:
            case PauseMode.ABORT:
                return self.abort()
            case PauseMode.RETRACT:
                for sample in reversed(self.running):
                    sample.retractions += 1
                    sample.row, sample.length = -1, 0
                    self.waiting.appendleft(sample)
                self.running = []
            case PauseMode.IN_PLACE:
                pass
        return []

    def resume(self) -> None:
        """Go on."""
        self.paused = False

    def flush(self) -> None:
        """Forget what could be shared.

        Raises:
            Refused: if requests hold keys and values that would have to go.
        """
        if self.running:
            raise Refused(
                f"the cache cannot be flushed while {len(self.running)} requests live in it; "
                "pause with mode retract or abort first, or load with flush_cache=false"
            )
        self._cache.release()

    def replace_weights(self, tensors: Mapping[str, Tensor], version: str, *, flush: bool) -> None:
        """Copy new weights into the model: all or, if refused, none.

        Without `flush`, running requests (after an `in_place` pause) go on with the keys and
        values of the old weights; no later request shares those.

        Raises:
            Refused: if the tensors do not fit, or a flush is asked for while requests are running.
        """
        if flush:
            self.flush()
        replace_parameters(self.model, tensors)
        self._era += 1
        self.version = version

    # --- the step ---

    @torch.inference_mode()
    def step(self, *, admit: bool = True) -> list[Sample]:
        """One forward pass: a token for every running request; returns those that ended.

        Args:
            admit: whether waiting requests may join.
        """
        decoding = len(self.running)
        tokens, sources, chunks, copies = self._admit() if admit else ([], [], [], [])
        if not self.running:
            return []
        self._reserve(decoding)
        logits = self._forward(decoding, tokens, sources, chunks, copies)
        for sample in self.running[:decoding]:
            sample.length += 1
        self.context_tokens += sum(sample.length for sample in self.running)
        sampled = sample_tokens(
            logits,
            [sample.request.sampling for sample in self.running],
            [sample.length for sample in self.running],
        )
        pairs = zip(sampled.tokens.tolist(), sampled.logprobs.tolist(), strict=True)
        for sample, (token, logprob) in zip(self.running, pairs, strict=True):
            sample.record(token, logprob, self.version)
            sample.finish_reason = self._finish_reason(sample)
        self.generated_tokens += len(self.running)
        self.prompt_tokens += len(tokens)
        self.prompt_pairs += sum(c.count * (2 * c.start + c.count + 1) // 2 for c in chunks)
        return self._drop_finished()

    def _admit(self) -> tuple[list[int], list[int], list[Chunk], list[PrefixCopy]]:
        """Move waiting requests to new rows.

        Returns: the prompt tokens to compute; for each new row the packed index (counted from the
        first of these tokens) of the one whose logits it samples from; where they go; what is
        copied first.
        """
        tokens: list[int] = []
        last_index: list[int] = []
        chunks: list[Chunk] = []
        copies: list[PrefixCopy] = []
        shareable = [s for s in self.running if s.prefix_era == self._era]
        same: dict[bytes, tuple[Sample, int]] = {}
        while self.waiting and len(self.running) < self.max_running_requests:
            sample = self.waiting[0]
            full = np.array((*sample.request.prompt_tokens, *sample.tokens), dtype=np.int64)
            if tokens and len(tokens) + len(full) > PREFILL_TOKENS and full.tobytes() not in same:
                break
            self.waiting.popleft()
            twin = same.get(full.tobytes())
            source: Sample | None
            if twin is not None:
                (source, index), shared = twin, len(full)
            else:
                source, shared = _longest_common_prefix(full, shareable)
                count = len(full) - shared
                chunks.append(
                    Chunk(
                        row=len(self.running),
                        start=shared,
                        count=count,
                        offset=len(tokens),
                        mask=chunk_mask(shared, count, self._device),
                    )
                )
                tokens.extend(full[shared:].tolist())
                index = len(tokens) - 1
                same[full.tobytes()] = (sample, index)
                shareable.append(sample)
            last_index.append(index)
            sample.row, sample.length, sample.prefilled = len(self.running), len(full), full
            sample.prefix_era = self._era
            if sample.cached_tokens is None:
                sample.cached_tokens = shared
            self.running.append(sample)
            if shared and source is not None:
                _append_copy(copies, source.row, sample.row, shared)
        return tokens, last_index, chunks, copies

    def _reserve(self, decoding: int) -> None:
        # A decoding row gets one more token in this step; a new one is as long as its prompt.
        longest = max((s.length for s in self.running[:decoding]), default=0)
        needed = max(longest + 1, *(s.length for s in self.running), 1)
        self._cache.reserve(len(self.running), needed, live=decoding, longest=longest)

    def _forward(
        self,
        decoding: int,
        tokens: list[int],
        sources: list[int],
        chunks: list[Chunk],
        copies: list[PrefixCopy],
    ) -> Float[Tensor, "N V"]:
        old = self.running[:decoding]
        starts = [sample.length for sample in old]
        positions = starts + [p for c in chunks for p in range(c.start, c.end)]
        pack = Pack(
            cache=self._cache,
            decode_rows=self._tensor(list(range(decoding))),
            decode_positions=self._tensor(starts),
            blocks=decode_blocks([start + 1 for start in starts], self._device),
            chunks=tuple(
                Chunk(
                    row=c.row,
                    start=c.start,
                    count=c.count,
                    offset=c.offset + decoding,
                    mask=c.mask,
                )
                for c in chunks
            ),
            copies=tuple(copies),
        )
        # Twins share one row of logits.
        rows = [*range(decoding), *(decoding + index for index in sources)]
        unique = sorted(set(rows))
        output = self.model(
            input_ids=self._tensor([sample.last_token for sample in old] + tokens)[None],
            position_ids=self._tensor(positions)[None],
            use_cache=False,
            logits_to_keep=self._tensor(unique),
            pack=pack,
        )
        logits: Tensor = output.logits[0]
        if len(unique) == len(rows):
            return logits
        at = {row: index for index, row in enumerate(unique)}
        return logits[self._tensor([at[row] for row in rows])]

    def _finish_reason(self, sample: Sample) -> FinishReason | None:
        sampling, token = sample.request.sampling, sample.last_token
        if token in sampling.stop_token_ids:
            return "stop"
        if token in self._end_tokens and not sampling.ignore_eos:
            return "stop"
        return "length" if len(sample.tokens) == sampling.max_new_tokens else None

    def _drop_finished(self) -> list[Sample]:
        """Free the rows of requests that ended, last first, and keep the rest compact."""
        ended = [sample for sample in self.running if sample.finish_reason is not None]
        for sample in reversed(ended):
            last = self.running.pop()
            if last is not sample:
                self._cache.move(last.row, sample.row, last.length)
                last.row = sample.row
                self.running[last.row] = last
        if not self.running and self._cache.size_bytes > _KEPT_CACHE_BYTES:
            self._cache.release()
        return ended

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


_KEPT_CACHE_BYTES = 1 << 30
"""An empty cache larger than this is given back to the system."""


def _longest_common_prefix(
    tokens: np.ndarray, samples: Iterable[Sample]
) -> tuple[Sample | None, int]:
    """The sample that shares the longest prefix, and its length: at most all but the last token,
    whose logits are needed."""
    best: Sample | None = None
    shared = 0
    for sample in samples:
        limit = min(len(tokens) - 1, len(sample.prefilled))
        if limit <= shared or tokens[shared] != sample.prefilled[shared]:
            continue
        different = tokens[:limit] != sample.prefilled[:limit]
        length = int(different.argmax()) if different.any() else limit
        if length > shared:
            best, shared = sample, length
    return best, shared


def _append_copy(copies: list[PrefixCopy], source: int, target: int, tokens: int) -> None:
    if copies:
        last = copies[-1]
        if (last.source, last.last + 1, last.tokens) == (source, target, tokens):
            copies[-1] = PrefixCopy(source, last.first, target, tokens)
            return
    copies.append(PrefixCopy(source, target, target, tokens))
