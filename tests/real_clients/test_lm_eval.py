"""lm-eval gets the same scores through the gateway as from the model by transformers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.pipeline.gateway.test_completions import evaluation_key
from tests.pipeline.gateway.test_serve import model, plan_of, serving
from tests.real_clients.environments import CLIENTS
from tests.real_clients.lab import _output

__all__ = ["model"]
pytestmark = pytest.mark.agents

_PROGRAM: Final = Path(__file__).with_name("programs") / "use_lm_eval.py"
_QUESTIONS: Final = 12
_WRITTEN: Final = ("=====", "42")
"""What the tiny model writes, and what it does not: its score is neither 0 nor 1."""
_CHOICE: Final = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" 1", " 22", " 333"]
doc_to_target: gold
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
_SUMS: Final = """
task: local_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["3"], max_gen_toks: {new_tokens}, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(folder: Path, new_tokens: int) -> Path:
    """A task with log-likelihoods, and one that generates, over the same questions."""
    folder.mkdir()
    data = folder / "questions.jsonl"
    data.write_text(
        "".join(
            json.dumps(
                {"question": f"{n} + {n * 7 % 5} =", "gold": n % 3, "answer": _WRITTEN[n % 2]}
            )
            + "\n"
            for n in range(_QUESTIONS)
        )
    )
    (folder / "choice.yaml").write_text(_CHOICE.format(data=data))
    (folder / "sums.yaml").write_text(_SUMS.format(data=data, new_tokens=new_tokens))
    return folder


def test_scores_equal_those_of_transformers(model: Path, tmp_path: Path) -> None:
    async def scenario() -> dict[str, Any]:
        async with serving(plan_of(model, "rollout.dtype=float32")) as (_, _, client):
            given = {
                "url": str(client.http.base_url).rstrip("/"),
                "key": await evaluation_key(client),
                "model": str(model),
                "tasks": str(write_tasks(tmp_path / "tasks", 5)),
                "context": 64,
                "libraries": [path for path in sys.path if path.endswith("site-packages")],
            }
            command = [str(CLIENTS.python_of("lm-eval")), str(_PROGRAM)]
            found: dict[str, Any] = json.loads(await _output(command, json.dumps(given), tmp_path))
            return found

    both = asyncio.run(scenario())
    served, plain = both["served"], both["plain"]
    assert served["results"] == plain["results"]
    assert plain["results"]["local_sums"]["exact_match,none"] == 0.5
    assert 0 < plain["results"]["local_choice"]["acc,none"] < 1
    assert served["samples"]["local_sums"] == plain["samples"]["local_sums"]
    pairs = zip(served["samples"]["local_choice"], plain["samples"]["local_choice"], strict=True)
    for ours, theirs in pairs:
        for (one, greedy), (other, also) in zip(ours, theirs, strict=True):
            assert float(one) == pytest.approx(float(other), abs=1e-3)
            assert str(greedy) == str(also)
