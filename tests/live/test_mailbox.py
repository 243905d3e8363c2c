"""Requests reach the run they are for, once, in order, whoever else writes; replies come back."""

from __future__ import annotations

import json
import math
import os
import random
import threading
from pathlib import Path

import pytest

from areal_lab.control.events import (
    EtaRequested,
    PauseRequested,
    Request,
    ResumeRequested,
    StopRequested,
)
from areal_lab.live.mailbox import (
    REPLIES,
    REQUESTS,
    Inbox,
    RequestRefused,
    RunEnded,
    ask,
    exchanges,
    open_mailbox,
)
from tests.fuzz import damaged_bytes, damaged_json, mutations

KEY = "0123456789abcdef"


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    open_mailbox(tmp_path)
    return Inbox(tmp_path, KEY)


class Runs:
    """A run that answers in a thread until it is told to end."""

    def __init__(self, inbox: Inbox, *, refuse: str = "") -> None:
        self.inbox, self.refuse = inbox, refuse
        self.taken: list[Request] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.answer)

    def __enter__(self) -> Runs:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def answer(self) -> None:
        while not self.over.wait(0.01):
            for letter in self.inbox.take():
                self.taken.append(letter.request)
                text = self.refuse or f"did number {len(self.taken)}"
                self.inbox.reply(letter.id, text, done=not self.refuse)


def ask_here(inbox: Inbox, request: Request, *, key: str = KEY, timeout_s: float = 30) -> str:
    return ask(inbox.folder, key, request, timeout_s=timeout_s, alive=lambda: True)


ALL = (PauseRequested(), ResumeRequested(), StopRequested())


@pytest.mark.parametrize("request_", [*ALL, EtaRequested(0.5), EtaRequested(math.inf)])
def test_a_request_comes_out_as_it_went_in(inbox: Inbox, request_: Request) -> None:
    with Runs(inbox) as run:
        assert ask_here(inbox, request_) == "did number 1"
        assert ask_here(inbox, request_) == "did number 2"
    assert run.taken == [request_, request_]
    for line in (inbox.folder / REQUESTS).read_text().split("\n"):
        assert not line or json.loads(line)["from"].endswith(f"process {os.getpid()}")


def test_a_refusal_is_an_error_with_the_reason(inbox: Inbox) -> None:
    with (
        Runs(inbox, refuse="the run is ending (stopped)"),
        pytest.raises(RequestRefused, match=r"^the run is ending \(stopped\)$"),
    ):
        ask_here(inbox, PauseRequested())


