"""Images on real servers: the log-probs of transformers, before and after new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from areal_lab.data.images import EncodedPrompt, encode_prompt
from areal_lab.data.small_tasks import rendered_sums
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.engine_client import EngineError
from areal_lab.engines.launch.start import EngineProcess
from areal_lab.engines.protocol import (
    Generated,
    GenerateRequest,
    PauseMode,
    SamplingParams,
    WeightsFolder,
)
from areal_lab.engines.weights.folder import write_weights
from areal_lab.models.image_features import ImagePixels
from areal_lab.models.vision import read_placeholder_tokens, read_vision_facts
from areal_lab.training.model import load_policy
from tests.real_engines.conftest import EACH_ENGINE, Announce, start
from tests.real_engines.lab import BOUND_S
from tools.vision_model import write_untrained

T = TypeVar("T")
CLEARLY = 1e-3


@dataclass
class VisionLab:
    """A server with a vision-language model, which is in a folder with its tokenizer."""

    loop: asyncio.AbstractEventLoop
    engine: EngineProcess
    folders: list[Path]
    weights: list[WeightsFolder]
    """By version, like the folders; written in advance, so that loading is all that takes time."""

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(BOUND_S):
                return await scenario

        return self.loop.run_until_complete(bounded())

    async def load(self, version: int) -> None:
        """Load the weights of a version."""
        loaded = await self.engine.client.load_weights(self.weights[version], PauseMode.RETRACT)
        assert loaded == version

    def requests(self, new_tokens: int) -> list[GenerateRequest]:
        """Two pictures behind equal tokens, two samples of each, and one text."""
        folder = self.folders[0]
        codec, vision = TextCodec.load(folder), read_vision_facts(folder)
        shown = rendered_sums(size=8, eval_size=2, seed=5).train[:2]
        prompts = [encode_prompt(codec, vision, one.prompt, one.images) for one in shown]
        prompts.append(encode_prompt(codec, vision, "1+2="))
        return [
            GenerateRequest(
                request_id=f"{number}-{sample}-{new_tokens}",
                prompt_tokens=prompt.tokens,
                images=prompt.images,
                sampling=SamplingParams(
                    max_new_tokens=new_tokens,
                    ignore_eos=True,
                    seed=sample,
                    never=read_placeholder_tokens(folder),
                ),
            )
            for number, prompt in enumerate(prompts)
            for sample in range(2)
        ]

    def errors(self, request: GenerateRequest, result: Generated) -> list[float]:
        """Largest error of the log-probs of each segment, under the version that it names."""
        found, before = [], ()
        for part in result.segments:
            prompt = EncodedPrompt(request.prompt_tokens, request.images)
            exact = self._exact(part.version, prompt, before + part.tokens)[len(before) :]
            found.append((exact - torch.tensor(part.logprobs)).abs().max().item())
            before += part.tokens
        return found

    @torch.no_grad()
    def _exact(self, version: int, prompt: EncodedPrompt, response: tuple[int, ...]) -> Any:
        folder = self.folders[version]
        model: Any = load_policy(folder)
        model.set_attn_implementation("sdpa")
        pixels, ids = ImagePixels(folder), torch.tensor([prompt.tokens + response])
        shown: dict[str, Any] = {}
        if prompt.images:
            shown = {
                "pixel_values": torch.cat(
                    [pixels.of(i.image, i.rows, i.columns) for i in prompt.images]
                ),
                "image_grid_thw": torch.tensor(
                    [[1, 2 * i.rows, 2 * i.columns] for i in prompt.images]
                ),
                "mm_token_type_ids": (ids == model.config.image_token_id).int(),
            }
        logits = model(input_ids=ids, **shown).logits[0, len(prompt.tokens) - 1 : -1]
        logits[:, list(read_placeholder_tokens(folder))] = -torch.inf
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.fixture(scope="module", params=[EACH_ENGINE[name] for name in ("embedded", "sglang")])
def lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, announce: Announce
) -> Iterator[VisionLab]:
    root = tmp_path_factory.mktemp(f"vision-{request.param}")
    folders = [root / f"model-{seed}" for seed in range(2)]
    for seed, folder in enumerate(folders):
        write_untrained(folder, seed=seed)
    weights = [
        write_weights(load_policy(folder), root / "sent", version, dtype=torch.float32)
        for version, folder in enumerate(folders)
    ]
    with asyncio.Runner() as runner:
        engine = runner.run(
            start(
                request.param,
                weights[0],
                root / "engine.log",
                announce,
                tokenizer=folders[0],
                context_length=256,
            )
        )
        engine.client.note_tokenizer(folders[0])
        yield VisionLab(runner.get_loop(), engine, folders, weights)
        runner.run(engine.stop())


def test_logprobs_of_responses_to_images_are_those_of_transformers(lab: VisionLab) -> None:
    requests = lab.requests(8)
    results = lab.run(lab.engine.client.generate(requests))
    for one, result in zip(requests, results, strict=True):
        assert lab.errors(one, result)[0] < CLEARLY, one.request_id
    # The pictures differ, and so do the responses to them.
    assert results[0].segments[0].logprobs != results[2].segments[0].logprobs


def test_an_interrupted_response_sees_its_image_again(lab: VisionLab) -> None:
    async def scenario() -> list[Generated]:
        client, requests = lab.engine.client, lab.requests(150)
        running = asyncio.create_task(client.generate(requests))
        while not all(client.received_tokens(one.request_id) >= 5 for one in requests):
            assert not running.done(), "responses ended before the update"
            await asyncio.sleep(0)
        await lab.load(1)
        return await running

    requests = lab.requests(150)
    try:
        results = lab.run(scenario())
        for one, result in zip(requests, results, strict=True):
            assert [part.version for part in result.segments] == [0, 1]
            assert max(lab.errors(one, result)) < CLEARLY, one.request_id
    finally:
        lab.run(lab.load(0))


def test_placeholders_are_never_sampled(lab: VisionLab) -> None:
    """Of about 32 tokens with weights that are nearly alike, 300 draws would have some."""
    results = lab.run(lab.engine.client.generate(lab.requests(50)))
    sampled = {t for one in results for part in one.segments for t in part.tokens}
    assert not sampled & set(read_placeholder_tokens(lab.folders[0]))
    assert len(sampled) > 8


def test_a_picture_that_is_resized_in_another_way_is_an_error(lab: VisionLab) -> None:
    wrong = lab.requests(3)[0]
    placed = wrong.images[0]
    image = wrong.prompt_tokens[placed.start]
    larger = replace(
        wrong,
        prompt_tokens=(
            *wrong.prompt_tokens[: placed.end],
            image,
            image,
            *wrong.prompt_tokens[placed.end :],
        ),
        images=(replace(placed, rows=2),),
    )
    with pytest.raises(EngineError, match="it lost an image, resizes images in another way"):
        lab.run(lab.engine.client.generate([larger]))
