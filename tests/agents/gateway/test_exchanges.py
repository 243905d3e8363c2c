"""Which call is sent again, and which only looks like it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from areal_lab.agents.gateway.exchanges import Exchange, sent_again
from areal_lab.agents.gateway.sessions import Session
from tests.agents.gateway.scripted import Scripted


def exchange(digest: bytes = b"a", **fields: Any) -> Exchange:
    session = Session(
        session_id="s", task_id="t", conversation=Scripted(), key_digest=b"", used_s=0.0
    )
    return Exchange(session=session, digest=digest, **fields)


def test_an_equal_body_alone_is_another_sample() -> None:
    assert sent_again([exchange()], b"a", retries=0) is None
    assert sent_again([exchange(clients=0, delivered=True, done_s=1)], b"a", retries=0) is None


def test_a_client_that_says_so_sends_it_again() -> None:
    first, second = exchange(), exchange(clients=0, delivered=True, done_s=1)
    assert sent_again([first, second], b"a", retries=1) is second
    assert sent_again([first, second], b"b", retries=1) is None


def test_an_answer_that_nobody_has_goes_to_the_next_equal_body() -> None:
    lost = exchange(clients=0)
    assert sent_again([lost], b"a", retries=0) is lost
    assert sent_again([lost], b"b", retries=0) is None
    assert sent_again([exchange(clients=0, done_s=1)], b"a", retries=0) is not None


def test_two_lost_answers_go_to_two_clients() -> None:
    known = [exchange(clients=0), exchange(clients=0)]
    for expected in known:
        found = sent_again(known, b"a", retries=1)
        assert found is expected
        found.clients += 1


EXCHANGES = st.builds(
    exchange,
    digest=st.sampled_from([b"a", b"b"]),
    clients=st.integers(0, 2),
    delivered=st.booleans(),
    done_s=st.none() | st.just(1.0),
)


@given(st.lists(EXCHANGES, max_size=5), st.integers(0, 2))
def test_only_an_equal_body_finds_something(known: list[Exchange], retries: int) -> None:
    found = sent_again(known, b"a", retries=retries)
    lost = [each for each in known if each.digest == b"a" and not each.clients | each.delivered]
    if found is not None:
        assert found.digest == b"a"
    if lost:
        assert found is lost[0]
    elif retries:
        assert (found is None) == all(each.digest != b"a" for each in known)
    else:
        assert found is None
