"""Rows that are cut and continued equal an interrupted engine, and one token at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_lab.data.problems import PromptSource, sample_seed
from areal_lab.data.sources import load_problems
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.embedded.sampler import uniform
from areal_lab.engines.protocol import GenerateRequest, PauseMode, SamplingParams
from areal_lab.models.locate import INCLUDED_MODELS
from cosim.load import load_cosim
from cosim.sampler import Row, Sampler

FOLDER = INCLUDED_MODELS["Sorter-102K"]
CONFIG = load_cosim("cosim_sorting", ["seed=5"])
CODEC = TextCodec.load(FOLDER)


@cache
def weights(version: int) -> Mapping[str, Tensor]:
    """The model, moved at random by each version."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    generator = torch.Generator().manual_seed(version)
    return {
        name: value + version * 0.02 * torch.randn(value.shape, generator=generator)
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(FOLDER, CONFIG, CODEC)


def rows(groups: int, samples: int = 4) -> list[Row]:
    source = PromptSource(load_problems(CONFIG.dataset, seed=5).train, seed=5)
    return [
        Row(g, s, CODEC.encode(source[g].prompt), sample_seed(5, "train", g, s))
        for g in range(groups)
        for s in range(samples)
    ]


def under(sampler: Sampler, version: int, some: Sequence[Row]) -> None:
    sampler.hold(weights(version), version)
    sampler.generate(some)


def one_token_at_a_time(row: Row) -> tuple[list[int], list[float]]:
    """Tokens and log-probs without a cache, a batch or an engine."""
    tokens, logprobs = list(row.prompt_tokens), []
    for version in row.versions:
        model = plain_model(version)
        distribution = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        cumulative = distribution.exp().cumsum(0)
        threshold = uniform(row.seed, len(tokens)) * cumulative[-1]
        token = int(torch.searchsorted(cumulative, threshold, right=True))
        tokens.append(token)
        logprobs.append(float(distribution[token]))
    return tokens[len(row.prompt_tokens) :], logprobs


@cache
def plain_model(version: int) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    model.load_state_dict(dict(weights(version)), strict=False)
    return model


@torch.no_grad()
def test_rows_that_are_cut_twice_equal_one_token_at_a_time(sampler: Sampler) -> None:
    some = rows(12)
    under(sampler, 0, some)
    assert {len(row.tokens) for row in some} >= {5, 9}
    for cut, version in ((2, 1), (4, 2)):
        for row in (continued := [row for row in some if len(row.tokens) > cut]):
            row.cut(cut)
        under(sampler, version, continued)
    assert max(len(row.segments) for row in some) == 3
    for row in some:
        tokens, logprobs = one_token_at_a_time(row)
        assert row.tokens == tokens
        assert row.logprobs == pytest.approx(logprobs, abs=1e-5)


def test_a_cut_row_equals_an_interrupted_request_bit_by_bit(sampler: Sampler) -> None:
    some = rows(8)
    under(sampler, 0, some)
    batcher = Sampler(FOLDER, CONFIG, CODEC)._batcher
    batcher.replace_weights(weights(0), "0", flush=True)
    requests = [
        batcher.add(
            GenerateRequest(
                request_id=str(number),
                prompt_tokens=row.prompt_tokens,
                sampling=SamplingParams(max_new_tokens=10, seed=row.seed),
            )
        )
        for number, row in enumerate(some)
    ]
    for _ in range(3):
        batcher.step()
    batcher.pause(PauseMode.RETRACT)
    batcher.replace_weights(weights(1), "1", flush=True)
    batcher.resume()
    while batcher.running or batcher.waiting:
        batcher.step()
    running = [row for row in some if len(row.tokens) > 3]
    for row in running:
        row.cut(3)
    under(sampler, 1, running)
    assert len(running) > 20
    for row, request in zip(some, requests, strict=True):
        assert (row.tokens, row.logprobs) == (request.tokens, request.logprobs)
        assert [part.version for part in row.segments] == [int(s.version) for s in request.spans]


def test_a_row_does_not_depend_on_its_company(sampler: Sampler) -> None:
    together, alone = rows(6), rows(6)
    under(sampler, 0, together)
    for row in alone:
        under(sampler, 0, [row])
    for one, other in zip(together, alone, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_row_longer_than_the_context_is_refused(sampler: Sampler) -> None:
    sampler.hold(weights(0), 0)
    with pytest.raises(ValueError, match="the context is 256"):
        sampler.generate([Row(0, 0, (5,) * 250, seed=1)])
