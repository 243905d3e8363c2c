"""Runs whose samples have several turns: real processes, a tiny model."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.load import load_config
from areal_lab.config.schema import TrainConfig
from areal_lab.config.shipped import CONFIGS
from areal_lab.pipeline.train import resume_run
from areal_lab.resolve.allocation import layout_of
from areal_lab.resolve.functions import workflow_of
from areal_lab.resolve.limits import usable_context
from areal_lab.resolve.resolved import resolve
from areal_lab.runlog.chrome_trace import chrome_trace
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.read_run import read_run
from benchmarks.tiny_model import write_tiny_model
from tests.agents.hosting.test_runner import STANDARD
from tests.pipeline.agent_runs import AGENT, STOPS, TEMPLATE, TOOL, config_of_agents, play
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import (
    checkpoints,
    do_run,
    metrics,
    rescored_difference,
    tiny_config,
    trained_samples,
)

ENVIRONMENT = (
    *("environment=own", f"environment.standard={STANDARD}"),
    *(f"environment.python={sys.executable}", "rollout.workflow.tool_call_parser=none"),
    "gconfig.max_new_tokens=32",
)
"""In place of the one that has to be named."""
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
        resolve(config)
    config = tiny_config(tmp_path, WORKFLOW, "actor.overlong_share=0.2")
    with pytest.raises(ValueError, match=r"overlong_share is 0\.2"):
        resolve(config)
    config = tiny_config(tmp_path, "gconfig.max_tokens=100")
    with pytest.raises(ValueError, match=r"max_tokens is 100.*without rollout\.workflow"):
        resolve(config)
    config = tiny_config(tmp_path, WORKFLOW, "gconfig.max_tokens=100000")
    with pytest.raises(ValueError, match="model's context is"):
        resolve(config)


def test_a_sample_leaves_the_tokens_that_an_engine_reserves() -> None:
    for backend, tokens in (("embedded", 256), ("sglang", 250), ("vllm", 256)):
        config = load_config(None, [f"rollout.backend={backend}"])
        assert usable_context(layout_of(config).engines, 256) == tokens


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


NAMES = sorted(path.stem for path in (CONFIGS / "agents").glob("*.yaml"))
CALLS = {"calculator": "Tool:", "search": "Open:", "tir": "```python\nprint("}


def tiny(name: str, folder: Path) -> TrainConfig:
    """The config with a model whose tokens are characters, and whose context is 256 of them."""
    write_tiny_model(folder / "model", initializer_range=0.2)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return load_config(
        name,
        [
            *(f"actor.path={folder / 'model'}", f"run_dir={folder / 'runs'}", "plots=false"),
            *("dataset.few_shot=1", "dataset.tool_examples=T", "dataset.batch_size=2"),
            *("total_train_steps=2", "gconfig.n_samples=4", "evaluation.max_problems=4"),
            *("rollout.threads=1", "actor.threads=1", "alarms.off=[equal_rewards]"),
            *(ENVIRONMENT if name == "verifiers" else ()),
        ],
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_config_of_turns_can_run(name: str, tmp_path: Path) -> None:
    config = tiny(name, tmp_path)
    problems = resolve(config).problems.train
    assert workflow_of(config) is not None
    if name in CALLS:
        assert CALLS[name] in problems[0].prompt, "its examples call the tool as the model has to"


@pytest.mark.slow
# The examples of the agent take more than 256 characters; tests/agents/examples runs it.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "openai_calculator"])
def test_a_shipped_config_of_turns_trains(name: str, tmp_path: Path) -> None:
    result = do_run(tiny(name, tmp_path))
    assert result.summary["status"] == "complete"
    assert sum(result.summary["outcomes"].values()) >= 2 * 2 * 4
    assert all(sample["turns"] for step in trained_samples(result.folder) for sample in step)
