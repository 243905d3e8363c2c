"""Continuous batching computes what one request alone would get, whatever runs beside it."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from areal_lab.data.stop_strings import StopScanner
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import Segment
from areal_lab.engines.client import sglang
from areal_lab.engines.client.resubmit import continuation
from areal_lab.engines.embedded import batcher as batcher_module
from areal_lab.engines.embedded import wire
from areal_lab.engines.embedded.attention import (
    IMPLEMENTATION,
    SPLIT_COST_ON_A_GPU_TOKENS,
    decode_blocks,
    similar_rows,
)
from areal_lab.engines.embedded.batcher import Batcher, Refused, VersionSpan
from areal_lab.engines.protocol import EngineError, Generated, PauseMode
from areal_lab.engines.weights.folder import CorruptWeights, deduplicated_state
from tests.data.byte_tokenizer import byte_tokenizer
from tests.data.test_stop_strings import decoding_everything
from tests.engines.tiny import (
    CONTEXT,
    END_TOKEN,
    VOCABULARY,
    largest_error,
    plain_logprobs,
    ragged_requests,
    request,
    run,
    tiny_model,
)

FLOAT32_ERROR = 1e-5


def batcher_of(model: PreTrainedModel, **options: Any) -> Batcher:
    served = copy.deepcopy(model)
    served.set_attn_implementation(IMPLEMENTATION)
    return Batcher(served, version="0", **options)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_logprobs_are_those_of_a_plain_forward(kind: str) -> None:
    """Ragged prompts, shared and equal prefixes, admission into the running batch."""
    model = tiny_model(kind)
    batcher = batcher_of(model, max_running_requests=5)
    requests = ragged_requests(14)
    for one in requests:
        batcher.add(one)
    samples = run(batcher)
    assert len(samples) == len(requests)
    for sample in samples.values():
        assert len(sample.tokens) == sample.request.sampling.max_new_tokens
        assert largest_error(model, sample) < FLOAT32_ERROR
    assert sum(sample.cached_tokens or 0 for sample in samples.values()) > 0


def test_rows_of_very_different_lengths_are_attended_in_blocks() -> None:
    model = tiny_model()
    batcher = batcher_of(model)
    lengths = (3, 200, 4, 120, 118, 2)
    for index, length in enumerate(lengths):
        chance = random.Random(index)
        prompt = [chance.randrange(2, VOCABULARY) for _ in range(length)]
        batcher.add(request(f"r{index}", prompt, 20, seed=index))
    for sample in run(batcher).values():
        assert largest_error(model, sample) < FLOAT32_ERROR

    blocks = decode_blocks(lengths, torch.device("cpu"))
    assert [(block.first, block.end) for block in blocks] == [
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 5),
        (5, 6),
    ]
    assert [block.longest for block in blocks] == [3, 200, 4, 120, 2]
    # A GPU pays for calls, not for padding, until a few rows are very long.
    assert list(similar_rows(lengths, SPLIT_COST_ON_A_GPU_TOKENS)) == [range(6)]
    long = (*lengths * 100, 100_000)
    assert list(similar_rows(long, SPLIT_COST_ON_A_GPU_TOKENS)) == [range(600), range(600, 601)]


def test_greedy_tokens_are_those_of_transformers() -> None:
    model = tiny_model()
    batcher = batcher_of(model, max_running_requests=4)
    for one in ragged_requests(8):
        sampling = dataclasses.replace(
            one.sampling, temperature=0.0, max_new_tokens=20, ignore_eos=False
        )
        batcher.add(dataclasses.replace(one, sampling=sampling))
    for sample in run(batcher).values():
        prompt = torch.tensor([sample.request.prompt_tokens])
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=20,
            do_sample=False,
        )
        assert sample.tokens == expected[0, prompt.shape[1] :].tolist()
        assert (sample.finish_reason == "stop") == (sample.tokens[-1] == END_TOKEN)
        assert largest_error(model, sample) < FLOAT32_ERROR


@pytest.mark.parametrize("max_running", [1, 3, 32])
def test_the_batch_around_a_request_does_not_change_its_tokens(max_running: int) -> None:
    model = tiny_model()
    alone = {}
    for one in ragged_requests(10):
        batcher = batcher_of(model)
        batcher.add(one)
        alone.update(run(batcher))
    requests = ragged_requests(10)
    random.Random(max_running).shuffle(requests)
    batcher = batcher_of(model, max_running_requests=max_running)
    for one in requests:
        batcher.add(one)
    together = run(batcher)
    assert {name: s.tokens for name, s in together.items()} == {
        name: s.tokens for name, s in alone.items()
    }


def test_a_group_is_prefilled_once() -> None:
    batcher = batcher_of(tiny_model())
    prompt = range(2, 32)
    for index in range(8):
        batcher.add(request(f"a{index}", prompt, 3, seed=index))
    batcher.add(request("b", [*range(2, 22), 50, 51], 3))
    batcher.step()
    assert batcher.prompt_tokens == 30 + 2
    assert [sample.cached_tokens for sample in batcher.running] == [0] + [30] * 7 + [20]
    batcher.add(request("late", prompt, 3))
    batcher.step()
    assert batcher.running[-1].cached_tokens == 29  # the last one's logits are needed
    assert batcher.prompt_tokens == 33
    assert len({tuple(sample.tokens) for sample in run(batcher).values()}) > 1


def test_prompts_beyond_the_budget_of_a_step_wait_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batcher_module, "PREFILL_TOKENS", 40)
    model = tiny_model()
    batcher = batcher_of(model)
    for index, length in enumerate((60, 30, 5, 30)):
        batcher.add(request(f"r{index}", [index + 2] * length, 5))
    batcher.step()
    assert len(batcher.running) == 1  # longer than the budget, so alone
    batcher.step()
    assert len(batcher.running) == 3
    for sample in run(batcher).values():
        assert largest_error(model, sample) < FLOAT32_ERROR


def test_temperature_is_part_of_the_reported_distribution_and_truncation_is_not() -> None:
    model = tiny_model()
    batcher = batcher_of(model)
    for index in range(6):
        options = {"temperature": 0.7, "top_k": 5} if index % 2 else {"temperature": 0.7}
        batcher.add(request(f"r{index}", [5, 6, 7], 12, seed=index, **options))
    for sample in run(batcher).values():
        assert largest_error(model, sample, temperature=0.7) < FLOAT32_ERROR


def test_stop_tokens_end_a_response_and_belong_to_it() -> None:
    batcher = batcher_of(tiny_model())
    batcher.add(request("free", [5, 6, 7], 30, seed=3))
    free = run(batcher)["free"].tokens
    stop = free[4]
    batcher.add(request("stopped", [5, 6, 7], 30, seed=3, stop_token_ids=(stop,)))
    stopped = run(batcher)["stopped"]
    assert stopped.tokens == free[: free.index(stop) + 1]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("interrupted_by", [None, PauseMode.RETRACT, PauseMode.ABORT])
def test_stop_strings_end_a_response_where_its_decoded_text_has_them(
    interrupted_by: PauseMode | None,
) -> None:
    """Compared with decoding every prefix of the undisturbed response; an interruption may fall
    between two letters of the string, which after an abort is begun in the prompt."""
    codec = TextCodec(byte_tokenizer())
    batcher = batcher_of(tiny_model(), codec=lambda: codec)
    for index in range(9):
        batcher.add(request(f"free{index}", [5, 6, 7], 30, seed=index))
    compared = 0
    for index, sample in enumerate(list(run(batcher).values())):
        stops = tuple(codec.decode_all(sample.tokens[at : at + 2]) for at in (14, 9))
        end = decoding_everything(codec, stops, sample.tokens)
        if "\ufffd" in "".join(stops) or END_TOKEN in sample.tokens[:end]:
            continue
        compared += 1
        one = request("stopped", [5, 6, 7], 30, seed=index, stop=stops)
        batcher.check(one)
        stopped = batcher.add(one)
        tokens = list[int]()
        if interrupted_by is not None:
            for _ in range(end - 1):
                batcher.step()
            batcher.pause(interrupted_by)
            batcher.resume()
        if interrupted_by is PauseMode.ABORT:
            tokens = stopped.tokens
            segment = Segment(tuple(tokens), tuple(stopped.logprobs), 0)
            aborted = Generated(request_id="stopped", segments=(segment,), finish_reason="abort",
                                retractions=0, cached_tokens=0)  # fmt: skip
            stopped = batcher.add(continuation(one, aborted))
        run(batcher)
        assert (*tokens, *stopped.tokens) == tuple(sample.tokens[:end])
        assert stopped.finish_reason == "stop"
    assert compared >= 3


def test_without_a_tokenizer_stop_strings_are_refused() -> None:
    def broken() -> TextCodec:
        raise ValueError("tokenizer.json is not a tokenizer")

    one = request("r", [5], stop=("ab",))
    with pytest.raises(Refused, match="has stop strings, but the engine has no tokenizer"):
        batcher_of(tiny_model()).check(one)
    with pytest.raises(Refused, match=r"has stop strings, but tokenizer\.json is not a tokenizer"):
        batcher_of(tiny_model(), codec=broken).check(one)


# --- pauses, aborts, versions ---


@pytest.fixture
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return tiny_model(seed=0), tiny_model(seed=1)


def interrupted(
    old: PreTrainedModel, new: PreTrainedModel, mode: PauseMode, steps: int = 6
) -> Batcher:
    """A batcher that was paused after some steps and holds the new weights, still paused.

    Three requests of 16, 18, 20 tokens run, two wait and join while the longer ones still run.
    """
    batcher = batcher_of(old, max_running_requests=3)
    for index in range(5):
        batcher.add(request(f"r{index}", range(2, 12 + index), 16 + 2 * index, seed=index))
    for _ in range(steps):
        batcher.step()
    batcher.pause(mode)
    batcher.replace_weights(deduplicated_state(new), "1", flush=mode is PauseMode.RETRACT)
    return batcher


def test_after_retract_later_tokens_are_those_of_the_new_weights(
    models: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    old, new = models
    batcher = interrupted(old, new, PauseMode.RETRACT)
    assert batcher.running == []
    batcher.resume()
    samples = run(batcher)
    for index in range(3):
        sample = samples[f"r{index}"]
        assert sample.retractions == 1
        assert sample.spans == [VersionSpan("0", 0, 6), VersionSpan("1", 6, 16 + 2 * index)]
        prompt = sample.request.prompt_tokens
        before = plain_logprobs(old, prompt, sample.tokens)[:6]
        after = plain_logprobs(new, prompt, sample.tokens)[6:]
        reported = torch.tensor(sample.logprobs)
        torch.testing.assert_close(reported, torch.cat((before, after)), atol=1e-5, rtol=0)
    for index in (3, 4):
        sample = samples[f"r{index}"]
        assert sample.retractions == 0
        assert sample.spans == [VersionSpan("1", 0, 16 + 2 * index)]
        assert largest_error(new, sample) < FLOAT32_ERROR


def test_in_place_keeps_the_old_cache_and_shows_it(
    models: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    old, new = models
    batcher = interrupted(old, new, PauseMode.IN_PLACE)
    assert len(batcher.running) == 3
    batcher.resume()
    samples = run(batcher)
    for index in range(3):
        sample = samples[f"r{index}"]
        assert sample.retractions == 0
        assert sample.spans == [VersionSpan("0", 0, 6), VersionSpan("1", 6, 16 + 2 * index)]
        after = plain_logprobs(new, sample.request.prompt_tokens, sample.tokens)[6:]
        assert (torch.tensor(sample.logprobs[6:]) - after).abs().max() > 0.01
    for index in (3, 4):  # admitted later: nothing of the old cache is shared
        assert largest_error(new, samples[f"r{index}"]) < FLOAT32_ERROR


def test_abort_gives_what_there_is(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    model, _ = models
    batcher = batcher_of(model, max_running_requests=2)
    for index in range(3):
        batcher.add(request(f"r{index}", [4, 5, 6], 9, seed=index))
    for _ in range(3):
        batcher.step()
    ended = {s.request.request_id: s for s in batcher.pause(PauseMode.ABORT)}
    assert {name: len(s.tokens) for name, s in ended.items()} == {"r0": 3, "r1": 3, "r2": 0}
    assert {s.finish_reason for s in ended.values()} == {"abort"}
    assert not batcher.running
    assert not batcher.waiting


def test_abort_by_id_leaves_the_others_alone() -> None:
    model = tiny_model()
    batcher = batcher_of(model, max_running_requests=4)
    for one in ragged_requests(6):
        batcher.add(one)
    batcher.step()
    names = [batcher.running[0].request.request_id, "r5", "unknown"]
    assert [s.request.request_id for s in batcher.abort(names)] == names[:2]
    samples = run(batcher)
    assert not samples.keys() & set(names)
    for sample in samples.values():
        assert largest_error(model, sample) < FLOAT32_ERROR


def test_a_flush_is_refused_before_anything_changes(
    models: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    old, new = models
    batcher = batcher_of(old)
    batcher.add(request("r", [4, 5, 6], 9))
    batcher.step()
    batcher.pause(PauseMode.IN_PLACE)
    with pytest.raises(Refused, match="cannot be flushed while 1 requests"):
        batcher.replace_weights(deduplicated_state(new), "1", flush=True)
    assert batcher.version == "0"
    batcher.resume()
    assert largest_error(old, run(batcher)["r"]) < FLOAT32_ERROR


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_change_nothing(
    models: tuple[PreTrainedModel, PreTrainedModel], damage: str
) -> None:
    old, new = models
    tensors = dict(deduplicated_state(new))
    last = list(tensors)[-1]
    match damage:
        case "missing":
            del tensors[last]
        case "unknown":
            tensors["model.extra.weight"] = torch.zeros(1)
        case "shape":
            tensors[last] = tensors[last][:-1]
    batcher = batcher_of(old)
    with pytest.raises(CorruptWeights):
        batcher.replace_weights(tensors, "1", flush=True)
    assert batcher.version == "0"
    batcher.add(request("r", [4, 5, 6], 9))
    assert largest_error(old, run(batcher)["r"]) < FLOAT32_ERROR


def test_an_empty_batch_computes_nothing() -> None:
    assert batcher_of(tiny_model()).step() == []


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [
        ([5, VOCABULARY], 1, f"token {VOCABULARY}, but tokens must be in 0 .. {VOCABULARY - 1}"),
        ([5, -1], 1, "token -1"),
        ([5] * (CONTEXT - 1), 2, f"needs {CONTEXT - 1} \\+ 2 tokens .* context is {CONTEXT}"),
    ],
)
def test_bad_requests_are_refused_in_one_line(
    prompt: list[int], max_new_tokens: int, message: str
) -> None:
    with pytest.raises(Refused, match=message) as raised:
        batcher_of(tiny_model()).check(request("r", prompt, max_new_tokens))
    assert "\n" not in str(raised.value)


def test_the_context_can_be_filled_to_its_end() -> None:
    model = tiny_model()
    batcher = batcher_of(model)
    one = request("r", range(2, 90), CONTEXT - 88)
    batcher.check(one)
    batcher.add(one)
    assert largest_error(model, run(batcher)["r"]) < 3e-5  # 168 tokens of rounding


# --- requests at fault ---

POISON = VOCABULARY - 1
"""A token whose embedding is NaN."""


def poisoned_model() -> PreTrainedModel:
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
        model.get_output_embeddings().weight[POISON] = 0  # so that others do not sample it
    return model


@pytest.mark.parametrize("max_running", [2, 64])
def test_a_request_that_cannot_be_sampled_fails_alone(max_running: int) -> None:
    """Those beside it get the tokens that they get without it."""
    good = [
        dataclasses.replace(
            one,
            prompt_tokens=tuple(token % POISON for token in one.prompt_tokens),
            sampling=dataclasses.replace(one.sampling, top_k=5),
        )
        for one in ragged_requests(9)
    ]
    expected: dict[str, list[int]] = {}
    for poisoned in (False, True):
        batcher = batcher_of(poisoned_model(), max_running_requests=max_running)
        for index, one in enumerate(good):
            batcher.add(one)
            if poisoned and index % 3 == 1:
                batcher.add(request(f"bad{index}", [5, POISON, 6], 4))
        samples = run(batcher)
        errors = {name: one.error for name, one in samples.items() if one.error}
        found = {name: one.tokens for name, one in samples.items() if not one.error}
        expected = expected or found
        assert found == expected
        assert found.keys() == {one.request_id for one in good}
        assert set(errors) == ({"bad1", "bad4", "bad7"} if poisoned else set())
        for name, error in errors.items():
            assert f"request {name} failed: FloatingPointError" in error
            assert samples[name].finish_reason == "abort"
            with pytest.raises(EngineError, match=f"it gave up: request {name} failed"):
                sglang.read(wire.reply(samples[name], "0", 0.0))
    # It is as good as new.
    batcher.add(good[0])
    assert run(batcher)[good[0].request_id].tokens == expected[good[0].request_id]


class _Raises(StopScanner):
    """Fails at a response's second token."""

    def completing(self, tokens: Sequence[int]) -> int | None:
        if len(self._window):
            raise UnicodeError("planted")
        return super().completing(tokens)


