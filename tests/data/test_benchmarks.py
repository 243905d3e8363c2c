"""Benchmarks from lines in the form of their releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.schema import BenchmarkName, DatasetConfig
from areal_lab.data.benchmarks import REWARDS, TEMPLATES, benchmark_problems
from areal_lab.data.sources import load_problems

ROWS: dict[BenchmarkName, dict[str, Any]] = {
    "gsm8k": {"question": "2 boxes of 600?", "answer": "2*600=<<2*600=1200>>1200\n#### 1,200"},
    "math500": {"problem": "What is $1/2$?", "answer": "\\frac{1}{2}", "solution": "Half."},
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": "def one():\n",
        "entry_point": "one",
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    },
    "mbpp": {
        "task_id": 12,
        "text": "Write one.",
        "code": "def one(): return 1",
        "test_list": ["assert one() == 1"],
        "test_setup_code": "",
    },
}
LAST_FIELD = {"gsm8k": "answer", "math500": "answer", "humaneval": "test", "mbpp": "test_list"}


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "in_prompt", "answer"),
    [
        ("gsm8k", "2 boxes of 600?", "1200"),
        ("math500", "\\boxed{}", "\\frac{1}{2}"),
        ("humaneval", "def one():\n", "    return 1\n"),
        ("mbpp", "assert one() == 1", "def one(): return 1"),
    ],
)
def test_prompt_and_answer_of_a_line(
    tmp_path: Path, name: BenchmarkName, in_prompt: str, answer: str
) -> None:
    (problem,) = benchmark_problems(name, written(tmp_path / "a.jsonl", ROWS[name]))
    assert in_prompt in problem.prompt
    assert problem.answer == answer


def test_a_template_of_your_own_replaces_the_usual_one(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", ROWS["gsm8k"])
    assert benchmark_problems("gsm8k", file, "Q {prompt} A")[0].prompt == "Q 2 boxes of 600? A"


@pytest.mark.parametrize("name", list(ROWS))
def test_a_missing_field_is_named_with_its_line(tmp_path: Path, name: BenchmarkName) -> None:
    without = {field: value for field, value in ROWS[name].items() if field != LAST_FIELD[name]}
    file = written(tmp_path / "a.jsonl", ROWS[name], without)
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2 has .*'{LAST_FIELD[name]}'"):
        benchmark_problems(name, file)


def test_a_gsm8k_answer_without_its_mark_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", {"question": "2?", "answer": "2"})
    with pytest.raises(ValueError, match="line 1 has no '####' in 'answer'"):
        benchmark_problems("gsm8k", file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl does not exist"):
        benchmark_problems("math500", tmp_path / "none.jsonl")


def test_the_test_split_of_mbpp_is_held_out(tmp_path: Path) -> None:
    rows = [{**ROWS["mbpp"], "task_id": number} for number in (11, 510, 601, 602)]
    found = load_problems(
        DatasetConfig(type="mbpp", path=written(tmp_path / "a.jsonl", *rows)), seed=1
    )
    assert [one.metadata["task_id"] for one in found.held_out] == [11, 510]
    assert [one.metadata["task_id"] for one in found.train] == [601, 602]


def test_other_benchmarks_take_the_held_out_ones_of_another_file(tmp_path: Path) -> None:
    other = {"question": "3 boxes?", "answer": "#### 3"}
    found = load_problems(
        DatasetConfig(
            type="gsm8k",
            path=written(tmp_path / "train.jsonl", ROWS["gsm8k"], other),
            eval_path=written(tmp_path / "test.jsonl", other),
        ),
        seed=1,
    )
    assert [one.answer for one in found.train] == ["1200"]
    assert [one.answer for one in found.held_out] == ["3"]


def test_every_benchmark_has_a_text_and_a_reward() -> None:
    assert set(TEMPLATES) == set(REWARDS) == set(ROWS)
