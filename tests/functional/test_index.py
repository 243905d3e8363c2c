"""What `import areal_lab.functional` offers and loads."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from areal_lab import functional
from tests.functional.test_table import ALL

PAGES = Path(__file__).resolve().parents[2] / "docs" / "functional"
WITHOUT_A_ROW = {
    "admissible": "decides on counts, not on tensors",
    "open_slots": "decides on counts, not on tensors",
    "lag_bound": "decides on counts, not on tensors",
    "mean_staleness_bounded": "arithmetic on numbers of samples",
    "mean_staleness_dropping": "arithmetic on numbers of samples",
    "linear_entropy_coefficient": "arithmetic on the number of a step",
    "padded_sequence_ids": "the ids of sequences_or_rows",
    "packed_sequence_ids": "makes the packed layout of every row",
    "packed_sequences": "makes the packed layout of every row",
    "carry_over_holes": "returns None: the rows of gae go through it",
    "grouped_rewards": "the rows of group_advantages go through it; its minimum has no gradient",
    "drifting_policy": "makes the samples of an example",
    "unbiased_gradient": "the mean of per_sample_gradients",
    "per_sample_gradients": "maps and differentiates a loss itself",
    "gradient_check": "calls a loss and its backward pass, and returns Python numbers",
    "half_squared_error": "the default of value_loss",
    "logistic_objective": "dpo_loss is the mean of it",
    "squared_objective": "ipo_loss is the mean of it",
    "loss_surface": "maps and differentiates a loss itself, and checks the values of its grid",
    "ratio_path": "maps and differentiates a loss itself, and checks the values of its grid",
}
"""Public functions that the table does not have, and why."""


def public_functions() -> list[str]:
    names = functional.__all__
    return [n for n in names if isinstance(getattr(functional, n), types.FunctionType)]


SCRIPT = """
import sys
import torch
from jaxtyping import Bool, Float, Int, Shaped
before = set(sys.modules)
import areal_lab.functional
print(*(set(sys.modules) - before))
"""


def test_nothing_but_torch_and_jaxtyping_is_loaded():
    process = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    added = set(process.stdout.decode().split())
    own = {name for name in added if name.startswith("areal_lab.")}
    shared = ("areal_lab.capacity", "areal_lab.extras", "areal_lab.logit_tiles")
    allowed = ("areal_lab.functional", *shared)
    assert all(name.startswith(allowed) for name in own)
    packages = {name.split(".")[0] for name in added} - set(sys.stdlib_module_names)
    assert packages == {"areal_lab"}


def test_the_index_is_complete_and_documented():
    assert len(set(functional.__all__)) == len(functional.__all__)
    for name in functional.__all__:
        value = getattr(functional, name)
        if callable(value) and getattr(value, "__module__", "").startswith("areal_lab"):
            assert value.__doc__, name


OWN = [n for n in public_functions() if "functional" in getattr(functional, n).__module__]
"""Those of this package; the arithmetic of capacity is shared with control."""


def test_docstrings_name_source_and_errors():
    """A paper, a framework, or "definition"; and what is refused in addition to wrong shapes."""
    refusal = r"raise ValueError|\bcheck_(?!token_inputs|same_shape)\w+\("
    for name in OWN:
        function = getattr(functional, name)
        assert re.search(r"^ *Source: \S", function.__doc__, re.MULTILINE), name
        if re.search(refusal, inspect.getsource(function)):
            assert "\n    Raises:\n        ValueError: " in function.__doc__, name


def test_every_argument_is_described_where_any_is():
    """By the docstring, the one that it refers to, or the index."""
    for name in OWN:
        function = getattr(functional, name)
        others = re.findall(r"arguments are those of `(\w+)`", function.__doc__)
        if not others and "\n    Args:" not in function.__doc__:
            continue
        texts = [functional.__doc__, function.__doc__]
        texts += [getattr(functional, other).__doc__ for other in others]
        described = re.findall(r"^ {4,}(\w+)(?::|  )", "\n".join(texts), re.MULTILINE)
        assert set(inspect.signature(function).parameters) <= set(described), name


def test_every_function_has_a_row_of_the_table_or_a_reason():
    shown = {word for _, case in ALL for word in re.findall(r"\w+", case.name)}
    covered = {name for _, case in ALL for name in case.covers}
    missing = set(public_functions()) - shown - covered
    unexplained = sorted(missing - set(WITHOUT_A_ROW))
    assert not unexplained, "add a row to a file in tests/functional/cases"
    assert missing == set(WITHOUT_A_ROW)
    assert covered <= set(functional.__all__)


def test_every_function_is_on_a_page():
    pages = [page.read_text() for page in PAGES.glob("*.md") if page.stem != "transforms"]
    words = {word for page in pages for word in re.findall(r"\w+", page)}
    unmentioned = sorted(set(public_functions()) - words)
    assert not unmentioned, "describe it on a page in docs/functional"


DOCS = Path(__file__).resolve().parents[2] / "docs"
WRITTEN_PAGES = [
    *sorted((DOCS / "functional").glob("*.md")),
    *sorted((DOCS / "concepts").glob("*.md")),
]
WRITTEN_PAGES += [DOCS / "reproduce.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", WRITTEN_PAGES, ids=lambda page: page.stem)
def test_code_of_a_page_runs(page):
    namespace = {"__name__": f"docs_{page.stem}"}
    for code, expected in BLOCK.findall(page.read_text()):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), namespace)
        if expected:
            assert printed.getvalue() == expected
