"""The comparison with TRL: figures of two runs, and that both sides score alike."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from areal_lab.config.load import load_config
from areal_lab.rewards.exact import exact_first_line
from benchmarks.process_usage import Sample, Usage
from benchmarks.trl import __main__ as demo_vs_trl
from benchmarks.trl import environment
from benchmarks.trl.sides import Side, learning_rates


def a_side(rewards: tuple[float, ...], *, step_s: float = 2.0) -> Side:
    """A run that began 10 s after its process, with one sample of its usage each second."""
    samples = tuple(
        Sample(at_s=100.0 + second, cpu_s=2.0 * second, memory_mib=500.0 + second)
        for second in range(100)
    )
    return Side(
        began_s=110.0,
        step_ends_s=tuple(step_s * (index + 1) for index in range(len(rewards))),
        rewards=rewards,
        held_out={},
        usage=Usage(started_s=100.0, ended_s=200.0, exit_code=0, samples=samples),
    )


def test_the_target_is_reached_when_three_rewards_in_a_row_have_a_mean_above_it() -> None:
    assert a_side((0.5, 1.0, 0.5, 0.9, 0.9, 0.9)).steps_to(0.85) == 6
    assert a_side((0.5, 1.0, 0.8, 0.8)).steps_to(0.85) == 4
    assert a_side((0.9, 0.9)).steps_to(0.85) is None
    assert a_side((0.85, 0.85, 0.85)).steps_to(0.85) is None


def test_times_are_counted_from_the_beginning_of_training_and_of_the_process() -> None:
    figures = a_side((0.9, 0.9, 0.9)).figures(0.85)
    assert figures["wall_s"] == 6.0
    assert figures["wall_from_process_start_s"] == 16.0
    assert figures["cpu_s"] == 12.0
    assert figures["step_s"] == 2.0
    assert figures["peak_mib"] == 599.0


def test_ratios_are_of_pairs_that_both_reached_the_target() -> None:
    ours = [a_side((0.9,) * 3, step_s=s).figures(0.85) for s in (1.0, 2.0, 1.0)]
    theirs = [a_side((0.9,) * 3, step_s=4.0).figures(0.85) for _ in range(2)]
    theirs.append(a_side((0.1,) * 3, step_s=4.0).figures(0.85))
    result = demo_vs_trl.compare(ours, theirs)
    assert result["ratio"] == 3.0
    assert result["spread"]["ratio"] == {"median": 3.0, "min": 2.0, "max": 4.0, "pairs": 2}
    assert result["spread"]["step_s_ratio"]["pairs"] == 3


def test_without_a_run_that_reached_the_target_there_is_no_ratio() -> None:
    runs = [a_side((0.1,) * 3).figures(0.85)]
    result = demo_vs_trl.compare(runs, runs)
    assert result["ratio"] is None
    assert result["spread"]["ratio"] is None
    assert result["step_s_ratio"] == 1.0


def test_trl_gets_the_learning_rate_of_each_step() -> None:
    rates = learning_rates(load_config(demo_vs_trl.CONFIG, ["total_train_steps=10"]))
    assert rates == pytest.approx([r * 1e-6 for r in (2, 4, 6, 8, 10, 10, 8, 6, 4, 2)])


@pytest.mark.parametrize(
    ("completion", "answer"),
    [(" 13\n5 + 5 = 10", "13"), ("13", "13"), (" 13 or 14", "13"), ("", "13"), ("\n13", "13")],
)
def test_both_sides_score_alike(completion: str, answer: str) -> None:
    # TRL is not installed here, so the function is taken out of the script that imports it.
    source = Path(environment.__file__).with_name("baseline.py").read_text()
    tree = ast.parse(source)
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "exact_first_line"
    ]
    names: dict[str, object] = {}
    exec(compile(tree, "baseline.py", "exec"), names)
    theirs = names["exact_first_line"]
    assert callable(theirs)
    assert theirs(completion, answer) == exact_first_line(completion, {"answer": answer})
