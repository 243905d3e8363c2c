"""The gateway without HTTP: start sessions, sample for them, reward, end and export them.

    | task             | made by | waits for                    | unblocked by
    | sample one call  | `ask`   | the session's conversation   | its replies
    | export a session | caller  | its end, its calls, a reward | `end`, `set_reward`, calls, time

A run uses it directly; agents use it through `app`. It lives in one event loop.

Samplings in flight, and which of them a call that is sent again belongs to.

    call --> Exchange (a task that samples) <-- the same call again: client gave up, or retries
                |                                  gets the same answer
                v
             Answer, recorded in the session whether or not a client still waits

A sampling outlives its client. Its tokens are in the session's conversation either way; if it were
canceled, the client's next attempt would sample the same turn once more.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from areal_lab.agents.gateway.calls import (
    Answer,
    Call,
    Completing,
    Conversation,
    Dialect,
    ExportStyle,
    PromptTooLong,
    continued,
    prompt,
    usage_of,
)
from areal_lab.agents.gateway.errors import ApiError, invalid
from areal_lab.agents.gateway.sessions import EndedBy, Limits, Session, Sessions

OpenConversation = Callable[[str], Conversation]
"""Open the conversation of a new session on a task, by the task's id."""

_SHARED_KEY: Final = (
    "several users share this key: their turns are one sample, so give each user a key"
)
_log = logging.getLogger(__name__)


