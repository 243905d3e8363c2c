"""The controller of a run as a serial resource: replies and batches wait for each other.

    generated --> reader, one of many --> controller --> scored
    Train     --> controller --> fetched from hosts --> training step

One thing at a time: a batch before replies, and otherwise what arrived first. Readers are agents
beside the engines or the ranks' own programs; each reads the replies of an equal block of engines.
"""

from __future__ import annotations

import simpy

from areal_lab.control.events import EngineId
from simulator.engine.clock import Clock
from simulator.run.system import Controller, Fetched, Process

REPLIES = "handling replies"
BATCHES = "handling batches"
NOTHING_TO_HANDLE = "nothing to handle"


class ControllerQueue:
    """Queues of one run, and what passed through them."""

    def __init__(self, env: simpy.Environment, cost: Controller, engines: int) -> None:
        self._env = env
        self._cost = cost
        self._engines = engines
        self._controller = simpy.PriorityResource(env)
        self._readers = [simpy.Resource(env) for _ in range(cost.readers)]
        self.clock = Clock(NOTHING_TO_HANDLE)
        """Of the controller."""
        self.received_bytes = 0.0
        self.sent_bytes = 0.0
        self.fetched_bytes = 0.0
        """From the hosts of engines by the trainer."""
        self.reply_s = 0.0
        """From the end of the generation of a prompt's responses until they are handled, over all
        prompts."""
        self.replies = 0
        """Prompts whose responses were handled."""

    def takes_time(self, responses: int, tokens: int) -> bool:
        """Whether these responses of one prompt take any time."""
        return self._cost.read_s(tokens) > 0 or self._cost.reply(responses, tokens).seconds > 0

    def count(self, responses: int, tokens: int) -> None:
        """Count responses that take no time."""
        self.received_bytes += self._cost.reply(responses, tokens).received_bytes
        self.replies += 1

    def reply(self, engine: EngineId, responses: int, tokens: int) -> Process:
        """Read and handle the responses to a prompt."""
        env, begin_s = self._env, self._env.now
        read_s = self._cost.read_s(tokens)
        if read_s > 0:
            with self._readers[engine * len(self._readers) // self._engines].request() as turn:
                yield turn
                yield env.timeout(read_s)
        yield from self._handle(REPLIES, self._cost.reply(responses, tokens).seconds)
        self.count(responses, tokens)
        self.reply_s += env.now - begin_s

    def batch(self, responses: int, tokens: int) -> Process:
        """Send a batch, or what it is made of, to the trainer."""
        handled = self._cost.batch(responses, tokens)
        # Behind all replies, the trainer would wait while its batch is complete.
        yield from self._handle(BATCHES, handled.seconds, priority=0)
        self.sent_bytes += handled.sent_bytes

    def fetched(self, responses: int, tokens: int) -> Fetched:
        """What the trainer then fetches itself."""
        fetched = self._cost.fetch(responses, tokens)
        self.fetched_bytes += fetched.bytes
        return fetched

    def _handle(self, name: str, seconds: float, *, priority: int = 1) -> Process:
        if seconds <= 0:
            return
        with self._controller.request(priority) as turn:
            yield turn
            self.clock.set(self._env.now, name)
            yield self._env.timeout(seconds)
            self.clock.set(self._env.now, NOTHING_TO_HANDLE)
