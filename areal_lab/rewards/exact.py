"""Rewards that compare text: 1 for the correct answer, 0 otherwise. Standard library only.

A reward function takes the completion and the example (`prompt`, the gold `answer`, the problem's
other fields) and returns a number, or a dictionary of named numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\$?\.\d+")


def exact_first_line(completion: str, example: Mapping[str, Any]) -> float:
    r"""1 if the first line is the gold answer, ignoring spaces around it.

    >>> exact_first_line(" 13\n5 + 5 = 10", {"answer": "13"})
    1.0
    >>> exact_first_line(" 13 or 14", {"answer": "13"})
    0.0

    Raises:
        ValueError: the gold answer is empty.
    """
    first_line = completion.split("\n", 1)[0]
    return float(first_line.strip() == _gold(example))


def answer_line(completion: str, example: Mapping[str, Any]) -> float:
    r"""1 if the completion is the line `Answer:` and the gold answer, ignoring spaces.

    >>> answer_line("Answer: 918\n", {"answer": "918"})
    1.0
    >>> answer_line("Tool: 918", {"answer": "918"})
    0.0

    Raises:
        ValueError: the gold answer is empty.
    """
    mark, colon, found = completion.strip().partition(":")
    return float((mark, colon, found.strip()) == ("Answer", ":", _gold(example)))


def last_number(completion: str, example: Mapping[str, Any]) -> float:
    """1 if the last number of the completion equals that of the gold answer.

    >>> last_number("12 eggs at $2: that makes $24.00.", {"answer": "24"})
    1.0
    """
    return _equal(_last_number(completion), _last_number(str(example["answer"])))


def gsm8k(completion: str, example: Mapping[str, Any]) -> float:
    r"""1 if the number after the last `####` equals that of the gold answer.

    Without the mark the last number counts: the original check requires the mark, but few base
    models write it.
    Source: Cobbe et al. (arXiv:2110.14168), `dataset.py` of their release.

    >>> gsm8k("7 * 9 = 63\n#### 63", {"answer": "63"})
    1.0
    """
    marked = completion.rsplit("####", 1)[1] if "####" in completion else None
    found = _last_number(completion) if marked is None else _first_number(marked)
    return _equal(found, _last_number(str(example["answer"])))


def _gold(example: Mapping[str, Any]) -> str:
    gold = str(example["answer"]).strip()
    if not gold:
        # A completion that says nothing would be right.
        raise ValueError("the gold answer of the problem is empty; use another reward function")
    return gold


def _first_number(text: str) -> Decimal | None:
    match = _NUMBER.search(text)
    return None if match is None else _value(match.group())


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def _value(number: str) -> Decimal | None:
    try:
        return Decimal(number.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def _equal(found: Decimal | None, wanted: Decimal | None) -> float:
    return float(found is not None and found == wanted)
