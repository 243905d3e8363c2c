"""Runs of agents and tools on a tiny model that calls tools at random, and what holds for them.

A call is one token of the model's vocabulary, whose text is encoded as other tokens: whatever
encodes what was sampled once more gives log-probs that no checkpoint has.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, pairwise, repeat
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from areal_lab.config.schema import TrainConfig
from areal_lab.pipeline.state import RunState
from benchmarks.tiny_model import write_tiny_model
from tests.pipeline import programs
from tests.pipeline.programs import ask as programs_ask
from tests.pipeline.tiny_run import (
    checkpoints,
    do_run,
    tiny_config,
    trained_samples,
)

STEPS: Final = 4
CALLS: Final = tuple(
    f'<tool_call>{{"name": "times", "arguments": {{ "b": {n},"a":{n + 1}}}}}</tool_call>'
    for n in range(6)
)
LINES: Final = tuple(f"T{n}" for n in range(16))
TEMPLATE: Final = """\
{%- for tool in tools or [] %}{{ tool.function.name }}={% endfor -%}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '=' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}</tool_call>' }}
        {%- endfor %}
        {{- '<end>' }}
    {%- else %}
        {{- '- ' + m.content }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '=' }}{% endif %}"""
AGENT: Final = "{name: agent, fn: 'tests.pipeline.programs:multiplies'}"
"""Calls a tool in messages."""
TOOL: Final = "{name: tool_use, max_turns: 3, call: T, result: '='}"
"""Calls one by lines, which `STOPS` end; most are no arithmetic, and the model is told so."""
STOPS: Final = 'gconfig.stop=["\\n", "+-"]'
"""A token, and a string."""


def config_of_agents(folder: Path, workflow: str, *overrides: str) -> TrainConfig:
    """An asynchronous run that saves each of its versions."""
    model = folder / "model"
    words = CALLS if workflow == AGENT else LINES
    write_tiny_model(model, initializer_range=0.2, head_size=32, words=words)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return tiny_config(
        folder,
        f"total_train_steps={STEPS}",
        "eta=3",
        "save_every_steps=1",
        "rollout.max_concurrent_rollouts=3",
        "dataset.few_shot=0",
        "gconfig.max_new_tokens=60",
        f"rollout.workflow={workflow}",
        *overrides,
    )


@dataclass(frozen=True)
class Played:
    """A run that ended."""

    folder: Path
    summary: dict[str, Any]
    samples: list[dict[str, Any]]
    """What was trained on."""

    def worst(self) -> float:
        """Largest |log-prob - behavior log-prob| of a token, under the checkpoint of its version;
        after checking that all tokens are there, once, each with its log-prob and version."""
        seen = [(sample["group"], sample["sample"]) for sample in self.samples]
        assert len(seen) == len(set(seen)) == STEPS * 3 * 4
        assert self.summary["status"] == "complete"
        assert self.summary["version_mismatches"] == self.summary["dropped"] == 0
        for sample in self.samples:
            generated = [part for part in sample["parts"] if "tokens" in part]
            assert all(len(part["tokens"]) == len(part["logprobs"]) for part in generated)
            turns = sample["turns"]
            assert sum(len(part["tokens"]) for part in generated) == sum(t["tokens"] for t in turns)
            # One row, and no fork: each prompt begins with the tokens of the turn before it.
            assert "row" not in sample
            assert not any(turn.get("fork") for turn in turns)
            assert len(turns_of(sample)) == len(turns)
        models = checkpoints(self.folder)
        return max(largest_gap(models, sample) for sample in self.samples)

    def changes(self) -> tuple[int, int]:
        """How often the weights changed inside of a turn, and between two turns of a sample."""
        turns = [turns_of(sample) for sample in self.samples]
        within = sum(len(versions) > 1 for sample in turns for versions in sample)
        between = sum(a[-1] != b[0] for sample in turns for a, b in pairwise(sample))
        return within, between


@torch.no_grad()
def largest_gap(models: dict[int, Any], sample: dict[str, Any]) -> float:
    """Largest |log-prob - behavior log-prob|, each under the token's version."""
    context = list(sample["prompt_tokens"])
    found: list[tuple[int, int, int, float]] = []  # version, place, token, log-prob
    for part in sample["parts"]:
        tokens = part.get("tokens", part.get("observation"))
        places = range(len(context), len(context) + len(tokens))
        if "tokens" in part:
            versions = repeat(part["version"])
            found += zip(versions, places, tokens, part["logprobs"], strict=False)
        context += tokens
    plain = {
        version: models[version](torch.tensor([context])).logits[0].log_softmax(-1)
        for version in {version for version, *_ in found}
    }
    return max(
        abs(float(plain[version][place - 1, token]) - logprob)
        for version, place, token, logprob in found
    )


def turns_of(sample: dict[str, Any]) -> list[list[int]]:
    """The versions of each turn of a sample."""
    turns: list[list[int]] = [[]]
    for part in sample["parts"]:
        if "observation" in part:
            turns.append([])
        else:
            turns[-1].append(part["version"])
    return turns


def play(
    config: TrainConfig, *, kill_at: int = 0, reward_fn: Callable[..., float] | None = None
) -> Played:
    """Run to the end; an engine is killed when an agent got reply `kill_at`, and others wait."""
    state, replies = RunState(), count(1)

    def ask(*arguments: Any, **keywords: Any) -> dict[str, Any]:
        reply = programs_ask(*arguments, **keywords)
        if next(replies) == kill_at:
            victim = next(one for one in state.children if one.name.startswith("engine"))
            os.killpg(victim.pid, signal.SIGKILL)
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "ask", ask)
        result = do_run(config, state=state, reward_fn=reward_fn)
    samples = [sample for step in trained_samples(result.folder) for sample in step]
    return Played(result.folder, result.summary, samples)
