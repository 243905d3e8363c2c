"""One running server, and what the tests of the contract do with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.launch.start import EngineProcess
from areal_lab.engines.protocol import (
    Generated,
    GenerateRequest,
    PauseMode,
    SamplingParams,
    WeightsFolder,
)
from areal_lab.engines.weights.folder import write_weights
from areal_lab.functional.logprobs.cutoff import Cutoff
from tests.real_engines.engines import Facts

T = TypeVar("T")
VOCABULARY = 97
END_TOKEN = 1
CONTEXT = 1024
MOST_TRIES = 20
LONG = 300
"""Tokens of a response that is still running when something happens to it."""
LONGEST = 900
"""The same, where what happens takes more than one call: vLLM may be through with 300 by then."""
BOUND_S = 120.0
"""Timeout of a test of a tiny model on a busy machine."""


def tiny_model(seed: int, *, intermediate_size: int = 96) -> PreTrainedModel:
    """Two layers of random weights, large enough that distributions are uneven; heads of 32, which
    every engine has kernels for; an output layer that is the embeddings, which not every engine
    gives new weights by itself."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=END_TOKEN,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.mul_(3)
    return model.eval()


@dataclass
class Lab:
    """A server that runs for the whole session, and the models it can be given."""

    facts: Facts
    loop: asyncio.AbstractEventLoop
    engine: EngineProcess
    root: Path
    models: dict[int, PreTrainedModel]
    """By seed, which is also the version."""
    written: dict[int, WeightsFolder] = field(default_factory=dict)
    fresh: int = 0

    @property
    def client(self) -> EngineClient:
        """The client that the server was started with."""
        return self.engine.client

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        """Run a scenario within the bound."""

        async def bounded() -> T:
            async with asyncio.timeout(BOUND_S):
                return await scenario

        return self.loop.run_until_complete(bounded())

    def weights(self, version: int) -> WeightsFolder:
        """The folder of a version, written once."""
        if version not in self.written:
            folder = self.root / f"from-{version}"
            self.written[version] = write_weights(
                self.models[version], folder, version, dtype=torch.float32
            )
        return self.written[version]

    def fresh_weights(self, version: int) -> WeightsFolder:
        """A copy in a separate folder, to be damaged."""
        folder = self.root / f"fresh-{self.fresh}"
        self.fresh += 1
        return write_weights(self.models[version], folder, version, dtype=torch.float32)

    def unfit_weights(self, version: int) -> WeightsFolder:
        """A whole folder whose last layers are narrower than those of the model."""
        folder = self.root / f"unfit-{self.fresh}"
        self.fresh += 1
        model = tiny_model(version, intermediate_size=64)
        return write_weights(model, folder, version, dtype=torch.float32)

    async def load(self, version: int, mode: PauseMode = PauseMode.RETRACT) -> None:
        """Load a version."""
        assert await self.client.load_weights(self.weights(version), mode) == version

    async def begin_again(self) -> None:
        """Version 0, not paused."""
        await self.client.resume()
        await self.load(0)

    @asynccontextmanager
    async def running(
        self, requests: Sequence[GenerateRequest], *, tokens: int = 5
    ) -> AsyncIterator[asyncio.Task[list[Generated]]]:
        """Requests on their way, each seen to have some tokens.

        On a busy machine they may end before they are seen; then they are sent again.
        """
        task = asyncio.create_task(self.client.generate(requests))
        tries = 1
        try:
            while not all(
                self.client.received_tokens(one.request_id) >= tokens for one in requests
            ):
                if task.done():
                    assert tries < MOST_TRIES, "all tries ended before they were seen"
                    task.result()  # raises what went wrong, if something did
                    task, tries = asyncio.create_task(self.client.generate(requests)), tries + 1
                await self.client.ready()  # paces the loop
            yield task
            await task
        finally:
            task.cancel()

    def errors(self, version: int, prompt: Sequence[int], result: Generated) -> Tensor:
        """For each token of a response, how far its log-prob is from that of a plain forward pass
        of this version over the whole sequence."""
        reported = [value for segment in result.segments for value in segment.logprobs]
        plain = plain_logprobs(self.models[version], prompt, tokens_of(result))
        return (plain - torch.tensor(reported)).abs()


def request(name: str, prompt: Sequence[int], count: int, **sampling: Any) -> GenerateRequest:
    """A request that ends only at its length, unless set otherwise."""
    stops = sampling.get("stop_token_ids") or sampling.get("stop")
    values = {"ignore_eos": not stops, **sampling}
    return GenerateRequest(
        request_id=name,
        prompt_tokens=tuple(prompt),
        sampling=SamplingParams(max_new_tokens=count, **values),
    )


def tokens_of(result: Generated) -> list[int]:
    """All tokens of a response."""
    return [token for segment in result.segments for token in segment.tokens]


def versions_of(result: Generated) -> list[int]:
    """The version of each segment."""
    return [segment.version for segment in result.segments]


@torch.no_grad()
def plain_logprobs(
    model: PreTrainedModel,
    prompt: Sequence[int],
    tokens: Sequence[int],
    temperature: float = 1.0,
    keep: Cutoff | None = None,
) -> Tensor:
    """Log-probs of `tokens` after `prompt`, by one unbatched forward pass; of the tokens that
    `keep` leaves, if there is such a rule."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    if keep is not None:
        logits = logits.masked_fill(logits < keep(logits)[:, None], -torch.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
