"""What holds for every notebook: its file, its prose, its cells, and how it runs as a script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebooks.rules import problems
from tools.notebooks import files
from tools.notebooks.files import FOLDER, NAMES, ROOT, WITH_TORCH, existing

HERE = Path(__file__).parent
EXTRAS = {True: "areal_lab[train,notebooks]", False: "areal_lab[notebooks]"}
"""What the header asks for, by whether the notebook's own process computes with torch."""
TRAINS = {"06_train_live"}
"""Starts runs, which need torch, in other processes."""

notebooks = pytest.mark.parametrize("name", existing())


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_exists(name: str) -> None:
    if name not in existing():
        pytest.skip(f"notebooks/{name}.py has not been written yet")


def test_the_folder_has_no_other_notebooks() -> None:
    assert set(existing()) <= set(NAMES)


@pytest.mark.skipif(not existing(), reason="there are no notebooks")
def test_marimo_has_nothing_to_say_about_them() -> None:
    paths = [str(FOLDER / f"{name}.py") for name in existing()]
    checked = run("-m", "marimo", "check", "--strict", *paths, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@notebooks
def test_it_has_a_test_file(name: str) -> None:
    assert (HERE / f"test_{name}.py").is_file(), f"tests/notebooks/test_{name}.py is missing"


@notebooks
def test_the_header_says_what_it_needs(name: str) -> None:
    header = files.header(files.source(name))
    assert header["requires-python"] == ">=3.11"
    assert header["dependencies"] == [EXTRAS[name in WITH_TORCH | TRAINS]]
    assert header["tool"]["uv"]["sources"]["areal_lab"] == {"path": "..", "editable": True}


@notebooks
def test_it_begins_with_name_question_and_cost(name: str) -> None:
    title, question, cost = files.prose(files.source(name))[:3]
    assert title == f"# {files.app_title(files.source(name))}"
    assert re.search(r"\?[*_]*$", question), f"no question: {question}"
    assert "CPU" in cost, f"does not say what it costs: {cost}"
    assert "torch" in cost, f"does not say whether it needs torch: {cost}"


@notebooks
def test_it_ends_with_things_to_try_and_the_code(name: str) -> None:
    assert files.headings(files.source(name))[-2:] == ["## Try this", "## The code"]


@notebooks
def test_no_cell_defines_an_algorithm(name: str) -> None:
    assert problems(files.source(name)) == []


IN_BROWSERS = {"03_staleness", "04_speedup", "05_buy_a_cluster", "09_response_lengths"}
"""Also pages whose Python runs in the browser: their scripts run without what browsers lack."""
LIKE_A_BROWSER = "import marimo; from tests.browser_python import install; install()"
AS_SCRIPT = """\
import runpy, sys
sys.path.insert(0, {root!r})
{before}
runpy.run_path({path!r}, run_name="__main__")
print("torch" in sys.modules)
"""


@notebooks
def test_it_runs_as_a_script(name: str, tmp_path: Path) -> None:
    path = FOLDER / f"{name}.py"
    before = LIKE_A_BROWSER if name in IN_BROWSERS else ""
    script = AS_SCRIPT.format(root=str(ROOT), path=str(path), before=before)
    ended = run("-c", script, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    *printed, loaded_torch = ended.stdout.splitlines()
    assert len(printed) <= 20, "a script prints a few lines at most"
    assert ended.stderr == ""
    assert not list(tmp_path.iterdir()), "a script leaves nothing in the folder it is started from"
    if name not in WITH_TORCH:
        assert loaded_torch == "False", "torch was loaded"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
