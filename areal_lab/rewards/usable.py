"""Check a reward function: `python -m areal_lab.rewards.usable module:name LEVEL KEYWORDS`.

In a separate process, because the module's imports may be heavy. Prints the problem and exits with
1.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from areal_lab.config.functions import Form, check_call, load_function, main
from areal_lab.host.isolation import LevelSetting
from areal_lab.rewards.sandbox.levels import NoSandbox, choose, runs_programs, takes_sandbox

FORM: Final = Form("score(completion, example)")
_SECOND: Final = frozenset(
    {
        *("answer", "answers", "completion", "completions", "expected", "gold", "gold_answer"),
        *("ground_truth", "ground_truths", "gt", "label", "labels", "prompt", "prompts"),
        *("reference", "references", "response", "responses", "solution", "solution_str"),
        *("solutions", "target", "targets"),
    }
)
"""Names of a second parameter in other frameworks, which pass a text or a list there."""
_MAPPING: Final = re.compile(r"([\w.]+\.)?(Mutable)?(Mapping|dict|Dict)\b")
_TEXT: Final = re.compile(r"([\w.]+\.)?(str|list|List|Sequence|tuple|Tuple)\b")
"""Declared types of a second parameter that decide its use whatever its name."""
_FIRST: Final = frozenset({"data_source", "prompts", "queries", "task_info"})
_LISTS: Final = frozenset({"completions", "labels", "prompts", "queries", "responses"})
"""Parameters that are lists with one item for each completion, in TRL and OpenRLHF."""
_GIVEN: Final[Mapping[str, str]] = {
    **dict.fromkeys(("completion", "response", "solution_str", "action"), "completion"),
    **dict.fromkeys(("completions", "responses"), "completion"),
    **dict.fromkeys(("prompt", "prompts"), 'example["prompt"]'),
    **dict.fromkeys(
        sorted(
            _SECOND
            - {
                *("completion", "completions", "response", "responses"),
                *("prompt", "prompts", "solution_str"),
            }
        ),
        'example["answer"]',
    ),
    **dict.fromkeys(("extra_info", "task_info"), "dict(example)"),
    "example": "example",
    "queries": 'example["prompt"] + completion',
    "data_source": '""',
}
"""Our value for a parameter of that name. For other names: the problem's field."""


def check_reward(
    function: Callable[..., Any], keywords: Mapping[str, Any], sandbox: LevelSetting = "auto"
) -> None:
    """Check that a reward function can be called as one."""
    given = {"sandbox": sandbox, **keywords} if takes_sandbox(function) else keywords
    parameters = _parameters(function)
    try:
        check_call(function, FORM, given)
    except ValueError as error:
        adapts = parameters and str(error).startswith("takes ") and FORM.call in str(error)
        advice = f"; write {_adapted(function, parameters)}" if adapts else ""
        raise ValueError(f"{error}{advice}") from None
    if _is_foreign([one for one in parameters if one.kind in _POSITIONAL]):
        taken = ", ".join(map(str, parameters))
        raise ValueError(
            f"takes ({taken}), as in other frameworks, but is called as {FORM.call}, with a text "
            f"and the mapping of its problem; write {_adapted(function, parameters)}"
        )


_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Parameters of a call, or for a class those of an instance; empty without a signature."""
    is_class = isinstance(function, type)
    called: Any = vars(function).get("__call__") if is_class else function
    try:
        return [*inspect.signature(called).parameters.values()][is_class:]
    except (TypeError, ValueError):
        return []


def _is_foreign(positional: list[inspect.Parameter]) -> bool:
    """Return whether parameters are those of another framework."""
    names = [one.name for one in positional]
    if not _FIRST.isdisjoint(names[:1]):
        return True
    kinds = [inspect.formatannotation(one.annotation).strip("'") for one in positional[1:2]]
    if any(map(_MAPPING.match, kinds)):
        return False
    return not _SECOND.isdisjoint(names[1:2]) or any(map(_TEXT.match, kinds))


def _adapted(function: Callable[..., Any], parameters: list[inspect.Parameter]) -> str:
    """Code of a function that calls another framework's."""
    kinds = (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
    wanted = [one for one in parameters if one.default is one.empty and one.kind in kinds]
    names = [one.name for one in wanted]
    given = dict(_GIVEN)
    if names and not any("completion" in given.get(name, "") for name in names):
        given[next((name for name in names if name not in given), names[0])] = "completion"
    # In AReaL `completions` is one text, next to its tokens.
    several = "prompt_ids" not in names and any(one in _LISTS for one in names)
    passed: list[str] = []
    for one in wanted:
        is_tokens = one.name in ("prompt_ids", "completion_ids")
        value = "[]" if is_tokens else given.get(one.name, f'example["{one.name}"]')
        by_name = several or one.kind not in _POSITIONAL
        value = f"[{value}]" if several else value
        passed.append(f"{one.name}={value}" if by_name else value)
    name = getattr(function, "__name__", "yours")
    name = (name if name.isidentifier() else "yours") + "()" * isinstance(function, type)
    return f"def {FORM.call}: return {name}({', '.join(passed)}){'[0]' if several else ''}"


def check(
    name: str, setting: LevelSetting, keywords: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Import a function and check its parameters; with a parameter `sandbox`, find a level that
    works.
    """
    function = load_function(name)
    try:
        check_reward(function, keywords, setting)
    except ValueError as error:
        raise ValueError(f"it {error}") from error
    if runs_programs(function):
        try:
            choose(keywords.get("sandbox", setting))
        except NoSandbox as error:
            raise ValueError(f"reward.{error}") from error


if __name__ == "__main__":
    name, setting, keywords = sys.argv[1:]
    sys.exit(main([name], lambda one: check(one, setting, json.loads(keywords))))  # type: ignore[arg-type]
