"""The workflow `environment`: a model and an environment take turns.

    prompt | reset text | turn | step text | turn | ... until the environment is done

The reward is the sum of the environment's; one that gives none is scored by the run's reward
function, on the last turn.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from areal_lab.agents.environments.protocol import Environment, Step
from areal_lab.agents.returns import linear_returns
from areal_lab.agents.tools.threads import Threads
from areal_lab.agents.workflow import Episode, Row, Turn, WorkflowEngine, ended, room
from areal_lab.config.functions import load_function
from areal_lab.data.trajectory import Observation, SampleEnd, Segment
from areal_lab.rewards.service import RewardOutcome

TEXT: Final = "{text}"


class Play:
    """Turns of a model in an environment.

    Args:
        fn: `module:factory` of environments (`protocol.Environment`), called once per sample with
            `kwargs`; a class is one.
        kwargs: of the factory.
        max_turns: of the model.
        around: text around what the environment says after a turn; `{text}` is replaced.
        turn_discount: trains each turn on its own return, the discounted sum of the rewards from it
            on; None trains all turns on the sample's reward.
        timeout_s: of one call of the environment.

    Raises:
        ValueError: a number is out of its bounds, or the factory cannot be used.
    """

    def __init__(
        self,
        *,
        fn: str,
        kwargs: Mapping[str, Any] | None = None,
        max_turns: int = 10,
        around: str = "\n{text}\n",
        turn_discount: float | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}, but must be >= 1")
        if TEXT not in around:
            raise ValueError(f"around is {around!r}, but must contain {TEXT}")
        if turn_discount is not None and not 0 <= turn_discount <= 1:
            raise ValueError(f"turn_discount is {turn_discount}, but must be in [0, 1], or null")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, but must be > 0 (seconds)")
        self._make = _factory(fn, dict(kwargs or {}))
        self._max_turns = max_turns
        self._around = around
        self._discount = turn_discount
        self._timeout_s = timeout_s
        self._threads = Threads(f"the environment {fn}")

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        """See `Workflow.run`."""
        try:
            return await self._run(engine, data)
        except _Late as error:
            outcome = RewardOutcome("timeout", math.nan, detail=str(error))
            return Episode(rows=(), outcome=outcome, end="abort")

    async def _run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        environment: Environment = await self._call(self._make)
        try:
            first = await self._call(environment.reset, data)
            prompt = engine.encode(f"{data['prompt']}{first or ''}", begins=True)
            if room(engine, prompt) < 1:
                raise ValueError(
                    f"the environment begins with {len(prompt)} tokens, but the context has "
                    f"{engine.context_tokens}; raise gconfig.max_tokens"
                )
            return await self._play(engine, data, environment, prompt)
        finally:
            if close := getattr(environment, "close", None):
                await self._call(close)

    async def _play(
        self,
        engine: WorkflowEngine,
        data: Mapping[str, Any],
        environment: Environment,
        prompt: tuple[int, ...],
    ) -> Episode:
        context, parts, turns = prompt, list[Segment | Observation](), list[Turn]()
        end: SampleEnd
        while True:
            generated = await engine.turn(context)
            tokens = tuple(token for part in generated.segments for token in part.tokens)
            parts.extend(generated.segments)
            context += tokens
            text, end = engine.decode(tokens), ended(engine, context, generated)
            if end == "abort":
                turns.append(Turn(tokens=len(tokens)))
                break
            step: Step = await self._call(environment.step, text)
            turns.append(Turn(tokens=len(tokens), reward=step.reward))
            # The environment takes a turn that was cut off, too: it may be all that it needs.
            if step.done:
                break
            if len(turns) == self._max_turns:
                end = "turns"
                break
            told = engine.encode(self._around.replace(TEXT, step.text))
            if room(engine, context + told) < 1:
                end = "context"
                break
            parts.append(Observation(told))
            context += told
        rewards = [turn.reward for turn in turns]
        given = [reward for reward in rewards if reward is not None]
        row = Row(prompt_tokens=prompt, parts=tuple(parts))
        if not given:
            outcome = await engine.score(text, data)
        else:
            outcome = _outcome(math.fsum(given))
            if self._discount is not None and outcome.status == "ok":
                row = self._with_returns(row, turns)
        return Episode(rows=(row,), outcome=outcome, end=end, turns=tuple(turns))

    def _with_returns(self, row: Row, turns: list[Turn]) -> Row:
        assert self._discount is not None
        before: list[int | None] = [None, *range(len(turns) - 1)]
        rewards = [0.0 if turn.reward is None else turn.reward for turn in turns]
        returns = linear_returns(before, rewards, self._discount)
        # A turn that was aborted before its first token is in no row.
        kept = [
            one for one, turn in zip(returns, turns, strict=True) if one is not None and turn.tokens
        ]
        return Row(prompt_tokens=row.prompt_tokens, parts=row.parts, turn_returns=tuple(kept))

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the environment: on the event loop if it is async, else in a thread.

        Raises:
            _Late: it took too long.
        """
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(function):
                    return await function(*arguments)
                value = await self._threads.run(lambda: function(*arguments))
                return await value if isinstance(value, Awaitable) else value
        except TimeoutError as error:
            if not limit.expired():
                raise
            name = getattr(function, "__name__", "the factory")
            raise _Late(f"{name} of the environment took over {self._timeout_s:g} s") from error


class _Late(Exception):
    """The environment took too long."""


def _outcome(reward: float) -> RewardOutcome:
    if math.isfinite(reward):
        return RewardOutcome("ok", reward)
    detail = f"the environment gave rewards with the sum {reward}, but rewards must be finite"
    return RewardOutcome("error", math.nan, detail=detail)


def _factory(fn: str, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """The factory with its arguments.

    Raises:
        ValueError: in one line: it does not exist, does not take them, or cannot work with them.
    """
    factory = load_function(fn)
    try:
        inspect.signature(factory).bind(**kwargs)
    except TypeError as error:
        raise ValueError(f"{fn}: {error}") from error
    if check := getattr(factory, "check", None):
        check(**kwargs)
    return lambda: factory(**kwargs)
