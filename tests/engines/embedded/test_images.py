"""Requests with images: the log-probs of transformers, whatever runs beside them or came before."""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.data.images import (
    EncodedPrompt,
    PlacedImage,
    image_of_bytes,
    one_placeholder_each,
    rope_positions,
)
from areal_lab.engines.client.resubmit import continuation
from areal_lab.engines.embedded import batcher as batcher_module
from areal_lab.engines.embedded import wire
from areal_lab.engines.embedded.batcher import Batcher, Refused, Sample
from areal_lab.engines.embedded.images import ImageNumbers, PromptPositions
from areal_lab.engines.embedded.loading import load_model
from areal_lab.engines.protocol import NEVER, Generated, GenerateRequest, PauseMode, SamplingParams
from areal_lab.engines.weights.folder import stored_state
from areal_lab.models.image_features import ImagePixels
from tests.engines.tiny import run
from tests.vision_folder import (
    IMAGE,
    KINDS,
    VIDEO,
    facts_of,
    picture,
    plain,
    prompts_with_pictures,
    transformers_logprobs,
    write_vision_model,
)

ERROR = 2e-5


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model", request.param)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the first kind only."""
    return write_vision_model(tmp_path_factory.mktemp("small") / "model")


def batcher_of(folder: Path, **options: Any) -> Batcher:
    return Batcher(
        load_model(folder, torch.float32),
        version="0",
        vision=facts_of(folder),
        pixels=ImagePixels(folder),
        **options,
    )


def request(name: str, prompt: EncodedPrompt, new_tokens: int, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_tokens=prompt.tokens,
        images=prompt.images,
        sampling=SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, **sampling),
    )


def requests_of(folder: Path, samples: int = 2) -> list[GenerateRequest]:
    return [
        request(f"{number}-{sample}", prompt, 6 + sample, seed=10 * number + sample)
        for number, prompt in enumerate(prompts_with_pictures(facts_of(folder)))
        for sample in range(samples)
    ]


def add(batcher: Batcher, requests: list[GenerateRequest]) -> list[Sample]:
    for one in requests:
        batcher.check(one)
    return [batcher.add(one) for one in requests]


def error_of(folder: Path, samples: list[Sample], model: Any = None) -> float:
    """Largest error of a log-prob, from transformers' own forward."""
    model, pixels = model or plain(folder), ImagePixels(folder)
    largest = 0.0
    for sample in samples:
        prompt = EncodedPrompt(sample.request.prompt_tokens, sample.request.images)
        with torch.no_grad():
            exact = transformers_logprobs(model, pixels, prompt, tuple(sample.tokens))
        largest = max(largest, (exact - torch.tensor(sample.logprobs)).abs().max().item())
    return largest


def test_logprobs_are_those_of_transformers(folder: Path) -> None:
    """Pictures of several sizes, text beside them, equal and shared prefixes, a busy batch."""
    batcher = batcher_of(folder, max_running_requests=4)
    samples = add(batcher, requests_of(folder))
    run(batcher)
    assert error_of(folder, samples) < ERROR
    # The second sample of a picture copies what the first one has.
    assert all(one.cached_tokens for one in samples[1::2])


def test_an_interrupted_response_continues_exactly(folder: Path, tmp_path: Path) -> None:
    """After a retraction and new weights, the prompt with its pictures is computed again."""
    changed = load_model(
        write_vision_model(tmp_path / "new", plain(folder).config.model_type, seed=1), torch.float32
    )
    batcher = batcher_of(folder)
    samples = add(batcher, requests_of(folder))
    for _ in range(3):
        batcher.step()
    batcher.pause(PauseMode.RETRACT)
    batcher.replace_weights(stored_state(changed), "1", flush=True)
    batcher.resume()
    run(batcher)
    new = plain(tmp_path / "new")
    for sample in samples:
        first, second = sample.spans
        assert (first.version, second.version) == ("0", "1")
        # What came after the change is of the new weights, given all that came before.
        prompt = EncodedPrompt(sample.request.prompt_tokens, sample.request.images)
        with torch.no_grad():
            exact = transformers_logprobs(new, ImagePixels(folder), prompt, tuple(sample.tokens))
        behind = slice(second.start, None)
        error = (exact[behind] - torch.tensor(sample.logprobs[behind])).abs().max()
        assert error < ERROR