def test_an_error_after_a_token_was_sampled_ends_its_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batcher = batcher_of(tiny_model(), codec=lambda: TextCodec(byte_tokenizer()))
    for index in range(3):
        batcher.add(request(f"r{index}", [5, 6, index], 6, seed=index))
    undisturbed = {name: one.tokens for name, one in run(batcher).items()}
    for index in range(3):
        batcher.add(request(f"r{index}", [5, 6, index], 6, seed=index))
        if index == 1:
            monkeypatch.setattr(batcher_module, "StopScanner", _Raises)
            batcher.add(request("bad", [9, 9], 6, stop=("never",)))
    samples = run(batcher)
    assert "UnicodeError: planted" in str(samples.pop("bad").error)
    assert {name: one.tokens for name, one in samples.items()} == undisturbed


def test_an_engine_that_can_compute_nothing_raises_its_error() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    batcher = batcher_of(model)
    batcher.add(request("r", [5], 3))
    with pytest.raises(FloatingPointError, match="not finite"):
        batcher.step()


def test_requests_of_one_call_are_queued_together_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batcher = batcher_of(tiny_model(), codec=lambda: TextCodec(byte_tokenizer()))

    def raises(*_: object) -> None:
        raise UnicodeError("planted")

    monkeypatch.setattr(batcher_module, "StopScanner", raises)
    with pytest.raises(UnicodeError):
        batcher.add_all([request("a", [5]), request("b", [5], stop=("x",))])
    assert not batcher.waiting
