"""YAML that reads back as it was, and files that are not lost when they are written again."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.cluster.deploy.files import (
    Edited,
    File,
    comments,
    read_yaml_text,
    write_files,
    yaml_text,
)

ODD = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    [
        "no",
        "1e3",
        "0o17",
        "12:30",
        "~",
        "",
        " x ",
        "a\n",
        "a\n\x85",
        "a\n\u2028b",
        "\n\na",
        "${X}",
        "#",
        "- a",
        "'\"\\",
        "=",
        "\t",
    ]
)
VALUES = st.recursive(
    ODD | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(ODD, VALUES, min_size=1, max_size=3))
def test_yaml_reads_back_as_it_was(document: dict[str, Any]) -> None:
    text = yaml_text(document)
    nested = f"a:\n  {yaml_text(document, 2)}\n"
    head = comments(["Made by a test."])
    assert read_yaml_text(f"{head}{text}\n---\n{nested}") == [document, {"a": document}]
    assert head == "# Made by a test.\n"


@given(ODD)
def test_a_value_reads_back_at_any_depth(text: str) -> None:
    assert read_yaml_text(f"a:\n  b: {yaml_text(text, 2)}\n  c: 1") == [{"a": {"b": text, "c": 1}}]


@pytest.mark.parametrize(
    "word", ["1e3", "0o17", "1_000", "12:30:00", "no", "Y", "null", ".5", "-1"]
)
def test_text_that_some_parser_takes_for_something_else_is_quoted(word: str) -> None:
    assert yaml_text({"a": word}) == f'a: "{word}"'


def test_a_file_that_was_not_edited_is_replaced(tmp_path: Path) -> None:
    first, second = File("a.yaml", "a: 1\n", ""), File("a.yaml", "a: 2\n", "")
    assert write_files(tmp_path / "new", [first]) == {"a.yaml": "written"}
    assert write_files(tmp_path / "new", [first]) == {"a.yaml": "unchanged"}
    assert write_files(tmp_path / "new", [second]) == {"a.yaml": "replaced"}
    assert read_yaml_text((tmp_path / "new" / "a.yaml").read_text()) == [{"a": 2}]


@pytest.mark.parametrize("edit", ["a: 3\n", "", "# note\n"])
def test_an_edited_file_is_kept_and_so_are_the_others(edit: str, tmp_path: Path) -> None:
    first = [File("a.yaml", "a: 1\n", ""), File("b.yaml", "b: 1\n", "")]
    write_files(tmp_path, first)
    path = tmp_path / "b.yaml"
    edited = edit + path.read_text() if edit else "b: 7\n"
    path.write_text(edited)
    second = [File("a.yaml", "a: 2\n", ""), File("b.yaml", "b: 2\n", "")]
    with pytest.raises(Edited, match=r"b\.yaml has been edited"):
        write_files(tmp_path, second)
    assert path.read_text() == edited
    assert "a: 1" in (tmp_path / "a.yaml").read_text()
    assert write_files(tmp_path, second, force=True) == {"a.yaml": "replaced", "b.yaml": "replaced"}


@given(ODD, ODD)
def test_what_was_written_counts_as_unedited_whatever_is_in_it(one: str, other: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), [File("a", one, "")])
        assert set(write_files(Path(folder), [File("a", other, "")]).values()) <= {
            "unchanged",
            "replaced",
        }
