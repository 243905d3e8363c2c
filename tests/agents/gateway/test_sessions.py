"""Sessions without HTTP: keys, capacity, the end, late rewards, and any order of all of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.agents.gateway.calls import Answer, Call
from areal_lab.agents.gateway.chat import parse
from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.gateway.responses import parse as parse_response
from areal_lab.agents.gateway.sessions import Limits, Session, Sessions
from tests.agents.gateway.scripted import ADMIN, Scripted, answered, says

CALL = parse({"messages": [{"role": "user", "content": "x"}]})


def sessions(**limits: Any) -> Sessions:
    return Sessions(ADMIN, Limits(**limits))


def status(wanted: Any, *args: Any, **kwargs: Any) -> int:
    with pytest.raises(ApiError) as caught:
        wanted(*args, **kwargs)
    return caught.value.status


def answer(number: int = 0, replies: int = 1) -> Answer:
    made = [says("abcdef", request_id=f"r{number}.{i}") for i in range(replies)]
    return answered(*made, interaction_id=f"chatcmpl-{number}")


def recorded(session: Session, number: int = 0, *, replies: int = 1, call: Call = CALL) -> str:
    found = answer(number, replies)
    session.record(call, found)
    return found.interaction_id


def test_keys_are_random_and_nothing_shows_them() -> None:
    known = sessions()
    first, key = known.start("task", Scripted(), 0.0)
    second, other = known.start("task", Scripted(), 0.0)
    assert key != other
    assert len(key) >= 40
    assert (first.session_id, second.session_id) == ("task-0", "task-1")
    for shown in (repr(first), repr(known), str(vars(known).get("counts"))):
        assert key not in shown
        assert ADMIN not in shown
    assert known.of_key([key], 0.0) is first
    assert known.of_key(["wrong", other], 0.0) is second


def test_who_may_do_what() -> None:
    known = sessions()
    _, key = known.start("task", Scripted(), 0.0)
    known.require_admin([ADMIN])
    known.require_admin([key, ADMIN])
    assert status(known.require_admin, []) == 401
    assert status(known.require_admin, [key]) == 403
    assert status(known.of_key, [], 0.0) == 401
    assert status(known.of_key, ["wrong"], 0.0) == 401
    assert status(known.of_key, [ADMIN], 0.0) == 403
    assert status(known.of_key, ["\ud800"], 0.0) == 401
    for admin_key in ("", "two words", "\xe9", "a\n"):
        with pytest.raises(ValueError, match="admin key must be of printable ASCII"):
            Sessions(admin_key, Limits())


def test_a_key_is_used_by_one_open_session_at_a_time() -> None:
    known = sessions()
    first, key = known.start("task", Scripted(), 0.0, "agents-own-key")
    assert key == "agents-own-key"
    assert status(known.start, "task", Scripted(), 0.0, key) == 409
    known.end(first, 1.0)
    second, _ = known.start("task", Scripted(), 1.0, key)
    assert known.open_of_key([key], 1.0) is second
    assert known.of_id(first.session_id, 1.0) is first
    assert status(known.start, "task", Scripted(), 1.0, ADMIN) == 400
    for unfit in ("", " ", "two words", "\xe9", "a\n"):
        assert status(known.start, "task", Scripted(), 1.0, unfit) == 400


def test_a_key_stays_with_its_later_session_when_the_earlier_is_forgotten() -> None:
    known = sessions(retry_window_s=5)
    first, key = known.start("task", Scripted(), 0.0)
    known.end(first, 0.0)
    known.export(first, 0.0, style="individual", discount=1.0)
    second, _ = known.start("task", Scripted(), 1.0, key)
    known.expire(10.0)
    assert status(known.of_id, first.session_id, 10.0) == 404
    assert known.open_of_key([key], 10.0) is second


def test_capacity_is_granted_one_by_one() -> None:
    known = sessions(capacity=1)
    known.start("task", Scripted(), 0.0)
    with pytest.raises(ApiError, match="no capacity is left") as caught:
        known.start("task", Scripted(), 0.0)
    assert caught.value.headers["retry-after"] == "1"
    assert known.grant_capacity() == 1
    known.start("task", Scripted(), 0.0)
    assert known.capacity == 0
    assert sessions().grant_capacity() is None


def test_a_refused_start_takes_no_capacity() -> None:
    known = sessions(capacity=2)
    known.start("task", Scripted(), 0.0, "key")
    assert status(known.start, "task", Scripted(), 0.0, "key") == 409
    assert known.capacity == 1


def test_open_sessions_are_limited_and_ended_ones_make_room() -> None:
    known = sessions(open_sessions=2)
    first, _ = known.start("task", Scripted(), 0.0)
    known.start("task", Scripted(), 0.0)
    assert status(known.start, "task", Scripted(), 0.0) == 429
    known.end(first, 0.0)
    known.start("task", Scripted(), 0.0)


def test_calls_are_limited_over_all_and_in_each_session() -> None:
    known = sessions(requests=3, session_requests=2)
    first, _ = known.start("task", Scripted(), 0.0)
    second, _ = known.start("task", Scripted(), 0.0)
    known.begin_call(first, 0)
    known.begin_call(first, 1)
    assert status(known.begin_call, first, 2) == 429
    known.begin_call(second, 2)
    assert status(known.begin_call, second, 3) == 429
    known.end_call(first, 1.0)
    known.begin_call(first, 2)
    assert known.counts["refused_requests"] == 2


def test_a_session_ends_once() -> None:
    known = sessions()
    session, key = known.start("task", Scripted(), 0.0)
    known.end(session, 1.0)
    known.end(session, 9.0, "timeout")
    assert (session.ended_s, session.ended_by) == (1.0, "client")
    assert status(known.open_of_key, [key], 1.0) == 410
    assert known.of_key([key], 1.0) is session


def test_an_unused_session_times_out_and_one_that_samples_does_not() -> None:
    known = sessions(session_timeout_s=10)
    session, key = known.start("task", Scripted(), 0.0)
    known.open_of_key([key], 8.0)
    known.open_of_key([key], 17.0)
    known.begin_call(session, 0)
    assert known.expire(100.0) == []
    known.end_call(session, 100.0)
    assert known.expire(109.0) == []
    assert known.expire(110.0) == [session]
    assert session.ended_by == "timeout"
    with pytest.raises(ApiError, match="has timed out") as caught:
        known.open_of_key([key], 110.0)
    assert caught.value.status == 410


def test_a_key_is_checked_against_the_time_without_a_sweep() -> None:
    known = sessions(session_timeout_s=10)
    _, key = known.start("task", Scripted(), 0.0)
    assert status(known.open_of_key, [key], 10.0) == 410


def test_a_session_that_nobody_exports_is_forgotten_and_counted() -> None:
    known = sessions(session_timeout_s=10, reward_timeout_s=5)
    session, key = known.start("task", Scripted(), 0.0)
    recorded(session)
    known.expire(10.0)
    known.expire(24.9)
    assert known.of_id(session.session_id, 24.9) is session
    known.expire(25.0)
    assert status(known.of_id, session.session_id, 25.0) == 404
    assert status(known.of_key, [key], 25.0) == 410
    assert known.counts["never_exported"] == 1
    assert known.counts["never_exported_tokens"] == 2


# --- rewards ---


def test_rewards_of_the_session_and_of_single_replies() -> None:
    known = sessions()
    session, _ = known.start("task", Scripted(), 0.0)
    assert status(known.set_reward, session, 1.0, 0.0) == 400
    one, many = recorded(session, 0), recorded(session, 1, replies=3)
    assert session.outcome == "no_reward"
    known.set_reward(session, 0.5, 0.0, one)
    assert session.outcome == "rewarded"
    known.set_reward(session, 0.25, 0.0, many, 2)
    known.set_reward(session, -1.0, 0.0)
    known.set_reward(session, 1.0, 0.0)
    assert session.reward == 1.0
    assert status(known.set_reward, session, 1.0, 0.0, "chatcmpl-9") == 400
    assert status(known.set_reward, session, 1.0, 0.0, many) == 400
    assert status(known.set_reward, session, 1.0, 0.0, many, 3) == 400
    assert status(known.set_reward, session, 1.0, 0.0, one, 1) == 400
    assert status(known.set_reward, session, math.inf, 0.0) == 400
    known.end(session, 0.0)
    found = known.export(session, 0.0, style="individual", discount=1.0)
    assert found["reward"] == 1.0
    assert found["interactions"][one]["rewards"] == [0.5]
    assert found["interactions"][many]["rewards"] == [None, None, 0.25]
    conversation = session.conversation
    assert isinstance(conversation, Scripted)
    assert conversation.scores[0].rewards == {"r0.0": 0.5, "r1.2": 0.25}
    assert conversation.scores[0].final == 1.0


def test_no_reward_is_no_reward_of_zero() -> None:
    known = sessions()
    nothing, _ = known.start("task", Scripted(), 0.0)
    silent, _ = known.start("task", Scripted(), 0.0)
    zero, _ = known.start("task", Scripted(), 0.0)
    for session in (silent, zero):
        recorded(session)
    known.set_reward(zero, 0.0, 0.0)
    found = []
    for session in (nothing, silent, zero):
        known.end(session, 0.0)
        exported = known.export(session, 0.0, style="individual", discount=1.0)
        found.append((exported["outcome"], exported["reward"]))
    assert found == [("no_interactions", None), ("no_reward", None), ("rewarded", 0.0)]
    assert (known.counts["no_reward"], known.counts["rewarded"]) == (1, 1)


@pytest.mark.parametrize("timeout_s", [0.0, 5.0])
def test_a_late_reward_is_waited_for_as_long_as_it_is_taken(timeout_s: float) -> None:
    known = sessions(reward_timeout_s=timeout_s)
    session, _ = known.start("task", Scripted(), 0.0)
    recorded(session)
    known.end(session, 100.0)
    left_s = known.unsettled_s(session, 100.0)
    assert left_s == (timeout_s or None)
    assert status(known.set_reward, session, 1.0, 100.0 + timeout_s) == 410
    assert known.unsettled_s(session, 100.0 + timeout_s) is None
    if timeout_s:
        known.set_reward(session, 1.0, 104.0)
        assert known.unsettled_s(session, 104.0) is None


def test_a_reward_after_the_export_is_refused() -> None:
    known = sessions(reward_timeout_s=50, retry_window_s=60)
    session, key = known.start("task", Scripted(), 0.0)
    recorded(session)
    known.set_reward(session, 1.0, 0.0)
    known.end(session, 0.0)
    known.export(session, 1.0, style="individual", discount=1.0)
    assert status(known.set_reward, session, 2.0, 2.0) == 410
    assert known.export(session, 2.0, style="individual", discount=1.0)["reward"] == 1.0
    assert known.counts["exported"] == 1
    known.expire(61.0)
    with pytest.raises(ApiError, match="was exported"):
        known.of_key([key], 61.0)


def test_an_export_waits_for_the_end_and_for_calls() -> None:
    known = sessions(session_timeout_s=10)
    session, _ = known.start("task", Scripted(), 0.0)
    assert known.unsettled_s(session, 3.0) == 7.0
    known.begin_call(session, 0)
    assert known.unsettled_s(session, 3.0) == math.inf
    known.end(session, 3.0)
    assert known.unsettled_s(session, 3.0) == math.inf
    known.end_call(session, 4.0)
    assert known.unsettled_s(session, 4.0) is None


def test_an_unused_session_settles_when_it_times_out() -> None:
    known = sessions(session_timeout_s=10)
    session, _ = known.start("task", Scripted(), 0.0)
    assert known.unsettled_s(session, 10.0) is None
    assert session.ended_by == "timeout"


# --- what later calls continue ---


def test_turns_share_the_messages_that_they_repeat() -> None:
    """Every call repeats the history; kept apart, a session would grow with the square."""
    session, _ = sessions().start("task", Scripted(), 0.0)
    history: list[dict[str, Any]] = []
    tools = [{"type": "function", "name": "f"}]
    for number in range(3):
        history.append({"role": "user", "content": f"question {number} " * 10})
        call = parse_response({"input": list(history), "instructions": "Be.", "tools": tools})
        recorded(session, number, call=call)
        history.append({"role": "assistant", "content": "abcdef"})
    first, second, third = (session.turn(f"chatcmpl-{n}") for n in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert [each.content[:10] for each in third.messages[::2]] == [
        "question 0",
        "question 1",
        "question 2",
    ]
    for ours, theirs in zip(first.messages, third.messages, strict=False):
        assert ours is theirs
    assert second.system[0] is third.system[0]
    assert second.tools is third.tools
    assert session.turn("chatcmpl-9") is None
    recorded(session, 7)
    assert session.turn("chatcmpl-7") is None


@pytest.mark.parametrize(
    "limits",
    [
        {"open_sessions": 0},
        {"requests": 0},
        {"body_bytes": 0},
        {"capacity": -1},
        {"session_timeout_s": 0},
        {"keep_alive_s": 0},
        {"retry_after_s": math.nan},
        {"retry_window_s": -1},
        {"reward_timeout_s": -1},
    ],
)
def test_wrong_limits_are_named(limits: dict[str, Any]) -> None:
    (name,) = limits
    with pytest.raises(ValueError, match=f"{name} is"):
        Limits(**limits)


# --- any order ---

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "call", "done", "reward", "end", "export", "grant"]),
        st.integers(0, 3),
        st.floats(0, 8),
    ),
    max_size=40,
)


@given(STEPS)
def test_in_any_order_nothing_is_lost_and_every_refusal_is_defined(
    steps: list[tuple[str, int, float]],
) -> None:
    known = sessions(
        capacity=2,
        open_sessions=3,
        session_requests=2,
        session_timeout_s=10,
        reward_timeout_s=4,
        retry_window_s=3,
    )
    made: list[Session] = []
    now_s, granted, answers = 0.0, 2, 0
    for what, which, passed_s in steps:
        now_s += passed_s
        session = made[which % len(made)] if made else None
        refused = None
        try:
            if what == "start":
                made.append(known.start("t", Scripted(), now_s)[0])
            elif what == "grant":
                known.grant_capacity()
                granted += 1
            elif what == "done" and session is not None and session.in_flight:
                recorded(session, answers)
                answers += 1
                known.end_call(session, now_s)
            elif session is not None:
                act(known, what, session, now_s)
        except ApiError as error:
            refused = error.status
        assert refused in (None, 400, 410, 429)
        known.expire(now_s)
        assert known.capacity == granted - len(made)
        assert known.open == sum(each.ended_s is None for each in made) <= 3
        assert sum(len(each.interactions) for each in made) == answers
        assert all(0 <= each.in_flight <= 2 for each in made)
        assert all(each.ended_s is not None for each in made if each.exported_s is not None)


def act(known: Sessions, what: str, session: Session, now_s: float) -> None:
    match what:
        case "call":
            known.require_open(session, now_s)
            known.begin_call(session, session.in_flight)
        case "reward":
            known.set_reward(session, 1.0, now_s)
            assert session.outcome == "rewarded"
        case "end":
            known.end(session, now_s)
        case "export" if known.unsettled_s(session, now_s) is None:
            assert not session.in_flight
            known.export(session, now_s, style="individual", discount=1.0)
        case _:
            pass
