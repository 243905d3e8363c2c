"""The workflow `environment`: a model and an environment take turns.

    prompt | reset text | turn | step text | turn | ... until the environment is done

The reward is the sum of the environment's rewards, or `unfinished_reward` if the sample ended
before the first of them. With `scored` the run's reward function scores the last turn instead.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from areal_lab.agents.environments.protocol import Environment, Step
from areal_lab.agents.tools.box import Threads
from areal_lab.agents.turns import linear_returns
from areal_lab.agents.workflow import Episode, Row, WorkflowEngine, ended, room
from areal_lab.config.functions import load_function
from areal_lab.data.trajectory import Observation, SampleEnd, Segment, Turn
from areal_lab.rewards.service import RewardOutcome

TEXT: Final = "{text}"

_log = logging.getLogger(__name__)


class Play:
    """Turns of a model in an environment.

    Args:
        fn: `module:factory` of environments (`protocol.Environment`), called once per sample with
            `kwargs`; a class is a factory.
        kwargs: keywords of the factory.
        max_turns: maximum turns of the model.
        around: text around the environment's text after a turn; `{text}` is replaced.
        turn_discount: trains each turn on its own return, the discounted sum of the rewards from it
            on; None trains all turns on the sample's reward.
        timeout_s: time limit of one call of the environment.
        scored: the environment gives no rewards, and `reward.fn` scores the last turn.
        unfinished_reward: reward of a sample that ended (turns, context, abort) before the
            environment gave a reward.

    Raises:
        ValueError: a number is out of its bounds, two keywords contradict each other, or the
            factory cannot be used.
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
        scored: bool = False,
        unfinished_reward: float = 0.0,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}, but must be >= 1")
        if TEXT not in around:
            raise ValueError(f"around is {around!r}, but must contain {TEXT}")
        if turn_discount is not None and not 0 <= turn_discount <= 1:
            raise ValueError(f"turn_discount is {turn_discount}, but must be in [0, 1], or null")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, but must be > 0 (seconds)")
        if not math.isfinite(unfinished_reward):
            raise ValueError(f"unfinished_reward is {unfinished_reward}, but must be finite")
        if scored and unfinished_reward:
            raise ValueError(
                f"unfinished_reward is {unfinished_reward:g}, but with scored the reward function "
                "scores unfinished samples, too; leave out one of them"
            )
        self._fn = fn
        self._make = _factory(fn, dict(kwargs or {}))
        self._max_turns = max_turns
        self._around = around
        self._discount = turn_discount
        self._timeout_s = timeout_s
        self._scored = scored
        self._unfinished_reward = unfinished_reward
        self._threads = Threads(f"the environment {fn}")

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        """See `Workflow.run`."""
        played = _Played()
        try:
            return await self._run(engine, data, played)
        except _Late as error:
            outcome = RewardOutcome("timeout", math.nan, detail=str(error))
            return played.episode(outcome, "abort")

    async def _run(
        self, engine: WorkflowEngine, data: Mapping[str, Any], played: _Played
    ) -> Episode:
        environment: Environment = await self._call(self._make)
        try:
            first = await self._call(environment.reset, data)
            prompt = engine.encode(f"{data['prompt']}{engine.plain(first or '')}", begins=True)
            if room(engine, prompt) < 1:
                raise ValueError(
                    f"the environment begins with {len(prompt)} tokens, but the context has "
                    f"{engine.context_tokens}; raise gconfig.max_tokens"
                )
            played.prompt = prompt
            return await self._play(engine, data, environment, played)
        finally:
            await self._close(environment)

    async def _play(
        self,
        engine: WorkflowEngine,
        data: Mapping[str, Any],
        environment: Environment,
        played: _Played,
    ) -> Episode:
        context, parts, turns = played.prompt, played.parts, played.turns
        end: SampleEnd
        done = False
        while True:
            generated = await engine.turn(context)
            tokens = generated.tokens
            parts.extend(generated.segments)
            turns.append(Turn(tokens=len(tokens)))
            context += tokens
            text, end = engine.decode(tokens), ended(engine, context, generated)
            if end == "abort":
                break
            step: Step = await self._call(environment.step, text)
            turns[-1] = replace(turns[-1], reward=step.reward)
            # The environment also gets a truncated turn: it may be all that it needs.
            if step.done:
                done = True
                break
            if len(turns) == self._max_turns:
                end = "turns"
                break
            said = engine.plain(step.text, within=self._around)
            told = engine.encode(self._around.replace(TEXT, said))
            if room(engine, context + told) < 1:
                end = "context"
                break
            parts.append(Observation(told))
            context += told
        given = [turn.reward for turn in turns if turn.reward is not None]
        if self._scored:
            outcome = _error(_NOT_SCORED) if given else await engine.score(text, data)
        elif given:
            outcome = _outcome(math.fsum(given))
        elif done:
            outcome = _error(_NO_REWARD)
        else:
            outcome = _outcome(self._unfinished_reward)
        if outcome.status != "ok":
            return played.episode(outcome, end)
        if not given:
            played.reward_last(outcome.reward)
        return played.episode(outcome, end, self._discount)

    async def _close(self, environment: Environment) -> None:
        """Close the environment. A failure is only logged: the sample is complete."""
        if close := getattr(environment, "close", None):
            try:
                await self._call(close)
            except Exception as error:
                reason = str(error) or type(error).__name__
                _log.warning("closing an environment of %s failed: %s", self._fn, reason)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the environment: on the event loop if it is async, else in a thread."""
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
    """The environment exceeded its time limit."""


@dataclass(slots=True)
class _Played:
    """Part of a sample that is done so far; it survives a call that times out."""

    prompt: tuple[int, ...] = ()
    parts: list[Segment | Observation] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def reward_last(self, reward: float) -> None:
        """Add a reward to the last turn that has tokens; turns without tokens are in no row."""
        for place in reversed(range(len(self.turns))):
            if self.turns[place].tokens:
                self.turns[place] = replace(self.turns[place], reward=reward)
                return

    def episode(
        self, outcome: RewardOutcome, end: SampleEnd, discount: float | None = None
    ) -> Episode:
        """Build the sample, with returns of its turns if there is a discount."""
        row = Row(
            prompt_tokens=self.prompt,
            parts=tuple(self.parts),
            turn_returns=() if discount is None else self._returns(discount),
        )
        sampled = any(turn.tokens for turn in self.turns)
        rows = (row,) if sampled else ()
        return Episode(rows=rows, outcome=outcome, end=end, turns=tuple(self.turns))

    def _returns(self, discount: float) -> tuple[float, ...]:
        before: list[int | None] = [None, *range(len(self.turns) - 1)]
        rewards = [0.0 if turn.reward is None else turn.reward for turn in self.turns]
        found = linear_returns(before, rewards, discount)
        return tuple(
            one
            for one, turn in zip(found, self.turns, strict=True)
            if one is not None and turn.tokens
        )


_NO_REWARD: Final = (
    "the environment is done, but no step gave a reward; give Step a reward, or write scored: true "
    "to have reward.fn score the last turn"
)
_NOT_SCORED: Final = (
    "a step gave a reward, but with scored: true reward.fn alone gives it; leave out one of them"
)


def _outcome(reward: float) -> RewardOutcome:
    if math.isfinite(reward):
        return RewardOutcome("ok", reward)
    return _error(f"the environment gave rewards with the sum {reward}, but rewards must be finite")


def _error(detail: str) -> RewardOutcome:
    return RewardOutcome("error", math.nan, detail=detail)


def _factory(fn: str, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """The factory with its arguments."""
    factory = load_function(fn)
    try:
        inspect.signature(factory).bind(**kwargs)
    except TypeError as error:
        raise ValueError(f"{fn}: {error}") from error
    if check := getattr(factory, "check", None):
        check(**kwargs)
    return lambda: factory(**kwargs)
