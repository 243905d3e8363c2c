"""Rows of data sets: text stays as it is in every format, and what would change is refused."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import pickle
import random
import zipfile
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch.utils.data
from pyarrow import feather, ipc, parquet

from areal_lab.config.offline import DemonstrationsConfig, PairsConfig
from areal_lab.config.schema import DatasetConfig
from areal_lab.data.rows import Written, object_rows, read_rows, text_of
from areal_lab.data.sources import given_problems, load_problems
from areal_lab.offline.rows import given_rows, load_rows
from tests.fuzz import damaged_bytes, damaged_json, mutations, one_line

TEXTS = (
    *("007", "0100", "N/A", "NA", "nan", "True", "1e5", "2024-01-02", "-0", "+5", "1_000", "0x1F"),
    *(
        "",
        " x ",
        "½",
        "1,200",
        'say "7"',
        "a\nb",
        "a\tb",
        "\u2028",
        "null",
        "None",
        "12:30",
        "\x00",
    ),
)


def fields(text: str) -> dict[str, str]:
    return {"question": f"q {text}", "answer": text, "tests": text, "chosen": text}


def rows_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows as a file, in the format that its extension names."""
    table = pa.Table.from_pylist(rows)
    text = io.StringIO()
    match path.suffix:
        case ".csv" | ".tsv":
            separator = "," if path.suffix == ".csv" else "\t"
            names = list(rows[0])
            writer = csv.DictWriter(text, names, delimiter=separator, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        case ".json":
            json.dump(rows, text, indent=2)
        case ".jsonl" | ".ndjson":
            text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        case ".parquet":
            parquet.write_table(table, path)
            return path
        case ".feather":
            feather.write_feather(table, path)
            return path
        case ".arrow":
            with ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table)
            return path
        case _:
            datasets.Dataset.from_list(rows).save_to_disk(str(path))
            return path
    path.write_text(text.getvalue(), encoding="utf-8", newline="")
    return path


def test_text_stays_as_it_is_in_every_format(tmp_path: Path) -> None:
    rows = [fields(text) for text in TEXTS]
    table = pa.Table.from_pylist(rows)
    names = ("a.csv", "a.tsv", "a.json", "a.jsonl", "a.ndjson", "a.parquet", "a.feather", "a.arrow")
    given: list[Any] = [rows_file(tmp_path / name, rows) for name in (*names, "saved")]
    given += [str(given[0]), rows, tuple(rows), iter(rows), table, table.to_batches()[0]]
    given += [pd.DataFrame(rows), datasets.Dataset.from_list(rows), table.to_pydict()]
    given += [datasets.Dataset.from_list(rows).to_iterable_dataset()]
    given += [{name: np.array(column) for name, column in pd.DataFrame(rows).items()}]
    for data in given:
        found = [row for _, row in object_rows(data, "rows")]
        if isinstance(data, dict):  # NumPy's arrays of text have none that ends with NUL
            found, kept = found[:-1], rows[:-1]
        else:
            kept = rows
        assert [dict(row) for row in found] == kept, data
        assert [text_of(row, "", "answer") for row in found] == [row["answer"] for row in kept]


REFUSED_IN_JSON = (
    ("NaN", "has NaN in 'answer'"),
    ("-Infinity", "has -Infinity in 'answer'"),
    ("1e400", "has 1e400 in 'answer'"),
    ("[[1, [NaN]]]", "has NaN in 'answer'"),
    ("9" * 5000, "in 'answer'"),
    ("0.10", "has the number 0.10 in 'answer', which as text is 0.1; write it as text"),
    ("1e5", "has the number 1e5 in 'answer', which as text is 100000.0"),
    ("-0", "has the number -0 in 'answer'"),
    ("0.1000000000000000055", "in 'answer', which as text is 0.1;"),
    ("true", "has bool in 'answer'"),
    ("null", "has NoneType in 'answer'"),
    ('["7"]', "has list in 'answer'"),
    ('{"a": 1}', "has dict in 'answer'"),
    ('"\\ud800"', "has half of a surrogate pair"),
    ('"1", "answer": "2"', "has the field 'answer' twice"),
)


