"""Stop strings on SmolLM2, by servers with its tokenizer: every engine ends at the same token."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.dialect import Call, Reply
from areal_lab.engines.protocol import Generated, SamplingParams, WeightsFolder
from areal_lab.models.locate import resolve_model_path
from benchmarks.tiny_model import write_tiny_model
from tests.data.test_stop_strings import decoding_everything
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import do_run, tiny_config, trained_samples
from tests.real_engines.conftest import Announce, start
from tests.real_engines.engines import ENGINES
from tests.real_engines.lab import request, tokens_of

pytestmark = pytest.mark.sglang
TOKENS = 60
PROMPTS = (
    "The capital of France is Paris. The capital of Italy is",
    "Q: 2 + 2\nA: 4\nQ: 3 + 5\nA: 8\nQ: 4 + 4\nA:",
    "Emoji of a smile: 😀. Emoji of a heart: ❤️. More of them: 😀❤️😀❤️",
)


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_ends_at_the_token_that_completes_the_string(
    name: str, tmp_path: Path, announce: Announce
) -> None:
    folder = resolve_model_path("SmolLM2-135M-Instruct")
    codec = TextCodec.load(folder)
    aborts: list[Call] = []

    async def scenario() -> list[tuple[Generated, Generated, tuple[str, ...]]]:
        weights = WeightsFolder(path=folder, version=0, checksum="", size_bytes=0)
        engine = await start(name, weights, tmp_path / "engine.log", announce, tokenizer=folder)
        call = engine.client._connection.call

        async def watched(one: Call) -> Reply:
            if "abort" in one.path:
                aborts.append(one)
            return await call(one)

        engine.client._connection.call = watched  # type: ignore[method-assign]
        compared = []
        try:
            for text in PROMPTS:
                one = request("free", codec.encode(text), TOKENS, temperature=0.0)
                (free,) = await engine.client.generate([one])
                tokens = tokens_of(free)
                for stops in stop_strings(codec, tokens):
                    sampling = SamplingParams(
                        max_new_tokens=TOKENS, temperature=0.0, stop=stops, ignore_eos=False
                    )
                    stopping = replace(one, request_id="stopping", sampling=sampling)
                    compared.append((free, *(await engine.client.generate([stopping])), stops))
        finally:
            await engine.stop()
        return compared

    compared = asyncio.run(scenario())
    assert len(compared) >= 12
    for free, stopped, stops in compared:
        end = decoding_everything(codec, stops, tokens_of(free))
        assert (tokens_of(stopped), stops) == (tokens_of(free)[:end], stops)
        assert stopped.finish_reason == "stop"
    announce(f"{name}: {len(aborts)} of {len(compared)} samples were ended by the client\n")
    if name != "sglang":  # which decodes too few tokens for a string that was spelled out
        assert not aborts


def stop_strings(codec: TextCodec, tokens: list[int]) -> list[tuple[str, ...]]:
    """Strings of two to nine characters that the response has, some from inside its tokens."""
    text = codec.decode_all(tokens)
    places = [(at, at + length) for at, length in ((8, 2), (17, 4), (30, 9), (45, 3), (61, 5))]
    found = [text[start:end] for start, end in places if "\ufffd" not in text[start:end]]
    single = [one for one in found if one]
    return [*((one,) for one in single), tuple(single[-2:])]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_servers_of_a_run_find_its_stop_strings(tmp_path: Path, engine: str) -> None:
    """They get the tokenizer of the model; interrupted responses end there, too."""
    write_tiny_model(tmp_path / "model", initializer_range=0.2, head_size=32)
    stops = [f"{first}{second}" for first in "12" for second in "0123456789"]
    config = tiny_config(
        tmp_path,
        f"rollout.backend={engine}",
        f"gconfig.stop={json.dumps(stops)}",
        "gconfig.max_new_tokens=60",
        "total_train_steps=3",
        "eta=2",
    )
    folder = do_run(config, reward_fn=even_digits).folder
    flag = "tokenizer_path" if engine == "sglang" else "tokenizer"
    log = (folder / "logs" / "engine-0.log").read_text()
    assert re.search(rf"{flag}'?[=:] ?'{tmp_path / 'model'}'", log)
    codec = TextCodec.load(config.actor.path)
    samples = [sample for step in trained_samples(folder) for sample in step]
    texts = [
        codec.decode_all([token for part in sample["parts"] for token in part["tokens"]])
        for sample in samples
    ]
    stopped = [any(stop in text for stop in stops) for text in texts]
    assert sum(stopped) > 3
    assert not [text for text in texts if any(stop in text[:-1] for stop in stops)]
    for sample, text, has_one in zip(samples, texts, stopped, strict=True):
        ended = has_one or text.endswith("<end>")
        assert sample["finish_reason"] == ("stop" if ended else "length")
