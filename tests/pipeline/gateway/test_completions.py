"""Completions of plain text over HTTP equal forward passes of the model; keys keep nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_lab.data.tokenize import TextCodec
from tests.pipeline.gateway.test_serve import Client, model, plan_of, serving

__all__ = ["model"]
TEXT = "Question: 12 + 30\nAnswer:"


async def evaluation_key(client: Client) -> str:
    reply = await client.post("/rl/start_session", client.admin, {"evaluation": True})
    assert reply.status_code == 200, reply.text
    key: str = reply.json()["api_key"]
    return key


async def complete(client: Client, key: str, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "m", "prompt": prompt, "temperature": 0, **fields}
    reply = await client.post("/v1/completions", key, body)
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["choices"]
    assert [each["index"] for each in found] == list(range(len(found)))
    return found


class Plain:
    """The model by transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.codec = TextCodec.load(folder)

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)

    def check(self, choice: dict[str, Any], prompt: list[int], *, echo: bool, top: int) -> None:
        """Every log-prob is that of a forward pass over prompt and greedy completion."""
        tokens, found = list(prompt), choice["logprobs"]
        while len(tokens) < len(prompt) + len(found["tokens"]) - len(prompt) * echo:
            tokens.append(int(self.logprobs(tokens)[-1].argmax()))
        rows = self.logprobs(tokens)
        first = 0 if echo else len(prompt)
        assert len(found["token_logprobs"]) == len(tokens) - first
        for place, logprob in enumerate(found["token_logprobs"], first):
            if place == 0:
                assert logprob is None
                continue
            row = rows[place - 1]
            assert logprob == pytest.approx(float(row[tokens[place]]), abs=1e-4)
            if top:
                best = found["top_logprobs"][place - first]
                assert max(best.values()) == pytest.approx(float(row.max()), abs=1e-4)
                assert logprob in best.values()


def test_log_probs_equal_a_forward_pass(model: Path) -> None:
    async def scenario() -> None:
        plain = Plain(model)
        tokens = list(plain.codec.encode(TEXT))
        async with serving(plan_of(model, "rollout.dtype=float32")) as (_, _, client):
            key = await evaluation_key(client)
            for top in (0, 1, 5):
                for most in (0, 1, 4):
                    (one,) = await complete(
                        client, key, TEXT, max_tokens=most, echo=True, logprobs=top
                    )
                    plain.check(one, tokens, echo=True, top=top)
                    assert one["text"].startswith(TEXT)
            (one,) = await complete(client, key, tokens, max_tokens=3, logprobs=2)
            plain.check(one, tokens, echo=False, top=2)
            many = await complete(client, key, [tokens, tokens[:5]], max_tokens=2, n=2, logprobs=1)
            for each, prompt in zip(many, [tokens, tokens, tokens[:5], tokens[:5]], strict=True):
                plain.check(each, prompt, echo=False, top=1)
            texts = [
                (await complete(client, key, TEXT, max_tokens=5, temperature=1, seed=seed))[0]
                for seed in (7, 7, 8)
            ]
            assert texts[0]["text"] == texts[1]["text"] != texts[2]["text"]

    asyncio.run(scenario())


def test_chats_report_the_most_likely_tokens(model: Path) -> None:
    async def scenario() -> None:
        async with serving(plan_of(model)) as (_, _, client):
            body = {
                "messages": [{"role": "user", "content": "1 + 2"}],
                **{"max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 3},
            }
            key = await evaluation_key(client)
            reply = (await client.post("/v1/chat/completions", key, body)).json()
            for each in reply["choices"][0]["logprobs"]["content"]:
                assert len(each["top_logprobs"]) == 3
                best = [other["logprob"] for other in each["top_logprobs"]]
                assert best == sorted(best, reverse=True)
                assert max(best) <= 1e-4
            kept = await client.post("/v1/chat/completions", await client.start(), body)
            assert "evaluation key" in kept.headers["x-areal-lab-note"]

    asyncio.run(scenario())


def test_an_evaluation_key_keeps_nothing(model: Path) -> None:
    async def scenario() -> None:
        async with serving(plan_of(model)) as (gateway, _, client):
            key = await evaluation_key(client)
            service = gateway._service
            chat = {"messages": [{"role": "user", "content": "1 + 2"}], "max_tokens": 1}
            for _ in range(40):
                await complete(client, key, "1 + 2", max_tokens=1, echo=True, logprobs=1)
                assert (await client.post("/v1/chat/completions", key, chat)).status_code == 200
            (session,) = service.sessions._by_id.values()
            assert session.interactions == {}
            assert not any(service._exchanges.values())
            assert len(gateway._sampling) <= 2
            assert service.statistics()["counts"]["generated_tokens"] == 80
            reward = await client.post("/rl/set_reward", key, {"reward": 1.0})
            assert "takes no rewards" in reply_error(reward)

    asyncio.run(scenario())


def reply_error(reply: Any) -> str:
    assert reply.status_code >= 400, reply.text
    message: str = reply.json()["error"]["message"]
    assert "\n" not in message
    return message


WRONG = (
    ({"prompt": []}, "none of them empty"),
    ({"prompt": [1, "a"]}, "none of them empty"),
    ({"prompt": [[1], []]}, "none of them empty"),
    ({"prompt": [-1]}, "prompt has token -1"),
    ({"prompt": [10**6]}, "prompt has token 1000000"),
    ({"best_of": 3}, "best_of is 3, but must equal n, which is 1"),
    ({"suffix": "x"}, "suffix is not served"),
    ({"logprobs": 21}, "logprobs is 21, but must be from 0 to 20"),
    ({"max_tokens": 10**6}, "max_tokens is 1000000, but must be at most"),
    ({"prompt": ["a"] * 1025}, "at most 1,024 completions"),
    ({"prompt": "a" * 5000}, "prompt is too long"),
)


def test_wrong_bodies_get_one_line(model: Path) -> None:
    async def scenario() -> None:
        async with serving(plan_of(model)) as (_, _, client):
            key = await evaluation_key(client)
            for fields, message in WRONG:
                reply = await client.post("/v1/completions", key, {"prompt": "a", **fields})
                assert message in reply_error(reply)
            reply = await client.post("/v1/completions", await client.start(), {"prompt": "a"})
            assert "need an evaluation key" in reply_error(reply)

    asyncio.run(scenario())
