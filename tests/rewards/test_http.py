"""Rewards of a service over HTTP: a real server that replies, fails, hangs and talks nonsense."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError
from areal_lab.resolve.functions import check_functions
from areal_lab.resolve.resolved import resolve
from areal_lab.rewards.http import MOST_REPLY_BYTES, HttpReward
from areal_lab.rewards.service import RewardError
from cosim.load import resolve_cosim
from tests.cosim.small import small
from tests.pipeline.tiny_run import do_run, tiny_config, trained_samples
from tests.rewards.test_service import score_group, statuses

REPLIES = {
    "13": b'{"reward": 1.0}',
    "number": b"0.5",
    "parts": b'{"format": 0.25, "answer": 1}',
    "garbage": b"<html>busy</html>",
    "null": b"null",
    "true": b"true",
    "text": b'{"reward": "high"}',
    "nan": b'{"reward": NaN}',
    "nothing": b"",
    "huge": b"1" * (MOST_REPLY_BYTES + 1),
}


class Service(ThreadingHTTPServer):
    """Rewards by what the completion says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        self.keys()
        self.reply(405, b"post")

    def do_POST(self) -> None:
        self.keys()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        said = str(body["completion"])
        self.server.asked[said] += 1
        match said:
            case "fails twice" if self.server.asked[said] <= 2:
                self.reply(503, b"loading")
            case "is busy" if self.server.asked[said] == 1:
                self.reply(429, b"slow down", ("Retry-After", "0"))
            case "fails":
                self.reply(500, b"Traceback: no such model")
            case "hangs up":
                self.close_connection = True
            case "hangs":
                self.server.over.wait()
            case "is unknown":
                self.reply(404, b"no such path")
            case "moves":
                self.reply(302, b"", ("Location", "/elsewhere"))
            case _:
                self.reply(200, REPLIES.get(said, b"0"))

    def keys(self) -> None:
        self.server.keys.add(self.headers["Authorization"])

    def reply(self, status: int, content: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            pass  # the client did not wait for all of it


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def closed() -> str:
    """An address where nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}/score"


QUICK = {"backoff_s": 0.0, "retries": 2}


def test_rewards_are_those_of_the_service(service: Service) -> None:
    service.bodies.clear()
    outcomes, counts = score_group(["13", "number", "14", "parts"], service.url)
    assert [one.reward for one in outcomes] == [1.0, 0.5, 0.0, 1.25]
    assert outcomes[3].rewards == {"format": 0.25, "answer": 1.0}
    assert counts == {"ok": 4, "timeout": 0, "error": 0, "refused": 0}
    assert all(body["problem"] == {"answer": "13"} for body in service.bodies)


def test_null_is_no_reward(service: Service) -> None:
    assert statuses(score_group(["null"], service.url)[0]) == ["refused"]


def test_what_may_pass_is_tried_again(service: Service) -> None:
    service.asked.clear()
    outcomes, _ = score_group(["fails twice", "is busy"], service.url, kwargs=QUICK)
    assert statuses(outcomes) == ["ok", "ok"]
    assert service.asked == {"fails twice": 3, "is busy": 2}


@pytest.mark.parametrize(
    ("completion", "attempts", "reason"),
    [
        ("fails", 3, "failed 3 times; at last: status 500: Traceback: no such model"),
        ("hangs up", 3, "failed 3 times; at last: RemoteProtocolError"),
        ("hangs", 3, "failed 3 times; at last: ReadTimeout"),
        ("is unknown", 1, "replied 404: no such path"),
        ("moves", 1, "replied 302"),
        ("garbage", 1, "replied '<html>busy</html>', but must reply JSON"),
        ("true", 1, "but must reply JSON"),
        ("nothing", 1, "but must reply JSON"),
        ("text", 1, "returned 'high', but must return a number"),
        ("nan", 1, "returned nan, but rewards must be finite"),
        ("huge", 1, "replied more than 1048576 bytes"),
    ],
)
def test_a_failure_is_no_reward_and_says_why(
    service: Service, completion: str, attempts: int, reason: str
) -> None:
    service.asked.clear()
    kwargs = {**QUICK, "timeout_s": 0.3 if completion == "hangs" else 20.0}
    outcomes, _ = score_group([completion, "13"], service.url, kwargs=kwargs, timeout_s=60)
    assert statuses(outcomes) == ["error", "ok"]
    assert math.isnan(outcomes[0].reward)
    assert reason in outcomes[0].detail
    assert service.asked[completion] == attempts


def test_the_time_limit_of_rewards_is_that_of_all_attempts(service: Service) -> None:
    outcomes, _ = score_group(["hangs", "13"], service.url, timeout_s=0.5)
    assert statuses(outcomes) == ["timeout", "ok"]


def test_a_service_that_fails_too_often_ends_the_run(service: Service) -> None:
    with pytest.raises(RewardError, match=r"(?s)11 of the last.*status 500"):
        score_group(["fails"] * 11, service.url, kwargs=QUICK, max_error_rate=0.1, timeout_s=60)


def test_a_key_is_of_the_environment(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    service.keys.clear()
    keywords = {"key_variable": "MY_KEY"}
    HttpReward.check(service.url, **keywords)
    assert score_group(["13"], service.url, kwargs=keywords)[0][0].reward == 1.0
    assert service.keys == {"Bearer secret"}
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ValueError, match="MY_KEY, which is not set"):
        HttpReward(service.url, **keywords)  # type: ignore[arg-type]


def test_a_service_that_is_there_is_accepted(service: Service) -> None:
    assert not list(check_functions(load_config("tiny", {"reward.fn": service.url})))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, r"reward\.fn: http://127\.0\.0\.1:\d+/score cannot be reached: ConnectError.*start"),
        ({"reward.fn": "http://nowhere.invalid/"}, "cannot be reached"),
        ({"reward.fn": "http://"}, "cannot be reached"),
        ({"reward.kwargs.retries": -1}, "retries is -1"),
        ({"reward.kwargs.timeout_s": 0}, "timeout_s is 0"),
        ({"reward.kwargs.backoff_s": -1}, "backoff_s is -1"),
        ({"reward.kwargs.retry": 1}, "'retry'"),
    ],
)
def test_what_cannot_work_is_refused_before_a_run(settings: dict[str, Any], reason: str) -> None:
    given = {"reward.fn": closed(), **settings}
    (problem,) = check_functions(load_config("tiny", given))
    assert problem.setting in ("reward.fn", "reward.kwargs")
    with pytest.raises(ValueError, match=reason):
        raise ValueError(str(problem))
    assert "\n" not in str(problem)


def test_a_run_is_scored_by_a_service(service: Service, tmp_path: Path) -> None:
    result = do_run(tiny_config(tmp_path, "total_train_steps=1", f"reward.fn={service.url}"))
    assert result.summary["rewards"]["ok"] >= 12
    (step,) = trained_samples(result.folder)
    assert {sample["reward"] for sample in step} == {0.0}
    config = tiny_config(tmp_path, f"reward.fn={closed()}")
    with pytest.raises(ConfigError, match=r"reward\.fn: .* cannot be reached"):
        resolve(config)


def test_a_co_simulation_has_no_services(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a co-simulation calls a function of its process"):
        resolve_cosim(small(tmp_path, "reward.fn=http://127.0.0.1:1/"))
