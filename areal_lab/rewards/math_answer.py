r"""Rewards of mathematical answers by math-verify: `\frac12`, `0.5` and `1/2` are equal.

Needs `pip install 'areal_lab[math]'`; there is no other rule without it. math-verify's own time
limit needs signals and is off: `reward.timeout_s` kills the worker instead. math-verify 0.9 drops
the base of a number, reads a time as a fraction and a word as a product of its letters: such gold
answers are compared as texts.
"""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from itertools import accumulate
from typing import Any, Final

from areal_lab.extras import require

require("areal_lab.rewards.math_answer", "math")

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # noqa: E402
from sympy import Float, Number  # noqa: E402 - it comes with math_verify

from areal_lab.rewards.exact import ascii_of  # noqa: E402

_EITHER = (LatexExtractionConfig(), ExprExtractionConfig())
_BOX: Final = re.compile(r"\\(?:boxed|fbox)\b\s*")
_MOST_NESTED: Final = 60  # brackets: sympy takes minutes for thousands
_JOINED: Final = re.compile(
    r"[\s$]*(?:[,;]|and\b|or\b|\\text\s*\{\s*(?:and|or)\s*\})[\s$]*(?:(?:and|or)\b[\s$]*)?"
    r"(?:[A-Za-z]\s*=\s*)?"
)
"""Text between boxes that form one answer: `\boxed{1} and \boxed{2}`."""
_POWER_OF_TEN: Final = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d{1,3})(?!\w|\.\d)")
_THOUSANDS: Final = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\,|[\u00a0\u2009\u202f])\d{3})+(?![\d,])")
_SPACED: Final = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_MIXED: Final = re.compile(r"(-?\d+) (\d+)/(\d+)")
_DATE: Final = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?[-/]\d\d?[-/]\d{4}")
_CLOCK: Final = re.compile(r"(?<![\d:])\d+:[0-5]\d(?![\d:])|(?<![\d:])\d+(?::\d+){2,}")
"""A time of day, or a ratio of several numbers."""
_BASE: Final = re.compile(r"\d\)?\s*_")
"""A number with its base: `101_2`."""
_WORDS: Final = re.compile(r"(?=.*[A-Za-z]{4})[A-Za-z]+(?:[ '-][A-Za-z]+)*")
"""At least one word, and not a product of a few variables such as `abc`."""
_WRAPPED: Final = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{([^{}]*)\}")
_SPACING: Final = re.compile(r"\\(?:left|right|[ ,;:!])|[\s${}~()]")
_NOON: Final = re.compile(r"([ap])\.?m\.?$")
_TOKEN: Final = re.compile(r"\\[A-Za-z]+|[A-Z]")
_GREEK: Final = (r"\zeta", r"\kappa", r"\chi", r"\upsilon", r"\xi", r"\eta", r"\nu", r"\iota")
_DIGITS: Final = 6  # math-verify compares these decimals


