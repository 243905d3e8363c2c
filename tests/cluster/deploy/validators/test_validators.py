"""Generated files pass the validators of those who read them, and a planted mistake does not.

files --kubernetes-validate, hadolint, shellcheck, bash -n, SkyPilot, compose's schema--> messages
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft201909Validator

from areal_lab.cluster.deploy.files import read_yaml_text
from areal_lab.cluster.deploy.kinds import DeployKind
from areal_lab.config.shipped import training_configs
from tests.cluster.deploy.asked import FOUR_NODES, KINDS, documents, files_of
from tests.cluster.deploy.validators.environments import VALIDATORS

pytestmark = pytest.mark.deploy
RUNS: Sequence[tuple[tuple[str, ...], dict[str, Any]]] = (
    *(((name,), {"nodes": 3, "mounts": ["m:/models"]}) for name in training_configs()),
    (("tiny",), {"nodes": 1}),
    (FOUR_NODES, {"gpus_per_node": 4, "secrets": ["HF_TOKEN"], "with_ray": True}),
    (("tiny", "allocation_mode=vllm:d2t4|fsdp:d8"), {"image": "example.com:5000/lab/areal:1.0"}),
    (("tiny", "gconfig.stop=['$HOME', \"'\", '`id`', '# x']"), {"nodes": 2, "out": Path("it's")}),
)
"""Arguments and options that together use every part of every file."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each run, with the files of all kinds."""
    root = tmp_path_factory.mktemp("deployed")
    for number, (config, options) in enumerate(RUNS):
        for kind in KINDS:
            known = {**options, "mounts": []} if kind is DeployKind.SKYPILOT else options
            if kind is DeployKind.SKYPILOT and config == ("gsm8k",):
                known = {**options, "mounts": ["s3://bucket:/models"]}
            for name, text in files_of(kind, config, **known).items():
                (root / str(number)).mkdir(exist_ok=True)
                (root / str(number) / name).write_text(text, encoding="utf-8")
    return root


def program(name: str) -> str:
    return str(VALIDATORS.python_of("linters").with_name(name))


def complaints(command: Sequence[str], *files: Path) -> str:
    """What a validator says of files; empty if it accepts them all."""
    ended = subprocess.run(
        [*command, *map(str, files)], capture_output=True, text=True, check=False, timeout=120
    )
    said = ended.stdout + ended.stderr
    return "" if ended.returncode == 0 else said or f"exit code {ended.returncode}"


def changed(path: Path, folder: Path, old: str, new: str) -> Path:
    """A copy of a file with one mistake."""
    text = path.read_text(encoding="utf-8")
    assert old in text
    copy = folder / path.name
    copy.write_text(text.replace(old, new, 1), encoding="utf-8")
    return copy


def kubernetes() -> list[str]:
    return [program("kubernetes-validate"), "--strict"]


def hadolint() -> list[str]:
    return [program("hadolint"), "--failure-threshold", "style"]


def test_kubernetes_accepts_jobs_services_claims_and_config_maps(written: Path) -> None:
    for name in ("job.yaml", "storage.yaml", "rayjob.yaml"):
        files = sorted(written.glob(f"*/{name}"))
        assert len(files) == len(RUNS)
        assert not complaints(kubernetes(), *files)


@pytest.mark.parametrize(
    ("file", "mistake", "found"),
    [
        ("job.yaml", ("completionMode:", "completionMod:"), "completionMod"),
        ("job.yaml", ("  completions: 3", '  completions: "3"'), "completions"),
        (
            "job.yaml",
            ("      restartPolicy: Never", "      restartPolicies: Never"),
            "restartPolicies",
        ),
        ("job.yaml", ("          readOnly: true", "          readonly: true"), "readonly"),
        ("storage.yaml", ("  - ReadWriteMany", "  - 1"), "accessModes"),
        ("rayjob.yaml", ("data:\n", "dat:\n"), "dat"),
    ],
)
def test_kubernetes_finds_a_planted_mistake(
    file: str, mistake: tuple[str, str], found: str, written: Path, tmp_path: Path
) -> None:
    assert found in complaints(kubernetes(), changed(written / "0" / file, tmp_path, *mistake))


def test_hadolint_accepts_dockerfiles(written: Path) -> None:
    files = sorted(written.glob("*/Dockerfile.?pu"))
    assert len(files) == 2 * len(RUNS)
    assert not complaints(hadolint(), *files)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("python:3.11.14-slim-bookworm", "python", "DL3006"),
        (" --no-install-recommends", "", "DL3015"),
        ("WORKDIR /work", "WORKDIR work", "DL3000"),
        ("COPY constraints.txt ./", "COPYX constraints.txt ./", "14:5"),
        ("USER 10001", "USER root", "DL3002"),
        ("# hadolint ignore=DL3008\n", "", "DL3008"),
    ],
)
def test_hadolint_finds_a_planted_mistake(
    old: str, new: str, found: str, written: Path, tmp_path: Path
) -> None:
    path = changed(written / "0/Dockerfile.cpu", tmp_path, old, new)
    assert found in complaints(hadolint(), path)


