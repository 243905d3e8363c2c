"""Requests with equal tokens share a row until they sample different tokens: nothing but the number
of computed tokens shows it.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.engines.embedded.batcher import Batcher
from areal_lab.engines.embedded.sampler import sample_tokens
from areal_lab.engines.protocol import GenerateRequest, PauseMode, SamplingParams
from areal_lab.engines.weights.folder import deduplicated_state
from tests.engines.embedded.test_batcher import FLOAT32_ERROR, batcher_of
from tests.engines.tiny import VOCABULARY, largest_error, request, run, tiny_model

LOW_TEMPERATURE = 0.3
"""At which the samples of a group stay together for some tokens."""


def group(
    name: str,
    prompt: list[int],
    count: int,
    new_tokens: int = 8,
    temperature: float = LOW_TEMPERATURE,
) -> list[GenerateRequest]:
    return [
        request(f"{name}-{i}", prompt, new_tokens - i % 3, seed=i, temperature=temperature)
        for i in range(count)
    ]


def check_rows(batcher: Batcher) -> None:
    """Every request is in its row, with the tokens of the others there."""
    assert sorted(map(id, batcher.running)) == sorted(id(s) for row in batcher._rows for s in row)
    for index, sharing in enumerate(batcher._rows):
        assert sharing
        assert {sample.row for sample in sharing} == {index}
        assert len({(s.request.prompt_tokens, *s.tokens) for s in sharing}) == 1


def test_a_group_is_computed_once_until_its_samples_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    batcher = batcher_of(model)
    forward, computed = type(batcher.model).forward, []

    def watched(self: Any, **inputs: Any) -> Any:
        computed.append(inputs["input_ids"].shape[1])
        return forward(self, **inputs)

    monkeypatch.setattr(type(batcher.model), "forward", watched)
    batcher.add_all(group("g", list(range(2, 12)), 8))
    batcher.step()
    assert computed == [10]
    rows = []
    while batcher.running:
        check_rows(batcher)
        rows.append(len(batcher._rows))
        batcher.step()
    assert computed[1:] == rows
    assert rows[0] < 8
    assert sum(rows) < sum(7 - i % 3 for i in range(8))


@settings(max_examples=12)
@given(st.integers(0, 10_000))
def test_tokens_and_logprobs_are_those_of_each_request_alone(seed: int) -> None:
    """With requests that are admitted, aborted and retracted meanwhile, and others that end."""
    chance, model = random.Random(seed), tiny_model()
    batcher = batcher_of(model, max_running_requests=chance.choice([3, 7, 64]))
    prompts = [
        [chance.randrange(2, VOCABULARY) for _ in range(chance.randrange(1, 12))] for _ in range(4)
    ]
    ended = {}
    for turn in range(6):
        batcher.add_all(group(str(turn), chance.choice(prompts), chance.randrange(1, 6)))
        for _ in range(chance.randrange(1, 4)):
            ended |= {sample.request.request_id: sample for sample in batcher.step()}
            check_rows(batcher)
        if chance.random() < 0.3 and batcher.running:
            name = chance.choice(batcher.running).request.request_id
            ended |= {sample.request.request_id: sample for sample in batcher.abort([name])}
            check_rows(batcher)
        if chance.random() < 0.3:
            batcher.pause(PauseMode.RETRACT)
            batcher.resume()
    ended |= run(batcher)
    alone = batcher_of(model, max_running_requests=1)
    for sample in ended.values():
        if sample.tokens:
            assert largest_error(model, sample, LOW_TEMPERATURE) < 4 * FLOAT32_ERROR
        alone.add(sample.request)
        (whole,) = run(alone).values()
        assert sample.tokens == whole.tokens[: len(sample.tokens)]


def test_rows_of_old_weights_split_with_their_keys_and_values() -> None:
    """After an `in_place` pause, as each request alone."""
    old, new = tiny_model(), tiny_model(seed=1)
    tokens = []
    for names in (range(6), *([i] for i in range(6))):
        batcher = batcher_of(old)
        requests = group("g", list(range(2, 12)), 6)
        batcher.add_all([requests[i] for i in names])
        batcher.step()
        batcher.pause(PauseMode.IN_PLACE)
        batcher.replace_weights(deduplicated_state(new), "1", flush=False)
        batcher.resume()
        tokens.append({name: sample.tokens for name, sample in run(batcher).items()})
    together, *each = tokens
    assert together == {name: t for alone in each for name, t in alone.items()}


@pytest.mark.parametrize("temperatures", [(1.0, 1.0, 1.0), (0.5, 1.0, 0.5), (0.0, 0.5, 0.0)])
def test_requests_with_one_row_of_logits_get_their_own_tokens(
    temperatures: tuple[float, ...],
) -> None:
    """Of any settings, as with a row each."""
    logits = torch.randn(2, 50, generator=torch.manual_seed(0))
    rows = [0, 1, 0, 0, 1, 0, 1, 0, 1]
    sampling = [
        SamplingParams(
            max_new_tokens=1,
            seed=i,
            temperature=temperatures[i % 3],
            top_p=0.8 if i == 4 else 1.0,
            top_k=5 if i == 5 else -1,
        )
        for i in range(9)
    ]
    positions = [i // 2 for i in range(9)]
    together = sample_tokens(logits, sampling, positions, rows)
    each = sample_tokens(logits[torch.tensor(rows)], sampling, positions)
    assert together.tokens.tolist() == each.tokens.tolist()
    torch.testing.assert_close(together.logprobs, each.logprobs)
    assert len(set(together.tokens.tolist())) > 2
