"""Fast paths of parsing: their results are those of the general path."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from areal_lab.foreign import literal, verl
from areal_lab.foreign.literal import DEPTH, read_dict
from areal_lab.foreign.quantities import UNREAD, number

_SCALARS = (
    0,
    -1,
    2.5,
    1e-07,
    1e300,
    10**30,
    True,
    False,
    None,
    "",
    "a b",
    "nan",
    "NaN",
    "é",
    "x,y",
)


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth > 0 and kind < 0.2:
        return _object(rng, depth - 1)
    if depth > 0 and kind < 0.3:
        return [_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return rng.choice((*_SCALARS, float("nan"), float("inf")))


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    return {f"k/{rng.randint(0, 9)}": _value(rng, depth) for _ in range(rng.randint(0, 5))}


def test_json_objects_read_fast_are_those_read_as_any_dictionary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(1)
    texts = [json.dumps(_object(rng, 3), ensure_ascii=False) for _ in range(400)]
    texts += [text[: rng.randint(0, len(text))] for text in texts]
    texts += [text + rng.choice(("}", ",", " x", '"')) for text in texts[:400]]
    texts += [text.replace(":", ": 0", 1) for text in texts[:400]]  # no JSON: 01
    fast = [read_dict(text) for text in texts]
    assert sum(literal._plain_json(text, 0) is not None for text in texts) > 300
    monkeypatch.setattr(literal, "_plain_json", lambda _text, _start: None)
    assert fast == [read_dict(text) for text in texts]
    monkeypatch.setattr(literal, "_PLAIN_PAIR", literal.re.compile("(?!)"))
    assert fast == [read_dict(text) for text in texts]


def test_escapes_and_deep_nesting_are_not_read_fast() -> None:
    assert literal._plain_json('{"a": "\\u0041"}', 0) is None
    deep = '{"a": ' * (DEPTH + 1) + "1" + "}" * (DEPTH + 1)
    assert literal._plain_json(deep, 0) is None


def test_pairs_of_verl_split_fast_are_those_of_the_separator() -> None:
    rng = random.Random(2)
    parts = (" - ", " - ", " - ", " -", "- ", "  ", "\t", "\n", "\u00a0", "a/b:1", "c:-0.5", "e-05")
    for _ in range(20_000):
        text = "".join(rng.choice(parts) for _ in range(rng.randint(1, 9))).strip()
        general = [one for one in verl._SEPARATOR.split(text) if one.strip()]
        assert [one for one in verl._pieces(text) if one.strip()] == general, repr(text)


def test_starts_of_verl_records_are_those_of_the_pattern() -> None:
    rng = random.Random(3)
    parts = ("step:1 - ", "step:2", " ", "_step:3 -", "step:", "x", "(p pid=1) ", "step:44 -a")
    for _ in range(20_000):
        text = "".join(rng.choice(parts) for _ in range(rng.randint(1, 6)))
        assert verl._starts(text) == [one.start() for one in verl._START.finditer(text)], repr(text)


def test_long_text_is_no_number_and_is_not_kept() -> None:
    assert number(" " * 500 + "1.5") == 1.5
    assert number("1" * 500) is UNREAD
