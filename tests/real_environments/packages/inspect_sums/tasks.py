"""Tasks of inspect-ai, as its users write them: products, with a tool."""

import asyncio
import math
import os
import random
import re

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import CachePolicy, get_model
from inspect_ai.scorer import Score, Target, accuracy, mean, scorer
from inspect_ai.solver import Generate, TaskState, generate, solver, use_tools
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
def right():
    async def score(state: TaskState, target: Target) -> Score:
        match state.output.completion:
            case "raise":
                raise RuntimeError("the judge does not answer")
            case "ask the model":
                await get_model().generate("Is it right?")
            case "fail":
                return Score(value="I", reason="scoring_failed", explanation="no file")
            case "no score":
                return Score(value=math.nan)
            case "text":
                return Score(value="about half")
        found = re.findall(r"\d+", state.output.completion)
        return Score(value="C" if target.text in found else "I")

    return score


@scorer(metrics={"share": [mean()]})
def called():
    async def score(state: TaskState, target: Target) -> Score:  # noqa: ARG001 - inspect's
        calls = any(getattr(message, "tool_calls", None) for message in state.messages)
        return Score(value={"share": 0.25 * calls})

    return score


@solver
def waits(fifo: str):
    """Waits in the sample of this name, and says so; the others end."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:  # noqa: ARG001 - inspect's
        if state.input_text == "waits":
            with open(fifo, "w", buffering=1) as file:
                print("waits", file=file)
                try:
                    await asyncio.Event().wait()
                finally:
                    print("ended", file=file)
        return state

    return solve


@task
def sums(first: int = 0, num_tasks: int = 12, shuffled: bool = False):
    """Replies are cached: each sample must have its own nevertheless."""
    samples = [
        Sample(input=f"How much is {n} * {n + 1}?", target=str(n * (n + 1)))
        for n in range(first, first + num_tasks)
    ]
    if shuffled:
        random.shuffle(samples)
    return Task(
        dataset=MemoryDataset(samples),
        solver=[use_tools(times()), generate(cache=CachePolicy(per_epoch=False))],
        scorer=[right(), called()],
    )


@task
def waiting(fifo: str):
    samples = [Sample(input="waits", id="waits"), Sample(input="ends", id="ends")]
    return Task(dataset=samples, solver=waits(fifo), scorer=called())


WAITS = asyncio.Event()


@solver
def ends(file: str):
    """The evaluation ends while both samples run, unless the file exists."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:  # noqa: ARG001 - inspect's
        if os.path.exists(file):
            return state
        if state.input_text == "waits":
            WAITS.set()
            await asyncio.Event().wait()
        await WAITS.wait()
        open(file, "x").close()
        for running in asyncio.all_tasks():
            if "evaluate" in running.get_coro().__qualname__:  # of the runner
                running.cancel()
        return state

    return solve


@task
def ending(file: str):
    samples = [Sample(input="waits", id="waits"), Sample(input="ends", id="ends")]
    return Task(dataset=samples, solver=ends(file), scorer=called())


@task
def boxed():
    return Task(dataset=[Sample(input="?", sandbox="local")], scorer=called())


@task
def unscored():
    return Task(dataset=[Sample(input="?")])


@task
def costly():
    """Its evaluation is refused by the library: no price of the model is known."""
    return Task(dataset=[Sample(input="?", id="one")], scorer=called(), cost_limit=1.0)
