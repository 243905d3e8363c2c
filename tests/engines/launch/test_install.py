"""Real installations of a one-line package: new, repeated, interrupted, broken."""

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
from areal_lab.engines.launch import environments, install
from areal_lab.engines.launch.backends import BACKENDS, INSTALLABLE, Build, InstallCost
from areal_lab.engines.launch.environments import Condition, Environment, environment, verify
from areal_lab.engines.launch.install import InstallError, Progress, Recipe, check, describe, needed
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
    """The recipe of SGLang with a tiny package instead of the requirements."""
    monkeypatch.setenv("AREAL_LAB_ENGINES", str(tmp_path / "engines"))
    monkeypatch.setattr(environments, "_REQUIREMENTS", tmp_path)
    (tmp_path / "sglang-cpu.txt").write_text(f"# one\n{wheel(tmp_path, 'sglang', '0.5')}\n")
    return replace(
        install.choose("sglang", "cpu"),
        test=("-c", "import sglang; print(sglang.version)"),
        cost=InstallCost(1 << 20, 1 << 20, "a moment", True),
    )


def silent() -> Progress:
    return Progress(Console(file=io.StringIO()))


def condition() -> Condition:
    return environment("sglang").condition


def test_an_installation_is_done_once(recipe: Recipe, tmp_path: Path) -> None:
    assert condition() is Condition.MISSING
    # A symbolic link is replaced, and its target is kept.
    (tmp_path / "elsewhere" / "precious").mkdir(parents=True)
    recipe.folder.parent.mkdir()
    recipe.folder.symlink_to(tmp_path / "elsewhere")
    install.install(recipe, silent())
    assert (tmp_path / "elsewhere" / "precious").is_dir()
    found = environment("sglang")
    assert (found.condition, found.version, found.build) == (Condition.READY, "0.5", "cpu")
    assert install.installed("sglang")
    assert not needed(recipe, found)
    assert install.engine_version("sglang") == "0.5"
    run = [str(environments.python_of("sglang")), "-c", "import sglang; print(sglang.version)"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "0.5\n"
    # With changed requirements the environment still works, and `install` replaces it.
    with recipe.requirements.open("a") as requirements:
        requirements.write("# two\n")
    assert condition() is Condition.OUTDATED
    assert condition().usable
    assert needed(recipe, environment("sglang"))


def test_another_build_needs_an_installation(recipe: Recipe) -> None:
    found = Environment(backend="sglang", folder=recipe.folder, condition=Condition.READY)
    assert not needed(recipe, found)
    assert needed(replace(recipe, build="gpu"), found)


def test_an_incomplete_environment_is_replaced(recipe: Recipe) -> None:
    """Whatever is in it: the stamp says that it is incomplete."""
    good = recipe.requirements.read_text()
    recipe.requirements.write_text("./there-is-no-such-file.whl\n")
    with pytest.raises(InstallError, match=r"pip failed; the last lines of .*install\.log"):
        install.install(recipe, silent())
    assert condition() is Condition.INCOMPLETE
    assert not install.installed("sglang")
    (recipe.folder / "bin" / "python").unlink()
    (recipe.folder / "bin" / "python").write_text("not a program")
    recipe.requirements.write_text(good)
    check(recipe)
    # An engine that cannot be imported is not installed either.
    with pytest.raises(InstallError, match="the test of the engine failed") as refusal:
        install.install(replace(recipe, test=("-c", "import gone")), silent())
    assert "No module named 'gone'" in str(refusal.value)
    assert condition() is Condition.INCOMPLETE
    install.install(recipe, silent())
    assert condition() is Condition.READY


def test_a_folder_of_the_user_is_not_replaced(recipe: Recipe) -> None:
    (recipe.folder / "precious").mkdir(parents=True)
    with pytest.raises(InstallError, match="was not created by this command; move it away"):
        check(recipe)
    assert (recipe.folder / "precious").is_dir()
    check(recipe, force=True)


def broken(recipe: Recipe) -> str:
    """What is missing from the environment, which a new installation repairs."""
    found = verify(environment("sglang"))
    assert found.condition is Condition.BROKEN
    assert needed(recipe, found)
    assert f"{recipe.folder} (broken: {found.missing})" in "\n".join(describe(recipe, found))
    output = CliRunner().invoke(cli.app, ["engine", "install", "sglang", "--dry-run"])
    assert f"(broken: {found.missing})" in output.stdout
    check(recipe)
    install.install(recipe, silent())
    assert not needed(recipe, verify(environment("sglang")))
    return found.missing


def test_a_broken_environment_is_replaced(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "visible_gpus", lambda: ())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wheel(tmp_path, "two_words", "1.0")
    recipe.requirements.write_text("sglang==0.5\nTwo.Words==1.0  # spelled otherwise\n")
    recipe = replace(recipe, stamp=environments.requirements_hash("sglang", "cpu"))
    install.install(recipe, silent())
    (packages,) = recipe.folder.glob("lib/python3*/site-packages")
    shutil.rmtree(packages / "__pycache__")
    assert verify(environment("sglang")).condition is Condition.READY
    output = CliRunner().invoke(cli.app, ["engine", "install", "sglang"])
    assert output.stdout.endswith("; use --force to reinstall\n")

    shutil.rmtree(packages / "two_words-1.0.dist-info")
    assert broken(recipe) == "package Two.Words is missing"
    (packages / "sglang.py").unlink()
    assert broken(recipe) == "sglang.py of sglang-0.5 is missing"
    (packages / "sglang-0.5.dist-info" / "RECORD").unlink()
    assert broken(recipe) == "the file list of sglang-0.5 is missing"
    python = recipe.folder / "bin" / "python"
    python.unlink()
    python.write_text("not a program")
    assert broken(recipe) == "its Python does not run"
    # The system's Python was replaced.
    python.unlink()
    python.write_text("#!/bin/sh\necho /elsewhere\n")
    python.chmod(0o755)
    assert "looks for packages in /elsewhere" in broken(recipe)


def test_a_file_with_the_folders_name_is_replaced_with_force(recipe: Recipe) -> None:
    recipe.folder.parent.mkdir()
    recipe.folder.write_text("precious")
    with pytest.raises(InstallError, match="was not created by this command"):
        check(recipe)
    check(recipe, force=True)
    install.install(recipe, silent())
    assert condition() is Condition.READY


def test_a_folder_that_is_not_writable_is_refused(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)  # the tests may run as root
        with pytest.raises(InstallError, match="is not writable; set AREAL_LAB_ENGINES to"):
            check(recipe)
    nowhere = replace(recipe, folder=Path("/proc/areal_lab/sglang"))
    with pytest.raises(InstallError, match=r"/proc/areal_lab/sglang cannot be created \(No such"):
        install.install(nowhere, silent())


def test_two_installations_do_not_run_at_the_same_time(recipe: Recipe) -> None:
    recipe.folder.mkdir(parents=True)
    with (recipe.folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InstallError, match="another process is installing sglang"):
            install.install(recipe, silent())


def test_missing_disk_space_is_refused_before_anything_is_written(recipe: Recipe) -> None:
    greedy = replace(recipe, cost=InstallCost(0, 1 << 60, "", True))
    with pytest.raises(InstallError, match="GiB free, but sglang needs 1073741824"):
        check(greedy)
    assert not recipe.folder.exists()


def test_the_installation_is_described(recipe: Recipe) -> None:
    text = "\n".join(describe(recipe, environment("sglang")))
    assert "CPU build, because it was requested" in text
    assert "1 packages with pinned versions" in text
    assert f"{recipe.folder} (not installed)" in text


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_the_shipped_requirements_are_all_pinned(backend: str) -> None:
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
        ("vlm", f"known are {', '.join(INSTALLABLE)}; did you mean 'vllm'?"),
    ],
)
def test_an_engine_that_cannot_be_installed_is_refused(backend: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        install.choose(backend)


def test_the_build_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "visible_gpus", lambda: ())
    assert (install.choose("vllm").build, install.choose("vllm").reason) == (
        "cpu",
        "no GPU is visible",
    )
    monkeypatch.setattr(install, "visible_gpus", lambda: ("0", "1"))
    chosen = install.choose("vllm")
    assert (chosen.build, chosen.reason) == ("gpu", "2 GPU(s) are visible")
    assert chosen.with_dependencies
    assert install.choose("vllm", "cpu").build == "cpu"


