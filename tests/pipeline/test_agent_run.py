"""Runs whose samples have several turns: real processes, a tiny model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.load import load_config
from areal_lab.pipeline.run import prepare
from areal_lab.pipeline.train import resume_run
from areal_lab.preflight.limits import usable_context
from areal_lab.runlog.chrome_trace import chrome_trace
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.read_run import read_run
from tests.pipeline.tiny_run import (
    checkpoints,
    do_run,
    metrics,
    rescored_difference,
    tiny_config,
    trained_samples,
)

WORKFLOW = (
    "rollout.workflow={name: multi_turn, max_turns: 3, turn_discount: 0.5, feedback: ' = 9 = '}"
)


def length_parity(completion: str, example: Mapping[str, Any]) -> float:
    """1 or 0, so that some samples end after a turn and others do not."""
    del example
    return float(len(completion) % 3 == 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, each of whose versions is saved."""
    config = tiny_config(
        tmp_path_factory.mktemp("agent"),
        "total_train_steps=4",
        "eta=2",
        "save_every_steps=1",
        "token_fields=true",
        WORKFLOW,
    )
    return do_run(config, reward_fn=length_parity).folder


def test_every_turn_is_trained_on_as_it_was_sampled(folder: Path) -> None:
    models, worst, turns = checkpoints(folder), 0.0, set()
    for step in trained_samples(folder):
        for sample in step:
            worst = max(worst, rescored_difference(models, sample)[0])
            observations = [part for part in sample["parts"] if "observation" in part]
            turns.add(len(sample["turns"]))
            assert len(observations) == len(sample["turns"]) - 1
            generated = [len(part["tokens"]) for part in sample["parts"] if "tokens" in part]
            assert sum(generated) == sum(turn["tokens"] for turn in sample["turns"])
            assert sample["completion"].count(" = 9 = ") >= len(observations)
    assert worst < 1e-4
    assert turns == {1, 2, 3}


def test_rewards_are_discounted_by_the_turns_before(folder: Path) -> None:
    for step in trained_samples(folder):
        for sample in step:
            last = sample["turns"][-1]["reward"]
            assert sample["reward"] == last * 0.5 ** (len(sample["turns"]) - 1)


def test_metrics_summary_and_trace_count_turns(folder: Path) -> None:
    for line, step in zip(metrics(folder), trained_samples(folder), strict=True):
        turns = [len(sample["turns"]) for sample in step]
        assert line["turns_mean"] == pytest.approx(sum(turns) / len(turns))
        assert line["turns_max"] == max(turns)
        assert line["rows_per_sample"] == 1
        assert line["tool_calls_mean"] == 0
    log = read_log_file(folder / "events.jsonl")
    summary = json.loads((folder / "summary.json").read_text())
    assert sum(summary["sample_ends"].values()) == 4 * len(list(log.groups))
    trace = chrome_trace(log)["traceEvents"]
    slices = [event for event in trace if event["ph"] == "X"]
    assert sum(event.get("cat") == "turn" for event in slices) == sum(
        len(group.turns) for group in log.groups
    )
    assert sum(event.get("cat") == "sample" for event in slices) == 4 * len(list(log.groups))


def test_a_run_is_read_with_its_observations(folder: Path) -> None:
    run = read_run(folder)
    tokens = run.tokens
    observed = tokens["versions"] == -1
    assert observed.any()
    assert (tokens["lag"][observed] == -1).all()
    assert (tokens["lag"][~observed] >= 0).all()
    assert all("".join(tokens.texts(i)) == tokens.completions[i] for i in range(len(run.samples)))


def test_a_run_that_continues_keeps_turns(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, "total_train_steps=2", "eta=2", "checkpoint.open_groups=tokens", WORKFLOW
    )
    first = do_run(config).folder
    again = load_config(first / "config.yaml", [])
    assert again.rollout.workflow["max_turns"] == 3
    assert [report.step for report in resume_run(first, ["total_train_steps=4"])] == [3, 4]
    groups = [sample["group"] for step in trained_samples(first) for sample in step]
    assert sorted(set(groups)) == list(range(4 * 3))


def test_a_workflow_that_cannot_run_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "rollout.workflow={name: multi_turns}")
    with pytest.raises(ValueError, match=r"rollout\.workflow: name is 'multi_turns'.*'multi_turn'"):
        prepare(config)
    config = tiny_config(tmp_path, WORKFLOW, "actor.overlong_share=0.2")
    with pytest.raises(ValueError, match=r"overlong_share is 0\.2"):
        prepare(config)
    config = tiny_config(tmp_path, "gconfig.max_tokens=100")
    with pytest.raises(ValueError, match=r"max_tokens is 100.*without rollout\.workflow"):
        prepare(config)
    config = tiny_config(tmp_path, WORKFLOW, "gconfig.max_tokens=100000")
    with pytest.raises(ValueError, match="model's context is"):
        prepare(config)


def test_a_sample_leaves_the_tokens_that_an_engine_reserves() -> None:
    for backend, tokens in (("embedded", 256), ("sglang", 250), ("vllm", 256)):
        config = load_config(None, [f"rollout.backend={backend}"])
        assert usable_context(config, 256) == tokens
