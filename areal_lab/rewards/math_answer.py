r"""Rewards of mathematical answers by math-verify: `\frac12`, `0.5` and `1/2` are equal.

Needs `pip install 'areal_lab[math]'`; there is no other rule without it. math-verify's own time
limit needs signals and is off: `reward.timeout_s` kills the worker instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_lab.extras import require

require("areal_lab.rewards.math_answer", "math")

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # noqa: E402

_EITHER = (LatexExtractionConfig(), ExprExtractionConfig())


def math_answer(completion: str, example: Mapping[str, Any]) -> float:
    r"""1 if the answer of the completion equals the gold answer, as mathematics.

    The answer is that in `\boxed{}`, else the last expression. A completion without one gets 0.

    >>> math_answer(r"So it is $\boxed{\frac{1}{2}}$.", {"answer": "0.5"})
    1.0

    Raises:
        ValueError: the gold answer cannot be read, so that no completion could be correct.
    """
    gold = parse(f"\\boxed{{{example['answer']}}}", _EITHER, parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot read the gold answer {example['answer']!r}")
    found = parse(completion, _EITHER, parsing_timeout=None)
    return float(bool(found) and verify(gold, found, timeout_seconds=None))
