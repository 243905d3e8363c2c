"""The simulator is light: no torch, and tables and pictures only for those who ask."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest

import simulator

HEAVY = ("torch", "transformers", "pandas", "matplotlib", "scipy", "omegaconf")


def loaded_after(statement: str) -> str:
    script = f"import sys; {statement}; print(sorted({set(HEAVY)!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


@pytest.mark.parametrize(
    "statement",
    ["import simulator", "import simulator; [getattr(simulator, n) for n in simulator.__all__]"],
    ids=["the package", "every public name"],
)
def test_importing_the_simulator_loads_nothing_heavy(statement: str) -> None:
    assert loaded_after(statement) == "[]"


def test_simulating_loads_nothing_heavy() -> None:
    statement = (
        "import simulator; c = simulator.SimulationConfig(); c.workload.steps = 1; "
        "c.workload.warmup_steps = 0; c.workload.prompts_per_batch = 64; c.seeds = 1; "
        "simulator.replicate(c).to_json()"
    )
    assert loaded_after(statement) == "[]"


def test_every_public_name_is_listed_once_and_found() -> None:
    assert len(set(simulator.__all__)) == len(simulator.__all__)
    assert dir(simulator) == sorted(simulator.__all__)
    for name in simulator.__all__:
        assert getattr(simulator, name) is not None


def test_a_public_name_is_never_hidden_by_the_module_of_that_name() -> None:
    for module in iter_modules(simulator.__path__):
        if module.name != "__main__":
            import_module(f"simulator.{module.name}")
    for name in simulator.__all__:
        assert not isinstance(getattr(simulator, name), ModuleType), name


def test_a_plan_and_a_calibration_are_called_by_name(tmp_path: Path) -> None:
    question = simulator.load_plan(
        None,
        [
            *("simulation=small", "steps=4", "search.seeds=1", "candidates.gpu=[H100]"),
            *("candidates.nodes=[1]", "candidates.rollout_share=[0.5]", "search.sensitivity=0"),
        ],
    )
    assert simulator.find_plan(question).best is not None
    table = tmp_path / "steps.csv"
    rows = [f"{n},512,{5 + n / 10}" for n in (1, 2, 4, 8, 16, 32, 64, 128)]
    table.write_text("\n".join(["batch,context,ms", *rows]))
    assert simulator.calibrate_from(table).parts


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        simulator.simulat  # noqa: B018
