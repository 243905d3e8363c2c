"""The simulator without what Python in a browser lacks; `tests/browser_python.py` says what."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import simulator

ROOT = Path(__file__).parents[2]
SHORT = ["workload.steps=4", "workload.warmup_steps=1"]

LIKE_A_BROWSER = "from tests.browser_python import install; install()\n"
SIMULATE = """\
import json, simulator
overrides = {overrides}
result = simulator.simulate(simulator.load_simulation({preset!r}, overrides))
print(json.dumps(result.columns["end_s"].tolist()))
"""


def in_a_browser(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIKE_A_BROWSER + script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("small", []),
        # micro-batches by memory: padded, packed
        ("table_7", SHORT),
        ("table_1_1.5b_colocated", [*SHORT, "workload.prompts_per_batch=64"]),
    ],
)
def test_a_preset_gives_the_same_seconds(preset: str, overrides: list[str]) -> None:
    ended = in_a_browser(SIMULATE.format(preset=preset, overrides=overrides))
    assert ended.returncode == 0, ended.stderr
    here = simulator.simulate(simulator.load_simulation(preset, overrides))
    assert json.loads(ended.stdout) == here.columns["end_s"].tolist()


def test_lengths_are_fitted_the_same() -> None:
    tokens = [400, 500, 700, 1500, 2500, 4000] * 10
    ended = in_a_browser(f"import simulator; print(simulator.fit_lengths({tokens}).distance)")
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) == simulator.fit_lengths(tokens).distance


def test_every_module_can_be_imported() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for room in ("simulator", "areal_lab/control", "areal_lab/config", "areal_lab/plots")
        for path in sorted((ROOT / room).rglob("*.py"))
    ]
    ended = in_a_browser(f"import importlib\nfor name in {names}: importlib.import_module(name)")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("import simulator, numpy as np; np.repeat(np.zeros(2), np.ones(2, np.int64))", "repeat"),
        ("import numpy as np; np.add.reduceat(np.ones(2), np.zeros(1, np.int64))", "add.reduceat"),
        ("import numpy as np; np.bincount(np.zeros(3, np.int64))", "bincount"),
        ("from concurrent.futures import ProcessPoolExecutor", "ProcessPoolExecutor"),
        ("import torch", "torch"),
        ("import threading; threading.Thread(target=print).start()", "thread"),
        ("import subprocess; subprocess.run(['true'])", "processes"),
    ],
)
def test_what_a_browser_lacks_is_refused(script: str, error: str) -> None:
    ended = in_a_browser(script)
    assert ended.returncode == 1
    assert error in ended.stderr.splitlines()[-1]


def test_indices_of_the_width_of_an_address_pass() -> None:
    script = (
        "import numpy as np\n"
        "one = np.ones(2, np.int64).astype(np.intp, copy=False)\n"
        "print(np.repeat(np.zeros(2), one), np.bincount(one), np.add.reduceat(one, one - 1))\n"
    )
    assert in_a_browser(script).returncode == 0
