"""Problems from files, and one-line errors for broken files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.config.schema import DatasetConfig
from areal_lab.data.jsonl import file_problems, gold_answer, read_problems
from areal_lab.data.problems import ProblemSet
from areal_lab.data.sources import load_problems

GSM8K = (
    {"question": "How many eggs?", "answer": "She has <<3*4=12>>12.\n#### 12"},
    {"question": "How much money?", "answer": "That is $1,200.\n#### 1,200"},
    {"question": "How far?", "answer": "It is 7 miles.\n#### 7"},
)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def problems_of(path: Path, *, seed: int = 1, **settings: Any) -> ProblemSet:
    return file_problems(DatasetConfig(path=str(path), **settings), seed=seed)


def test_gsm8k_is_read_as_it_comes(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *GSM8K)
    problems = read_problems(path, DatasetConfig())
    assert [problem.answer for problem in problems] == ["12", "1200", "7"]
    assert problems[0].prompt == "How many eggs?"
    assert problems[0].as_example()["full_answer"] == GSM8K[0]["answer"]


def test_other_fields_reach_the_reward_function(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", {"text": "1+1", "gold": 2, "level": "easy"})
    dataset = DatasetConfig(
        prompt_field="text", answer_field="gold", prompt_template="Solve {prompt} {now}:"
    )
    (problem,) = read_problems(path, dataset)
    assert problem.prompt == "Solve 1+1 {now}:"
    assert problem.as_example()["answer"] == "2"
    assert problem.as_example()["level"] == "easy"


def test_empty_lines_and_a_missing_last_line_break_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"question": "a", "answer": "1"}\n\n{"question": "b", "answer": "2"}')
    assert len(read_problems(path, DatasetConfig())) == 2


@given(st.lists(st.integers(0, 30), min_size=2, max_size=60), st.integers(0, 1000))
def test_equal_prompts_stay_on_one_side(numbers: list[int], seed: int) -> None:
    path = Path("problems.jsonl")
    rows = [{"question": f"{n}?", "answer": str(n)} for n in numbers]
    if len(set(numbers)) < 2:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "areal_lab.data.jsonl.read_rows",
            lambda _: ((f"row {i}", r) for i, r in enumerate(rows)),
        )
        split = problems_of(path, seed=seed)
    assert len(split.train) + len(split.held_out) == len(rows)
    assert not {p.prompt for p in split.train} & {p.prompt for p in split.held_out}


def test_a_seed_decides_the_split(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(50)]
    path = write(tmp_path / "a.jsonl", *rows)
    assert problems_of(path, seed=1) == problems_of(path, seed=1)
    assert problems_of(path, seed=1).held_out != problems_of(path, seed=2).held_out
    assert len(problems_of(path, eval_size=5).held_out) == 5


def test_problems_of_the_held_out_file_are_not_trained_on(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", *GSM8K)
    held_out = write(tmp_path / "test.jsonl", GSM8K[1])
    split = problems_of(train, eval_path=str(held_out))
    assert [problem.answer for problem in split.train] == ["12", "7"]
    assert [problem.answer for problem in split.held_out] == ["1200"]


def test_eval_size_takes_a_part_of_the_held_out_file(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", GSM8K[0])
    held_out = write(tmp_path / "test.jsonl", *GSM8K[1:])
    assert len(problems_of(train, eval_path=str(held_out), eval_size=1).held_out) == 1
    with pytest.raises(ValueError, match=r"eval_size is 3, but .*test.jsonl has 2 problems"):
        problems_of(train, eval_path=str(held_out), eval_size=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"question": "a", "answer": "1"}\n{"question": oops}\n',
            r"line 2 is not JSON: .*column 14",
        ),
        ('{"question": "a"}\n', r"line 1 has no field 'answer'; it has 'question'"),
        ('\n["a"]\n', "line 2 is not a JSON object"),
        ('{"question": "a", "answer": ["1"]}\n', "line 1 has list in 'answer'"),
        ('{"question": "a", "answer": null}\n', "line 1 has NoneType in 'answer'"),
        ('{"question": " ", "answer": "1"}\n', "line 1 has an empty 'question'"),
        ("", "has no problems"),
        ('{"question": "a", "answer": "1"}\n', "has 1 different problems, but needs at least 2"),
    ],
)
def test_a_broken_file_is_described_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        problems_of(path)
    assert "broken.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"question": "a", "answer": "1"}\n{"question": "\xe9", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"latin.jsonl, line 2 is not UTF-8"):
        problems_of(path)


def test_a_missing_file_is_named_with_the_folder_it_was_looked_for_in(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.jsonl does not exist \(paths are relative to"):
        problems_of(tmp_path / "nowhere.jsonl")


def test_an_unknown_extension_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.xls"
    path.touch()
    with pytest.raises(ValueError, match=r"data.xls has an unknown extension; known are .arrow"):
        problems_of(path)


def test_a_template_has_a_place_for_the_prompt(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must contain \{prompt\}"):
        problems_of(tmp_path / "a.jsonl", prompt_template="Question:")


def test_tables_are_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    table = datasets.Dataset.from_list([dict(row) for row in GSM8K])
    table.to_csv(str(tmp_path / "a.csv"))
    table.save_to_disk(str(tmp_path / "folder"))
    for path in (tmp_path / "a.csv", tmp_path / "folder"):
        problems = read_problems(path, DatasetConfig())
        assert [problem.answer for problem in problems] == ["12", "1200", "7"]
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"b.parquet cannot be read as parquet") as caught:
        read_problems(tmp_path / "b.parquet", DatasetConfig())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("so\n#### 1,234", "1234"), (" 5 ", "5"), ("#### -3\n", "-3"), ("a #### b #### c", "c")],
)
def test_gold_answer(answer: str, gold: str) -> None:
    assert gold_answer(answer) == gold


def test_the_configuration_chooses_the_source(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *GSM8K)
    from_file = load_problems(DatasetConfig(type="jsonl", path=str(path)), seed=1)
    assert len(from_file.train) + len(from_file.held_out) == 3
    generated = load_problems(DatasetConfig(operations=["multiply"]), seed=1)
    assert "*" in generated.train[0].prompt
    with pytest.raises(ValueError, match="type=jsonl needs a file"):
        load_problems(DatasetConfig(type="jsonl"), seed=1)
