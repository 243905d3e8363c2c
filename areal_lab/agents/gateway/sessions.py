"""Sessions: keys, capacity, time limits, interactions and rewards. No clock, no tasks, no HTTP.

    start --> open --end, timeout--> ended --rewarded, or waited for it--> settled --export--> gone
               |  calls, rewards       |  late rewards                        rows

Seconds are those of one clock that only goes forward; every caller passes them in.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from areal_lab.agents.gateway.calls import (
    Answer,
    Call,
    Conversation,
    ExportStyle,
    Scores,
    Turn,
    generated_tokens,
    turn_after,
)
from areal_lab.agents.gateway.errors import ApiError, invalid
from areal_lab.agents.messages import Message, Tool

EndedBy: TypeAlias = Literal["client", "timeout", "gateway"]
Outcome: TypeAlias = Literal["rewarded", "no_reward", "no_interactions"]
"""A session without a reward differs from one with reward 0."""

_COUNTS: Final = (
    *("open_sessions", "requests", "session_requests", "body_bytes", "session_body_bytes"),
)
_MOST_GONE: Final = 8192
"""Keys of exported sessions that are remembered, to report that these are over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on concurrent sessions and calls of one gateway."""

    open_sessions: int = 1024
    """Concurrent sessions; one more is refused with 429."""
    capacity: int | None = None
    """Sessions that may start before `grant_capacity` grants more; None is unlimited."""
    requests: int = 1024
    """Concurrent calls of all sessions; one more is refused with 429."""
    session_requests: int = 64
    """Concurrent calls of one session."""
    body_bytes: int = 8 * 2**20
    """Largest body of a request; reading one of 8 MiB blocks the event loop for about 0.2 s."""
    session_body_bytes: int = 32 * 2**20
    """Bytes of concurrently received bodies of one session; more are refused with 429."""
    session_timeout_s: float = 3600.0
    """Idle time after which a session is ended."""
    reward_timeout_s: float = 0.0
    """Time after its end in which a session without a reward may still get one."""
    retry_window_s: float = 60.0
    """Time for which the answer to a call is kept for a client that retries."""
    retry_after_s: float = 1.0
    """Pause before the next attempt, sent with 429."""
    keep_alive_s: float = 15.0
    """Interval of keep-alive events in a stream that waits for its answer."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be >= 1")
        if self.capacity is not None and self.capacity < 0:
            raise ValueError(f"capacity is {self.capacity}, but must be at least 0 or None")
        for name in ("session_timeout_s", "retry_after_s", "keep_alive_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be > 0")
        for name in ("reward_timeout_s", "retry_window_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be >= 0")


@dataclass(slots=True, kw_only=True)
class Interaction:
    """One call with its answer."""

    interaction_id: str
    replies: tuple[str, ...]
    """The `request_id` of the generation of each reply."""
    generated_tokens: int
    turn: Turn | None
    """Conversation up to here, if a later call may continue it."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Rewards by the index of the reply."""
    delivered: bool = False
    """True if a client received it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One run of an agent."""

    session_id: str
    task_id: str
    conversation: Conversation = field(repr=False)
    key_digest: bytes = field(repr=False)
    used_s: float
    """Time of its last use."""
    evaluation: bool = False
    """True if its requests are independent, and nothing of them is kept."""
    user: str = field(default="", repr=False)
    """First user that a client names; others share the key by mistake."""
    in_flight: int = 0
    """Running calls."""
    body_bytes: int = 0
    """Bytes of bodies that are being received."""
    ended_s: float | None = None
    ended_by: EndedBy | None = None
    exported_s: float | None = None
    reward: float | None = None
    """Reward of the whole session."""
    told: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Further fields of the reply to `/rl/start_session`."""
    interactions: dict[str, Interaction] = field(default_factory=dict, repr=False)
    """In order of their answers."""
    changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set when the session ends, gets a reward or an answer; a waiting task clears it."""
    _messages: dict[Message, Message] = field(default_factory=dict, repr=False)
    _tools: list[tuple[Tool, ...]] = field(default_factory=list, repr=False)

    @property
    def outcome(self) -> Outcome:
        """Current outcome of the session."""
        if self.reward is not None or any(each.rewards for each in self.interactions.values()):
            return "rewarded"
        return "no_reward" if self.interactions else "no_interactions"

    def record(self, call: Call, answer: Answer) -> None:
        """Store the parts of an answer that later calls, rewards and the export need."""
        if self.evaluation:
            return
        self.interactions[answer.interaction_id] = Interaction(
            interaction_id=answer.interaction_id,
            replies=tuple(each.generated.request_id for each in answer.replies),
            generated_tokens=sum(generated_tokens(each) for each in answer.replies),
            turn=self._shared(turn_after(call, answer)) if call.keep else None,
        )

    def scores(self, *, style: ExportStyle, discount: float) -> Scores:
        """Rewards so far, by reply."""
        interactions = self.interactions.values()
        return Scores(
            style=style,
            discount=discount,
            final=self.reward,
            rewards={
                each.replies[index]: reward
                for each in interactions
                for index, reward in each.rewards.items()
            },
            undelivered=frozenset(
                reply for each in interactions if not each.delivered for reply in each.replies
            ),
        )

    def rewards_by_name(self) -> dict[str, float]:
        """Rewards of single replies, by the id of the call, and the index if it had several."""
        return {
            call if len(each.replies) == 1 else f"{call}/{index}": reward
            for call, each in self.interactions.items()
            for index, reward in sorted(each.rewards.items())
        }

    def total_reward(self) -> float | None:
        """Sum of the rewards of the session and its replies; None without one."""
        found = [*self.rewards_by_name().values(), *([] if self.reward is None else [self.reward])]
        return math.fsum(found) if found else None

    def turn(self, interaction_id: str) -> Turn | None:
        """Conversation that ends with this answer, if it was kept."""
        found = self.interactions.get(interaction_id)
        return None if found is None else found.turn

    def _shared(self, turn: Turn) -> Turn:
        """Share one object for each distinct message: each call repeats the history."""
        share = self._messages.setdefault
        tools = next((each for each in self._tools if each == turn.tools), None)
        if tools is None:
            tools = turn.tools
            self._tools.append(tools)
        return Turn(
            system=tuple(share(each, each) for each in turn.system),
            messages=tuple(share(each, each) for each in turn.messages),
            tools=tools,
        )


