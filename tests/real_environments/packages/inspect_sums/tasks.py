"""Tasks of inspect-ai, as its users write them: products, with a tool."""

import asyncio
import re

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, Target, accuracy, mean, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import tool


@tool
def times():
    async def execute(a: int, b: int) -> str:
        """Product of two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return str(a * b)

    return execute


@scorer(metrics=[accuracy()])
def right(judged: bool = False, failing: int = 0):
    async def score(state: TaskState, target: Target) -> Score:
        if judged:
            await get_model().generate("Is it right?")
        if failing:
            raise RuntimeError("the judge does not answer")
        found = re.findall(r"\d+", state.output.completion)
        return Score(value="C" if target.text in found else "I")

    return score


@scorer(metrics={"share": [mean()]})
def called(value: str = ""):
    async def score(state: TaskState, target: Target) -> Score:
        calls = any(getattr(message, "tool_calls", None) for message in state.messages)
        return Score(value={"share": value or 0.25 * calls})

    return score


@task
def sums(num_tasks: int = 12, value: str = "", judged: bool = False, failing: int = 0):
    return Task(
        dataset=[
            Sample(input=f"How much is {n} * {n + 1}?", target=str(n * (n + 1)))
            for n in range(num_tasks)
        ],
        solver=[use_tools(times()), generate()],
        scorer=[right(judged, failing), called(value)],
    )


@task
def boxed():
    return Task(dataset=[Sample(input="?")], scorer=right(), sandbox="local")