def test_a_resubmitted_response_continues_exactly(small: Path) -> None:
    batcher = batcher_of(small)
    (whole,) = add(batcher, requests_of(small)[:1])
    run(batcher)
    again = batcher_of(small)
    (begun,) = add(again, [dataclasses.replace(whole.request, request_id="begun")])
    for _ in range(3):
        again.step()
    (ended,) = again.abort()
    sent = wire.reply(ended, "0", 0.0)["output_ids"]
    so_far = Generated(
        request_id="begun", segments=(), finish_reason="abort", retractions=0, cached_tokens=0
    )
    rest = dataclasses.replace(
        continuation(begun.request, so_far),
        prompt_tokens=begun.request.prompt_tokens + tuple(sent),
        continued_tokens=len(sent),
        sampling=dataclasses.replace(begun.request.sampling, max_new_tokens=6 - len(sent)),
    )
    (finished,) = add(again, [rest])
    run(again)
    assert [*sent, *finished.tokens] == whole.tokens


def test_a_picture_does_not_take_the_keys_of_another(small: Path) -> None:
    """Equal tokens, two pictures: in one batch, and from the prefixes of requests that ended."""
    one, other = prompts_with_pictures(facts_of(small))[:2]
    assert one.tokens == other.tokens
    batcher = batcher_of(small, kept_prefix_bytes=1 << 20)
    cached = []
    for number, prompt in enumerate((one, other, one, other)):
        samples = add(batcher, [request(f"{number}-{s}", prompt, 4, seed=s) for s in range(2)])
        run(batcher)
        assert error_of(small, samples) < ERROR
        cached.append(samples[0].cached_tokens)
    # The token before the picture is common; its own prompt, all but the last token.
    assert cached == [0, 2, len(one.tokens) - 1, len(one.tokens) - 1]
    together = [request(f"t{i}", prompt, 4) for i, prompt in enumerate((one, other))]
    samples = add(batcher_of(small), together)
    assert [one.request.prompt_tokens for one in samples] == [one.tokens, other.tokens]


def test_a_bug_in_the_comparison_of_prefixes_would_show(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        batcher_module,
        "ImageNumbers",
        type("Blind", (), {"in_place": lambda _, tokens, __: tokens}),
    )
    one, other = prompts_with_pictures(facts_of(small))[:2]
    batcher = batcher_of(small, kept_prefix_bytes=1 << 20)
    for number, prompt in enumerate((one, other)):
        samples = add(batcher, [request(str(number), prompt, 4)])
        run(batcher)
    assert error_of(small, samples) > 1e-3


def test_an_image_is_computed_once_for_all_requests(small: Path) -> None:
    batcher, calls = batcher_of(small), []
    tower: Any = batcher.model.model.visual
    forward = tower.forward
    tower.forward = lambda pixels, **named: calls.append(len(pixels)) or forward(pixels, **named)
    prompts = prompts_with_pictures(facts_of(small))
    add(batcher, [request(f"{n}-{s}", prompts[n], 3, seed=s) for n in (0, 3) for s in range(4)])
    run(batcher)
    # Picture 1 is in both prompts: 8 patches, and 24 of the large one.
    assert calls == [8 + 24]


def test_placeholders_are_never_sampled(small: Path) -> None:
    batcher = batcher_of(small)
    with torch.no_grad():  # a policy that would sample nothing else
        head: Any = batcher.model.get_output_embeddings()
        head.weight[[IMAGE, VIDEO]] = 100 * head.weight.mean(0)
    for temperature in (0.0, 1.0):
        requests = [
            request(f"{temperature}-{i}", prompt, 5, temperature=temperature, seed=i)
            for i, prompt in enumerate(prompts_with_pictures(facts_of(small)))
        ]
        samples = add(batcher, requests)
        run(batcher)
        assert not {IMAGE, VIDEO} & {token for sample in samples for token in sample.tokens}


