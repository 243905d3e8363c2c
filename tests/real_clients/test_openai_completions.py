"""OpenAI's client gets log-probs of plain text and of other tokens with an evaluation key."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.pipeline.gateway.test_completions import Plain, evaluation_key
from tests.pipeline.gateway.test_serve import model, plan_of, serving
from tests.real_clients.environments import CLIENTS
from tests.real_clients.lab import _output

__all__ = ["model"]
pytestmark = pytest.mark.agents

_PROGRAM: Final = Path(__file__).with_name("programs") / "use_openai_completions.py"
_PROMPTS: Final = ("Question: 12 + 30\nAnswer:", "one two")


def check_equal(found: Any, expected: Any) -> None:
    """Equal but for the last digits of log-probs, which depend on the batch of the engine."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            check_equal(found[name], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            check_equal(one, other)
    else:
        assert found == expected


def test_log_probs_are_those_of_the_model_streamed_or_not(model: Path, tmp_path: Path) -> None:
    async def scenario() -> dict[str, Any]:
        async with serving(plan_of(model, "rollout.dtype=float32")) as (_, _, client):
            given = {
                "url": str(client.http.base_url).rstrip("/"),
                "key": await evaluation_key(client),
                "prompts": _PROMPTS,
            }
            command = [str(CLIENTS.python_of("openai")), str(_PROGRAM)]
            found: dict[str, Any] = json.loads(await _output(command, json.dumps(given), tmp_path))
            return found

    found, plain = asyncio.run(scenario()), Plain(model)
    whole, streamed = found["completion"]
    check_equal(streamed, whole)
    for prompt, choice in zip(_PROMPTS, whole, strict=True):
        plain.check(choice, list(plain.codec.encode(prompt)), echo=True, top=3)
    whole, streamed = found["chat"]
    check_equal(streamed, whole)
    assert [len(each["top_logprobs"]) for each in whole] == [3] * len(whole) != []
