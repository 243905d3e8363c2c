"""Responses with a JSON schema: they match it, and their log-probs are those of allowed tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.embedded.batcher import Batcher, Refused, Sample
from areal_lab.engines.embedded.grammar import Grammars
from areal_lab.engines.protocol import PauseMode
from tests.data.byte_tokenizer import END, byte_tokenizer
from tests.engines.embedded.test_batcher import batcher_of
from tests.engines.tiny import request, run, tiny_model

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

CODEC = TextCodec(byte_tokenizer())
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
SCHEMA = json.dumps(PERSON)


def model() -> PreTrainedModel:
    """Some rows of its logits have no token, as in padded models."""
    return tiny_model(vocab_size=264, eos_token_id=END)


def batcher() -> Batcher:
    return batcher_of(model(), codec=lambda: CODEC)


def one(name: str, seed: int, **sampling: Any) -> Any:
    values = {"json_schema": SCHEMA, "ignore_eos": False, **sampling}
    return request(name, [5, 6, 7], 120, seed=seed, **values)


def text(sample: Sample) -> str:
    return CODEC.decode(sample.tokens)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}, {"top_k": 3, "temperature": 2.0}])
def test_every_whole_response_matches_its_schema(sampling: dict[str, Any]) -> None:
    engine = batcher()
    for seed in range(12):
        engine.check(one(f"r{seed}", seed, **sampling))
        engine.add(one(f"r{seed}", seed, **sampling))
    samples = run(engine).values()
    whole = [sample for sample in samples if sample.finish_reason == "stop"]
    for sample in whole:
        value = json.loads(text(sample))
        jsonschema.validate(value, PERSON)
        assert text(sample).startswith('{"name": ')
    assert len(whole) >= 1
    for sample in samples:
        assert (sample.finish_reason == "stop") == (len(sample.tokens) < 120)


def test_requests_without_a_schema_are_as_without_the_others() -> None:
    """They share the row of their prompt with requests that have one."""
    alone, mixed = batcher(), batcher()
    for seed in range(4):
        alone.add(request(f"free{seed}", [5, 6, 7], 12, seed=seed))
        mixed.add(request(f"free{seed}", [5, 6, 7], 12, seed=seed))
        mixed.add(one(f"json{seed}", seed))
    expected, found = run(alone), run(mixed)
    for name, sample in expected.items():
        assert found[name].tokens == sample.tokens
        assert found[name].logprobs == pytest.approx(sample.logprobs, abs=1e-5)


@torch.no_grad()
def test_log_probs_are_over_the_allowed_tokens() -> None:
    engine = batcher()
    sample = engine.add(one("r", 3, temperature=1.5))
    run(engine)
    grammar = Grammars(lambda: CODEC, vocabulary=264, end_tokens=frozenset({END}))
    matcher = grammar.matcher(SCHEMA)
    ids = torch.tensor([[5, 6, 7, *sample.tokens]])
    rows = model()(ids).logits[0, 2:-1].float() / 1.5
    for row, token, logprob in zip(rows, sample.tokens, sample.logprobs, strict=True):
        allowed = torch.from_numpy(matcher.allowed())
        expected = row.masked_fill(~allowed, -torch.inf).log_softmax(-1)[token]
        assert logprob == pytest.approx(float(expected), abs=1e-4)
        matcher.accept(token)


def test_an_interruption_changes_nothing() -> None:
    undisturbed = batcher()
    free = undisturbed.add(one("r", 4))
    run(undisturbed)
    engine = batcher()
    sample = engine.add(one("r", 4))
    for _ in range(5):
        engine.step()
    engine.pause(PauseMode.RETRACT)
    engine.resume()
    run(engine)
    assert sample.tokens == free.tokens
    assert sample.finish_reason == free.finish_reason


def test_a_value_that_could_continue_ends_with_an_end_token() -> None:
    engine = batcher()
    for seed in range(8):
        schema = '{"type": "integer", "minimum": 0}'
        engine.add(one(f"r{seed}", seed, json_schema=schema, stop_token_ids=(262,)))
    for sample in run(engine).values():
        if sample.finish_reason == "stop":
            assert sample.last_token in (END, 262)
            sample.tokens.pop()
        assert int(text(sample)) >= 0


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"not": {}}', "json_schema is not supported: Unimplemented keys"),
        ('{"type": "nope"}', "json_schema is not supported: Invalid type"),
        ("[1]", "json_schema is not valid"),
        ("{", "json_schema is not valid"),
        ('{"$ref": "http://example.com/a.json"}', "json_schema is not supported"),
    ],
)
def test_a_schema_that_is_not_supported_is_refused(schema: str, message: str) -> None:
    with pytest.raises(Refused, match=f"request r: {message}") as raised:
        batcher().check(one("r", 0, json_schema=schema))
    assert "\n" not in str(raised.value)


def test_without_a_tokenizer_or_the_library_schemas_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = batcher_of(tiny_model())
    assert not bare.enforces_schemas()
    with pytest.raises(Refused, match="needs a tokenizer"):
        bare.check(one("r", 0))
    # A vocabulary without the tokenizer's last tokens.
    assert not batcher_of(tiny_model(), codec=lambda: CODEC).enforces_schemas()
    monkeypatch.setattr(Grammars, "installed", lambda: False)
    with pytest.raises(Refused, match="llguidance"):
        batcher().check(one("r", 0))
    assert not batcher().enforces_schemas()