def math_answer(completion: str, example: Mapping[str, Any]) -> float:
    r"""Return 1 if the answer of the completion equals the gold answer mathematically, else 0.

    The answer is that in the last `\boxed{}` or `\fbox{}`, or in the last ones if only `and`, `or`
    or a comma separate them; else the last expression. A completion without one gets 0, and so does
    one whose last box is cut off. The last box counts: Hendrycks et al. (arXiv:2103.03874),
    `last_boxed_only_string` of their release.

    >>> math_answer(r"So it is $\boxed{\frac{1}{2}}$.", {"answer": "0.5"})
    1.0
    >>> math_answer(r"So it is \boxed{2}. No, it is \boxed{3}.", {"answer": "3"})
    1.0
    """
    answer = str(example["answer"]).strip()
    if _BOX.search(answer):
        answer = " and ".join(_last_boxes(answer) or [])
    if _DATE.fullmatch(answer):
        raise ValueError(f"the gold answer {answer!r} is a date, which mathematics subtracts")
    if _is_text(answer):
        return float(_same_text(completion, answer))
    found = boxed_answer(completion)
    rename = _capitals_apart(answer, found or "")
    gold = parse(rf"\boxed{{{rename(_content(answer))}}}", _EITHER, parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot read the gold answer {answer!r}")
    if found is None or _nested(found) > _MOST_NESTED:
        return 0.0
    try:
        parsed = parse(rename(found), _EITHER, parsing_timeout=None)
        decimals = max(_decimals(gold), _decimals(parsed))
        equal = verify(gold, parsed, float_rounding=decimals, timeout_seconds=None)
        return float(bool(parsed) and (equal or _same_number(gold, parsed)))
    except Exception:  # the gold answer is valid, so the problem is the model's text
        return 0.0


def boxed_answer(completion: str) -> str | None:
    r"""Part of a completion with its answer, in the notation of math-verify.

    Returns the last boxes; all of it if it has only empty ones or none; None if the last box is cut
    off.
    """
    boxes = _last_boxes(completion)
    if boxes is None:
        return None
    return _boxes(boxes) if boxes else _POWER_OF_TEN.sub(_written_out, _as_ascii(completion))


def _last_boxes(completion: str) -> list[str] | None:
    """Contents of the last boxes that form one answer; None if the last box is cut off."""
    text = _as_ascii(completion)
    joined: list[str] = []
    start = len(text)  # of the first box that was joined
    for mark in reversed([*_BOX.finditer(text)]):
        content = _braced(text, mark.end())
        if content is None:
            return joined or None
        if not content.strip():
            continue  # such as in a sentence about the box
        end = mark.end() + len(content) + 2 * (text[mark.end()] == "{")
        if joined and not _JOINED.fullmatch(text[end:start]):
            break
        joined.insert(0, content)
        start = mark.start()
    return joined


def _is_text(answer: str) -> bool:
    """Return whether the library would lose the meaning of a gold answer."""
    return bool(_CLOCK.search(answer) or _BASE.search(answer) or _WORDS.fullmatch(answer))


def _same_text(completion: str, answer: str) -> bool:
    """Compare as texts the last box, or else the last words of a completion."""
    boxes = _last_boxes(completion)
    if boxes is None:
        return False
    gold = _plain(answer)
    found = [" and ".join(boxes)] if boxes else [*_endings(_as_ascii(completion), len(gold))]
    texts = {_plain(one) for one in found}
    if not _NOON.search(gold):
        texts |= {_NOON.sub("", one) for one in texts if _CLOCK.match(one)}
    return gold in texts


def _plain(text: str) -> str:
    """Text without what only sets it: spaces, brackets, fonts, a full stop, a leading zero."""
    text = _WRAPPED.sub(r"\1", _as_ascii(text))
    text = _SPACING.sub("", text).lower()
    text = text if _NOON.search(text) else text.removesuffix(".")
    return re.sub(r"^0(?=\d:)", "", _NOON.sub(r"\1m", text))


def _endings(text: str, length: int) -> Iterator[str]:
    """The last words of a text: one, two, and so on."""
    words = text.split()
    for count in range(1, min(len(words), length) + 1):
        yield " ".join(words[-count:])


def _capitals_apart(answer: str, found: str) -> Callable[[str], str]:
    """Rename capital letters of a gold answer that has both cases: `R - r` would be 0."""
    letters = {one for one in _TOKEN.findall(answer) if one.lower() in _variables(answer)}
    free = (one for one in _GREEK if one not in answer and one not in found)
    names = dict(zip(sorted(letters), free, strict=False))
    return lambda text: _TOKEN.sub(
        lambda one: f"{names.get(one[0], one[0])}" + " " * (one[0] in names), text
    )


def _variables(text: str) -> set[str]:
    """Lower case letters that are not part of a command."""
    return set(re.sub(r"\\[A-Za-z]+", " ", text)) & set("abcdefghijklmnopqrstuvwxyz")


def _same_number(gold: list[Any], parsed: list[Any]) -> bool:
    r"""Return whether two numbers are equal as floating point: 6.02e23, `6.02 \times 10^{23}`."""
    if not any(hasattr(one, "has") and one.has(Float) for one in (gold[0], parsed[0])):
        return False
    left, right = _value(gold[0]), _value(parsed[0])
    return left is not None and right is not None and cmath.isclose(left, right, rel_tol=1e-12)


def _value(parsed: Any) -> complex | None:
    """Value of an expression without variables; None for another, or one too large."""
    try:
        return complex(parsed) if getattr(parsed, "is_number", False) else None
    except (TypeError, ValueError, OverflowError):
        return None


def _decimals(parsed: list[Any]) -> int:
    """Decimals to compare: six digits of the smallest number, so that 1e-7 is not 2e-7.

    math-verify rounds both sides to six decimals, which makes every smaller number 0.
    """
    numbers = [_value(one) for one in parsed]
    for one in parsed:
        if not getattr(one, "is_number", False) and hasattr(one, "atoms"):
            numbers += map(_value, one.atoms(Number))
    sizes = [abs(number) for number in numbers if number is not None]
    small = [size for size in sizes if 0 < size < 1]
    return _DIGITS if not small else _DIGITS - 1 - math.floor(math.log10(min(small)))


def _boxes(contents: list[str]) -> str:
    return " and ".join(rf"$\boxed{{{_content(one)}}}$" for one in contents)


def _braced(text: str, start: int) -> str | None:
    r"""Text in braces from `start` on, else up to a space or `$`; None if it is cut off."""
    if text[start : start + 1] != "{":
        found = re.compile(r"[^\s${}\\]*").match(text, start)
        return found[0] if found and found[0] else ("" if text[start:].strip() else None)
    depth = at = 0
    for at in range(start, len(text)):
        if text[at] in "{}" and text[at - 1] != "\\":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return text[start + 1 : at]
    return None


def _nested(text: str) -> int:
    """Maximum number of open brackets."""
    steps = (1 if one in "({[" else -1 for one in text if one in "({[)}]")
    return max(accumulate(steps), default=0)


def _content(content: str) -> str:
    """Content of a box, with numbers in the notation of math-verify."""
    text = _as_ascii(content).strip().strip("$").strip().removesuffix(".").strip()
    text = _THOUSANDS.sub(lambda one: re.sub(r"\D", "", one[0]), text)
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "")
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text) if _MIXED.fullmatch(text) else text
    return _POWER_OF_TEN.sub(_written_out, text)


def _written_out(found: re.Match[str]) -> str:
    """A number without its power of ten: LaTeX reads `1e-3` as 1 times e, less 3."""
    return format(Decimal(found[0]), "f")


def _as_ascii(text: str) -> str:
    """Text with the digits, minus signs and fractions of ASCII."""
    return text if text.isascii() else "".join(map(ascii_of, text))
