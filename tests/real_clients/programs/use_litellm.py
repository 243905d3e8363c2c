"""litellm: completions of plain text with log-probs, whole and streamed."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it is downloaded

given = json.load(sys.stdin)
sys.path.extend(given["libraries"])  # pydantic and others are not installed twice

import litellm  # noqa: E402 - the path is set first


def completion(*, stream: bool) -> Any:
    return litellm.text_completion(
        model="text-completion-openai/any",
        prompt=given["prompts"],
        api_base=f"{given['url']}/v1",
        api_key=given["key"],
        stream=stream,
        echo=True,
        logprobs=3,
        max_tokens=4,
        temperature=0,
    )


choices = completion(stream=False).choices
texts = ["" for _ in given["prompts"]]
for part in completion(stream=True):
    for choice in part.choices:
        texts[choice.index or 0] += choice.text or ""
print(
    json.dumps(
        {
            "choices": [
                {"text": choice.text, "logprobs": dict(choice.logprobs)} for choice in choices
            ],
            "streamed": texts,
        }
    )
)
