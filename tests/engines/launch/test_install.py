"""Environments of engines, made for real from a package of one line: once, again, half, spoiled."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from areal_lab.cli import app as cli
from areal_lab.engines.launch import environments, install, install_progress
from areal_lab.engines.launch.backends import BACKENDS, INSTALLABLE, Build, InstallCost
from areal_lab.engines.launch.environments import Condition, Environment, environment
from areal_lab.engines.launch.install import InstallError, Recipe, check, describe, make, needed
from areal_lab.engines.launch.install_progress import Progress
from areal_lab.engines.launch.verify_environment import examined
from areal_lab.host.processes import last_lines


def wheel(folder: Path, name: str, version: str, code: str = "") -> Path:
    """A package of one module."""
    file = folder / f"{name}-{version}-py3-none-any.whl"
    facts = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr(f"{name}.py", code or f"version = {version!r}\n")
        packed.writestr(
            f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        packed.writestr(
            f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        packed.writestr(f"{facts}/RECORD", "")
    return file


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """SGLang's, but for what is installed."""
    monkeypatch.setenv("AREAL_LAB_ENGINES", str(tmp_path / "engines"))
    monkeypatch.setattr(environments, "_REQUIREMENTS", tmp_path)
    (tmp_path / "sglang-cpu.txt").write_text(f"# one\n{wheel(tmp_path, 'sglang', '0.5')}\n")
    return replace(
        install.choose("sglang", "cpu"),
        look=("-c", "import sglang; print(sglang.version)"),
        cost=InstallCost(1 << 20, 1 << 20, "a moment", True),
    )


def silent() -> Progress:
    return Progress(Console(file=io.StringIO()))


def condition() -> Condition:
    return environment("sglang").condition