def refusal(data: Any, **settings: Any) -> str:
    """The error of data as problems, which must be one line."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller reads it
        given_problems(data, DatasetConfig(**settings), seed=1)
    assert one_line(caught.value), str(caught.value)
    return str(caught.value)


def test_a_value_of_json_that_would_change_is_refused_with_its_line(tmp_path: Path) -> None:
    good = '{"question": "a", "answer": "1"}'
    for name, between, place in (("a.jsonl", "\n", "line 2"), ("a.json", ",\n", "row 2")):
        for value, message in REFUSED_IN_JSON:
            text = f'{good}{between}{{"question": "b", "answer": {value}}}'
            path = tmp_path / name
            path.write_text(f"[{text}]" if name == "a.json" else text)
            said = refusal(path)
            assert message in said, (value, said)
            assert f"{path}, " in said
            assert place in said or name == "a.json"  # what is no JSON has the line of the list


def test_numbers_are_text_where_their_text_is_certain(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for value, text in (("7", "7"), ("-3", "-3"), ("0.5", "0.5"), ("1" * 40, "1" * 40)):
        path.write_text(f'{{"question": "a", "answer": {value}}}\n')
        ((_, row),) = read_rows(path)
        assert text_of(row, "", "answer") == text
    for number, text in (
        (np.int64(7), "7"),
        (np.float64(0.1), "0.1"),
        (np.float32(0.5), "0.5"),
        (np.str_("007"), "007"),
        (0.1, "0.1"),
        (10**30, str(10**30)),
    ):
        ((_, row),) = object_rows([{"answer": number}], "rows")
        assert text_of(row, "", "answer") == text


def test_a_number_whose_text_is_uncertain_is_a_number_everywhere_else(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "a", "answer": "1", "weight": 0.10}\n')
    ((_, row),) = read_rows(path)
    assert (row["weight"], isinstance(row["weight"], Written)) == (0.1, True)
    assert type(pickle.loads(pickle.dumps(row))["weight"]) is float
    assert json.dumps(row["weight"]) == "0.1"


def test_a_value_of_an_object_that_would_change_is_refused_with_its_row(tmp_path: Path) -> None:
    values: tuple[Any, ...] = (
        *(float("nan"), np.float32(0.1), np.float16(0.1), Decimal("0.10"), date(2024, 1, 2)),
        *(datetime(2024, 1, 2), b"7", True, np.bool_(True), None, pd.NA, pd.NaT, 1j, ["7"]),
        *(np.datetime64("2024-01-02"), np.array([1]), 10**5000),
    )
    for value in values:
        said = refusal([{"question": "a", "answer": "1"}, {"question": "b", "answer": value}])
        assert said.startswith("problems, row 2 has "), said
        assert "'answer'" in said
    for value, kind in (
        (0.1, pa.float32()),
        (np.float16(0.1), pa.float16()),
        (float("nan"), pa.float64()),
        (Decimal("0.10"), pa.decimal128(10, 2)),
        (datetime(2024, 1, 2), pa.timestamp("s")),
        (date(2024, 1, 2), pa.date32()),
        (b"7", pa.binary()),
        (True, pa.bool_()),
        (None, pa.string()),
        ({"x": "1"}, pa.struct([("x", pa.string())])),
    ):
        column = pa.array([value, value], kind)
        table = pa.table({"question": ["a", "b"], "answer": column})
        parquet.write_table(table, tmp_path / "a.parquet")
        stored = datasets.Dataset(table)
        for data in (tmp_path / "a.parquet", table, stored, stored.to_iterable_dataset()):
            said = refusal(data)
            assert "row 1 has " in said, said
            assert "'answer'" in said


def test_a_narrow_number_of_a_frame_is_refused_as_that_of_a_table() -> None:
    for kind in ("float32", "Float32", "float32[pyarrow]", "float16", "float16[pyarrow]"):
        said = refusal(pd.DataFrame({"question": "a", "answer": pd.Series([0.1], dtype=kind)}))
        assert "row 1 has the number 0.1 in 'answer'" in said
        ((_, row),) = object_rows(pd.DataFrame({"answer": pd.Series([0.25], dtype=kind)}), "rows")
        assert text_of(row, "", "answer") == "0.25"


def test_json_in_a_table_is_read_as_values(tmp_path: Path) -> None:
    # `datasets` makes such columns of objects whose fields differ from row to row.
    kind = datasets.Json()
    features = datasets.Features(
        {
            "info": kind,
            "many": datasets.List(kind),
            "in": {"side": kind, "x": datasets.Value("float32")},
        }
    )
    rows = [
        {"info": {"answer": "007", "n": 1}, "many": [{"a": 1}, "b"], "in": {"side": [], "x": 1.5}},
        {"info": {"answer": ["7", 2.5]}, "many": [], "in": {"side": None, "x": 0.5}},
    ]
    data = datasets.Dataset.from_list(rows, features=features)
    data.to_parquet(str(tmp_path / "a.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    for source in (data, tmp_path / "a.parquet", tmp_path / "saved", data.to_iterable_dataset()):
        assert [row for _, row in object_rows(source, "rows")] == rows
    ((_, row), *_) = object_rows(data, "rows")
    assert text_of(row, "", "info.answer") == "007"
    for text in ("1e999", "{", '{"a": 1, "a": 2}'):
        array = pa.ExtensionArray.from_storage(pa.json_(), pa.array([text]))
        parquet.write_table(pa.table({"answer": array}), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=r"a\.parquet cannot be read as parquet: .*its JSON"):
            list(read_rows(tmp_path / "a.parquet"))


def test_all_fields_that_are_text_follow_the_rule(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for field in ("prompt", "response", "chosen", "rejected"):
        row = {"prompt": "a", "response": "b", "chosen": "c", "rejected": "d"}
        text = json.dumps(row).replace(f'"{row[field]}"', "1.50")
        path.write_text(f"{text}\n")
        kind = DemonstrationsConfig if field in ("prompt", "response") else PairsConfig
        with pytest.raises(ValueError, match=f"line 1 has the number 1.50 in '{field}'"):
            load_rows(kind(path=str(path)), seed=1)
    rows = [{"prompt": "a", "response": float("nan")}]
    with pytest.raises(ValueError, match="train_dataset, row 1 has nan in 'response'"):
        given_rows(DemonstrationsConfig(), rows, [{"prompt": "b", "response": "c"}])
    path.write_text('{"question": 0.10, "answer": "1"}\n')
    assert "in 'question'" in refusal(path)
    for name in ("mbpp", "humaneval", "gsm8k", "math500"):
        path.write_text(
            '{"text": "t", "code": 0.10, "test_list": ["assert f() == 0.10"], "task_id": "1", '
            '"test_setup_code": "", "question": 0.10, "answer": 0.10, "problem": "p", '
            '"prompt": "p", "canonical_solution": 0.10}\n'
        )
        with pytest.raises(ValueError, match=r"line 1 has the number 0\.10 in '"):
            load_problems(DatasetConfig(type=name, path=str(path)), seed=1)


ONE = '{"question": "a", "answer": "007"}'
TWO = '{"question": "b", "answer": "1"}'


def test_a_file_is_read_by_its_content_however_it_is_written(tmp_path: Path) -> None:
    lines, listed = f"{ONE}\n{TWO}\n", f"[{ONE}, {TWO}]"
    pretty = json.dumps([json.loads(ONE), json.loads(TWO)], indent=4)
    objects = "\n".join(json.dumps(json.loads(one), indent=1) for one in (ONE, TWO))
    written: dict[str, bytes] = {
        "mark.jsonl": b"\xef\xbb\xbf" + lines.encode(),
        "mark.json": b"\xef\xbb\xbf" + pretty.encode(),
        "windows.jsonl": f"{ONE}\r\n\r\n  \r\n{TWO}\r\n".encode(),
        "no_end.jsonl": f"\n{ONE}\n\n{TWO}".encode(),
        "list.json": listed.encode(),
        "list.jsonl": listed.encode(),
        "pretty.json": pretty.encode(),
        "objects.json": objects.encode(),
        "wrapped.json": f'{{"version": 1, "data": {listed}}}'.encode(),
        "wrapped_pretty.json": json.dumps({"rows": json.loads(listed)}, indent=2).encode(),
        "columns.json": b'{"question": ["a", "b"], "answer": ["007", "1"]}',
        "of_pandas.json": pd.DataFrame([json.loads(one) for one in (ONE, TWO)]).to_json().encode(),
        "named_wrong.csv": lines.encode(),
        "named_wrong.txt": listed.encode(),
        "named_wrong.parquet": lines.encode(),
        "no_extension": lines.encode(),
        "packed.jsonl.gz": gzip.compress(lines.encode()),
        "packed.json.bz2": bz2.compress(pretty.encode()),
        "packed.csv.xz": lzma.compress(b"question,answer\na,007\nb,1\n"),
        "packed.jsonl.zst": pa.compress(lines.encode(), codec="zstd", asbytes=True),
        "packed_and_unnamed.jsonl": gzip.compress(lines.encode()),
        "mark.csv": b"\xef\xbb\xbfquestion,answer\r\na,007\r\n\r\nb,1\r\n",
    }
    table = rows_file(tmp_path / "a.parquet", [json.loads(ONE), json.loads(TWO)])
    written["named_wrong.jsonl"] = table.read_bytes()
    for name, content in written.items():
        path = tmp_path / name
        path.write_bytes(content)
        found = [(row["question"], row["answer"]) for _, row in read_rows(path)]
        assert found == [("a", "007"), ("b", "1")], name


def test_a_place_is_the_line_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('question,answer\n"a\nb",1\n\nc,2\n')
    assert [where for where, _ in read_rows(path)] == [f"{path}, line {n}" for n in (2, 5)]
    path = tmp_path / "a.jsonl"
    path.write_text(f"\n{ONE}\n\n{TWO}\n")
    assert [where for where, _ in read_rows(path)] == [f"{path}, line {n}" for n in (2, 4)]


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    packed = gzip.compress(ONE.encode() * 999)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.jsonl", ONE)
    for name, content, message in (
        ("empty.jsonl", b"", "has no rows"),
        ("empty.csv", b"", "has no rows"),
        ("blank.json", b" \n\n", "has no rows"),
        ("names.csv", b"question,answer\n", "has no rows"),
        ("wide.jsonl", ONE.encode("utf-16"), "is UTF-16, but must be UTF-8"),
        ("latin.csv", b"question,answer\n\xe9,1\n", "is not UTF-8 behind line"),
        ("cut.jsonl.gz", packed[: len(packed) // 2], "cannot be read: "),
        ("damaged.jsonl.gz", packed[:20] + b"xx" + packed[22:], "cannot be read: "),
        ("a.jsonl.zip", archive.getvalue(), "is a zip archive"),
        ("deep.jsonl", b'{"question": ' + b"[" * 100_000, "line 1 "),
        ("list.json", f"[{ONE}, 7]".encode(), "row 2 is not a JSON object: 7"),
        ("cut.json", f"[\n{ONE},\n".encode(), "line 3 is not JSON"),
        ("ragged.csv", b"question,answer\na,1,2\n", "line 2 has 3 values, but there are 2 fields"),
        ("quote.csv", b'question,answer\n"a,1\n', "is not CSV"),
        ("twice.csv", b"question,answer,answer\na,1,2\n", "has the field 'answer' twice"),
        ("semicolons.csv", b"question;answer\na;1\n", "has one field, 'question;answer', but"),
        ("no.parquet", b"no parquet", "cannot be read as parquet"),
        ("cut.parquet", b"PAR1" + bytes(50), "cannot be read as parquet"),
        ("cut.arrow", b"ARROW1" + bytes(50), "cannot be read as arrow"),
        ("no.arrow", b"no arrow", "cannot be read as arrow"),
        ("pointer.parquet", b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
        ("pointer.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
        ("data.xls", b"\xd0\xcf\x11\xe0", "has an unknown extension; known are .arrow"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        said = refusal(path)
        assert message in said, (name, said)
        assert name in said or "problems has no rows" in said


def test_a_folder_of_shards_and_a_pattern_are_read_in_order(tmp_path: Path) -> None:
    for number, one in enumerate((ONE, TWO)):
        (tmp_path / f"train-{number:05}-of-00002.jsonl").write_text(f"{one}\n")
    (tmp_path / "README.md").write_text("# Data\n")
    (tmp_path / "dataset_infos.json").write_text("{}")
    for path in (tmp_path, tmp_path / "train-*.jsonl", tmp_path / "*-0000[01]-*"):
        assert [row["answer"] for _, row in read_rows(path)] == ["007", "1"]
    (tmp_path / "test-00000-of-00001.jsonl").write_text(f"{ONE}\n")
    assert "may be several splits; name one, or a pattern" in refusal(tmp_path)
    (tmp_path / "none").mkdir()
    assert "is a folder without files of rows (it has nothing)" in refusal(tmp_path / "none")
    assert "nothing*.jsonl does not exist" in refusal(tmp_path / "nothing*.jsonl")
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list([json.loads(ONE)])})
    splits.save_to_disk(str(tmp_path / "splits"))
    assert "holds several splits (train)" in refusal(tmp_path / "splits")


def test_a_program_may_give_rows_in_any_form(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(40)]
    dataset = DatasetConfig()
    path = rows_file(tmp_path / "a.jsonl", rows)
    expected = given_problems(rows, dataset, seed=1)
    assert len(expected.train) + len(expected.held_out) == 40
    of_rows = datasets.Dataset.from_list(rows)
    indexed = torch.utils.data.Subset(rows, range(len(rows)))  # type: ignore[arg-type]  # a list
    given: list[Any] = [tuple(rows), iter(rows), (row for row in rows), pd.DataFrame(rows), path]
    for data in (*given, indexed):
        assert given_problems(data, dataset, seed=1).digest() == expected.digest()
    problems = [*expected.train, *expected.held_out]
    assert len(given_problems(iter(problems), dataset, seed=1).train) == len(expected.train)
    assert given_problems(expected, dataset, seed=1) is expected
    for data in (
        {"train": rows[:30], "test": rows[30:]},
        (rows[:30], rows[30:]),
        datasets.DatasetDict({"train": of_rows, "validation": of_rows.select(range(30, 40))}),
        (pd.DataFrame(rows[:30]), of_rows.select(range(30, 40))),
    ):
        split = given_problems(data, dataset, seed=1)
        assert (len(split.train), len(split.held_out)) == (30, 10)
    twice = pd.DataFrame([["a", "1", "2"]], columns=["question", "answer", "answer"])
    for data, message in (
        (7, "problems is int, but must be a list of rows, such as"),
        (b"x", "problems is bytes"),
        ([], "problems has no rows"),
        (["2 + 3 ="], "row 1 is str ('2 + 3 ='), but must have fields, such as"),
        ([("2 + 3 =", "5")], "row 1 is tuple"),
        ({"question": "a", "answer": "1"}, "problems is one mapping (['question', 'answer'])"),
        ({"question": ["a"], "answer": ["1", "2"]}, "lists of different lengths"),
        (problems[0], "problems is one Problem"),
        ({"train": rows, "test": rows, "other": rows}, "leave out 'other'"),
        (lambda: rows, "problems is function"),
        (list, "problems is type"),
        (np.zeros((2, 2)), "row 1 is ndarray"),
        ("openai/gsm8k", "openai/gsm8k does not exist"),
        (json.dumps(rows), "but a path has at most 4095 bytes, and 255 between slashes"),
        ({str(n): row for n, row in enumerate(rows)}, "problems is one mapping (['0', '1', "),
        (twice, "problems has the field 'answer' twice"),
        (pa.table([["a"], ["b"]], names=["answer", "answer"]), "has the field 'answer' twice"),
        (pa.Table.from_pylist(rows).to_reader(), "row 1 is RecordBatch"),
    ):
        assert message in refusal(data)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The content of a file of each format, by its extension."""
    folder = tmp_path_factory.mktemp("shapes")
    rows = [fields(text) for text in TEXTS[:12]]
    found = {}
    for suffix in (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".feather", ".arrow"):
        found[suffix] = rows_file(folder / f"a{suffix}", rows).read_bytes()
    found[".jsonl.gz"] = gzip.compress(found[".jsonl"], mtime=0)
    return found


