"""What holds for every notebook: its file, its prose, its cells, and how it runs as a script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.notebooks.rules import problems
from tools.notebooks import files, wasm
from tools.notebooks.browser_wheel import write_wheel
from tools.notebooks.files import FOLDER, NAMES, ROOT, WITH_TORCH, existing, source
from tools.notebooks.gallery import card

HERE = Path(__file__).parent
EXTRAS = {True: "areal_lab[train,notebooks]", False: "areal_lab[notebooks]"}
"""What the header asks for, by whether the notebook's own process computes with torch."""
TRAINS = {"06_train_live"}
"""Starts runs, which need torch, in other processes."""

notebooks = pytest.mark.parametrize("name", existing())


def test_the_folder_has_the_notebooks_that_are_listed_and_no_others() -> None:
    assert existing() == list(NAMES)


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
def test_it_begins_with_name_question_and_usual_answer_and_ends_with_its_cost(name: str) -> None:
    title, question, usual, *_, cost = files.prose(files.source(name))
    assert title == f"# {files.app_title(files.source(name))}"
    assert re.search(r"\?[*_]*$", question), f"no question: {question}"
    assert re.match(r"\*\*The usual answers?:\*\* ", usual), f"no usual answer: {usual}"
    assert cost.startswith("**Cost of this page:** ")
    assert "CPU" in cost, f"does not say what it costs: {cost}"
    assert "torch" in cost, f"does not say whether it needs torch: {cost}"


@notebooks
def test_its_card_has_its_question(name: str) -> None:
    title, question = card(files.FOLDER / f"{name}.py")
    assert title == f"{int(name[:2])}. {files.app_title(files.source(name))}"
    assert "?" in question


@notebooks
def test_it_ends_with_things_to_try_and_the_code(name: str) -> None:
    assert files.headings(files.source(name))[-2:] == ["## Try this", "## The code"]


@notebooks
def test_no_cell_defines_an_algorithm(name: str) -> None:
    assert problems(files.source(name)) == []


def test_the_gallery_imports_what_setups_import(tmp_path: Path) -> None:
    """Names of packages that import on demand, too, and past what is not installed."""
    (tmp_path / "first.py").write_text(
        "with app.setup:\n    import nowhere_at_all\n    import rare_module\n"
    )
    (tmp_path / "rare_module.py").write_text("")
    (tmp_path / "lazy_package").mkdir()
    (tmp_path / "lazy_package" / "__init__.py").write_text(
        "def __getattr__(name):\n    import importlib\n"
        "    return importlib.import_module('lazy_package.' + name)\n"
    )
    (tmp_path / "lazy_package" / "part.py").write_text("")
    (tmp_path / "second.py").write_text("with app.setup:\n    from lazy_package import part as p\n")
    script = (
        "import sys; from pathlib import Path; from queue import SimpleQueue\n"
        "from tools.notebooks.gallery import load_setups\n"
        "asked = SimpleQueue()\n"
        "for one in ('first.py', 'second.py'): asked.put(Path(one))\n"
        "asked.put(None); load_setups(asked)\n"
        "print({'rare_module', 'lazy_package.part'} <= set(sys.modules))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "True\n"


@notebooks
def test_the_setup_of_a_notebook_is_read(name: str) -> None:
    assert ("marimo", []) in files.setup_imports(files.source(name))


AS_SCRIPT = """\
import runpy, sys
sys.path[:0] = {paths!r}
{before}
runpy.run_path({path!r}, run_name="__main__")
{after}
print("torch" in sys.modules)
"""
LIKE_A_BROWSER = """\
import marimo
from tests.browser_python import install
install()
import areal_lab, simulator
assert areal_lab.__file__.startswith({site!r}) and simulator.__file__.startswith({site!r})
"""
OF_THE_WHEEL = """\
ours = [one for name, one in sys.modules.items() if name.split(".")[0] in {packages!r}]
found = [str(one.__file__) for one in ours if getattr(one, "__file__", None)]
assert not (lacking := [one for one in found if not one.startswith({site!r})]), lacking
"""
PACKAGES = {"areal_lab", "simulator", "reproductions", "benchmarks"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for pages whose Python runs in the browser, unpacked."""
    folder = tmp_path_factory.mktemp("browser_wheel")
    with zipfile.ZipFile(write_wheel(folder, ())) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.slow] * (one in WITH_TORCH)) for one in existing()],
)
def test_it_runs_as_a_script(name: str, site: Path, tmp_path: Path) -> None:
    """Notebooks that are also pages run from their wheel, and without what browsers lack."""
    paths, before, after = [str(ROOT)], "", ""
    if name in wasm.NAMES:
        paths, before = [str(site), str(ROOT)], LIKE_A_BROWSER.format(site=str(site))
        after = OF_THE_WHEEL.format(site=str(site), packages=PACKAGES)
    path = str(FOLDER / f"{name}.py")
    script = AS_SCRIPT.format(paths=paths, path=path, before=before, after=after)
    ended = run("-c", script, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    *printed, loaded_torch = ended.stdout.splitlines()
    assert len(printed) <= 20, "a script prints a few lines at most"
    assert ended.stderr == ""
    assert not list(tmp_path.iterdir()), "a script leaves nothing in the folder it is started from"
    if name not in WITH_TORCH:
        assert loaded_torch == "False", "torch was loaded"


@pytest.mark.parametrize("name", [one for one in existing() if "reproductions" in source(one)])
def test_it_finds_what_is_not_installed_from_any_folder(name: str, tmp_path: Path) -> None:
    for installed in ("areal_lab", "simulator"):
        (tmp_path / installed).symlink_to(ROOT / installed)
    script = f"import runpy; runpy.run_path({str(FOLDER / f'{name}.py')!r})"
    ended = run("-c", script, cwd=tmp_path, modules=tmp_path)
    assert ended.returncode == 0, ended.stderr


def run(*arguments: str, cwd: Path, modules: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(modules)},
        capture_output=True,
        text=True,
        check=False,
    )