def test_made_once_and_then_nothing_is_to_be_done(recipe: Recipe, tmp_path: Path) -> None:
    assert condition() is Condition.MISSING
    # Where a link is, it is replaced, and what it points to stays.
    (tmp_path / "elsewhere" / "precious").mkdir(parents=True)
    recipe.folder.parent.mkdir()
    recipe.folder.symlink_to(tmp_path / "elsewhere")
    make(recipe, silent())
    assert (tmp_path / "elsewhere" / "precious").is_dir()
    found = environment("sglang")
    assert (found.condition, found.version, found.build) == (Condition.READY, "0.5", "cpu")
    assert install.installed("sglang")
    assert not needed(recipe, found)
    assert install.engine_version("sglang") == "0.5"
    run = [str(environments.python_of("sglang")), "-c", "import sglang; print(sglang.version)"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "0.5\n"
    # A line of the requirements changes: the environment works, and is made again when asked for.
    with recipe.requirements.open("a") as requirements:
        requirements.write("# two\n")
    assert condition() is Condition.OUTDATED
    assert condition().usable
    assert needed(recipe, environment("sglang"))


def test_the_other_build_is_another_environment(recipe: Recipe) -> None:
    found = Environment(backend="sglang", folder=recipe.folder, condition=Condition.READY)
    assert not needed(recipe, found)
    assert needed(replace(recipe, build="gpu"), found)


def test_one_left_halfway_is_made_again(recipe: Recipe) -> None:
    """Whatever is in it, as after a power cut: the stamp says that it was not finished."""
    good = recipe.requirements.read_text()
    recipe.requirements.write_text("./there-is-no-such-file.whl\n")
    with pytest.raises(InstallError, match=r"pip failed; the last lines of .*install\.log"):
        make(recipe, silent())
    assert condition() is Condition.HALF_MADE
    assert not install.installed("sglang")
    (recipe.folder / "bin" / "python").unlink()
    (recipe.folder / "bin" / "python").write_text("not a program")
    recipe.requirements.write_text(good)
    check(recipe)
    # An engine that cannot be imported is not there either.
    with pytest.raises(InstallError, match="the look at the engine failed") as refusal:
        make(replace(recipe, look=("-c", "import gone")), silent())
    assert "No module named 'gone'" in str(refusal.value)
    assert condition() is Condition.HALF_MADE
    make(recipe, silent())
    assert condition() is Condition.READY


def test_what_somebody_else_made_is_left_alone(recipe: Recipe) -> None:
    (recipe.folder / "precious").mkdir(parents=True)
    with pytest.raises(InstallError, match="was not made by this command; move it away"):
        check(recipe)
    assert (recipe.folder / "precious").is_dir()
    check(recipe, force=True)


def broken(recipe: Recipe) -> str:
    """What the environment lacks; it is to be made again, and then it is whole."""
    found = examined(environment("sglang"))
    assert found.condition is Condition.BROKEN
    assert needed(recipe, found)
    assert f"{recipe.folder} (broken: {found.lacks})" in "\n".join(describe(recipe, found))
    told = CliRunner().invoke(cli.app, ["engine", "install", "sglang", "--dry-run"])
    assert f"(broken: {found.lacks})" in told.stdout
    check(recipe)
    make(recipe, silent())
    assert not needed(recipe, examined(environment("sglang")))
    return found.lacks


def test_what_was_complete_and_is_broken_is_made_again(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "visible_gpus", lambda: ())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wheel(tmp_path, "two_words", "1.0")
    recipe.requirements.write_text("sglang==0.5\nTwo.Words==1.0  # spelled otherwise\n")
    recipe = replace(recipe, stamp=environments.requirements_hash("sglang", "cpu"))
    make(recipe, silent())
    (packages,) = recipe.folder.glob("lib/python3*/site-packages")
    shutil.rmtree(packages / "__pycache__")
    assert examined(environment("sglang")).condition is Condition.READY
    told = CliRunner().invoke(cli.app, ["engine", "install", "sglang"])
    assert told.stdout.endswith("(--force makes it anew); nothing to do\n")

    shutil.rmtree(packages / "two_words-1.0.dist-info")
    assert broken(recipe) == "Two.Words is not in it"
    (packages / "sglang.py").unlink()
    assert broken(recipe) == "sglang-0.5 has lost sglang.py"
    (packages / "sglang-0.5.dist-info" / "RECORD").unlink()
    assert broken(recipe) == "sglang-0.5 has lost its list of files"
    python = recipe.folder / "bin" / "python"
    python.unlink()
    python.write_text("not a program")
    assert broken(recipe) == "its Python does not run"
    # The system's Python has become another one.
    python.unlink()
    python.write_text("#!/bin/sh\necho /elsewhere\n")
    python.chmod(0o755)
    assert "looks for packages in /elsewhere" in broken(recipe)


def test_a_file_in_the_way_is_replaced_if_asked_for(recipe: Recipe) -> None:
    recipe.folder.parent.mkdir()
    recipe.folder.write_text("precious")
    with pytest.raises(InstallError, match="was not made by this command"):
        check(recipe)
    check(recipe, force=True)
    make(recipe, silent())
    assert condition() is Condition.READY


def test_a_place_that_cannot_be_written_to_is_refused(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)  # the tests may run as root
        with pytest.raises(InstallError, match="is not writable; let AREAL_LAB_ENGINES name"):
            check(recipe)
    nowhere = replace(recipe, folder=Path("/proc/areal_lab/sglang"))
    with pytest.raises(InstallError, match=r"/proc/areal_lab/sglang cannot be made \(No such"):
        make(nowhere, silent())


def test_two_do_not_install_at_the_same_time(recipe: Recipe) -> None:
    recipe.folder.mkdir(parents=True)
    with (recipe.folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InstallError, match="another process is installing sglang"):
            make(recipe, silent())


def test_no_space_is_said_before_anything_is_done(recipe: Recipe) -> None:
    greedy = replace(recipe, cost=InstallCost(0, 1 << 60, "", True))
    with pytest.raises(InstallError, match="GiB free, but sglang takes 1073741824"):
        check(greedy)
    assert not recipe.folder.exists()


def test_what_will_be_done_is_said(recipe: Recipe) -> None:
    said = "\n".join(describe(recipe, environment("sglang")))
    assert "CPU build, because it was asked for" in said
    assert "1 packages, each with its version" in said
    assert f"{recipe.folder} (not installed)" in said


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_the_shipped_requirements_are_pinned_to_the_last(backend: str) -> None:
    lines = environments.pinned(environments.requirements_file(backend, "cpu"))
    names = [line.partition("==")[0].lower().replace("_", "-") for line in lines]
    assert all("==" in line for line in lines)
    assert len(set(names)) == len(names)
    assert {"torch", "triton", "setuptools"} < set(names)
    assert not any("://" in line or "@" in line for line in lines)


@pytest.mark.parametrize("backend", INSTALLABLE)
@pytest.mark.parametrize("build", ["cpu", "gpu"])
def test_each_engine_can_be_installed_in_each_build(backend: str, build: Build) -> None:
    recipe = install.choose(backend, build)
    assert recipe.cost.disk_bytes >= recipe.cost.download_bytes > 0
    package = BACKENDS[backend].distribution[build]
    assert any(line.startswith(f"{package}==") for line in environments.pinned(recipe.requirements))


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("embedded", "is part of this package"),
        ("vlm", f"there are {', '.join(INSTALLABLE)}; did you mean 'vllm'?"),
    ],
)
def test_what_cannot_be_installed_is_refused(backend: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        install.choose(backend)


def test_the_build_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "visible_gpus", lambda: ())
    assert (install.choose("vllm").build, install.choose("vllm").why) == (
        "cpu",
        "no GPU is visible",
    )
    monkeypatch.setattr(install, "visible_gpus", lambda: ("0", "1"))
    chosen = install.choose("vllm")
    assert (chosen.build, chosen.why) == ("gpu", "2 GPU(s) are visible")
    assert chosen.with_dependencies
    assert install.choose("vllm", "cpu").build == "cpu"


