"""How sessions are served: what is refused first, and the two styles of returns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from areal_lab.agents.catalogue import make_workflow
from areal_lab.agents.gateway.calls import Scores
from areal_lab.agents.gateway.server import base_url, bind, is_loopback
from areal_lab.agents.hosting.conversations import Conversations, Serving, run_limits
from areal_lab.agents.hosting.online import Online
from areal_lab.agents.messages import ChatRequest, Message
from areal_lab.agents.workflow import Attended, Opens, ReadsModel
from tests.agents.hosting.test_outside import TEMPLATE
from tests.agents.scripted import Scripted
from tests.data.byte_tokenizer import save_byte_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def ask(text: str) -> ChatRequest:
    return ChatRequest(messages=(Message(role="user", content=text),))


@pytest.mark.parametrize(("style", "first"), [("tree", None), ("linear", 0.5)])
def test_only_linear_returns_leak_between_sub_agents(
    model: Path, style: str, first: float | None
) -> None:
    serving = Serving(turn_discount=0.5, turn_discount_style=style)
    conversation = Conversations(model, serving).open(Scripted(["one", "two"]), "s")
    for text in ("you look left", "you look right"):
        asyncio.run(conversation.reply(ask(text)))
    assert conversation.returns(Scores(discount=0.5, rewards={"turn-2": 1.0})) == (first, 1.0)


@pytest.mark.parametrize("pinned", [True, False])
def test_how_a_turn_was_sampled_is_kept(model: Path, pinned: bool) -> None:
    conversation = Conversations(model, Serving(pinned=pinned)).open(Scripted(["one"]), "s")
    request = ChatRequest(messages=ask("hello").messages, temperature=0.25, top_p=0.5)
    asyncio.run(conversation.reply(request))
    (sampling,) = conversation.samplings
    assert (sampling.temperature, sampling.top_p) == ((1.0, 1.0) if pinned else (0.25, 0.5))


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"fn": "m:f"}, "agent with mode online has no keyword 'fn'; it takes host, port"),
        ({"port": 70000}, r"port is 70000, but must be in \[0, 65535\]"),
        ({"session_timeout_s": 0}, "session_timeout_s is 0, but must be > 0"),
        ({"reward_timeout_s": -1}, "reward_timeout_s is -1, but must be >= 0"),
        ({"requests": 0}, "requests is 0, but must be >= 1"),
        ({"session_requests": 0}, "session_requests is 0, but must be >= 1"),
        ({"turn_discount": 1.5}, r"turn_discount is 1\.5, but must be in \[0, 1\]"),
        ({"turn_discount_style": "lineal"}, "but must be one of tree, linear.*mean 'linear'"),
        ({"admin_key_file": "/"}, "admin_key_file is /, which is not a file"),
    ],
)
def test_an_online_workflow_that_cannot_be_made_is_refused(
    keywords: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        make_workflow({"name": "agent", "mode": "online", **keywords})


def test_other_modes_have_no_address() -> None:
    with pytest.raises(ValueError, match="agent with mode inline has no keyword 'port'"):
        make_workflow({"name": "agent", "fn": "os.path:join", "port": 1})
    with pytest.raises(ValueError, match="mode is 'remote', but must be inline, subprocess, en"):
        make_workflow({"name": "agent", "fn": "os.path:join", "mode": "remote"})


def test_a_model_that_cannot_be_served_is_refused_before_it_is(model: Path) -> None:
    online = make_workflow({"name": "agent", "mode": "online"})
    assert isinstance(online, Online)
    beside: object = online
    assert isinstance(beside, Attended)
    assert isinstance(beside, Opens)
    assert isinstance(beside, ReadsModel)
    online.check_model(model)
    with bind() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is not available"):
            Online(port=port).check_model(model)
    with pytest.raises(ValueError, match=r"host is '192\.0\.2\.1', but must be an address of this"):
        Online(host="192.0.2.1").check_model(model)
    with pytest.raises(ValueError, match="host is '', but must be"):
        Online(host="").check_model(model)
    with pytest.raises(ValueError, match="hermez"):
        Online(tool_call_parser="hermez").check_model(model)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        online.check_model(model)


def test_addresses_of_gateways() -> None:
    with bind() as listener:
        port = listener.getsockname()[1]
        assert (base_url(listener), is_loopback(listener)) == (f"http://127.0.0.1:{port}", True)
    with bind(0, "0.0.0.0") as listener:
        port = listener.getsockname()[1]
        assert (base_url(listener), is_loopback(listener)) == (f"http://127.0.0.1:{port}", False)


def test_a_run_has_limits_of_its_own() -> None:
    limits = run_limits(session_timeout_s=5, reward_timeout_s=2, requests=3, session_requests=1)
    assert (limits.session_timeout_s, limits.reward_timeout_s) == (5, 2)
    assert (limits.requests, limits.session_requests) == (3, 1)
    assert limits.open_sessions > 1_000_000
