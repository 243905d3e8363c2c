"""A damaged log gives the same values, or fewer; never another one."""

from __future__ import annotations

import gzip
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from areal_lab.foreign.read import read_run
from areal_lab.foreign.record import as_json
from tests.foreign.damage import DAMAGES
from tests.foreign.expected import SPECIMENS, compared, expected_of

BY_NAME = pytest.mark.parametrize("path", SPECIMENS, ids=lambda path: path.name)
_OF_THE_WHOLE = ("runs_or_attempts", "attempts[", "mode is None", "gpus is None")
"""Differences that a shorter log has by its nature."""


def imported(content: bytes) -> dict[str, Any]:
    """A log from standard input."""
    return as_json(read_run([Path("-")], stdin=io.BytesIO(content)))


def values_of(run: Mapping[str, Any]) -> int:
    return sum(value is not None for one in run["steps"] for value in one.values())


@pytest.mark.parametrize("damage", DAMAGES)
@BY_NAME
def test_terminals_and_collectors_change_no_value(path: Path, damage: str) -> None:
    text = path.read_bytes().decode()
    found = imported(DAMAGES[damage](text).encode())
    assert compared(found, expected_of(path), fewer=True) == []
    if not damage.startswith("missing"):
        assert values_of(found) == values_of(imported(text.encode()))


def test_a_missing_number_is_null_and_nothing_takes_its_place() -> None:
    log = b"step:7 - timing_s/gen:nan - timing_s/step:inf - critic/score/mean:np.float64(nan)\n"
    (step,) = imported(log + b"step:8 - timing_s/gen:1.5 - timing_s/step:None\n")["steps"][:1]
    assert step["generation_s"] is step["step_time_s"] is step["reward_mean"] is None


@BY_NAME
def test_compressed_and_cut_gzip(path: Path) -> None:
    packed = gzip.compress(path.read_bytes())
    assert compared(imported(packed), expected_of(path)) == []
    cut = imported(packed[: len(packed) * 2 // 3])
    assert _other_than_shorter(cut, path) == []


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
@BY_NAME
def test_byte_order_marks(path: Path, encoding: str) -> None:
    content = path.read_bytes().decode().encode(encoding)
    assert compared(imported(content), expected_of(path)) == []


@BY_NAME
def test_a_log_cut_after_any_line(path: Path) -> None:
    lines = [f"{one}\n" for one in path.read_bytes().decode().split("\n")[:-1]]
    for count in range(1, len(lines)):
        for text in ("".join(lines[:count]), "".join(lines[:count]).rstrip("\r\n")):
            found = imported(text.encode())
            assert _other_than_shorter(found, path) == [], f"{count} lines"


@BY_NAME
def test_a_log_cut_inside_any_line(path: Path) -> None:
    text = path.read_bytes().decode()
    for end in range(5, len(text), max(31, len(text) // 40)):
        assert _other_than_shorter(imported(text[:end].encode()), path) == [], f"{end} characters"


@BY_NAME
def test_a_log_that_begins_later(path: Path) -> None:
    if path.stem in ("damaged", "trl_console_transformers5"):
        pytest.skip("its steps are numbered by what comes before")
    lines = path.read_bytes().decode().split("\n")
    for count in range(1, len(lines) - 1):
        found = imported("\n".join(lines[count:]).encode())
        assert _other_than_shorter(found, path) == [], f"without {count} lines"


def test_a_number_at_the_cut_end_is_not_a_number() -> None:
    found = imported(b"step:7 - timing_s/gen:30.5 - response_length/mean:19")
    (step,) = found["steps"]
    assert step["generation_s"] == 30.5
    assert step.get("response_length_mean") is None
    assert found["unread"] == 1


def test_a_broken_line_is_joined_inside_digits_and_keys() -> None:
    log = (
        b"(TaskRunner pid=9) step:7 - timing_s/ge\nn:30.5 - response_length/mean:19\n04.5 - "
        b"critic/score/mean:0.25 - timing_s/step:61.5\n(TaskRunner pid=9) done\n"
    )
    (step,) = imported(log)["steps"]
    assert step["generation_s"] == 30.5
    assert step["response_length_mean"] == 1904.5
    assert step["step_time_s"] == 61.5


def test_a_line_of_another_process_is_never_the_rest_of_a_broken_one() -> None:
    log = (
        b"(TaskRunner pid=9) step:7 - timing_s/gen:30.5 - timing_s/step:61.5\n"
        b"(Other pid=8) 5.25 - timing_s/ref:7.5 - timing_s/adv:1.5\n(TaskRunner pid=9) done\n"
    )
    (step,) = imported(log)["steps"]
    assert step["step_time_s"] == 61.5
    assert step.get("reference_s") is None


def test_a_record_that_stops_where_others_go_on_loses_its_last_number() -> None:
    whole = "step:{} - timing_s/gen:30.5 - timing_s/step:61.25 - perf/throughput:900.5\n"
    cut = "step:3 - timing_s/gen:30.5 - timing_s/step:6\n"
    steps = imported((whole.format(1) + whole.format(2) + cut).encode())["steps"]
    assert [one["step_time_s"] for one in steps] == [61.25, 61.25, None]
    assert [one["generation_s"] for one in steps] == [30.5] * 3


def test_repeated_lines_of_ray_count_once() -> None:
    line = b"(TaskRunner pid=9) step:7 - timing_s/gen:30.5 - timing_s/step:61.5"
    found = imported(line + b"\n" + line + b" [repeated 4x across cluster]\n")
    assert len(found["steps"]) == 1
    assert found["steps"][0]["step_time_s"] == 61.5


def test_records_that_ran_into_each_other_give_neither_value() -> None:
    found = imported(
        b"step:7 - timing_s/gen:30.5 - timing_s/step:61.5 - timing_s/gen:31.5 - timing_s/ref:1.0\n"
    )
    (step,) = found["steps"]
    assert step["generation_s"] is None
    assert step["step_time_s"] == 61.5
    assert found["unread"] == 1


def _other_than_shorter(found: Mapping[str, Any], path: Path) -> list[str]:
    return [
        one
        for one in compared(found, expected_of(path), fewer=True)
        if not one.startswith(_OF_THE_WHOLE)
    ]