def scripts(folder: Path, to: Path) -> Iterator[Path]:
    """All shell scripts, those in YAML as files."""
    for number, path in enumerate(sorted(folder.glob("*/job.yaml"))):
        text = documents(path.read_text(encoding="utf-8"))["ConfigMap"]["data"]["start.sh"]
        yield to / f"start-{number}.sh"
        (to / f"start-{number}.sh").write_text(text, encoding="utf-8")
    for number, path in enumerate(sorted(folder.glob("*/sky.yaml"))):
        (task,) = read_yaml_text(path.read_text(encoding="utf-8"))
        for part in ("setup", "run"):
            yield to / f"{part}-{number}.bash"
            text = f"#!/bin/bash\n{task[part]}"
            (to / f"{part}-{number}.bash").write_text(text, encoding="utf-8")
    yield from sorted(folder.glob("*/*.sbatch"))


def test_shells_accept_the_scripts(written: Path, tmp_path: Path) -> None:
    files = list(scripts(written, tmp_path))
    assert len(files) > 4 * len(RUNS)
    assert not complaints([program("shellcheck")], *files)
    for file in files:
        assert not complaints(["bash", "-n"], file)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('"${nodes[0]}"', "${nodes}", "SC2128"),
        ('"$controller:6380"', "$leader:6380", "SC2154"),
        ("done\n", "", "SC10"),
    ],
)
def test_shellcheck_finds_a_planted_mistake(
    old: str, new: str, found: str, written: Path, tmp_path: Path
) -> None:
    path = changed(written / "0/run.sbatch", tmp_path, old, new)
    assert found in complaints([program("shellcheck")], path)


def test_bash_finds_a_loop_without_an_end(written: Path, tmp_path: Path) -> None:
    path = changed(written / "0/run.sbatch", tmp_path, "done\n", "")
    assert "syntax error" in complaints(["bash", "-n"], path)


def tasks_said(tasks: Sequence[Any], home: Path) -> list[str]:
    """What SkyPilot says of each task; empty if it accepts it."""
    ended = subprocess.run(
        [
            str(VALIDATORS.python_of("skypilot")),
            str(Path(__file__).with_name("read_tasks.py")),
        ],
        input="".join(f"{json.dumps(task)}\n" for task in tasks),
        env={**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split("\n")[:-1]


def test_skypilot_accepts_tasks_and_finds_planted_mistakes(written: Path, tmp_path: Path) -> None:
    paths = sorted(written.glob("*/sky.yaml"))
    right = [read_yaml_text(path.read_text(encoding="utf-8"))[0] for path in paths]
    # Values of secrets are given when a task is launched.
    for task in right:
        task["secrets"] = dict.fromkeys(task.get("secrets", {}), "given")
    one = right[-1]
    wrong = [
        {**{key: value for key, value in one.items() if key != "run"}, "run_": one["run"]},
        {**one, "num_nodes": "three"},
        {**one, "resources": {**one["resources"], "accelerator": "H100:8"}},
        {**one, "secrets": ["TOKEN"]},
    ]
    found = tasks_said([*right, *wrong], tmp_path)
    assert found[: len(right)] == [""] * len(RUNS)
    for said, word in zip(
        found[len(right) :],
        ("did you mean 'run'", "num_nodes", "accelerator", "secrets"),
        strict=True,
    ):
        assert word in said


def compose_schema() -> Any:
    (path,) = (
        VALIDATORS.python_of("linters")
        .parents[1]
        .glob("lib/*/site-packages/compose/config/*spec.json")
    )
    return json.loads(path.read_text(encoding="utf-8"))


def test_composes_schema_accepts_files_and_finds_planted_mistakes(written: Path) -> None:
    validator = Draft201909Validator(compose_schema())
    paths = sorted(written.glob("*/compose.yaml"))
    assert len(paths) == len(RUNS)
    for path in paths:
        (file,) = read_yaml_text(path.read_text(encoding="utf-8"))
        del file["name"]  # newer than this schema
        assert not list(validator.iter_errors(file)), path
    service = file["services"]["controller"]
    for name, value in (("shm_sizes", "1gb"), ("healthcheck", {"tests": []}), ("volumes", 3)):
        kept = dict(service)
        service[name] = value
        assert len(list(validator.iter_errors(file))) == 1, name
        service.clear()
        service.update(kept)
    assert not list(validator.iter_errors(file))
