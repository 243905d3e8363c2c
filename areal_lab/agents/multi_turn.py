"""Ask again: after a wrong response the model gets feedback and another turn.

prompt --> response --(wrong)--> feedback --> response --> ... --> right, or no turn is left
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from areal_lab.agents.workflow import Episode, Row, WorkflowEngine, ended, room
from areal_lab.config.functions import Form, check_call, load_function
from areal_lab.data.trajectory import Observation, SampleEnd, Segment, Turn
from areal_lab.rewards.exact import numbers_of


class MultiTurn:
    """Turns until a response is right; later ones have a lower reward.

    The reward of a sample is that of its last turn times `turn_discount` for each turn before it
    (AReaL's `MultiTurnWorkflow`).

    Args:
        max_turns: maximum turns of a sample.
        turn_discount: factor of each further turn.
        feedback: text between a wrong response and the next turn. `{prompt}` and the problem's
            other fields except the answer are replaced; other braces are kept. Or
            `module:function` of the response and the problem that returns it, such as
            `too_small_or_big`.
        correct: lowest reward of a right response, which is the last turn.

    Raises:
        ValueError: a number is out of its bounds, or the feedback would reveal the answer.
    """

    def __init__(
        self,
        *,
        max_turns: int = 2,
        turn_discount: float = 1.0,
        feedback: str = "\nThat is wrong. Try again.\n",
        correct: float = 1.0,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}, but must be >= 1")
        if not 0 < turn_discount <= 1:
            raise ValueError(f"turn_discount is {turn_discount}, but must be in (0, 1]")
        self._max_turns = max_turns
        self._turn_discount = turn_discount
        self._feedback = _feedback(feedback)
        self._correct = correct

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        """See `Workflow.run`."""
        prompt = engine.encode(str(data["prompt"]), begins=True)
        context, parts, turns = prompt, list[Segment | Observation](), list[Turn]()
        end: SampleEnd
        while True:
            generated = await engine.turn(context)
            tokens = generated.tokens
            parts.extend(generated.segments)
            context += tokens
            outcome = await engine.score(engine.decode(tokens), data)
            turns.append(Turn(tokens=len(tokens), reward=outcome.reward))
            end = ended(engine, context, generated)
            if outcome.status != "ok" or outcome.reward >= self._correct or end == "abort":
                break
            if len(turns) == self._max_turns:
                break
            feedback = engine.encode(self._feedback(engine.decode(tokens), data))
            if room(engine, context + feedback) < 1:
                end = "context"
                break
            parts.append(Observation(feedback))
            context += feedback
        discounted = outcome.reward * self._turn_discount ** (len(turns) - 1)
        return Episode(
            rows=(Row(prompt_tokens=prompt, parts=tuple(parts)),),
            outcome=replace(outcome, reward=discounted),
            end=end,
            turns=tuple(turns),
        )


def too_small_or_big(completion: str, data: Mapping[str, Any]) -> str:
    r"""Report on which side of the gold answer a number is, and repeat the last line.

    >>> too_small_or_big(" 12\n", {"prompt": "1 + 1 = 2\n9 + 4 =", "answer": "13"})
    'Too small.\n9 + 4 ='
    """
    answer = str(data["answer"]).strip()
    asked = str(data["prompt"]).rstrip("\n").rpartition("\n")[2]
    golds, numbers = numbers_of(answer), numbers_of(completion)
    if len(golds) != 1 or (gold := golds[0]) is None:
        raise ValueError(f"the answer is {answer!r:.60}, but too_small_or_big needs a number")
    if not numbers or (number := numbers[0]) is None:
        said = "No number."
    elif number == gold:
        said = "Write only the number."
    else:
        said = "Too small." if number < gold else "Too big."
    begins = "" if completion.endswith("\n") else "\n"
    return f"{begins}{said}\n{asked}"


def _feedback(setting: str) -> Callable[[str, Mapping[str, Any]], str]:
    if _NAMED.fullmatch(setting):
        named: Callable[[str, Mapping[str, Any]], str] = load_function(setting)
        try:
            check_call(named, Form("feedback(completion, data)", may_wait=False))
        except ValueError as error:
            raise ValueError(f"feedback {setting} {error}") from error
        return named

    for answer in ("{answer}", "{full_answer}"):
        if answer in setting:
            raise ValueError(
                f"feedback contains {answer}, but must not tell the model the answer; remove it"
            )

    def text(completion: str, data: Mapping[str, Any]) -> str:
        del completion
        # In one pass: the text of a field may have braces, too.
        return _FIELD.sub(lambda name: str(data.get(name[1], name[0])), setting)

    return text


_NAMED: Final = re.compile(r"[\w.]+:[\w.]+")
_FIELD: Final = re.compile(r"\{(\w+)\}")
