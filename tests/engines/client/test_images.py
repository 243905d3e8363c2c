"""Requests with images on the wire, and prompts that a server has otherwise than we do."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from areal_lab.data.images import EncodedPrompt, place_images
from areal_lab.engines.client.dialect import Chunk, GenerateOptions
from areal_lab.engines.client.sglang import SGLANG
from areal_lab.engines.client.stream import SampleStream
from areal_lab.engines.client.vllm import VLLM
from areal_lab.engines.embedded.wire import parse_generate
from areal_lab.engines.protocol import NEVER, EngineError, GenerateRequest, SamplingParams
from tests.vision_folder import FACTS, IMAGE, START, STOP, VIDEO, picture

WHOLE = GenerateOptions(stream=False, stream_interval=8, cache_name="")


def requests() -> list[GenerateRequest]:
    """Two samples of a prompt with two images, and one without."""
    shown = place_images([START, IMAGE, STOP, 7, IMAGE, 8], [picture(1), picture(2)], FACTS)
    prompts = [shown, shown, EncodedPrompt((7, 8))]
    return [
        GenerateRequest(
            request_id=str(number),
            prompt_tokens=prompt.tokens,
            images=prompt.images,
            sampling=SamplingParams(max_new_tokens=3, never=(IMAGE, VIDEO)),
        )
        for number, prompt in enumerate(prompts)
    ]


def test_sglang_gets_a_placeholder_for_each_image() -> None:
    body = SGLANG.generate(requests(), WHOLE).body
    assert body is not None
    assert body["input_ids"] == [[START, IMAGE, STOP, 7, IMAGE, 8]] * 2 + [[7, 8]]
    one, other = (base64.b64encode(picture(seed).png).decode() for seed in (1, 2))
    assert body["image_data"] == [[one, other], [one, other], []]
    assert body["return_prompt_token_ids"] is True
    bias = {str(IMAGE): NEVER, str(VIDEO): NEVER}
    assert [params["logit_bias"] for params in body["sampling_params"]] == [bias] * 3
    text = SGLANG.generate(requests()[2:], WHOLE).body
    assert text is not None
    assert not {"image_data", "return_prompt_token_ids"} & text.keys()


def test_the_embedded_engine_reads_what_is_sent() -> None:
    sent = requests()
    body = SGLANG.generate(sent, WHOLE).body
    assert body is not None
    read, _, _ = parse_generate(body, FACTS)
    for one, other in zip(sent, read, strict=True):
        assert (one.prompt_tokens, one.images) == (other.prompt_tokens, other.images)
        assert other.sampling.never == one.sampling.never


def test_vllm_refuses_them_in_one_line() -> None:
    shown, _, text = requests()
    plain = replace(text, sampling=SamplingParams(max_new_tokens=3))
    assert VLLM.generate([plain], WHOLE).path
    for one in (shown, text, replace(shown, sampling=plain.sampling)):
        with pytest.raises(EngineError, match="vllm has not been tried with one"):
            VLLM.generate([one], WHOLE)


def chunk(prompt: tuple[int, ...] | None, *, end: bool = False) -> Chunk:
    return Chunk(
        tokens=(9,),
        logprobs=(-1.0,),
        prompt_tokens=prompt,
        finish_reason="stop" if end else None,
    )


ASKED = (START, IMAGE, IMAGE, STOP)


@pytest.mark.parametrize(
    ("reported", "found"),
    [
        ((START, IMAGE, STOP), "another one, of 3"),
        ((START, 7, 7, STOP), "another one, of 4"),
        ((), "another one, of 0"),
        (None, "none"),
    ],
)
def test_a_lost_image_is_an_error(reported: tuple[int, ...] | None, found: str) -> None:
    stream = SampleStream("a", prompt_tokens=ASKED)
    with pytest.raises(EngineError, match=f"a has a prompt of 4 .* reports {found}: it lost"):
        stream.add(chunk(reported, end=True), 0)


def test_the_prompt_may_come_with_any_message() -> None:
    for messages in (
        [chunk(ASKED), chunk(ASKED, end=True)],
        [chunk(ASKED), chunk(None, end=True)],
        [chunk(None), chunk(ASKED, end=True)],
    ):
        stream = SampleStream("a", prompt_tokens=ASKED)
        for one in messages:
            stream.add(one, 0)
        assert len(stream.generated().segments[0].tokens) == 2
    # Of prompts without images nothing is asked.
    SampleStream("b").add(chunk((1, 2), end=True), 0)
