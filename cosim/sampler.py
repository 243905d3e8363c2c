"""Rows of tokens that real weights generate, one version at a time.

The embedded engine's batcher runs in this process.

Responses that real weights generate, and where another version takes over.

    simulated   |-------- version 3 --------|---- version 4 ----|      e.g. 9,275 tokens
    real        | 3   | 3   | 3   | 4   | 4   |                        five tokens

A real token takes the version that generated the last of the simulated tokens it stands for. When
weights change, the later real tokens are discarded and generated again: prompt and earlier tokens
continue under the new version with the same seed, as an interrupted request does on an engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from torch import Tensor

from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import GroupId, Version
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import FinishReason, Segment, Trajectory
from areal_lab.engines.embedded.batcher import Batcher
from areal_lab.engines.embedded.loading import load_model
from areal_lab.engines.protocol import GenerateRequest, SamplingParams
from areal_lab.models.folder import compute_dtype
from areal_lab.pipeline.rollout.groups import sampling_params
from areal_lab.runlog.records import Segments


class Sampler:
    """The inference engine of a co-simulated run."""

    def __init__(self, folder: Path, config: TrainConfig, codec: TextCodec) -> None:
        """Load the model of a Hugging Face folder; `hold` gives it weights."""
        model = load_model(folder, compute_dtype(config.rollout.dtype))
        self._batcher = Batcher(
            model,
            version="",
            max_running_requests=config.rollout.max_running_requests,
            codec=lambda: codec,
        )
        self._sampling = sampling_params(config.gconfig, codec, folder)
        self.version: Version | None = None
        """Version of the weights it holds."""

    @property
    def generated_tokens(self) -> int:
        """Since the start, those included that were cut off."""
        return self._batcher.generated_tokens

    def hold(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Copy weights into the model, unless it holds this version."""
        if version != self.version:
            self._batcher.replace_weights(weights, str(version), flush=True)
            self.version = version

    def generate(self, rows: Sequence[Row]) -> None:
        """Continue each row from its tokens to its end, all in one batch."""
        assert self.version is not None, "call hold first"
        samples = []
        for number, row in enumerate(rows):
            request = GenerateRequest(
                request_id=str(number),
                prompt_tokens=(*row.prompt_tokens, *row.tokens),
                sampling=self._params(row),
                continued_tokens=len(row.tokens),
            )
            self._batcher.check(request)
            samples.append(self._batcher.add(request))
        while self._batcher.running or self._batcher.waiting:
            self._batcher.step()
        for row, sample in zip(rows, samples, strict=True):
            row.tokens += sample.tokens
            row.logprobs += sample.logprobs
            row.versions += [self.version] * len(sample.tokens)
            row.finish_reason = sample.finish_reason

    def _params(self, row: Row) -> SamplingParams:
        left = self._sampling.max_new_tokens - len(row.tokens)
        return replace(self._sampling, max_new_tokens=left, seed=row.seed)


@dataclass(slots=True, eq=False)
class Row:
    """One sample while it is generated."""

    group: GroupId
    sample: int
    prompt_tokens: tuple[int, ...]
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while it has not ended."""
    reward: float = math.nan
    """Until it is scored; a trainer refuses it."""
    rewards: dict[str, float] = field(default_factory=dict)

    def cut(self, kept: int) -> None:
        """Discard all tokens but the first `kept`; the row has then not ended."""
        assert 0 <= kept < len(self.tokens)
        del self.tokens[kept:], self.logprobs[kept:], self.versions[kept:]
        self.finish_reason = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The tokens, split where the version changes."""
        ends = [len(list(members)) for _, members in groupby(self.versions)]
        parts, start = [], 0
        for count in ends:
            part = slice(start, start + count)
            tokens, logprobs = tuple(self.tokens[part]), tuple(self.logprobs[part])
            parts.append(Segment(tokens, logprobs, self.versions[start]))
            start += count
        return tuple(parts)

    def trajectory(self) -> Trajectory:
        """The row as the trainer takes it."""
        assert self.finish_reason is not None, "it has not ended"
        return Trajectory(
            group=self.group,
            sample=self.sample,
            prompt_tokens=self.prompt_tokens,
            parts=self.segments,
            finish_reason=self.finish_reason,
            reward=self.reward,
            rewards=self.rewards,
        )


def kept_by_share(real_tokens: int, simulated_until: int, simulated_tokens: int) -> int:
    """Real tokens that stay when a response is cut after a share of its simulated tokens.

    Real token i of n (from 1) stands for the simulated ones up to the share i/n.
    """
    return real_tokens * simulated_until // simulated_tokens


def kept_by_tokens(real_tokens: int, simulated_until: int, tokens_per_token: int) -> int:
    """The same if each real token stands for this many simulated ones; at least one is cut."""
    return min(simulated_until // tokens_per_token, real_tokens - 1)


def cuts(segments: Segments) -> list[tuple[Version, int]]:
    """For each version, the simulated tokens until its end; neighbors have different versions."""
    found: list[tuple[Version, int]] = []
    total = 0
    for version, tokens in segments:
        total += tokens
        if found and found[-1][0] == version:
            found.pop()
        found.append((version, total))
    return found
