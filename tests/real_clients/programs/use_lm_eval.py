"""lm-eval scores two tasks, through a gateway and by transformers; says both results."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

given = json.load(sys.stdin)
sys.path.extend(given["libraries"])  # torch and transformers are not installed twice
os.environ["OPENAI_API_KEY"] = given["key"]
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

logging.disable(logging.WARNING)


def scores(kind: str, **arguments: Any) -> dict[str, Any]:
    found = simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=["local_choice", "local_sums"],
        task_manager=TaskManager(include_path=given["tasks"], include_defaults=False),
        bootstrap_iters=0,
        random_seed=0,
        batch_size=4,
    )
    samples = {
        task: [one["filtered_resps"] for one in sorted(those, key=lambda one: one["doc_id"])]
        for task, those in found["samples"].items()
    }
    return {"results": found["results"], "samples": samples}


served = scores(
    "local-completions",
    model="served",
    base_url=f"{given['url']}/v1/completions",
    tokenizer=given["model"],
    tokenizer_backend="huggingface",
    max_length=given["context"],
    num_concurrent=4,
)
plain = scores(
    "hf",
    pretrained=given["model"],
    dtype="float32",
    device="cpu",
    max_length=given["context"],
)
Path("both.json").write_text(json.dumps({"served": served, "plain": plain}, default=str))
print(json.dumps({"served": served, "plain": plain}, default=str))
