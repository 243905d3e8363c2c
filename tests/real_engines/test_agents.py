"""Conversations on real servers: every token is of the version it names, whatever happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lab.engines.protocol import Generated, PauseMode
from tests.pipeline.agent_runs import AGENT, STOPS, TOOL, config_of_agents, play
from tests.pipeline.rewards import even_digits
from tests.real_engines.conftest import Announce
from tests.real_engines.lab import CONTEXT, Lab, request, tokens_of, versions_of

SERVERS = [pytest.param(name, marks=pytest.mark.sglang) for name in ("sglang", "vllm")]
"""The embedded engine has these runs in the default suite."""
OPENING = list(range(2, 80))
BRIDGE = [80, 81, 82]
LONGEST = CONTEXT - len(OPENING) - 3 * (40 + len(BRIDGE)) - 10


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.ABORT])
def test_a_conversation_reuses_no_prefix_of_older_weights(lab: Lab, mode: PauseMode) -> None:
    """Weights change after the second of four turns, and in the middle of the fourth."""

    async def scenario() -> tuple[list[list[int]], list[Generated]]:
        client, prompts, turns = lab.client, [OPENING], list[Generated]()

        def said(turn: Generated) -> None:
            turns.append(turn)
            prompts.append([*prompts[-1], *tokens_of(turn), *BRIDGE])

        for number in range(3):
            if number == 2:
                await client.pause(mode)
                await lab.load(1, mode)
                await client.resume()
            said(*await client.generate([request(f"turn {number}", prompts[-1], 40)]))
        async with lab.running([request("turn 3", prompts[-1], LONGEST, seed=5)]) as answers:
            await client.pause(mode)
            await lab.load(2, mode)
            await client.resume()
        said(*answers.result())
        return prompts[:4], turns

    prompts, turns = lab.run(scenario())
    assert [versions_of(turn) for turn in turns] == [[0], [0], [1], [1, 2]]
    for prompt, turn in zip(prompts, turns, strict=True):
        assert len(tokens_of(turn)) == (LONGEST if turn is turns[-1] else 40)
        start = 0
        for segment in turn.segments:
            end = start + len(segment.tokens)
            errors = lab.errors(segment.version, prompt, turn)[start:end]
            assert errors.max() < 10 * lab.facts.error
            start = end
    # All keep what a turn computed; vLLM does not say so.
    assert (turns[1].cached_tokens > 0) is (lab.facts.name != "vllm")
    assert turns[2].cached_tokens == 0


@pytest.mark.parametrize("engine", SERVERS)
def test_tokens_of_agents_are_reproduced_though_a_server_dies(
    tmp_path: Path, engine: str, announce: Announce
) -> None:
    config = config_of_agents(
        tmp_path,
        AGENT,
        f"allocation_mode={engine}:d2+fsdp:d1",
        "rollout.max_engine_restarts=0",
        "rollout.pause_mode=abort",
    )
    played = play(config, kill_at=40)
    worst, (within, between) = played.worst(), played.changes()
    announce(f"{engine}: {worst:.1e}; weights changed {within} times in turns, {between} between\n")
    assert worst < 1e-4
    assert (played.summary["engine_losses"], played.summary["engine_restarts"]) == (1, 0)
    assert played.summary["resubmitted_samples"] > 0
    assert within + between > 0
    assert any("tool" in turn for sample in played.samples for turn in sample["turns"])


@pytest.mark.parametrize("engine", SERVERS)
def test_tokens_around_results_of_tools_are_reproduced(
    tmp_path: Path, engine: str, announce: Announce
) -> None:
    config = config_of_agents(tmp_path, TOOL, STOPS, f"rollout.backend={engine}")
    played = play(config, reward_fn=even_digits)
    worst, (within, between) = played.worst(), played.changes()
    announce(f"{engine}: {worst:.1e}; weights changed {within} times in turns, {between} between\n")
    assert worst < 1e-4
    assert within + between > 0
    assert max(len(sample["turns"]) for sample in played.samples) > 1
