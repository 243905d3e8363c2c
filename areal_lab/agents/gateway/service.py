"""The gateway without HTTP: start sessions, sample for them, reward, end and export them.

    | task             | made by | waits for                    | unblocked by
    | sample one call  | `ask`   | the session's conversation   | its replies
    | export a session | caller  | its end, its calls, a reward | `end`, `set_reward`, calls, time

A run uses it directly; agents use it through `app`. It lives in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from areal_lab.agents.gateway.calls import Answer, Call, Dialect, continued, prompt
from areal_lab.agents.gateway.conversation import Conversation, ExportStyle, PromptTooLong
from areal_lab.agents.gateway.errors import ApiError, invalid
from areal_lab.agents.gateway.exchanges import Exchange, sent_again
from areal_lab.agents.gateway.sessions import EndedBy, Limits, Session, Sessions
from areal_lab.agents.messages import ChatReply

OpenConversation = Callable[[str], Conversation]
"""Makes the conversation of a new session on a task, by the task's id."""

_log = logging.getLogger(__name__)


class Service:
    """All sessions and what they sample."""

    def __init__(
        self,
        open_conversation: OpenConversation,
        *,
        admin_key: str,
        model: str,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        began: Callable[[Session], Mapping[str, Any]] = lambda _: {},
        lost: Callable[[Session], None] = lambda _: None,
    ) -> None:
        """Create the service without sessions.

        Args:
            open_conversation: for sessions that are started over HTTP.
            admin_key: starts sessions and exports them.
            model: the name under which the model is listed; every name is served.
            limits: what it serves at a time.
            clock: seconds of a clock that only goes forward.
            began: called with each session whose conversation `open_conversation` made; what it
                returns is in the reply to `/rl/start_session` (`Session.told`).
            lost: called with each session that is forgotten although nothing has exported it.
        """
        self.limits = limits or Limits()
        self.sessions = Sessions(admin_key, self.limits, lost)
        self.model = model
        self.in_flight = 0
        """Calls that sample now."""
        self._open_conversation = open_conversation
        self._began = began
        self._clock = clock
        self._exchanges: dict[Session, list[Exchange]] = {}
        self._closed = False

    # --- sessions ---

    def start_session(
        self, task_id: str, key: str | None = None, conversation: Conversation | None = None
    ) -> tuple[Session, str]:
        """Start a session, and return it with its key.

        Raises:
            ApiError: as `Sessions.start`, and 503 once the gateway closes.
        """
        self._require_open()
        now_s = self._clock()
        if conversation is not None:
            return self.sessions.start(task_id, conversation, now_s, key)
        self.sessions.check_capacity(now_s)
        session, key = self.sessions.start(task_id, self._open_conversation(task_id), now_s, key)
        session.told = self._began(session)
        return session, key

    def session(self, keys: Iterable[str]) -> Session:
        """The session of a key, open or ended; raises ApiError as `Sessions.of_key`."""
        return self.sessions.of_key(keys, self._clock())

    def open_session(self, keys: Iterable[str]) -> Session:
        """The open session of a key; raises ApiError as `Sessions.open_of_key`."""
        return self.sessions.open_of_key(keys, self._clock())

    def session_by_id(self, session_id: str) -> Session:
        """A session by its id; raises ApiError as `Sessions.of_id`."""
        return self.sessions.of_id(session_id, self._clock())

    def end_session(self, session: Session, by: EndedBy = "client") -> None:
        """End a session; what samples now is still recorded, and waited for by its export."""
        self.sessions.end(session, self._clock(), by)
        session.changed.set()

    def set_reward(
        self,
        session: Session,
        reward: float,
        interaction_id: str | None = None,
        index: int | None = None,
    ) -> None:
        """Set a reward; raises ApiError as `Sessions.set_reward`."""
        self.sessions.set_reward(session, reward, self._clock(), interaction_id, index)
        session.changed.set()

    async def settled(self, session: Session) -> None:
        """Wait until a session has ended, samples nothing, and has a reward or will get none."""
        while (left_s := self.sessions.unsettled_s(session, self._clock())) is not None:
            session.changed.clear()
            try:
                # At least a little, so that a time rounded down is not waited for in vain.
                async with asyncio.timeout(max(left_s, 0.001) if left_s < math.inf else None):
                    await session.changed.wait()
            except TimeoutError:
                pass  # the time is over, which the condition above sees

    def export(
        self, session: Session, *, style: ExportStyle = "individual", discount: float = 1.0
    ) -> dict[str, Any]:
        """The trajectories of a settled session; they are forgotten after a while."""
        found = self.sessions.export(session, self._clock(), style=style, discount=discount)
        self._exchanges.pop(session, None)
        return found

    def sweep(self) -> None:
        """End sessions that are not used, and forget what nobody asks for any more."""
        now_s = self._clock()
        for session in self.sessions.expire(now_s):
            session.changed.set()
        for session in list(self._exchanges):
            if not self._recent(session, now_s):
                del self._exchanges[session]

    # --- calls ---

    def ask(
        self, session: Session, dialect: Dialect, call: Call, digest: bytes, *, retries: int = 0
    ) -> Exchange:
        """Start to sample for a call, or find the exchange that the client asks for once more.

        Args:
            session: an open session.
            dialect: of the call.
            call: what is asked for.
            digest: of its body.
            retries: how often the client says it has sent this call before.

        Raises:
            ApiError: if it follows an unknown reply, or too many calls sample, or the session has
                ended in the meantime.
        """
        self._require_open()
        self.sessions.require_open(session, self._clock())
        known = self._recent(session, self._clock())
        again = sent_again(known, digest, retries=retries)
        if again is not None:
            again.clients += 1
            self.sessions.counts["sent_again"] += 1
            return again
        if call.follows:
            earlier = session.turn(call.follows)
            if earlier is None:
                raise dialect.unknown(call.follows)
            call = continued(call, earlier)
        self.sessions.begin_call(session, self.in_flight)
        self.in_flight += 1
        self.sessions.counts["calls"] += 1
        self.sessions.counts.update(call.notes)
        exchange = Exchange(session=session, digest=digest)
        exchange.task = asyncio.create_task(self._sample(exchange, dialect.id_prefix, call))
        # A client that has hung up does not ask how it went.
        exchange.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        known.append(exchange)
        self._exchanges[session] = known
        return exchange

    async def _sample(self, exchange: Exchange, id_prefix: str, call: Call) -> Answer:
        session = exchange.session
        try:
            replies = await self._replies(session, call)
            answer = Answer(
                interaction_id=f"{id_prefix}{secrets.token_hex(16)}",
                created_s=int(time.time()),
                replies=tuple(replies),
            )
            session.record(call, answer)
            generated = session.interactions[answer.interaction_id].generated_tokens
            self.sessions.counts["generated_tokens"] += generated
            return answer
        except BaseException:
            # If the client sends it again, it is a new call.
            self._exchanges[session].remove(exchange)
            raise
        finally:
            now_s = self._clock()
            exchange.done_s = now_s
            self.in_flight -= 1
            self.sessions.end_call(session, now_s)
            session.changed.set()
            del exchange  # its task's error refers to this frame

    async def _replies(self, session: Session, call: Call) -> list[ChatReply]:
        try:
            replies = await session.conversation.reply(prompt(call))
            if len(replies) != call.request.replies:
                raise RuntimeError(f"{len(replies)} replies to n = {call.request.replies}")
            return replies
        except ApiError:
            raise
        except PromptTooLong as error:
            message = f"prompt is too long: {error}"
            raise ApiError(400, message, code="context_length_exceeded") from error
        except ValueError as error:
            raise invalid(str(error)) from error
        except Exception as error:
            self.sessions.counts["failed"] += 1
            _log.exception("a call of session %s failed", session.session_id)
            raise ApiError(500, f"sampling failed: {type(error).__name__}: {error}") from error

    def _recent(self, session: Session, now_s: float) -> list[Exchange]:
        known = self._exchanges.get(session, [])
        window_s = self.limits.retry_window_s
        known[:] = [
            each for each in known if each.done_s is None or now_s - each.done_s <= window_s
        ]
        return known

    # --- the gateway itself ---

    def statistics(self) -> dict[str, Any]:
        """What it does now and has done so far."""
        return {
            "open_sessions": self.sessions.open,
            "capacity": self.sessions.capacity,
            "requests_in_flight": self.in_flight,
            "counts": dict(sorted(self.sessions.counts.items())),
        }

    async def drain(self, timeout_s: float) -> None:
        """Refuse everything new, and wait for what samples, but not longer than this."""
        self._closed = True
        tasks = [each.task for known in self._exchanges.values() for each in known]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Cancel what samples, end all sessions, and refuse everything new.

        Conversations record what they have sampled; sessions can still be exported.
        """
        self._closed = True
        tasks = [each.task for known in self._exchanges.values() for each in known]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in self.sessions.end_all(self._clock()):
            session.changed.set()

    def _require_open(self) -> None:
        if self._closed:
            raise ApiError(503, "the gateway is closing", code="closing")
