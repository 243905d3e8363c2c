"""Rewards of generated code: 1 if it passes the tests of its problem, 0 otherwise.

The tests run in `areal_lab.rewards.sandbox`, which is no security boundary. Set `reward.timeout_s`
above its 5 s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from areal_lab.rewards.sandbox import run_python

_FENCE: Final = re.compile(r"```[A-Za-z0-9_+-]*[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_AFTER_A_FUNCTION: Final = ("\nclass ", "\ndef ", "\nif ", "\nprint(", "\n#")
"""What a base model writes after the function that it was to complete: Chen et al., section 2.1."""


def humaneval(completion: str, example: Mapping[str, Any]) -> float:
    """1 if the completed function passes the problem's `check`.

    The completion continues the prompt, or is a whole function, perhaps in a Markdown fence.
    Source: Chen et al. (arXiv:2107.03374), `execution.py` of their release.
    """
    prompt, entry = str(example["source"]), str(example["entry_point"])
    return _passed((humaneval_code(completion, prompt, entry), example["test"], f"check({entry})"))


def mbpp(completion: str, example: Mapping[str, Any]) -> float:
    """1 if the program, perhaps in a Markdown fence, passes all tests of the problem.

    Source: Austin et al. (arXiv:2108.07732), section 2.1.
    """
    code = _fenced(completion).split("[DONE]", 1)[0].replace("[BEGIN]", "")
    # The setup comes second: of two problems it makes trees of a class that the solution defines.
    return _passed((code, str(example["test_setup_code"]), *map(str, example["test_list"])))


def humaneval_code(completion: str, prompt: str, entry_point: str) -> str:
    """The program of a completion: what continues the prompt, or a function that replaces it."""
    code = _fenced(completion)
    if f"def {entry_point}" in code:
        return f"{prompt}\n    pass\n\n{code}"  # the prompt has imports and helpers
    ends = [at for mark in _AFTER_A_FUNCTION if (at := code.find(mark)) >= 0]
    return prompt + code[: min(ends, default=len(code))]


def _fenced(completion: str) -> str:
    found = _FENCE.search(completion)
    return completion if found is None else found.group(1)


def _passed(parts: Sequence[str]) -> float:
    return float(run_python("\n\n".join(parts)).passed)