class Sessions:
    """All sessions of a gateway."""

    def __init__(
        self, admin_key: str, limits: Limits, lost: Callable[[Session], None] = lambda _: None
    ) -> None:
        """Start without sessions."""
        if not sendable(admin_key):
            raise ValueError("the admin key must be of printable ASCII characters without spaces")
        self.limits = limits
        self.capacity = limits.capacity
        """Sessions that may still start; None is unlimited."""
        self.counts: Counter[str] = Counter()
        """Counters by name."""
        self._lost = lost
        self._admin = _digest(admin_key)
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}
        self._gone: OrderedDict[bytes, str] = OrderedDict()

    def __repr__(self) -> str:
        """Show the number of sessions, but no keys."""
        return f"Sessions(open={self.open}, known={len(self._by_id)})"

    @property
    def open(self) -> int:
        """Sessions that have not ended."""
        return sum(1 for each in self._by_id.values() if each.ended_s is None)

    def unexported(self) -> list[Session]:
        """Sessions that were not exported yet, in order of their start."""
        return [
            each for each in self._by_id.values() if each.exported_s is None and not each.evaluation
        ]

    # --- keys ---

    def is_admin(self, keys: Iterable[str]) -> bool:
        """Return whether one of these keys is the admin's."""
        return any(hmac.compare_digest(_digest(key), self._admin) for key in keys)

    def require_admin(self, keys: Iterable[str]) -> None:
        """Require the admin's key."""
        found = list(keys)
        if not found:
            raise _no_key()
        if not self.is_admin(found):
            raise ApiError(403, "this needs the admin key", code="wrong_admin_key")

    def of_key(self, keys: Iterable[str], now_s: float) -> Session:
        """Session that a key belongs to, open or ended."""
        found = list(keys)
        if not found:
            raise _no_key()
        digests = [_digest(key) for key in found]
        for digest in digests:
            session = self._by_key.get(digest)
            # The dictionary finds it by a hash of a hash, so timing reveals nothing about the key.
            if session is not None and hmac.compare_digest(digest, session.key_digest):
                self._expire_one(session, now_s)
                return session
        for digest in digests:
            if digest in self._gone:
                raise _session_over(self._gone[digest], "was exported")
        if self.is_admin(found):
            raise ApiError(
                403,
                "this is the admin key; POST /rl/start_session gives a key of a session",
                code="admin_key",
            )
        raise ApiError(401, "no session has this key", code="invalid_api_key")

    def open_of_key(self, keys: Iterable[str], now_s: float) -> Session:
        """Open session of a key; counts as use."""
        session = self.of_key(keys, now_s)
        self.require_open(session, now_s)
        return session

    def require_open(self, session: Session, now_s: float) -> None:
        """Refuse a session that has ended, with 410; counts as use of an open one."""
        if session.ended_s is not None:
            raise _over(session)
        session.used_s = now_s

    # --- life ---

    def grant_capacity(self) -> int | None:
        """Allow one more session, if they are counted; returns the number that may start."""
        if self.capacity is not None:
            self.capacity += 1
        return self.capacity

    def start(
        self, task_id: str, conversation: Conversation, now_s: float, key: str | None = None
    ) -> tuple[Session, str]:
        """Start a session; returns it with its key, which is not stored.

        `key` replaces a new key; it may be that of an ended session.
        """
        self.check_capacity(now_s)
        chosen = secrets.token_urlsafe(32) if key is None else key
        digest = _digest(chosen)
        if not sendable(chosen):
            raise invalid(
                "api_key must be of printable ASCII characters without spaces; leave it out to get "
                "a new one",
                "api_key",
            )
        if hmac.compare_digest(digest, self._admin):
            raise invalid("api_key is the admin key, but each session needs its own", "api_key")
        earlier = self._by_key.get(digest)
        if earlier is not None and earlier.ended_s is None:
            raise ApiError(
                409,
                f"api_key is in use by session {earlier.session_id}; end it first",
                param="api_key",
                code="api_key_in_use",
            )
        self._gone.pop(digest, None)
        self.counts["sessions"] += 1
        session = Session(
            session_id=f"{task_id or 'session'}-{self.counts['sessions'] - 1}",
            task_id=task_id,
            conversation=conversation,
            key_digest=digest,
            used_s=now_s,
        )
        if self.capacity is not None:
            self.capacity -= 1
        self._by_id[session.session_id] = session
        self._by_key[digest] = session
        return session, chosen

    def check_capacity(self, now_s: float) -> None:
        """Refuse a session above the limits."""
        self.expire(now_s)
        if self.capacity is not None and self.capacity < 1:
            why = "no capacity is left; POST /grant_capacity grants more"
        elif (found := self.open) >= self.limits.open_sessions:
            why = f"{found} sessions are open, of {self.limits.open_sessions} at most"
        else:
            return
        self.counts["refused_sessions"] += 1
        raise ApiError(429, why, code="no_capacity", retry_after_s=self.limits.retry_after_s)

    def end(self, session: Session, now_s: float, by: EndedBy = "client") -> None:
        """End a session; running calls are still recorded. Ending it twice changes nothing."""
        if session.ended_s is None:
            session.ended_s, session.ended_by = now_s, by
            self.counts[f"ended_by_{by}"] += 1

    def end_all(self, now_s: float) -> list[Session]:
        """End every open session because the gateway closes, and return them."""
        found = [each for each in self._by_id.values() if each.ended_s is None]
        for session in found:
            self.end(session, now_s, "gateway")
        return found

    def expire(self, now_s: float) -> list[Session]:
        """End idle sessions and return them; drop exported ones and those that nothing exports."""
        return [each for each in list(self._by_id.values()) if self._expire_one(each, now_s)]

    def _expire_one(self, session: Session, now_s: float) -> bool:
        limits = self.limits
        if session.in_flight or session.session_id not in self._by_id:
            return False
        if session.ended_s is None:
            if now_s - session.used_s < limits.session_timeout_s:
                return False
            self.end(session, now_s, "timeout")
            return True
        if session.exported_s is not None:
            if now_s - session.exported_s >= limits.retry_window_s:
                self._forget(session)
        elif now_s - session.ended_s >= (limits.session_timeout_s + limits.reward_timeout_s):
            if session.evaluation:
                self._forget(session)
                return False
            self.counts["never_exported"] += 1
            self.counts["never_exported_tokens"] += sum(
                each.generated_tokens for each in session.interactions.values()
            )
            self._lost(session)
            self._forget(session)
        return False

    def _forget(self, session: Session) -> None:
        del self._by_id[session.session_id]
        # The key may belong to a later session by now.
        if self._by_key.get(session.key_digest) is session:
            del self._by_key[session.key_digest]
            self._gone[session.key_digest] = session.session_id
            while len(self._gone) > _MOST_GONE:
                self._gone.popitem(last=False)

    # --- calls ---

    def begin_call(self, session: Session, in_flight: int) -> None:
        """Count a call that starts to sample."""
        limits = self.limits
        if in_flight >= limits.requests:
            why = f"{in_flight} requests are in flight, of {limits.requests} at most"
        elif session.in_flight >= limits.session_requests:
            why = (
                f"{session.in_flight} requests of this session are in flight, of "
                f"{limits.session_requests} at most"
            )
        else:
            session.in_flight += 1
            return
        self.counts["refused_requests"] += 1
        raise ApiError(429, why, code="too_many_requests", retry_after_s=self.limits.retry_after_s)

    def end_call(self, session: Session, now_s: float) -> None:
        """Count a call that has ended."""
        session.in_flight -= 1
        session.used_s = now_s

    # --- rewards ---

    def set_reward(
        self,
        session: Session,
        reward: float,
        now_s: float,
        interaction_id: str | None = None,
        index: int | None = None,
    ) -> None:
        """Set the reward of the session (`interaction_id` None) or of one reply; a later one
        replaces it.
        """
        if not math.isfinite(reward):
            raise invalid(f"reward is {reward}, but must be finite", "reward")
        if session.evaluation:
            raise invalid(
                f"session {session.session_id} is for evaluation, which takes no rewards; start "
                "one without `evaluation`"
            )
        if session.exported_s is not None:
            raise _over(session)
        if session.ended_s is not None and self._reward_left_s(session, now_s) <= 0:
            raise ApiError(
                410,
                f"session {session.session_id} ended {now_s - session.ended_s:.3g} s ago, but "
                f"rewards are taken for {self.limits.reward_timeout_s:g} s after the "
                "end",
                code="session_over",
            )
        if not session.interactions:
            raise ApiError(
                400,
                f"session {session.session_id} has no reply yet that a reward could be for",
                code="no_interactions",
            )
        session.used_s = now_s
        if interaction_id is None:
            session.reward = reward
            return
        found = session.interactions.get(interaction_id)
        if found is None:
            raise ApiError(
                400,
                f"interaction_id is {interaction_id}, but session {session.session_id} has no "
                "such reply",
                param="interaction_id",
                code="unknown_interaction",
            )
        count = len(found.replies)
        if index is None and count > 1:
            raise invalid(f"{interaction_id} has {count} replies; index must name one", "index")
        if not 0 <= (index or 0) < count:
            raise invalid(f"index is {index}, but must be below {count}", "index")
        found.rewards[index or 0] = reward

    def _reward_left_s(self, session: Session, now_s: float) -> float:
        assert session.ended_s is not None
        return session.ended_s + self.limits.reward_timeout_s - now_s

    # --- export ---

    def of_id(self, session_id: str, now_s: float) -> Session:
        """Session by its id."""
        session = self._by_id.get(session_id)
        if session is not None:
            self._expire_one(session, now_s)
        if session_id not in self._by_id or session is None:
            raise ApiError(
                404,
                f"there is no session {session_id}, or it was exported",
                param="session_id",
                code="unknown_session",
            )
        return session

    def unsettled_s(self, session: Session, now_s: float) -> float | None:
        """Seconds until the session can be exported if nothing happens; None if it can be now.

        Infinite while it samples.
        """
        if session.exported_s is not None:
            return None
        if session.in_flight:
            return math.inf
        self._expire_one(session, now_s)
        if session.ended_s is None:
            return session.used_s + self.limits.session_timeout_s - now_s
        if session.outcome != "no_reward":
            return None
        left_s = self._reward_left_s(session, now_s)
        return left_s if left_s > 0 else None

    def export(
        self, session: Session, now_s: float, *, style: ExportStyle, discount: float
    ) -> dict[str, Any]:
        """Trajectories of a settled session as plain JSON; can be repeated for a while."""
        assert self.unsettled_s(session, now_s) is None, session
        interactions = session.interactions.values()
        rows = session.conversation.rows(session.scores(style=style, discount=discount))
        if session.exported_s is None:
            session.exported_s = now_s
            self.counts["exported"] += 1
            self.counts[session.outcome] += 1
            self.counts["undelivered"] += sum(not each.delivered for each in interactions)
        return {
            "session_id": session.session_id,
            "task_id": session.task_id,
            "outcome": session.outcome,
            "ended_by": session.ended_by,
            "reward": session.reward,
            "interactions": {
                each.interaction_id: {
                    "replies": list(each.replies),
                    "rewards": [each.rewards.get(i) for i in range(len(each.replies))],
                    "generated_tokens": each.generated_tokens,
                    "delivered": each.delivered,
                }
                for each in interactions
            },
            "rows": rows,
        }


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def sendable(key: str) -> bool:
    """Return whether a key can be sent in a header."""
    return bool(key) and key.isascii() and key.isprintable() and " " not in key


def _no_key() -> ApiError:
    return ApiError(
        401,
        "no key; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
        code="missing_api_key",
    )


def _over(session: Session) -> ApiError:
    how = "has timed out" if session.ended_by == "timeout" else "has ended"
    how = "was exported" if session.exported_s is not None else how
    return _session_over(session.session_id, how)


def _session_over(session_id: str, how: str) -> ApiError:
    # 410, since clients send a request again after 409.
    return ApiError(410, f"session {session_id} {how}", code="session_over")
