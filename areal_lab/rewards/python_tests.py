"""Rewards of generated code: 1 if it passes the tests of its problem, 0 otherwise.

The code and its tests run in two processes of a sandbox, which limits both, and the tests compare
in their own process (`areal_lab.rewards.verdicts`, docs/sandbox.md). Each reward has further
components, which are 1 for one reason of a reward of 0: `unsupported` (the tests need objects that
cannot be sent between the two), `timed_out` and `crashed` (of the code). Set `reward.timeout_s`
above the sandbox's 8 s.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from areal_lab.host.isolation import LevelSetting
from areal_lab.rewards.sandbox.levels import choose
from areal_lab.rewards.sandbox.run import Limits
from areal_lab.rewards.verdicts.judge import judge

LIMITS: Final = Limits(cpu_s=5.0, timeout_s=8.0)
"""Limits of the code, and of its tests. CPU time, because training keeps the machine busy."""
_FENCE: Final = re.compile(r"```[A-Za-z0-9_+-]*[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_AFTER_A_FUNCTION: Final = ("\nclass ", "\ndef ", "\nif ", "\nprint(", "\n#")
"""Text that a base model writes after the function that it completes: Chen et al., section 2.1."""


def humaneval(
    completion: str, example: Mapping[str, Any], *, sandbox: LevelSetting = "auto"
) -> dict[str, float]:
    """Return 1 if the completed function passes the problem's `check`, else 0.

    The completion continues the prompt, or is a whole function, optionally in a Markdown fence.
    Source: Chen et al. (arXiv:2107.03374), `execution.py` of their release.
    """
    prompt, entry = str(example["source"]), str(example["entry_point"])
    return _rewards(
        humaneval_code(completion, prompt, entry),
        f"{example['test']}\n\ncheck({entry})",
        under_test=(entry,),
        prelude=prompt,
        sandbox=sandbox,
    )


def mbpp(
    completion: str, example: Mapping[str, Any], *, sandbox: LevelSetting = "auto"
) -> dict[str, float]:
    """Return 1 if the program, optionally in a Markdown fence, passes all tests of the problem,
    else 0.

    The functions and classes of the gold solution are tested.
    Source: Austin et al. (arXiv:2108.07732), section 2.1.
    """
    code = fenced(completion).split("[DONE]", 1)[0].replace("[BEGIN]", "")
    # The setup of two problems builds trees of a class that the solution defines.
    tests = (str(example["test_setup_code"]), *map(str, example["test_list"]))
    gold = str(example.get("code", example.get("answer", "")))
    names, imports = _defined(gold)
    return _rewards(
        code, "\n\n".join(tests), under_test=names or None, prelude=imports, sandbox=sandbox
    )


def humaneval_code(completion: str, prompt: str, entry_point: str) -> str:
    """Program of a completion: a continuation of the prompt, or a function that replaces it."""
    code = fenced(completion)
    if f"def {entry_point}" in code:
        return f"{prompt}\n    pass\n\n{code}"  # the prompt has imports and helpers
    ends = [at for mark in _AFTER_A_FUNCTION if (at := code.find(mark)) >= 0]
    return prompt + code[: min(ends, default=len(code))]


def fenced(completion: str) -> str:
    """Code of a completion: in its first Markdown fence, or all of it."""
    found = _FENCE.search(completion)
    return completion if found is None else found.group(1)


def _defined(code: str) -> tuple[list[str], str]:
    """Functions and classes that a gold solution defines, and the code of its imports."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError):
        return [], ""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    imports = [ast.unparse(one) for one in body if isinstance(one, (ast.Import, ast.ImportFrom))]
    return [one.name for one in body if isinstance(one, kinds)], "\n".join(imports)


def _rewards(
    code: str,
    tests: str,
    *,
    under_test: Sequence[str] | None,
    sandbox: LevelSetting,
    prelude: str = "",
) -> dict[str, float]:
    verdict = judge(
        choose(sandbox), code, tests, under_test=under_test, prelude=prelude, limits=LIMITS
    )
    failed, end = verdict.status == "failed", verdict.solution.end
    return {
        "reward": float(verdict.status == "passed"),
        "unsupported": float(verdict.status == "unsupported"),
        "timed_out": float(failed and end == "timeout"),
        "crashed": float(failed and end not in ("exited", "stopped", "timeout")),
    }
