"""How a function of the user's is called, checked before anything is started."""
# ruff: noqa: ARG001, ARG002, ARG005 -- signatures are what is tested

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from areal_lab.config.functions import Form, check_call
from areal_lab.rewards.usable import check_reward


class Score:
    """A class that is made with keywords, and called."""

    def __init__(self, *, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, completion: str, example: Mapping[str, Any]) -> float:
        return self.factor


class OfVerifiers:
    """A class whose instances are called as in another framework."""

    def __call__(self, completion: str, answer: str) -> float: ...


class Neither:
    """A class without `__call__`."""


def trl(prompts: Any, completions: Any, **kwargs: Any) -> Any: ...
def trl_short(completions: Any, **kwargs: Any) -> Any: ...
def trl_column(completions: Any, ground_truth: Any, **kwargs: Any) -> Any: ...
def verl(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> Any: ...
def verl_part(solution_str: Any, ground_truth: Any, method: str = "strict") -> Any: ...
def openrlhf(queries: Any, prompts: Any, labels: Any) -> Any: ...
def verifiers(completion: Any, answer: Any, **kwargs: Any) -> Any: ...
def rllm(task_info: Any, action: Any) -> Any: ...
def areal(
    prompt: Any, completions: Any, prompt_ids: Any, completion_ids: Any, answer: Any, **more: Any
) -> Any: ...
def sample(completion: str, reference: Any) -> Any: ...
def typed(completion: str, wanted: str) -> float: ...
def unnamed(output: Any, target: Any) -> float: ...
def by_name(completion: str, *, answer: str) -> float: ...
def three(completion: str, example: Any, level: int) -> float: ...
def mapping(completion: str, answer: Mapping[str, Any]) -> float: ...
def dictionary(completion: str, label: dict[str, Any]) -> float: ...
def plain(completion: str, example: Mapping[str, Any]) -> float: ...
async def waits(completion: str, problem: Mapping[str, Any]) -> float: ...
def wants_more(completion: str, example: Mapping[str, Any], *, length: int) -> float: ...
def wants_sandbox(completion: str, example: Mapping[str, Any], *, sandbox: str) -> float: ...
def yields(completion: str, example: Mapping[str, Any]) -> Any:
    yield 1.0


ADAPTED = {
    trl: 'trl(prompts=[example["prompt"]], completions=[completion])[0]',
    trl_short: "trl_short(completions=[completion])[0]",
    trl_column: 'trl_column(completions=[completion], ground_truth=[example["answer"]])[0]',
    verl: 'verl("", completion, example["answer"])',
    verl_part: 'verl_part(completion, example["answer"])',
    openrlhf: (
        'openrlhf(queries=[example["prompt"] + completion], prompts=[example["prompt"]], '
        'labels=[example["answer"]])[0]'
    ),
    verifiers: 'verifiers(completion, example["answer"])',
    sample: 'sample(completion, example["answer"])',
    typed: 'typed(completion, example["wanted"])',
    unnamed: 'unnamed(completion, example["answer"])',
    by_name: 'by_name(completion, answer=example["answer"])',
    three: 'three(completion, example, example["level"])',
    OfVerifiers: 'OfVerifiers()(completion, example["answer"])',
    rllm: "rllm(dict(example), completion)",
    areal: 'areal(example["prompt"], completion, [], [], example["answer"])',
}


@pytest.mark.parametrize("function", ADAPTED, ids=lambda one: one.__name__)
def test_a_reward_of_another_framework_is_refused_with_its_adapter(
    function: Callable[..., Any],
) -> None:
    with pytest.raises(ValueError, match="is called as score") as caught:
        check_reward(function, {})
    message, _, code = str(caught.value).partition("; write ")
    assert "\n" not in message
    assert code == f"def score(completion, example): return {ADAPTED[function]}"
    seen: list[object] = []

    def recorded(*given: Any, **named: Any) -> list[float]:
        seen.append((given, named))
        return [1.0]

    is_class = isinstance(function, type)
    names: dict[str, Any] = {function.__name__: (lambda: recorded) if is_class else recorded}
    exec(code, names)  # the advice is code that runs
    assert callable(names["score"])
    names["score"]("said", {"prompt": "p", "answer": "a", "wanted": "a", "level": 1})
    assert "said" in str(seen)


@pytest.mark.parametrize(
    ("function", "keywords"),
    [
        (plain, {}),
        (waits, {}),
        (mapping, {}),
        (dictionary, {}),
        (lambda completion, row: 1.0, {}),
        (lambda completion, task: 1.0, {}),
        (lambda *given: 1.0, {}),
        (lambda completion, example, **more: 1.0, {"length": 3}),
        (Score, {"factor": 2.0}),
        (Score(), {}),
        (Score().__call__, {}),
        (wants_more, {"length": 3}),
        (functools.partial(wants_more, length=3), {}),
        (max, {}),
        (wants_sandbox, {}),
        (functools.wraps(plain)(lambda *given: 1.0), {}),
        (print, {}),
    ],
)
def test_what_can_be_called_as_a_reward_is_taken(
    function: Callable[..., Any], keywords: dict[str, Any]
) -> None:
    check_reward(function, keywords)


@pytest.mark.parametrize(
    ("function", "keywords", "message"),
    [
        (wants_more, {}, "missing a required argument: 'length'"),
        (plain, {"length": 3}, "got an unexpected keyword argument 'length'"),
        (lambda completion: 1.0, {}, "too many positional arguments; write def score"),
        (Score, {"weight": 2.0}, "is made with weight: got an unexpected keyword"),
        (Neither, {}, "is a class without __call__, but must be called as score"),
        (yields, {}, "yields, but must return what it computes"),
        (3.0, {}, "is float 3.0, but must be a function, called as score(completion, example)"),
        ("m:f", {}, "is str 'm:f', but must be a function"),
        (functools.partial(plain, "said"), {}, "too many positional arguments"),
    ],
)
def test_what_cannot_be_called_as_a_reward_is_refused(
    function: Any, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- the message is below
        check_reward(function, keywords)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_function_that_nothing_waits_for_must_not_be_async() -> None:
    check_call(waits, Form("score(completion, example)"))
    for function in (waits, functools.partial(waits, "said")):
        form = Form("score(completion, example)" if function is waits else "score(example)")
        with pytest.raises(ValueError, match="is async, but nothing waits for it"):
            check_call(function, Form(form.call, may_wait=False))