def test_progress_counts_the_packages_in_pips_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "_INTERVAL_S", 0.0)
    progress = Progress(Console())
    progress.pip("Collecting torch==2.13.0\n  Downloading torch.whl (190.5 MB)\n", 0, 3)
    progress.pip("Collecting six (from torch)\nCollecting torch==2.13.0\n", 0, 3)
    progress.pip("Processing /wheels/yarl-1.2-cp311-cp311-linux.whl (from -r x.txt)\n", 0, 3)
    progress.pip("Installing collected packages: six, torch\n", 2, 3)
    lines = [line.split("] ")[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "downloading: 1 of 3 packages, now torch (190.5 MB)",
        "downloading: 2 of 3 packages, now torch",
        "downloading: 3 of 3 packages, now yarl",
        "unpacking: 2 of 3 packages",
    ]
    assert progress.downloaded_bytes == 190.5e6


def test_an_interrupted_installation_is_incomplete(recipe: Recipe, tmp_path: Path) -> None:
    """Ctrl-C during the final test, which never ends here."""
    endless = (
        "import pathlib, signal\npathlib.Path(__file__).with_name('here').touch()\nsignal.pause()\n"
    )
    package = wheel(tmp_path, "sglang", "0.7", endless)
    recipe.requirements.write_text(f"{package}\n")
    program = tmp_path / "installs.py"
    program.write_text(
        "import signal, sys\n"
        # Children of a background shell ignore Ctrl-C.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.insert(0, {str(Path.cwd())!r})\n"
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "from areal_lab.engines.launch import environments, install\n"
        "from tests.engines.launch.test_install import silent\n"
        f"environments._REQUIREMENTS = Path({str(tmp_path)!r})\n"
        "recipe = replace(install.choose('sglang', 'cpu'), test=('-c', 'import sglang'))\n"
        "install.install(recipe, silent())\n"
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
    assert condition() is Condition.INCOMPLETE
