"""Log-probs of given tokens equal a plain forward pass."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from areal_lab.engines.client.dialect import ScoreRequest
from areal_lab.engines.client.sglang import SGLANG
from areal_lab.engines.embedded import wire
from areal_lab.engines.embedded.attention import IMPLEMENTATION
from areal_lab.engines.embedded.batcher import Batcher, Refused
from areal_lab.engines.embedded.scoring import score_tokens
from areal_lab.engines.protocol import EngineError
from tests.engines.tiny import CONTEXT, VOCABULARY, ragged_requests, request, run, tiny_model

TOKENS = [int(t) for t in torch.randint(2, VOCABULARY, (90,), generator=torch.manual_seed(3))]


def plain(kind: str, tokens: list[int]) -> torch.Tensor:
    """Log-probs of every token at every place, by transformers' own attention."""
    with torch.no_grad():
        return tiny_model(kind)(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("start", [0, 1, 40, 89])
@pytest.mark.parametrize("most_logits", [1, 7 * VOCABULARY, 2**28])
def test_scores_equal_a_forward_pass(kind: str, start: int, most_logits: int) -> None:
    batcher = Batcher(with_our_attention(kind), version="0")
    found = score_tokens(batcher.model, TOKENS, start=start, top=3, most_logits=most_logits)
    whole = plain(kind, TOKENS)
    assert len(found.logprobs) == len(found.top) == len(TOKENS) - start
    for index, (logprob, top) in enumerate(zip(found.logprobs, found.top, strict=True), start):
        if index == 0:
            assert logprob is None
            assert top == ()
            continue
        row = whole[index - 1]
        assert logprob == pytest.approx(float(row[TOKENS[index]]), abs=1e-4)
        assert [token for token, _ in top] == row.topk(3).indices.tolist()
        assert [value for _, value in top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def with_our_attention(kind: str) -> PreTrainedModel:
    model = tiny_model(kind)
    model.set_attn_implementation(IMPLEMENTATION)
    return model


def test_scoring_between_steps_changes_no_sample() -> None:
    requests = ragged_requests(6)
    alone = Batcher(with_our_attention("llama"), version="0")
    alone.add_all(requests)
    batcher = Batcher(with_our_attention("llama"), version="0")
    batcher.add_all(requests)
    wanted, found = run(alone), {}
    while batcher.running or batcher.waiting:
        found |= {sample.request.request_id: sample for sample in batcher.step()}
        batcher.score(TOKENS, start=0, top=1)
    assert {name: one.tokens for name, one in found.items()} == {
        name: one.tokens for name, one in wanted.items()
    }


def test_generated_tokens_have_the_log_probs_of_their_generation() -> None:
    batcher = Batcher(with_our_attention("llama"), version="0")
    batcher.add(request("a", TOKENS[:20], 12))
    sample = run(batcher)["a"]
    found = batcher.score([*TOKENS[:20], *sample.tokens], start=20, top=0)
    assert list(found.logprobs) == pytest.approx(sample.logprobs, abs=1e-4)


@pytest.mark.parametrize("start", [0, 1, 5])
def test_the_wire_carries_scores(start: int) -> None:
    asked = ScoreRequest(request_id="a", tokens=tuple(TOKENS), start=start, top=2)
    body = dict(SGLANG.score(asked).body)  # type: ignore[misc]
    assert wire.asks_for_scores(body)
    assert not wire.asks_for_scores({"input_ids": TOKENS, "return_logprob": True})
    read = wire.Score.model_validate(body)
    batcher = Batcher(with_our_attention("llama"), version="7")
    scored = batcher.score(read.input_ids, start=read.logprob_start_len + 1, top=2)
    reply = wire.scores(read, scored, batcher.version)
    found = SGLANG.read_scores(reply, asked)
    wanted = score_tokens(batcher.model, TOKENS, start=start, top=2)
    assert found.version == 7
    assert found.top == wanted.top
    assert found.logprobs == wanted.logprobs
    other = replace(asked, tokens=(*TOKENS[:-1], 2 if TOKENS[-1] != 2 else 3))
    with pytest.raises(EngineError, match="others"):
        SGLANG.read_scores(reply, other)
    reply["meta_info"]["input_token_logprobs"][-1][0] = None
    with pytest.raises(EngineError, match="without a log-prob"):
        SGLANG.read_scores(reply, asked)


def test_wrong_tokens_are_refused() -> None:
    batcher = Batcher(with_our_attention("llama"), version="0")
    with pytest.raises(Refused, match=f"token {VOCABULARY} cannot be scored"):
        batcher.score([5, VOCABULARY], start=0, top=0)
    with pytest.raises(Refused, match=f"the context is {CONTEXT}"):
        batcher.score([5] * (CONTEXT + 1), start=0, top=0)
    assert batcher.score([5] * CONTEXT, start=0, top=0).logprobs[0] is None


def test_scores_that_are_not_finite_are_an_error() -> None:
    model = with_our_attention("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        score_tokens(model, TOKENS, start=0, top=0)
