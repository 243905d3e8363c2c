"""Log-probs of a real model: engines against transformers, both against float64.

Two float32 computations of 30 layers in another order differ by more than 1e-5, each from the other
and each from the exact value. So the measure is float64: an engine's error may be a small multiple
(`Facts.smollm2_ratio`) of that of transformers' own float32.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from areal_lab.engines.launch.start import EngineProcess
from areal_lab.engines.protocol import (
    Generated,
    GenerateRequest,
    RequestRefused,
    WeightsFolder,
)
from areal_lab.models.locate import resolve_model_path
from tests.real_engines.conftest import Announce, start
from tests.real_engines.engines import ENGINES
from tests.real_engines.lab import plain_logprobs, request, tokens_of

pytestmark = pytest.mark.sglang
PROMPTS = [[504, 3575, 282, 4649, 314], [28, 198, 1], [9690, 198, 2683, 359, 253], [504]]
TOKENS = 40


@pytest.fixture(scope="module")
def folder() -> Path:
    """The converted model."""
    return resolve_model_path("SmolLM2-135M-Instruct")


@pytest.mark.parametrize("name", ENGINES)
def test_logprobs_are_as_exact_as_those_of_transformers(
    name: str, folder: Path, tmp_path: Path, announce: Announce
) -> None:
    async def scenario() -> list[Generated]:
        weights = WeightsFolder(path=folder, version=0, checksum="", size_bytes=0)
        engine: EngineProcess = await start(name, weights, tmp_path / "engine.log", announce)
        try:
            return await engine.client.generate(
                [request(f"r{index}", prompt, TOKENS) for index, prompt in enumerate(PROMPTS)]
            )
        finally:
            await engine.stop()

    results = asyncio.run(scenario())
    reported = torch.cat([torch.tensor(result.segments[0].logprobs) for result in results])
    single, exact = (scored(folder, dtype, results) for dtype in (torch.float32, torch.float64))
    own = (single - exact).abs().max().item()
    error = (reported - exact).abs().max().item()
    difference = (reported - single).abs().max().item()
    announce(
        f"SmolLM2-135M-Instruct, {reported.numel()} tokens, largest differences of log-probs: "
        f"{name} from transformers {difference:.1e}; from float64 {error:.1e}, "
        f"transformers from float64 {own:.1e}\n"
    )
    assert error <= ENGINES[name].smollm2_ratio * own


SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
    "required": ["capital", "large"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "vllm"])
def test_responses_match_their_schema_and_others_are_free(
    name: str, folder: Path, tmp_path: Path, announce: Announce
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "The capital of France?"}],
        add_generation_prompt=True,
        return_dict=False,
    )

    def asked(seed: int, schema: str) -> GenerateRequest:
        values = {"json_schema": schema, "ignore_eos": False, "seed": seed}
        return request(f"{seed} {schema}"[:8], prompt, TOKENS, **values)

    async def scenario() -> list[list[Generated]]:
        weights = WeightsFolder(path=folder, version=0, checksum="", size_bytes=0)
        engine = await start(name, weights, tmp_path / "log", announce, tokenizer=folder)
        try:
            assert await engine.client.enforces_schemas()
            schema = json.dumps(SCHEMA)
            samples = [
                await engine.client.generate([asked(seed, schema) for seed in range(4)]),
                await engine.client.generate([asked(seed, "") for seed in range(4)]),
            ]
            with pytest.raises(RequestRefused, match="schema"):
                await engine.client.generate([asked(0, '{"type": "nope"}')])
            return samples
        finally:
            await engine.stop()

    bound, free = asyncio.run(scenario())
    for sample in bound:
        logprobs = [one for segment in sample.segments for one in segment.logprobs]
        assert max(logprobs) == 0, "of a token that the schema requires"
        text = tokenizer.decode(tokens_of(sample), skip_special_tokens=True)
        told = json.loads(text)
        assert text == json.dumps(told, ensure_ascii=False), "without white space that is free"
        assert set(told) == {"capital", "large"}
        assert isinstance(told["large"], bool)
    texts = [tokenizer.decode(tokens_of(sample)) for sample in free]
    announce(f"free: {texts}\n")
    assert not any(text.startswith("{") for text in texts)


def scored(folder: Path, dtype: torch.dtype, results: list[Generated]) -> Tensor:
    """Log-probs of the sampled tokens by transformers in this type, concatenated."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for module in model.modules():
        # transformers' norms compute in float32, whatever the type of the model.
        if dtype is torch.float64 and isinstance(module, LlamaRMSNorm):
            module.forward = partial(norm, module)
    return torch.cat(
        [
            plain_logprobs(model, prompt, tokens_of(result))
            for prompt, result in zip(PROMPTS, results, strict=True)
        ]
    )


def norm(module: LlamaRMSNorm, hidden: Tensor) -> Tensor:
    """The norm of a Llama in the type of its input."""
    mean_square = hidden.pow(2).mean(-1, keepdim=True)
    return module.weight * hidden * torch.rsqrt(mean_square + module.variance_epsilon)