def test_many_who_ask_at_once_each_get_their_own_reply(inbox: Inbox) -> None:
    replies: dict[float, str] = {}

    def ask_for(eta: float) -> None:
        replies[eta] = ask_here(inbox, EtaRequested(eta))

    with Runs(inbox) as run:
        threads = [threading.Thread(target=ask_for, args=(float(eta),)) for eta in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    order = [request.eta for request in run.taken if isinstance(request, EtaRequested)]
    assert sorted(order) == list(range(12))
    assert {eta: f"did number {order.index(eta) + 1}" for eta in order} == replies


def test_everything_that_was_asked_can_be_read_again(inbox: Inbox) -> None:
    assert exchanges(inbox.folder / "nowhere") == []
    with Runs(inbox):
        ask_here(inbox, EtaRequested(0.5))
    with Runs(inbox, refuse="the run is ending (stopped)"), pytest.raises(RequestRefused):
        ask_here(inbox, PauseRequested())
    with pytest.raises(TimeoutError):
        ask_here(inbox, StopRequested(), timeout_s=0)
    with (inbox.folder / REQUESTS).open("a") as file:
        file.write(json.dumps({"id": "2", "key": KEY, "ask": "dance"}) + "\n")
    found = exchanges(inbox.folder)
    assert [(one.asked, one.reply, one.done) for one in found] == [
        ("eta 0.5", "did number 1", True),
        ("pause", "the run is ending (stopped)", False),
        ("stop", "", None),
    ]
    assert found[0].sender.endswith(f"process {os.getpid()}")
    assert [one.at_s for one in found] == sorted(one.at_s for one in found)


def test_a_request_for_a_run_that_was_killed_is_not_done_by_the_next_one(inbox: Inbox) -> None:
    with Runs(inbox) as run:
        with pytest.raises(TimeoutError, match=r"did not reply to 'stop' within 0\.2 s"):
            ask_here(inbox, StopRequested(), key="of another run", timeout_s=0.2)
        ask_here(inbox, PauseRequested())
    assert run.taken == [PauseRequested()]


def test_lines_that_a_crash_cut_and_nonsense_are_skipped(inbox: Inbox) -> None:
    with (inbox.folder / REQUESTS).open("a") as file:
        file.write('{"id": "1", "key": "0123456789abcdef", "ask": "pa')  # no end of the line
    assert list(inbox.take()) == []
    with Runs(inbox) as run:
        assert ask_here(inbox, PauseRequested()) == "did number 1"
        with (inbox.folder / REQUESTS).open("a") as file:
            file.write("[1]\nnull\n\x00\n" + json.dumps({"id": "2", "key": KEY, "ask": "dance"}))
            file.write("\n" + json.dumps({"id": "3", "key": KEY, "ask": "eta"}) + "\n")
        assert ask_here(inbox, ResumeRequested()) == "did number 2"
    assert run.taken == [PauseRequested(), ResumeRequested()]
    said = [json.loads(line) for line in (inbox.folder / REPLIES).read_text().split("\n") if line]
    wrong = {reply["id"]: reply["text"] for reply in said if not reply["done"]}
    assert wrong["2"] == (
        "not a valid request: ask is 'dance', but must be one of pause, resume, stop, eta"
    )
    assert "eta" in wrong["3"]


def test_a_file_that_was_replaced_is_not_done_again(inbox: Inbox) -> None:
    with Runs(inbox) as run:
        ask_here(inbox, PauseRequested())
        ask_here(inbox, EtaRequested(3))
        file = inbox.folder / REQUESTS
        lines = file.read_text().split("\n")
        file.write_text("\n".join(lines[:3]))  # shorter than what was read: the first request
        ask_here(inbox, ResumeRequested())
    assert run.taken == [PauseRequested(), EtaRequested(3), ResumeRequested()]


def test_nobody_waits_for_a_run_that_is_not_alive(inbox: Inbox) -> None:
    def ask_with(alive: list[bool | None]) -> str:
        return ask(inbox.folder, KEY, PauseRequested(), timeout_s=60, alive=lambda: alive.pop(0))

    with pytest.raises(RunEnded, match="is not alive"):
        ask_with([False])
    assert not (inbox.folder / REQUESTS).read_text()
    with pytest.raises(RunEnded, match="ended before it replied to 'pause'"):
        ask_with([True, True, False])
    # A run that cannot be seen from here may reply all the same.
    with Runs(inbox):
        assert ask(inbox.folder, KEY, PauseRequested(), timeout_s=60, alive=lambda: None)


def test_a_reply_that_came_just_before_the_end_counts(inbox: Inbox) -> None:
    alive = [True]

    def end() -> bool:
        if not alive:  # the run has replied and ended since the last look
            for letter in inbox.take():
                inbox.reply(letter.id, "stops", done=True)
        return bool(alive and alive.pop())

    assert ask(inbox.folder, KEY, StopRequested(), timeout_s=60, alive=end) == "stops"


def test_only_the_owner_may_write(inbox: Inbox) -> None:
    for name in (REQUESTS, REPLIES):
        assert (inbox.folder / name).stat().st_mode & 0o077 == 0
    (inbox.folder / REQUESTS).write_text("kept\n")
    open_mailbox(inbox.folder)
    assert (inbox.folder / REQUESTS).read_text() == "kept\n"


@mutations
def test_no_line_of_a_mailbox_stops_the_run_that_reads_it(
    tmp_path: Path, inbox: Inbox, count: int
) -> None:
    rng = random.Random(0)
    valid = {"id": "a", "key": KEY, "at_s": 1.5, "from": "me", "ask": "eta", "eta": 4}
    taken = 0
    for number in range(count):
        value = damaged_json(rng, {**valid, "id": f"{number}"})
        line = json.dumps(value).encode()
        line = damaged_bytes(rng, line) if rng.randrange(2) else line
        with (tmp_path / REQUESTS).open("ab") as file:
            file.write(b"\n" + line + b"\n")
        for letter in inbox.take():
            taken += 1
            letter.sender.encode()  # it can be shown
            assert isinstance(letter.request, Request)
            inbox.reply(letter.id, "done", done=True)
    assert 0 < taken < count
    for line in ("[" * 9000, json.dumps({**valid, "id": "b", "eta": 10**400})):
        with (tmp_path / REQUESTS).open("a") as file:
            file.write(f"\n{line}\n")
        assert list(inbox.take()) == []
    assert len(exchanges(tmp_path)) >= taken
    with (tmp_path / REQUESTS).open("a") as file:
        file.write(f"\n{json.dumps({**valid, 'id': 'last'})}\n")
    assert [letter.request for letter in inbox.take()] == [EtaRequested(4.0)]
