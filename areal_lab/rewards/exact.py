"""Rewards that compare text: 1 for the correct answer, 0 otherwise. Standard library only.

A reward function takes the completion and the example (`prompt`, the gold `answer`, the problem's
other fields) and returns a number, or a dictionary of named numbers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

_THOUSANDS: Final = (
    r"\d{1,3}(?:(?:,\d{3})+|(?:,\d{2})+,\d{3}|(?:['\u00a0\u2009\u202f_]\d{3})+)(?!\d)"
)
_WHOLE: Final = rf"(?:{_THOUSANDS}|\d+)"
_NUMBER: Final = re.compile(
    rf"""
    (?: (?<![A-Za-z0-9_)\]}}.%°]) (?P<sign>-)                  # not of 5-10 or x-5
      | (?<=[=(:<>\u2248]) (?P<apart>[ ]*-[ ]+)                     # = - 5
    )? \$?
    (?<![\d^]) (?<!(?<!\.)\.) (?<!\^\{{) (?<!\^-) (?<!\^\{{-)                # no exponents, no x_2
    (?<![A-Za-z0-9)]\*\*) (?<![A-Za-z0-9]_) (?<!_\{{)
    (?: (?P<mixed>\d+) [ ] (?=\d+/\d) )?
    (?P<number> (?: {_THOUSANDS} (?:\.\d+)?
      | (?P<comma> (?<![,(\[{{]) (?<![(\[{{]-) \d+,\d+ (?!,?\d) )  # 3,14 is a number, or two
      | \d+ (?:\.\d+)? | (?<!\.)\.\d+ ) (?: [eE][+-]?\d+ (?!\w|\.\d) )? )
    (?!\.?\d)                                                  # a version, such as 1.2.3
    (?: [ ]?/[ ]? (?P<below> -? {_WHOLE} (?:\.\d+)? ) (?![ ]?/|\.?\d) )?
    (?: \s? (?:[x*\u00b7\u00d7]|\\times|\\cdot) \s? 10 (?:\^|\*\*) \{{? (?P<exponent>[+-]?\d+) \}}?
      | (?:\^|\*\*) \{{? (?P<power>[+-]?\d+) \}}?
    )?
    (?P<raised> [)\]}}]* (?: \^(?=[\w({{+-]) | \*\*(?=\d) ) )?     # of 9^9^9, (-2)^2, 2^n
    """,
    re.VERBOSE,
)
"""A number in a text: its sign, thousands, decimals, fraction, and power."""
_FRACTION: Final = re.compile(
    r"\\[dt]?frac\s*(?:\{\s*([-\d.,]+)\s*\}|(\d))\s*(?:\{\s*([-\d.,]+)\s*\}|(\d))"
)
_WITHOUT_WORDS: Final = re.compile(r"[\d\s.,:;/()\[\]{}<>*^$%+-]+")
_LONGEST: Final = 4000  # digits; a longer number, or a larger power, has no value


def exact_first_line(completion: str, example: Mapping[str, Any]) -> float:
    r"""Return 1 if the first line is the gold answer (ignoring spaces around it), else 0.

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
    r"""Return 1 if the completion is the line `Answer:` and the gold answer (ignoring spaces), else
    0.

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
    """Return 1 if the last number of the completion equals that of the gold answer, else 0.

    >>> last_number("12 eggs at $2: that makes $24.00.", {"answer": "24"})
    1.0

    Raises:
        ValueError: the gold answer is several numbers without a text.
    """
    wanted = _gold_number(example)
    return _equal(numbers_of(completion)[-1:], wanted)


def gsm8k(completion: str, example: Mapping[str, Any]) -> float:
    r"""Return 1 if the number after the last `####` equals that of the gold answer, else 0.

    Without the mark the last number counts: the original check requires the mark, but few base
    models write it.
    Source: Cobbe et al. (arXiv:2110.14168), `dataset.py` of their release.

    >>> gsm8k("7 * 9 = 63\n#### 63", {"answer": "63"})
    1.0

    Raises:
        ValueError: the gold answer is several numbers without a text.
    """
    wanted = _gold_number(example)
    _, mark, marked = completion.rpartition("####")
    found = numbers_of(marked)
    return _equal(found[:1] if mark else found[-1:], wanted)


def numbers_of(text: str) -> list[Fraction | None]:
    """Numbers in a text; None for one with an uncertain value, such as `1/0`, `3,14` and
    `9^9^9`.
    """
    return [*map(_value, _numbers(text))]


def _equal(found: list[Fraction | None], wanted: Fraction | None) -> float:
    return float(wanted is not None and found == [wanted])


def _gold(example: Mapping[str, Any]) -> str:
    gold = str(example["answer"]).strip()
    if not gold:
        # An empty completion would be right.
        raise ValueError("the gold answer of the problem is empty; use another reward function")
    return gold


def _gold_number(example: Mapping[str, Any]) -> Fraction | None:
    gold = str(example["answer"]).rpartition("####")[2].strip()
    found = _numbers(gold)
    if len(found) > 1 and _WITHOUT_WORDS.fullmatch(gold):
        # Such as a date, a ratio or a tuple, of which the last number is not enough.
        raise ValueError(
            f"the gold answer {gold[:60]!r} is {len(found)} numbers, of which the last one alone "
            "would be compared; use another reward function, such as "
            "areal_lab.rewards.math_answer:math_answer or areal_lab.rewards.text:exact_match"
        )
    if found and found[-1]["comma"]:
        comma = found[-1]["comma"]
        raise ValueError(
            f"the gold answer {gold[:60]!r} has {comma}, which is one number or two; write "
            f"{comma.replace(',', '.')} or {comma.replace(',', ', ')}"
        )
    return _value(found[-1]) if found else None


def _numbers(text: str) -> list[re.Match[str]]:
    return [*_NUMBER.finditer(_ascii(text))]


def _ascii(text: str) -> str:
    """Text with the digits, minus signs, fractions and currency signs of ASCII."""
    if not text.isascii():
        signs = ("$" if unicodedata.category(one) == "Sc" else ascii_of(one) for one in text)
        text = "".join(signs)
    text = text.replace("{,}", ",").replace(r"\,", "\u2009").replace(r"\$", "$")
    return _FRACTION.sub(
        lambda found: (
            " " * found.string[: found.start()][-1:].isdigit()
            + f"{found[1] or found[2]}/{found[3] or found[4]}"
        ),
        text,
    )


def ascii_of(character: str) -> str:
    """A digit, a minus sign or a fraction in ASCII; other characters unchanged."""
    if character.isascii():
        return character
    if character in "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d":  # hyphens, dashes, minus signs
        return "-"
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    if unicodedata.decomposition(character).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    return "/" if character == "\u2044" else character


def _value(found: re.Match[str]) -> Fraction | None:
    """Value of a number; None if it is uncertain, as for 1/0."""
    if found["comma"] or found["raised"]:
        return None
    below, exponent, power = (found[name] for name in ("below", "exponent", "power"))
    before = found.string[: found.start("number")].rstrip(" ")
    try:
        value = _decimal(found["number"])
        if below and before.endswith("/"):
            value = _decimal(below)  # of 1/5/2024
        elif below:
            value /= _decimal(below)
        if found["mixed"]:
            value += int(found["mixed"])
        if power:
            value = _raised(value, int(power))
        if exponent:
            value *= _raised(Fraction(10), int(exponent))
    except (ArithmeticError, ValueError):
        return None
    return -value if found["sign"] or found["apart"] else value


def _decimal(text: str) -> Fraction:
    value = Decimal(re.sub(r"[^\d.eE+-]", "", text))
    if len(text) > _LONGEST or abs(value.adjusted()) > _LONGEST:
        raise OverflowError
    return Fraction(value)


def _raised(value: Fraction, power: int) -> Fraction:
    bits = value.numerator.bit_length() + value.denominator.bit_length()
    if bits * abs(power) > 4 * _LONGEST:
        raise OverflowError
    return Fraction(value**power)
