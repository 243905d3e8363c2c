"""Schemas of requests over HTTP: enforced for evaluation keys, text for the model otherwise."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.byte_tokenizer import END, save_byte_tokenizer
from tests.engines.tiny import tiny_model
from tests.pipeline.gateway.test_completions import complete, evaluation_key
from tests.pipeline.gateway.test_serve import Client, model, plan_of, serving
from tests.pipeline.test_agent_program import TEMPLATE

__all__ = ["model"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
NOTE = "x-areal-lab-note"


@pytest.fixture
def byte_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose tokenizer grammars can read."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "bytes"
    found = tiny_model(vocab_size=258, eos_token_id=END, max_position_embeddings=2048)
    found.save_pretrained(folder)
    save_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


async def ask(client: Client, key: str, **fields: Any) -> tuple[Any, str]:
    body = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 200, **fields}
    reply = await client.post("/v1/chat/completions", key, body)
    return reply, reply.headers.get(NOTE, "")


def is_person(text: str) -> bool:
    value = json.loads(text)
    return sorted(value) == ["name", "old"] and isinstance(value["old"], bool)


def test_replies_of_evaluation_keys_match_their_schema(byte_model: Path) -> None:
    pytest.importorskip("llguidance")

    async def scenario() -> None:
        async with serving(plan_of(byte_model, "gconfig.max_new_tokens=200")) as (
            gateway,
            _,
            client,
        ):
            key = await evaluation_key(client)
            for fields in ({"response_format": FORM}, {"guided_json": SCHEMA, "n": 3}):
                reply, note = await ask(client, key, **fields)
                assert (reply.status_code, note) == (200, ""), reply.text
                for choice in reply.json()["choices"]:
                    assert choice["finish_reason"] == "stop"
                    assert is_person(choice["message"]["content"])
            body = {"input": "Who?", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}}
            reply = await client.post("/v1/responses", key, {**body, "max_output_tokens": 200})
            assert NOTE not in reply.headers
            assert is_person(reply.json()["output"][0]["content"][0]["text"])
            (one,) = await complete(client, key, "Who? ", max_tokens=200, guided_json=SCHEMA)
            assert is_person(one["text"])
            # Most likely tokens would be those without the schema.
            reply, note = await ask(
                client, key, response_format=FORM, logprobs=True, top_logprobs=2
            )
            assert "only sampled tokens have log-probs" in note
            content = reply.json()["choices"][0]["logprobs"]["content"]
            assert all(each["logprob"] <= 0 and not each["top_logprobs"] for each in content)
            # A reply that may call a tool is not JSON.
            reply, note = await ask(client, key, response_format=FORM, tools=[TOOL])
            assert "response_format is not enforced" in note
            # A key of a session is trained on.
            reply, note = await ask(client, await client.start(), response_format=FORM)
            assert "response_format is not enforced" in note
            # The engine refuses this request, and serves the next.
            reply, _ = await ask(client, key, guided_json={"not": {"type": "string"}})
            assert reply.status_code == 400, reply.text
            assert reply.headers["x-should-retry"] == "false"
            assert 'Unimplemented keys: ["not"]' in reply.json()["error"]["message"]
            assert gateway._service.sessions.counts["failed"] == 0
            reply, _ = await ask(client, key, max_tokens=2)
            assert reply.status_code == 200

    asyncio.run(scenario())


def test_a_tokenizer_without_bytes_has_no_grammar(model: Path) -> None:
    async def scenario() -> None:
        async with serving(plan_of(model)) as (_, _, client):
            key = await evaluation_key(client)
            reply, note = await ask(client, key, guided_json=SCHEMA, max_tokens=4)
            assert reply.status_code == 200
            assert "guided_json is not enforced" in note
            body = {"prompt": "1 + 2", "max_tokens": 2, "guided_json": SCHEMA}
            reply = await client.post("/v1/completions", key, body)
            assert reply.headers[NOTE] == "guided_json is ignored"

    asyncio.run(scenario())
