"""Log-probs of a real model: engines against transformers, both against float64.

Two float32 computations of 30 layers in another order differ by more than 1e-5, each from the other
and each from the exact value. So the measure is float64: an engine's error may be a small multiple
(`Facts.smollm2_ratio`) of that of transformers' own float32.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from areal_lab.engines.launch.start import EngineProcess
from areal_lab.engines.protocol import Generated, WeightsFolder
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
