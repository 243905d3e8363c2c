"""Settings of the controller: what cannot be, what has no effect, and what the report says."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from areal_lab.config.problem import ConfigError
from simulator.assembly.build import problems
from simulator.assembly.simulate import replicate
from simulator.config.load import load_simulation
from simulator.report.tables import show_report
from simulator.report.to_json import cost_parts, report, warnings

PAPER = "table_1_1.5b_asynchronous"
SPMD = "controller.kind=spmd"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["controller.ranks=3"], "controller.ranks is 3, but must divide the data-parallel"),
        (
            ["workload.prompts_per_batch=500"],
            "the prompts of a batch (500), of which each rank has an equal share; 4 does",
        ),
        (
            ["rollout_gpus=92", "trainer.pipeline_parallel=1"],
            "of the trainer (36), the engines (92)",
        ),
        (["workload.minibatches=1024"], "each of 16 ranks (controller.kind=spmd) has only 512"),
        (["schedule.max_concurrent_prompts=4"], "schedule.max_concurrent_prompts is 4"),
        (["schedule.name=one_step_overlap"], "schedule.name is 'one_step_overlap'"),
        (["schedule.interruptible=false"], "(interruptible: false)"),
        (["schedule.name=partial_rollout"], "schedule.name is 'partial_rollout'"),
        (["schedule.require_batches=1"], "schedule.require_batches is 1, but needs one controller"),
        (
            ["cluster.hybrid_gpus=8", "controller.ranks=4"],
            "cluster.hybrid_gpus is 8, but needs one controller",
        ),
        (["faults.node_mtbf_h=100"], "faults.node_mtbf_h is 100, but needs one controller"),
        (["trainer.pipeline_parallel=7"], "trainer"),
        (["controller.inputs=missing.json"], "controller.inputs is 'missing.json', but it cannot"),
    ],
)
def test_what_ranks_cannot_have_is_one_problem(overrides: list[str], said: str) -> None:
    found = problems(load_simulation(PAPER, [SPMD, *overrides]))
    assert [said in problem.message for problem in found] == [True]
    assert "controller" in found[0].message or "trainer" in found[0].setting


@pytest.mark.parametrize("kind", ["single", "metadata"])
def test_a_controller_goes_with_every_schedule(kind: str) -> None:
    for settings in (
        ["schedule.name=one_step_overlap"],
        ["schedule.interruptible=false", "faults.node_mtbf_h=5000"],
        ["schedule.require_batches=1"],
        ["cluster.hybrid_gpus=8"],
        ["schedule.name=partial_rollout", "cluster.placement=colocated"],
    ):
        assert problems(load_simulation(PAPER, [f"controller.kind={kind}", *settings])) == []


def test_bounds_are_said_at_the_field() -> None:
    with pytest.raises(ConfigError, match=r"network_bytes_per_s is 100.* 12.5e9 is 100 Gb/s"):
        load_simulation(PAPER, ["controller.network_bytes_per_s=100"])
    with pytest.raises(ConfigError, match="none, single, metadata, spmd"):
        load_simulation(PAPER, ["controller.kind=ray"])


def test_settings_without_effect_are_said(tmp_path: Path) -> None:
    path = tmp_path / "inputs.json"
    path.write_text('{"controller_inputs": {}}')
    given = ["controller.ranks=2", f"controller.inputs={path}"]
    given += ["controller.network_bytes_per_s=1e9"]
    for kind, ignored in (
        ("none", ["ranks", "inputs", "network_bytes_per_s"]),
        ("single", ["ranks"]),
        ("spmd", ["network_bytes_per_s"]),
    ):
        said = warnings(load_simulation(PAPER, [f"controller.kind={kind}", *given]))
        about = [line for line in said if line.startswith("controller.")]
        assert [line.split()[0] for line in about] == [f"controller.{name}" for name in ignored]


def test_only_a_run_with_a_controller_names_its_source() -> None:
    def parts(kind: str) -> list[str]:
        config = load_simulation(PAPER, [f"controller.kind={kind}"])
        return [part.source for part in cost_parts(config) if part.name == "controller"]

    assert parts("none") == []
    assert "0.38 us of CPU to read a token, by the controller" in parts("single")[0]
    assert "beside the engines; 0.16 ms for a message" in parts("metadata")[0]
    assert "by each rank; no controller" in parts("spmd")[0]


def told(*overrides: str) -> tuple[dict[str, object], str]:
    brief = ["seeds=2", "workload.steps=6", "workload.warmup_steps=2"]
    config = load_simulation("small", [*brief, *overrides])
    found = report(replicate(config), config)
    text = StringIO()
    show_report(Console(file=text, width=100), found)
    return found, " ".join(text.getvalue().split())


def test_the_report_shows_the_controller_and_what_would_help(tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    path.write_text('{"controller_inputs": {"read_token_s": 0.003}}')
    found, text = told("controller.kind=single", f"controller.inputs={path}")
    controller = found["controller"]
    assert isinstance(controller, dict)
    assert controller["controller_received_bytes"]["mean"] > 8 * 43 * 100
    assert {"low", "mean", "high"} == controller["controller_s"].keys()
    assert "one controller reads all responses" in text
    assert "The controller limits this run: it is busy" in text
    assert "handling replies" in text
    assert "received by the controller" in text
    plain, text = told()
    assert "controller" not in plain
    assert "controller" not in text


def test_the_report_of_ranks_names_the_slowest_one() -> None:
    given = ("workload.answers.sigma=1.5", "trainer.step_s=0.1", "weights.update_s=0.01")
    eight = ("gpus=16", "rollout_gpus=8", "workload.prompts_per_batch=8", "eta=0")
    found, text = told(SPMD, *given, *eight)
    assert "controller" not in found
    assert "no controller: each rank has its engines" in text
    assert "waiting for other ranks" in text
    assert "The slowest rank limits this run" in text
