"""Keys of servers: who has one, where it is kept, and what is refused without it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from areal_lab.engines import keys
from areal_lab.engines.keys import (
    KEY_VARIABLE,
    KeyGuard,
    Receive,
    Scope,
    Send,
    authorization,
    key_file,
    key_for,
    new_key,
    remove_key_file,
    take_key,
    write_key_file,
)

PORT = 31_000
KEY = "the-key"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def passed(kind: str, *headers: tuple[bytes, bytes]) -> tuple[bool, list[MutableMapping[str, Any]]]:
    """Whether a guard passes on this connection, and what it sends itself."""
    reached: list[bool] = []
    sent: list[MutableMapping[str, Any]] = []

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        reached.append(True)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("the body of a refused request is not read")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope: Scope = {"type": kind, "headers": list(headers)}
    asyncio.run(KeyGuard(app, KEY)(scope, receive, send))
    return bool(reached), sent


def test_requests_with_the_key_are_passed_on() -> None:
    header = authorization(KEY)["authorization"].encode()
    for kind in ("http", "websocket"):
        assert passed(kind, (b"host", b"a"), (b"authorization", header)) == (True, [])
        assert passed(kind, (b"authorization", b"bearer  the-key")) == (True, [])
    assert passed("lifespan") == (True, [])


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer the-ke", "Bearer the-key2", "Basic the-key", KEY]
)
def test_other_requests_are_refused(header: str | None) -> None:
    headers = [] if header is None else [(b"authorization", header.encode())]
    reached, sent = passed("http", *headers)
    assert not reached
    assert [message.get("status") for message in sent] == [401, None]
    reached, sent = passed("websocket", *headers)
    assert not reached
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_a_process_takes_its_key_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert (take_key(), take_key()) == (KEY, "")
    assert KEY_VARIABLE not in os.environ
    assert authorization("") == {}
    assert len({new_key() for _ in range(9)}) == 9


def test_the_file_of_a_key_is_readable_by_its_user_only(tmp_path: Path) -> None:
    assert key_for(PORT) == ""
    key_file(PORT).parent.mkdir(parents=True)
    key_file(PORT).write_text("left by a server that was killed")
    key_file(PORT).chmod(0o644)
    file = write_key_file(PORT, KEY)
    assert file.is_relative_to(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert (key_for(PORT), key_for(PORT + 1), key_for(None)) == (KEY, "", "")
    remove_key_file(PORT, "of an earlier server on this port")
    assert file.exists()
    remove_key_file(PORT, KEY)
    remove_key_file(PORT, KEY)
    assert not file.exists()


def test_a_new_folder_of_keys_is_private() -> None:
    assert write_key_file(PORT, KEY).parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        ValueError, match=rf"cannot be written to .*or {KEY_VARIABLE} to a key"
    ) as e:
        write_key_file(PORT, KEY)
    assert KEY not in str(e.value)
    remove_key_file(PORT, KEY)


def test_the_variable_comes_before_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write_key_file(PORT, "of the file")
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert (key_for(PORT), key_for(None)) == (KEY, KEY)


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel"])
def test_a_key_that_no_header_can_have_is_refused_without_telling_it(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    for read in (take_key, lambda: key_for(None)):
        monkeypatch.setenv(KEY_VARIABLE, key)
        with pytest.raises(ValueError, match=f"^{KEY_VARIABLE} must be printable ASCII") as refused:
            read()
        assert key not in str(refused.value)


def test_the_module_needs_the_standard_library_only() -> None:
    """The Python of an engine imports it."""
    lines = Path(keys.__file__).read_text().splitlines()
    imported = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    assert imported == {
        *("__future__", "json", "os", "secrets", "socket"),
        *("collections.abc", "contextlib", "pathlib", "typing"),
    }
