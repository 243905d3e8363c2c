"""The notebook of response lengths: its default surprise, its claims, an upload, its export."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simulator import fit_lengths, load_simulation
from simulator.workload.lengths import lengths_from

NAME = "09_response_lengths"


@pytest.fixture(scope="module")
def shown(notebook: Callable[[str], tuple[Any, Mapping[str, Any]]]) -> Mapping[str, Any]:
    return notebook(NAME)[1]


@pytest.fixture(scope="module")
def run(shown: Mapping[str, Any]) -> Callable[..., tuple[Any, Mapping[str, Any]]]:
    """Run with other controls; the curve over batch sizes, which takes longest, is not repeated."""
    app = importlib.import_module(f"notebooks.{NAME}").app
    kept = {name: shown[name] for name in ("by_size", "growth")}

    def again(**controls: Any) -> tuple[Any, Mapping[str, Any]]:
        return app.run(defs={**kept, **controls})

    return again


def value(chosen: Any) -> SimpleNamespace:
    return SimpleNamespace(value=chosen)


def uploaded(content: bytes) -> SimpleNamespace:
    return SimpleNamespace(value=[1], name=lambda: "own.csv", contents=lambda: content)


def step_s(defs: Mapping[str, Any], kind: str, schedule: str) -> float:
    mean: float = defs["steps"][kind, schedule].step_s.mean
    return mean


def test_it_begins_with_a_fit_that_looks_good_and_a_synchronous_step_that_is_wrong(
    shown: Mapping[str, Any],
) -> None:
    assert shown["fit"].distance == pytest.approx(0.045, abs=0.002)
    assert shown["over"]["synchronous"].low > 1.08
    assert 1.0 < shown["over"]["asynchronous"].mean < 1.05


def test_half_of_a_synchronous_step_is_for_a_fifth_of_the_responses(
    shown: Mapping[str, Any],
) -> None:
    tail = shown["tail"]
    assert 0.78 < tail.done_at_half.low < tail.done_at_half.high < 0.86
    assert tail.longest_tokens.low > 3 * tail.mean_tokens.high


def test_eight_times_the_prompts_take_less_than_twice_as_long(shown: Mapping[str, Any]) -> None:
    assert 1.4 < shown["growth"] < 1.9


def test_without_a_tail_most_of_the_gain_is_gone(shown: Mapping[str, Any]) -> None:
    gains = {
        kind: step_s(shown, kind, "synchronous") / step_s(shown, kind, "asynchronous")
        for kind in ("trace", "constant")
    }
    assert gains["trace"] > 3
    assert gains["constant"] < 2


def test_a_lower_cap_shortens_the_synchronous_step_most(
    shown: Mapping[str, Any], run: Callable[..., Any]
) -> None:
    _, cut = run(cap=value(16000))
    saved = {
        schedule: 1 - step_s(cut, "trace", schedule) / step_s(shown, "trace", schedule)
        for schedule in ("synchronous", "asynchronous")
    }
    assert saved["synchronous"] == pytest.approx(0.30, abs=0.03)
    assert saved["asynchronous"] == pytest.approx(0.06, abs=0.02)
    assert float(shown["fit"].quantiles([0.9])[0]) == pytest.approx(16000, rel=0.05)


def test_the_sign_of_the_error_depends_on_the_tail(run: Callable[..., Any]) -> None:
    _, other = run(pick=value("deepseek_r1"), prompts=value(8))
    assert other["over"]["synchronous"].high < 1


def test_the_block_is_what_the_simulation_was_given(
    shown: Mapping[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "lengths.yaml"
    file.write_text(shown["block"], encoding="utf-8")
    lengths = lengths_from(load_simulation(file).workload.answers)
    shares = np.array([0.1, 0.5, 0.9, 0.99])
    assert lengths.quantiles(shares) == pytest.approx(shown["fit"].quantiles(shares))  # type: ignore[attr-defined]


def test_a_file_of_your_own_is_fitted_simulated_and_exported(run: Callable[..., Any]) -> None:
    rows = ["id,tokens,prompt_id"]
    model = fit_lengths("deepseek_r1").model("lognormal", group_correlation=0.5, max_tokens=4000)
    for prompt, group in enumerate(model.draw(np.random.default_rng(1), 60, 4).tolist()):
        rows += [f"x,{tokens},{prompt}" for tokens in group]
    _, defs = run(upload=uploaded("\n".join(rows).encode()), prompts=value(8))
    assert defs["fit"].answers == 240
    assert defs["alike"] == pytest.approx(0.5, abs=0.15)
    assert 'trace: "lengths.csv"' in defs["block"]
    assert defs["block"].startswith("# Lengths of 240 responses: own.csv.")
    assert step_s(defs, "trace", "synchronous") > step_s(defs, "trace", "asynchronous")


def test_a_file_that_is_no_table_is_explained(run: Callable[..., Any]) -> None:
    outputs, defs = run(upload=uploaded(b"tokens\nmany\n"))
    assert "steps" not in defs
    assert any(
        "own.csv, line 2: expected 1 number, got" in str(getattr(one, "text", ""))
        for one in outputs
    )


def test_lengths_that_are_all_equal_have_no_tail(run: Callable[..., Any]) -> None:
    outputs, defs = run(upload=uploaded(b"700\n" * 50), prompts=value(8))
    assert defs["fit"].kind == "constant"
    assert any("there is no tail" in str(getattr(one, "text", "")) for one in outputs)
