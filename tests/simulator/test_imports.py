"""The simulator is light: no torch, and tables and pictures only for those who ask."""

from __future__ import annotations

import subprocess
import sys

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


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        simulator.simulat  # noqa: B018
