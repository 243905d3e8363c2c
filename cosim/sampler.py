"""Generate rows under one version at a time, with the embedded engine's batcher in this process.

    hold(weights, version)  -->  generate(rows)  -->  every row continues from its tokens to its end

Rows of different prefixes run in one batch. A row's random numbers depend on its seed and the
position only, so tokens that were cut off and are generated again under the same weights are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import Version
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.embedded.batcher import Batcher
from areal_lab.engines.embedded.loading import load_model
from areal_lab.engines.protocol import GenerateRequest, SamplingParams
from areal_lab.models.dtypes import compute_dtype
from cosim.rows import Row


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
        self._sampling = config.gconfig
        self._stops = codec.stops(config.gconfig.stop)
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
        numbers = self._sampling
        return SamplingParams(
            max_new_tokens=numbers.max_new_tokens - len(row.tokens),
            temperature=numbers.temperature,
            top_p=numbers.top_p,
            top_k=numbers.top_k,
            stop_token_ids=self._stops.token_ids,
            stop=self._stops.strings,
            seed=row.seed,
        )
