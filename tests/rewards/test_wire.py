"""Replies of reward workers: what is sent arrives, and nothing else does."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.rewards.wire import (
    LENGTH,
    MOST_REPLY_BYTES,
    MOST_TEXT,
    BadReply,
    Failed,
    Ready,
    Reply,
    Scored,
    pack_reply,
    read_reply,
    reply_size,
)
from tests.fuzz import damaged_bytes, damaged_json, mutations, one_line

FINITE = st.floats(allow_nan=False, allow_infinity=False)
GOOD = {
    "kind": "scored", "request": 1, "index": 0, "status": "ok", "reward": 1.5,
    "rewards": {"a": 1.0}, "detail": "",
}  # fmt: skip


def crossed(reply: Reply) -> Reply:
    data = pack_reply(reply)
    assert reply_size(data[: LENGTH.size]) == len(data) - LENGTH.size
    return read_reply(data[LENGTH.size :])


@given(
    st.builds(
        Scored,
        st.integers(0, 2**40),
        st.integers(0, 2**20),
        st.just("ok"),
        FINITE,
        st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=200), FINITE),
        st.text(st.characters(codec="utf-8")),
    )
)
def test_a_reward_arrives_as_it_was_sent(scored: Scored) -> None:
    assert crossed(scored) == scored


def test_other_replies_arrive_as_they_were_sent() -> None:
    assert crossed(Ready(True)) == Ready(True)
    assert crossed(Failed("a\nb")) == Failed("a\nb")
    for status in ("timeout", "error", "refused"):
        found = crossed(Scored(1, 2, status, detail="why"))
        assert isinstance(found, Scored)
        assert (found.status, found.detail) == (status, "why")
        assert math.isnan(found.reward)


def test_texts_are_cut_to_their_ends_and_can_be_written() -> None:
    found = crossed(Failed("x" * MOST_TEXT + "the end \udc80"))
    assert isinstance(found, Failed)
    assert found.traceback.endswith("xthe end ?")
    assert len(found.traceback) == MOST_TEXT


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other"},
        {"kind": None},
        {"request": "1"},
        {"request": 1.0},
        {"request": True},
        {"index": None},
        {"index": [0]},
        {"status": "fine"},
        {"reward": None},
        {"reward": "1"},
        {"reward": True},
        {"reward": 10**400},
        {"reward": [1]},
        {"rewards": [1]},
        {"rewards": {"a": None}},
        {"rewards": {"a": {"b": 1}}},
        {"rewards": {"x" * 201: 1}},
        {"rewards": {str(n): 1 for n in range(1001)}},
        {"detail": 1},
        {"more": 1},
    ],
)
def test_wrong_fields_are_refused(change: dict[str, Any]) -> None:
    assert read_reply(json.dumps(GOOD).encode()) == Scored(1, 0, "ok", 1.5, {"a": 1.0})
    with pytest.raises(BadReply):
        read_reply(json.dumps(GOOD | change).encode())


@pytest.mark.parametrize("name", GOOD)
def test_missing_fields_are_refused(name: str) -> None:
    with pytest.raises(BadReply):
        read_reply(json.dumps({key: value for key, value in GOOD.items() if key != name}).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'"' * 7,
        b"[" * 100_000,
        b"1" * 10_000,
        json.dumps(GOOD).replace("1.5", "NaN").encode(),
        json.dumps(GOOD).replace("1.5", "-Infinity").encode(),
        json.dumps(GOOD).replace("1.5", "1e400").encode(),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadReply):
        read_reply(data)


@given(st.binary(max_size=50))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read_reply(data)
    except BadReply:
        pass  # the only error


def test_a_long_reply_is_refused_before_it_is_read() -> None:
    assert reply_size(LENGTH.pack(MOST_REPLY_BYTES)) == MOST_REPLY_BYTES
    with pytest.raises(BadReply, match="at most 4194304 are read"):
        reply_size(LENGTH.pack(MOST_REPLY_BYTES + 1))


@mutations
def test_whatever_a_worker_sends_is_a_reply_or_refused_in_one_line(count: int) -> None:
    rng = random.Random(0)
    valid = [GOOD, {"kind": "ready", "is_async": True}, {"kind": "failed", "traceback": "a\nb"}]
    refused = 0
    for _ in range(count):
        told: BadReply | None = None
        data = json.dumps(damaged_json(rng, rng.choice(valid))).encode()
        data = damaged_bytes(rng, data) if rng.randrange(2) else data
        try:
            reply = read_reply(data)
        except BadReply as error:
            told = error
            refused += 1
        else:
            if isinstance(reply, Scored) and reply.status == "ok":
                assert math.isfinite(reply.reward)
            pack_reply(reply)
        assert told is None or one_line(told)
    assert refused > count / 2
