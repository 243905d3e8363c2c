"""Agents and tools under weights that change: every token is of the version it names."""

from __future__ import annotations

from pathlib import Path

from tests.pipeline.agent_runs import AGENT, STOPS, TOOL, config_of_agents, play
from tests.pipeline.rewards import even_digits


def test_tokens_of_agents_are_reproduced_though_an_engine_dies(tmp_path: Path) -> None:
    config = config_of_agents(
        tmp_path,
        AGENT,
        "allocation_mode=embedded:d2+fsdp:d1",
        "rollout.max_engine_restarts=0",
    )
    played = play(config, kill_at=40)
    assert played.worst() < 1e-4
    assert (played.summary["engine_losses"], played.summary["engine_restarts"]) == (1, 0)
    assert played.summary["resubmitted_samples"] > 0
    within, between = played.changes()
    assert within > 0
    assert within + between > 5
    calls = [turn for sample in played.samples for turn in sample["turns"] if "tool" in turn]
    assert len(calls) > len(played.samples) / 2


def test_tokens_around_results_of_tools_are_reproduced(tmp_path: Path) -> None:
    config = config_of_agents(tmp_path, TOOL, STOPS)
    played = play(config, reward_fn=even_digits)
    assert played.worst() < 1e-4
    assert sum(played.changes()) > 0
    turns = [turn for sample in played.samples for turn in sample["turns"]]
    assert {turn.get("outcome") for turn in turns} >= {"error", None}
    assert len(turns) > len(played.samples) * 1.3
