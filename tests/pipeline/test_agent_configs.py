"""The shipped configs of several turns: each can run, and does with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lab.agents.catalogue import make_workflow
from areal_lab.config.load import load_config
from areal_lab.config.schema import TrainConfig
from areal_lab.config.shipped import CONFIGS
from areal_lab.pipeline.run import prepare
from benchmarks.tiny_model import write_tiny_model
from tests.pipeline.agent_runs import TEMPLATE
from tests.pipeline.tiny_run import do_run, trained_samples

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
        ],
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_config_of_turns_can_run(name: str, tmp_path: Path) -> None:
    config = tiny(name, tmp_path)
    problems = prepare(config).train
    assert make_workflow(config.rollout.workflow) is not None
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
