"""The gateway of an online run on a real socket: what it says, where, and to whom."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import httpx2
import pytest

from areal_lab.agents.gateway import server
from areal_lab.agents.hosting.online import Online
from areal_lab.agents.workflow import opened
from areal_lab.rewards.service import RewardError
from tests.agents.hosting.test_outside import PROBLEM, TEMPLATE
from tests.agents.scripted import Scripted
from tests.data.byte_tokenizer import save_byte_tokenizer


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "model"
    save_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_it_says_where_it_listens_and_what_it_waits_for(model: Path) -> None:
    async def scenario() -> None:
        online = Online()
        async with opened(online, model):
            url, file = online.address()["url"], Path(online.address()["admin_key_file"])
            assert url.startswith("http://127.0.0.1:")
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            told = "\n".join(online.notices())
            assert f"the run waits for sessions from outside at {url}; its admin key" in told
            assert f'curl {url}/rl/start_session -H "Authorization: Bearer $(cat {file})"' in told
            assert file.read_text() not in told
            assert "other machines" not in told
            assert online.waiting_for() == ""
            running = [
                asyncio.create_task(online.run(Scripted(["one"]), PROBLEM)) for _ in range(3)
            ]
            while not online.waiting_for().startswith("3"):
                await asyncio.sleep(0)
            assert online.waiting_for() == f"3 sessions from outside at {url} (0 open)"
            admin = {"authorization": f"Bearer {file.read_text()}"}
            async with httpx2.AsyncClient(base_url=url, trust_env=False) as http:
                for task_id in ("a", "a"):
                    body = {"task_id": task_id}
                    reply = await http.post("/v1/rl/start_session", json=body, headers=admin)
                    key = {"x-api-key": reply.json()["api_key"]}
                    assert reply.json()["data"]["prompt"] == PROBLEM["prompt"]
            waiting = f"1 session from outside at {url} (2 open, 1 more wanted on 'a')"
            assert online.waiting_for() == waiting
            async with httpx2.AsyncClient(base_url=url, trust_env=False) as http:
                await http.post("/rl/end_session", headers=key)
            await asyncio.gather(*running[1:])
            assert online.waiting_for() == "", "the group of the task is given up"
            running[0].cancel()
        assert not file.exists()

    asyncio.run(scenario())


def test_a_gateway_that_has_ended_ends_the_run(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_: object) -> None:
        raise OSError("too many open files")

    async def scenario() -> None:
        async with opened(Online(), model) as online:
            assert online is not None
            await online.run(Scripted(["one"]), PROBLEM)

    monkeypatch.setattr(server, "_sweep", fails)
    with pytest.raises(RewardError, match=r"gateway of the run has ended: .*too many open files"):
        asyncio.run(scenario())


def test_it_says_plainly_that_others_can_reach_it(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        key_file = tmp_path / "admin"
        online = Online(host="0.0.0.0", admin_key_file=str(key_file))
        async with opened(online, model):
            assert online.address()["admin_key_file"] == str(key_file)
            assert online.notices()[-1] == (
                "the gateway listens on 0.0.0.0: other machines can reach it, and requests are not "
                "encrypted"
            )
        assert key_file.exists()

    asyncio.run(scenario())
