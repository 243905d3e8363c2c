"""Rewards of an answer's form and words: choices, patterns, overlap with the gold answer, JSON.

If a function finds no answer at all, its component `no_answer` is 1, to count samples without an
answer separately from wrong ones (docs/rewards.md).
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_FENCE: Final = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def choice(
    completion: str, example: Mapping[str, Any], *, choices: str = "ABCD"
) -> dict[str, float]:
    """Return 1 if the last standalone choice is the gold answer, else 0.

    >>> choice("A is wrong, so it is (B).", {"answer": "B"})
    {'reward': 1.0, 'no_answer': 0.0}

    Args:
        completion: to score.
        example: its `answer` is one of the choices.
        choices: single characters; upper and lower case differ.

    Raises:
        ValueError: the gold answer is not a choice, so no completion could be right.
    """
    gold = str(example["answer"]).strip()
    if not gold or len(gold) > 1 or gold not in choices:
        raise ValueError(f"the gold answer is {gold!r}, but must be one of the choices {choices}")
    found = re.findall(rf"(?<!\w)[{re.escape(choices)}](?!\w)", completion)
    return _scored(found[-1] if found else None, gold)


def pattern(
    completion: str, example: Mapping[str, Any], *, pattern: str = r"(?im)^answer:(.*)$"
) -> dict[str, float]:
    r"""Return 1 if the capture of the last match of a pattern is the gold answer (ignoring spaces),
    else 0.

    >>> pattern("Answer: 17\nNo.\nAnswer: 18\n", {"answer": "18"})
    {'reward': 1.0, 'no_answer': 0.0}

    Args:
        completion: to score.
        example: with the gold `answer`.
        pattern: a regular expression with one group.
    """
    matches = list(_compiled(pattern, groups=1).finditer(completion))
    found = matches[-1][1] if matches else None
    return _scored(None if found is None else found.strip(), str(example["answer"]).strip())


def form(completion: str, example: Mapping[str, Any], *, pattern: str) -> float:
    r"""Return 1 if the whole completion, without spaces around it, matches a pattern, else 0.

    >>> form("<think>so</think> 7", {}, pattern=r"(?s)<think>.*</think>\s*\d+")
    1.0

    Args:
        completion: to score.
        example: ignored.
        pattern: a regular expression.
    """
    del example
    return float(_compiled(pattern, groups=0).fullmatch(completion.strip()) is not None)


def contains(completion: str, example: Mapping[str, Any]) -> float:
    """Return 1 if the completion contains the words of the gold answer in order and adjacent, else
    0.

    Not for numbers: punctuation is ignored, so 3.5 and 35 are equal.

    >>> contains("It is the Eiffel Tower.", {"answer": "eiffel tower"})
    1.0

    Raises:
        ValueError: the gold answer has no words.
    """
    return float(f" {' '.join(_gold(example))} " in f" {' '.join(_words(completion))} ")


def exact_match(completion: str, example: Mapping[str, Any]) -> float:
    """Return 1 if the words are those of the gold answer, without case, punctuation and articles,
    else 0.

    Not for numbers: 3.5 and 35 are equal; `areal_lab.rewards.exact:last_number` compares these.
    Source: Rajpurkar et al. (arXiv:1606.05250), `evaluate-v1.1.py` of their release.

    >>> exact_match("The Eiffel tower.", {"answer": "Eiffel Tower"})
    1.0

    Raises:
        ValueError: the gold answer has no words.
    """
    return float(_words(completion) == _gold(example))


def word_f1(completion: str, example: Mapping[str, Any]) -> float:
    """Harmonic mean of precision and recall of the words, normalized as by `exact_match`.

    Source: Rajpurkar et al. (arXiv:1606.05250), section 6.1.

    >>> word_f1("Eiffel Tower Paris", {"answer": "the Eiffel Tower"})
    0.8

    Raises:
        ValueError: the gold answer has no words.
    """
    found, gold = Counter(_words(completion)), Counter(_gold(example))
    common = (found & gold).total()
    return 2 * common / (found.total() + gold.total()) if common else 0.0


class JsonSchema:
    """Score 1 if the completion is JSON that a schema accepts, alone or in a Markdown fence.

    Needs `pip install 'areal_lab[json]'`. A reference to another file or an address is an error.

    Args:
        schema: schema of every problem; None takes the field `schema` of each problem.

    Raises:
        ValueError: it is not a valid JSON schema.
    """

    def __init__(self, schema: Mapping[str, Any] | bool | None = None) -> None:
        self.check(schema)
        self._schema = schema

    @staticmethod
    def check(schema: Mapping[str, Any] | bool | None = None) -> None:
        """Check the schema and the package; `areal_lab.resolve` calls this.

        Raises:
            ValueError: in one line.
        """
        from areal_lab.extras import MissingExtra, require

        try:
            require("areal_lab.rewards.text:JsonSchema", "json", "jsonschema", "referencing")
        except MissingExtra as error:
            raise ValueError(str(error)) from error
        if schema is not None:
            _validator(json.dumps(schema))

    def __call__(self, completion: str, example: Mapping[str, Any]) -> dict[str, float]:
        """The reward, and whether there was no JSON."""
        import referencing.exceptions

        schema = example.get("schema") if self._schema is None else self._schema
        if schema is None:
            raise ValueError("the problem has no field 'schema'; add it, or set reward.kwargs")
        fenced = _FENCE.search(completion)
        try:
            value = json.loads(completion if fenced is None else fenced[1])
        except (ValueError, RecursionError):
            return {"reward": 0.0, "no_answer": 1.0}
        valid = _validator(schema if isinstance(schema, str) else json.dumps(schema))
        try:
            return {"reward": float(valid.is_valid(value)), "no_answer": 0.0}
        except RecursionError:  # values that are nested too deeply for any answer
            return {"reward": 0.0, "no_answer": 0.0}
        except referencing.exceptions.Unresolvable as error:
            raise ValueError(
                f"the schema refers to {error.ref!r}, which is not in it; write it out"
            ) from error


def _scored(found: str | None, gold: str) -> dict[str, float]:
    return {"reward": float(found == gold), "no_answer": float(found is None)}


def _gold(example: Mapping[str, Any]) -> list[str]:
    words = _words(str(example["answer"]))
    if not words:
        raise ValueError(f"the gold answer is {example['answer']!r}, but must have a word")
    return words


def _words(text: str) -> list[str]:
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return _ARTICLES.sub(" ", bare).split()


@lru_cache(maxsize=64)
def _compiled(pattern: str, *, groups: int) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"pattern is {pattern!r}, which is not a regular expression: {error}"
        ) from (error)
    if groups and compiled.groups != groups:
        raise ValueError(
            f"pattern is {pattern!r}, which has {compiled.groups} groups, but needs {groups}"
        )
    return compiled


@lru_cache(maxsize=1024)
def _validator(schema: str) -> Any:
    import jsonschema
    import referencing

    read = json.loads(schema)
    maker = jsonschema.validators.validator_for(read, jsonschema.Draft202012Validator)
    try:
        maker.check_schema(read)
    except jsonschema.SchemaError as error:
        raise ValueError(f"schema is no JSON schema: {error.message}") from error
    # By default it would read files and addresses that a schema of a data set names.
    return maker(read, registry=referencing.Registry())
