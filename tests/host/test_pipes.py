"""Pipes between processes on one host and on two."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import threading
from multiprocessing import AuthenticationError

import pytest

from areal_lab.host.pipes import KEY_VARIABLE, PipeListener, open_pipe, shut, socket_pair
from tests.asynchronous import in_loop
from tests.fuzz import damaged_bytes, mutations


@in_loop
async def test_a_connection_carries_messages_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = PipeListener("127.0.0.1")
    monkeypatch.setenv(KEY_VARIABLE, listener.key.hex())
    try:
        (first, future), (second, other) = listener.expect(), listener.expect()
        theirs = [await asyncio.to_thread(open_pipe, where) for where in (second, first)]
        ours = [await other, await future]
        for one, two in zip(ours, theirs, strict=True):
            one.send({"batch": [1, 2]})
            assert two.recv() == {"batch": [1, 2]}
            two.send(b"x" * (1 << 20))
            assert one.recv() == b"x" * (1 << 20)
    finally:
        await listener.close()
    for pipe in (*ours, *theirs):
        shut(pipe)


@in_loop
async def test_who_has_another_key_or_says_nothing_gets_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = PipeListener("127.0.0.1")
    where, future = listener.expect()
    silent = socket.create_connection(("127.0.0.1", int(where.split(":")[2])))
    monkeypatch.setenv(KEY_VARIABLE, "00" * 32)
    try:
        with pytest.raises(AuthenticationError, match="digest"):
            await asyncio.to_thread(open_pipe, where)
        assert not future.done()
        # Neither keeps another process from connecting.
        monkeypatch.setenv(KEY_VARIABLE, listener.key.hex())
        theirs = await asyncio.to_thread(open_pipe, where)
        theirs.send("here")
        assert (await future).recv() == "here"
    finally:
        silent.close()
        await listener.close()


@mutations
def test_no_bytes_of_strangers_keep_a_process_from_connecting(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    message = b"\x00\x00\x00\x14" + b"#CHALLENGE#" + b"x" * 9

    async def scenario() -> None:
        errors: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        listener = PipeListener("127.0.0.1")
        monkeypatch.setenv(KEY_VARIABLE, listener.key.hex())
        try:
            where, future = listener.expect()
            port = int(where.split(":")[2])
            for _ in range(count):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(damaged_bytes(rng, message * 2))
                await asyncio.sleep(0)
            # More of them than there are threads for others, and silent.
            silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
            theirs = await asyncio.to_thread(open_pipe, where)
            theirs.send("here")
            assert (await future).recv() == "here"
            for one in silent:
                one.close()
        finally:
            await listener.close()
        gc.collect()
        assert errors == []

    asyncio.run(scenario())


def test_shutting_a_pipe_ends_a_read_of_another_thread() -> None:
    ours, theirs = socket_pair()
    ended: list[BaseException] = []

    def read() -> None:
        try:
            ours.recv()
        except (EOFError, OSError) as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    shut(ours)
    reader.join(30)
    assert not reader.is_alive()
    assert ended
    theirs.close()
    shut(ours)  # idempotent


def test_an_inherited_socket_is_a_pipe() -> None:
    ours, theirs = socket_pair()
    pipe = open_pipe(f"fd:{os.dup(theirs.fileno())}")
    theirs.close()
    ours.send(1)
    assert pipe.recv() == 1
    shut(pipe)
    with pytest.raises(EOFError):
        ours.recv()
    shut(ours)
