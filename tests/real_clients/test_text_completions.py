"""litellm and LlamaIndex complete plain texts with an evaluation key."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.pipeline.gateway.test_completions import Plain, evaluation_key
from tests.pipeline.gateway.test_serve import model, plan_of, serving
from tests.real_clients.environments import CLIENTS
from tests.real_clients.lab import _output

__all__ = ["model"]
pytestmark = pytest.mark.agents

_PROMPTS: Final = ("Question: 12 + 30\nAnswer:", "1 + 2")


def said_by(name: str, model: Path, folder: Path) -> Any:
    """What the program of a client was told about `_PROMPTS`."""
    program = Path(__file__).with_name("programs") / f"use_{name.replace('-', '_')}.py"

    async def scenario() -> Any:
        async with serving(plan_of(model, "rollout.dtype=float32")) as (_, _, client):
            given = {
                "url": str(client.http.base_url).rstrip("/"),
                "key": await evaluation_key(client),
                "prompts": _PROMPTS,
                "libraries": [path for path in sys.path if path.endswith("site-packages")],
            }
            command = [str(CLIENTS.python_of(name)), str(program)]
            return json.loads(await _output(command, json.dumps(given), folder))

    return asyncio.run(scenario())


def test_litellm_gets_the_log_probs_of_the_model(model: Path, tmp_path: Path) -> None:
    found, plain = said_by("litellm", model, tmp_path), Plain(model)
    for prompt, choice, streamed in zip(_PROMPTS, found["choices"], found["streamed"], strict=True):
        plain.check(choice, list(plain.codec.encode(prompt)), echo=True, top=3)
        assert choice["text"].startswith(prompt)
        assert streamed == choice["text"]


def test_llama_index_gets_the_text_and_the_log_probs_of_the_model(
    model: Path, tmp_path: Path
) -> None:
    found, plain = said_by("llama-index", model, tmp_path), Plain(model)
    for prompt, one in zip(_PROMPTS, found, strict=True):
        assert one["text"]
        assert one["streamed"] == one["text"]
        tokens = list(plain.codec.encode(prompt))
        best = plain.logprobs(tokens)[-1].topk(3).values.tolist()
        first = sorted((each["logprob"] for each in one["logprobs"][:3]), reverse=True)
        assert first == pytest.approx(best, abs=1e-4)
