"""LlamaIndex: completions of plain text, whole and streamed."""

from __future__ import annotations

import json
import sys

given = json.load(sys.stdin)
sys.path.extend(given["libraries"])  # numpy and others are not installed twice

from llama_index.llms.openai_like import OpenAILike  # noqa: E402 - the path is set first

model = OpenAILike(
    model="any",
    api_base=f"{given['url']}/v1",
    api_key=given["key"],
    is_chat_model=False,
    max_tokens=4,
    temperature=1,
    additional_kwargs={"logprobs": 3, "seed": 1},
)
found = []
for prompt in given["prompts"]:
    whole = model.complete(prompt)
    streamed = "".join(part.delta for part in model.stream_complete(prompt))
    found.append(
        {
            "text": whole.text,
            "streamed": streamed,
            "logprobs": [
                {"token": each.token, "logprob": each.logprob}
                for place in whole.logprobs or []
                for each in place
            ],
        }
    )
print(json.dumps(found))
