"""One version into several engines at once, whatever way weights travel.

    bring = courier(weights, clients)     nothing has happened yet
    await bring(client)                   for each of them, at the same time: returns when this
                                          engine holds the version, or raises why it does not

A folder is read by each engine on its own. Weights in the trainer's memory are sent to all of them
together, which begins when the first one is asked for; engines must be paused or idle for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from areal_lab.engines.client.engine_client import (
    EngineClient,
    EngineError,
    EngineUnreachable,
    VersionMismatch,
)
from areal_lab.engines.protocol import PauseMode, WeightsFolder
from areal_lab.engines.weights.records import EngineFailure, EngineTarget, WeightsInMemory
from areal_lab.training.process.client import TrainerProcess
from areal_lab.training.protocol import Pushed, PushRequest

Weights: TypeAlias = WeightsFolder | WeightsInMemory
PushTo: TypeAlias = Callable[[EngineClient], Coroutine[Any, Any, object]]
PreparePush: TypeAlias = Callable[[Weights, Sequence[EngineClient], PauseMode], PushTo]


def prepare_push_from(
    trainer: TrainerProcess,
    *,
    ranks: int = 1,
    pushed: Callable[[Pushed], None] = lambda _: None,
) -> PreparePush:
    """A courier for the weights of this trainer.

    Args:
        ranks: tensor-parallel degree of each engine.
        pushed: told of each push from the trainer's memory.
    """

    def prepare_push(weights: Weights, clients: Sequence[EngineClient], mode: PauseMode) -> PushTo:
        if isinstance(weights, WeightsFolder):
            return lambda client: client.load_weights(weights, mode)
        push = _Push(trainer, weights, clients, mode, ranks, pushed)
        return push.push_to

    return prepare_push


@dataclass(slots=True)
class _Push:
    """One collective push, and what each engine's part of it came to."""

    trainer: TrainerProcess
    weights: WeightsInMemory
    clients: Sequence[EngineClient]
    mode: PauseMode
    ranks: int
    pushed: Callable[[Pushed], None]
    work: asyncio.Task[dict[str, EngineFailure]] | None = None

    async def push_to(self, client: EngineClient) -> None:
        """Wait for this engine's part.

        Raises:
            EngineUnreachable: if it did not answer.
            VersionMismatch: if it holds something else afterwards.
            EngineError: if it refused.
        """
        if self.work is None:
            self.work = asyncio.create_task(self._push(), name="push weights")
        # One engine may be given up by whoever asked for it; the others still get theirs.
        failures = await asyncio.shield(self.work)
        if (failure := failures.get(client.base_url)) is not None:
            raise _ERRORS[failure.problem](failure.message)
        await client.confirm_push(self.weights.version, self.mode)

    async def _push(self) -> dict[str, EngineFailure]:
        answer = await self.trainer.push(
            PushRequest(
                version=self.weights.version,
                engines=tuple(EngineTarget(c.base_url, self.ranks) for c in self.clients),
                flush_cache=self.mode is not PauseMode.IN_PLACE,
            )
        )
        self.pushed(answer)
        return {failure.engine: failure for failure in answer.failures}


_ERRORS: dict[str, type[EngineError]] = {
    "refused": EngineError,
    "unreachable": EngineUnreachable,
    "mismatch": VersionMismatch,
}