def test_progress_counts_what_pip_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_progress, "_QUIET_S", 0.0)
    progress = Progress(Console())
    progress.pip("Collecting torch==2.13.0\n  Downloading torch.whl (190.5 MB)\n", 0, 3)
    progress.pip("Collecting six (from torch)\nCollecting torch==2.13.0\n", 0, 3)
    progress.pip("Processing /wheels/yarl-1.2-cp311-cp311-linux.whl (from -r x.txt)\n", 0, 3)
    progress.pip("Installing collected packages: six, torch\n", 2, 3)
    told = [line.split("] ")[1] for line in capsys.readouterr().out.splitlines()]
    assert told == [
        "fetching: 1 of 3 packages, now torch (190.5 MB)",
        "fetching: 2 of 3 packages, now torch",
        "fetching: 3 of 3 packages, now yarl",
        "unpacking: 2 of 3 packages",
    ]
    assert progress.downloaded_bytes == 190.5e6


def test_an_interrupted_installation_is_half_made(recipe: Recipe, tmp_path: Path) -> None:
    """Ctrl-C while the look, which never ends, is being taken."""
    endless = (
        "import pathlib, signal\npathlib.Path(__file__).with_name('here').touch()\nsignal.pause()\n"
    )
    package = wheel(tmp_path, "sglang", "0.7", endless)
    recipe.requirements.write_text(f"{package}\n")
    program = tmp_path / "installs.py"
    program.write_text(
        "import signal, sys\n"
        # A shell that starts a suite in the background has its children ignore Ctrl-C.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.insert(0, {str(Path.cwd())!r})\n"
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "from areal_lab.engines.launch import environments, install\n"
        "from tests.engines.launch.test_install import silent\n"
        f"environments._REQUIREMENTS = Path({str(tmp_path)!r})\n"
        "recipe = replace(install.choose('sglang', 'cpu'), look=('-c', 'import sglang'))\n"
        "install.make(recipe, silent())\n"
    )
    log = tmp_path / "log"
    with log.open("w") as out:
        installing = subprocess.Popen([sys.executable, str(program)], stdout=out, stderr=out)
    try:
        while not list(recipe.folder.glob("lib/*/site-packages/here")):
            assert installing.poll() is None, last_lines(log)
            try:
                installing.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        installing.send_signal(signal.SIGINT)
        assert installing.wait(20) != 0
    finally:
        installing.kill()
        installing.wait()
    assert condition() is Condition.HALF_MADE