class Service:
    """All sessions and their running calls."""

    def __init__(
        self,
        open_conversation: OpenConversation,
        *,
        admin_key: str,
        model: str,
        limits: Limits | None = None,
        seed_note: str = "seed is ignored: a run uses separate seeds",
        enforces_schemas: bool = False,
        open_evaluation: Callable[[], Completing] | None = None,
        clock: Callable[[], float] = time.monotonic,
        began: Callable[[Session], Mapping[str, Any]] = lambda _: {},
        lost: Callable[[Session], None] = lambda _: None,
    ) -> None:
        """Create the service without sessions; without `open_evaluation` it has no evaluation
        keys. With `enforces_schemas`, engines make their replies match JSON schemas.
        """
        self.limits = limits or Limits()
        self._seed_note = seed_note
        self._enforces_schemas = enforces_schemas
        self.sessions = Sessions(admin_key, self.limits, lost)
        self.model = model
        self.in_flight = 0
        """Running calls."""
        self._open_conversation = open_conversation
        self._open_evaluation = open_evaluation
        self._began = began
        self._clock = clock
        self._exchanges: dict[Session, list[Exchange]] = {}
        self._closed = False

    # --- sessions ---

    def start_session(
        self, task_id: str, key: str | None = None, conversation: Conversation | None = None
    ) -> tuple[Session, str]:
        """Start a session, and return it with its key."""
        self._require_open()
        now_s = self._clock()
        if conversation is not None:
            return self.sessions.start(task_id, conversation, now_s, key)
        self.sessions.check_capacity(now_s)
        session, key = self.sessions.start(task_id, self._open_conversation(task_id), now_s, key)
        session.told = self._began(session)
        return session, key

    def start_evaluation(self, task_id: str, key: str | None = None) -> tuple[Session, str]:
        """Start a session whose requests are independent; return it with its key."""
        if self._open_evaluation is None:
            raise invalid(
                "evaluation keys are not given by the gateway of a run; use `areal-lab gateway`",
                "evaluation",
            )
        session, key = self.start_session(task_id, key, self._open_evaluation())
        session.evaluation = True
        return session, key

    def session(self, keys: Iterable[str]) -> Session:
        """Session of a key, open or ended; raises ApiError as `Sessions.of_key`."""
        return self.sessions.of_key(keys, self._clock())

    def open_session(self, keys: Iterable[str]) -> Session:
        """Open session of a key; raises ApiError as `Sessions.open_of_key`."""
        return self.sessions.open_of_key(keys, self._clock())

    def session_by_id(self, session_id: str) -> Session:
        """Session by its id; raises ApiError as `Sessions.of_id`."""
        return self.sessions.of_id(session_id, self._clock())

    def end_session(self, session: Session, by: EndedBy = "client") -> None:
        """End a session. Running calls are still recorded, and its export waits for them."""
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
                # A minimum wait, so a time that was rounded down does not cause a busy loop.
                async with asyncio.timeout(max(left_s, 0.001) if left_s < math.inf else None):
                    await session.changed.wait()
            except TimeoutError:
                pass  # timed out: the condition above sees it

    def export(
        self, session: Session, *, style: ExportStyle = "individual", discount: float = 1.0
    ) -> dict[str, Any]:
        """Return the trajectories of a settled session, which are dropped after a while."""
        found = self.sessions.export(session, self._clock(), style=style, discount=discount)
        self._exchanges.pop(session, None)
        return found

    def sweep(self) -> None:
        """End idle sessions, and drop sessions that are not needed any more."""
        now_s = self._clock()
        for session in self.sessions.expire(now_s):
            session.changed.set()
        for session in list(self._exchanges):
            if not self._recent(session, now_s):
                del self._exchanges[session]

    # --- calls ---

    def noted(self, session: Session, call: Call) -> Call:
        """Add notes to a call: what is not served (seeds, top log-probs), and a shared key."""
        if call.request.top_logprobs and not session.evaluation:
            note = "only sampled tokens have log-probs: top_logprobs needs an evaluation key"
            request = replace(call.request, top_logprobs=0)
            call = replace(call, request=request, notes=(*call.notes, note))
        if call.completion is not None and not session.evaluation:
            raise ApiError(
                403,
                "completions of plain text need an evaluation key: POST /rl/start_session with "
                '{"evaluation": true}',
                code="evaluation_key_needed",
            )
        notes = []
        if call.schema_field:
            call, note = self._schema(session, call)
            notes += [note] if note else []
        if call.request.seed is not None and self._seed_note:
            notes.append(self._seed_note)
        session.user = session.user or call.user
        if call.user and call.user != session.user and not session.evaluation:
            notes.append(_SHARED_KEY)
        return replace(call, notes=(*call.notes, *notes)) if notes else call

    def _schema(self, session: Session, call: Call) -> tuple[Call, str]:
        """Leave a schema to the engine if that enforces it, and note the rest."""
        request, text, field = call.request, call.completion, call.schema_field
        calls_tools = bool(request.tools) and request.tool_choice != "none"
        if session.evaluation and self._enforces_schemas and not calls_tools:
            if not (request.top_logprobs or (text is not None and text.logprobs)):
                return call, ""
            # Scores are of all tokens.
            text = None if text is None else replace(text, logprobs=0)
            note = f"only sampled tokens have log-probs: {field} excludes other tokens"
            return replace(call, request=replace(request, top_logprobs=0), completion=text), note
        call = replace(call, request=replace(request, json_schema=""))
        if text is not None:
            return replace(call, completion=replace(text, json_schema="")), f"{field} is ignored"
        return call, f"{field} is not enforced: the prompt describes the form of the reply"

    def ask(
        self, session: Session, dialect: Dialect, call: Call, digest: bytes, *, retries: int = 0
    ) -> Exchange:
        """Start sampling for a call, or find the exchange that the client asks for again."""
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
        self.sessions.counts.update(note.partition(":")[0] for note in call.notes)
        exchange = Exchange(session=session, digest=digest)
        exchange.task = asyncio.create_task(self._sample(exchange, dialect.id_prefix, call))
        # A client that has hung up does not read the result.
        exchange.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        known.append(exchange)
        self._exchanges[session] = known
        return exchange

    async def _sample(self, exchange: Exchange, id_prefix: str, call: Call) -> Answer:
        session = exchange.session
        try:
            answer = replace(
                await self._answered(session, call),
                interaction_id=f"{id_prefix}{secrets.token_hex(16)}",
                created_s=int(time.time()),
            )
            session.record(call, answer)
            self.sessions.counts["generated_tokens"] += usage_of(answer).generated
        except BaseException:
            # If the client sends it again, it is a new call.
            self._exchanges[session].remove(exchange)
            raise
        else:
            if session.evaluation:
                self._exchanges[session].remove(exchange)
            return answer
        finally:
            now_s = self._clock()
            exchange.done_s = now_s
            self.in_flight -= 1
            self.sessions.end_call(session, now_s)
            session.changed.set()
            del exchange  # the task's error refers to this frame

    async def _answered(self, session: Session, call: Call) -> Answer:
        try:
            return await _answer(session.conversation, call)
        except ApiError:
            raise
        except BaseExceptionGroup as errors:
            # Completions of one call: one that fails ends the others.
            raise self._refusal(session, errors.exceptions[0]) from errors
        except Exception as error:
            raise self._refusal(session, error) from error

    def _refusal(self, session: Session, error: BaseException) -> ApiError:
        """Describe an error of a conversation to its client."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, PromptTooLong):
            message = f"prompt is too long: {error}"
            return ApiError(400, message, code="context_length_exceeded")
        if isinstance(error, ValueError):
            return invalid(str(error))
        self.sessions.counts["failed"] += 1
        _log.error("a call of session %s failed", session.session_id, exc_info=error)
        return ApiError(500, f"sampling failed: {type(error).__name__}: {error}")

    def _recent(self, session: Session, now_s: float) -> list[Exchange]:
        known = self._exchanges.get(session, [])
        window_s = self.limits.retry_window_s
        known[:] = [
            each for each in known if each.done_s is None or now_s - each.done_s <= window_s
        ]
        return known

    # --- the gateway itself ---

    def statistics(self) -> dict[str, Any]:
        """Counters since the start, and current load."""
        return {
            "open_sessions": self.sessions.open,
            "capacity": self.sessions.capacity,
            "requests_in_flight": self.in_flight,
            "counts": dict(sorted(self.sessions.counts.items())),
        }

    async def drain(self, timeout_s: float) -> None:
        """Refuse new calls, and wait for running ones, at most `timeout_s`."""
        self._closed = True
        tasks = [each.task for known in self._exchanges.values() for each in known]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Cancel running calls, end all sessions, and refuse new ones.

        Conversations record the tokens sampled so far; sessions can still be exported.
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


async def _answer(conversation: Conversation, call: Call) -> Answer:
    """Sample the answer to a call; its id and time come later."""
    if call.completion is not None:
        found = await cast(Completing, conversation).complete(call.completion)
        return Answer(interaction_id="", created_s=0, replies=(), completions=tuple(found))
    replies = await conversation.reply(prompt(call))
    if len(replies) != call.request.replies:
        raise RuntimeError(f"{len(replies)} replies to n = {call.request.replies}")
    return Answer(interaction_id="", created_s=0, replies=tuple(replies))


@dataclass(slots=True, eq=False, kw_only=True)
class Exchange:
    """One call that is sampled once, and the clients that wait for its answer."""

    session: Session
    digest: bytes
    """Hash of the body; a client that retries sends the same one."""
    task: asyncio.Task[Answer] = field(init=False)
    clients: int = 1
    """Connections that wait for the answer, or read it."""
    delivered: bool = False
    """True if a client received all of it."""
    done_s: float | None = None
    """Time at which the answer was complete."""

    def left(self, *, delivered: bool) -> None:
        """Count a client that has received the answer, or has hung up."""
        self.clients -= 1
        if not delivered:
            return
        self.delivered = True
        if self.session.evaluation:
            return
        interaction = self.session.interactions.get(self.task.result().interaction_id)
        assert interaction is not None
        interaction.delivered = True


def body_digest(dialect: str, body: Mapping[str, Any]) -> bytes:
    """Hash of a body: equal for the same values, whatever their order and spaces."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{dialect}\n{text}".encode("ascii")).digest()


def sent_again(known: Sequence[Exchange], digest: bytes, *, retries: int) -> Exchange | None:
    """Find the exchange that this call repeats; None if it is a new call.

    An agent may ask the same twice on purpose, to get two samples. So an equal body alone is no
    proof:

    - an answer without waiting or served clients belongs to the next equal body;
    - any answer does if the client marks the call as a retry (`X-Stainless-Retry-Count`).

    `known` has the session's running or recently ended exchanges, oldest first.
    """
    equal = [each for each in known if each.digest == digest]
    for each in equal:
        if not each.clients and not each.delivered:
            return each
    return equal[-1] if equal and retries > 0 else None