def test_what_cannot_be_served_is_refused_in_one_line(small: Path) -> None:
    shown, *_, text = prompts_with_pictures(facts_of(small))
    batcher = batcher_of(small)
    blind = Batcher(load_model(small, torch.float32), version="0")
    for engine, wrong, why in (
        (blind, request("a", shown, 1), r"has 1 image\(s\), but the engine's model has none"),
        (batcher, request("a", shown._replace(images=()), 1), r"2 placeholder token\(s\), but"),
        (batcher, request("a", text, 1, never=(7,)), r"must never sample \(7,\)"),
    ):
        with pytest.raises(Refused, match=why) as raised:
            engine.check(wrong)
        assert "\n" not in str(raised.value)
    batcher.check(request("a", shown, 1, never=(IMAGE,)))


# --- the wire ---


def body_of(prompt: EncodedPrompt, **more: Any) -> dict[str, Any]:
    files = [base64.b64encode(one.image.png).decode() for one in prompt.images]
    tokens = list(one_placeholder_each(prompt.tokens, prompt.images))
    return {"input_ids": [tokens, tokens], "image_data": [files, files], **more}


def test_images_come_in_base64_with_one_placeholder_each(small: Path) -> None:
    prompt = prompts_with_pictures(facts_of(small))[3]
    requests, batch, _ = wire.parse_generate(body_of(prompt), facts_of(small))
    assert batch
    for one in requests:
        assert (one.prompt_tokens, one.images) == prompt
    # One object, however many samples have it.
    assert requests[0].images[0].image is requests[1].images[0].image
    assert image_of_bytes(prompt.images[0].image.png) == requests[0].images[0].image


def test_image_data_is_base64_and_nothing_else(small: Path) -> None:
    """SGLang opens URLs and files that are named there."""
    prompt, vision = prompts_with_pictures(facts_of(small))[0], facts_of(small)
    tokens = list(one_placeholder_each(prompt.tokens, prompt.images))
    for data in ("/etc/passwd", "http://a/b.png", "file:///etc/passwd", "aGVsbG8="):
        with pytest.raises(Refused):
            wire.parse_generate({"input_ids": tokens, "image_data": [data]}, vision)
    with pytest.raises(Refused, match="the engine's model has none"):
        wire.parse_generate(body_of(prompt), None)
    with pytest.raises(Refused, match=r"1 placeholder token\(s\) for 0 image"):
        wire.parse_generate({"input_ids": tokens}, vision)


def test_a_bias_can_only_leave_tokens_out() -> None:
    sampling = {"logit_bias": {str(IMAGE): NEVER}}
    ((one,), *_) = wire.parse_generate({"input_ids": [7], "sampling_params": sampling})
    assert one.sampling.never == (IMAGE,)
    with pytest.raises(Refused, match="logit_bias of token 7 is -5, but must be -1e\\+09 or less"):
        wire.parse_generate({"input_ids": [7], "sampling_params": {"logit_bias": {"7": -5.0}}})


# --- parts ---


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(0, 9))
def test_positions_continue_behind_the_prompt(
    start: int, rows: int, columns: int, more: int
) -> None:
    placed = PlacedImage(picture(1), start, rows, columns)
    length = placed.end + 1
    expected = np.array(rope_positions(length + more, [placed]))
    positions = PromptPositions(length, [placed])
    for cut in range(length + more):
        assert (positions.of(0, cut) == expected[:, :cut]).all()
        assert (positions.of(cut, length + more) == expected[:, cut:]).all()


def test_a_number_is_of_one_image() -> None:
    numbers, tokens = ImageNumbers(), np.array([7, IMAGE, IMAGE, 8])
    places = [PlacedImage(picture(seed), 1, 1, 2) for seed in (1, 2, 1)]
    one, other, again = (numbers.in_place(tokens, [place])[1] for place in places)
    assert one == again != other
    numbers.forget()
    assert numbers.in_place(tokens, places[:1])[1] not in (one, other)
    assert numbers.in_place(tokens, []) is tokens