def damaged_files(rng: random.Random, shapes: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Files of all formats, each damaged somewhere, without an end."""
    rows = [fields(text) for text in TEXTS[:4]]
    while True:
        for suffix, content in shapes.items():
            yield suffix, damaged_bytes(rng, content)
        text = json.dumps(damaged_json(rng, rows))
        yield ".json", text.encode()
        yield ".jsonl", "".join(f"{json.dumps(damaged_json(rng, row))}\n" for row in rows).encode()


@mutations
def test_a_damaged_file_is_read_or_refused_in_one_line(
    count: int, shapes: dict[str, bytes], tmp_path: Path
) -> None:
    files = damaged_files(random.Random(33), shapes)
    dataset, whole = DatasetConfig(eval_size=1), 0
    for _ in range(count):
        suffix, content = next(files)
        path = tmp_path / f"a{suffix}"
        path.write_bytes(content)
        problems, said = None, None
        try:
            problems = given_problems(path, dataset, seed=1)
        except ValueError as error:
            said = error
        if problems is None:
            assert said is not None
            assert one_line(said), (suffix, content, said)
            assert str(path) in str(said) or "problems" in str(said), (suffix, content, said)
            continue
        whole += 1
        for one in (*problems.train, *problems.held_out):
            assert one.metadata["full_answer"] == text_of(one.metadata, "", "answer")
            (one.prompt + one.answer).encode()
    assert whole > count // 50
