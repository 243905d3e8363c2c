"""Push one version into several engines at once, by any transfer.

    push_to = prepare_push(weights, clients, mode)   nothing is sent yet
    await push_to(client)                            for all clients concurrently: returns when the
                                                     engine holds the version, or raises

Each engine reads a folder by itself. Weights in the trainer's memory go to all engines in one push,
which starts at the first `push_to`; engines must be paused or idle for it.
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
from areal_lab.training.protocol import Pushed, PushRequest, Trainer

Weights: TypeAlias = WeightsFolder | WeightsInMemory
PushTo: TypeAlias = Callable[[EngineClient], Coroutine[Any, Any, object]]
PreparePush: TypeAlias = Callable[[Weights, Sequence[EngineClient], PauseMode], PushTo]


def prepare_push_from(
    trainer: Trainer,
    *,
    ranks: int = 1,
    pushed: Callable[[Pushed], None] = lambda _: None,
) -> PreparePush:
    """Make the `prepare_push` of this trainer's weights.

    Args:
        ranks: tensor-parallel degree of each engine.
        pushed: called after each push from the trainer's memory.
    """

    def prepare_push(weights: Weights, clients: Sequence[EngineClient], mode: PauseMode) -> PushTo:
        if isinstance(weights, WeightsFolder):
            return lambda client: client.load_weights(weights, mode)
        push = _Push(trainer, weights, clients, mode, ranks, pushed)
        return push.push_to

    return prepare_push


@dataclass(slots=True)
class _Push:
    """One push to all engines, and the result for each of them."""

    trainer: Trainer
    weights: WeightsInMemory
    clients: Sequence[EngineClient]
    mode: PauseMode
    ranks: int
    pushed: Callable[[Pushed], None]
    work: asyncio.Task[dict[str, EngineFailure]] | None = None

    async def push_to(self, client: EngineClient) -> None:
        """Start the push if necessary, and wait for this engine's result.

        Raises:
            EngineUnreachable: if the engine did not reply.
            VersionMismatch: if it holds other weights afterwards.
            EngineError: if it refused.
        """
        if self.work is None:
            self.work = asyncio.create_task(self._push(), name="push weights")
        # One caller may be cancelled; the other engines still get their weights.
        failures = await asyncio.shield(self.work)
        if (failure := failures.get(client.base_url)) is not None:
            raise _ERRORS[failure.problem](failure.message)
        await client.confirm_push(self.weights.version, self.mode)

    async def _push(self) -> dict[str, EngineFailure]:
        reply = await self.trainer.push(
            PushRequest(
                version=self.weights.version,
                engines=tuple(EngineTarget(c.base_url, self.ranks, c.key) for c in self.clients),
                flush_cache=self.mode is not PauseMode.IN_PLACE,
            )
        )
        self.pushed(reply)
        return {failure.engine: failure for failure in reply.failures}


_ERRORS: dict[str, type[EngineError]] = {
    "refused": EngineError,
    "unreachable": EngineUnreachable,
    "mismatch": VersionMismatch,
}
