"""Reward functions that do what reward functions do on a bad day; the completion says what."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from areal_lab.rewards.wire import LENGTH, Scored, pack_reply


def _raise() -> None:
    raise KeyError("planted")


def _ignore_sigterm_and_hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


def _send(data: bytes) -> None:
    """Write to the service as the worker would; its descriptor is the first argument."""
    os.write(int(sys.argv[1]), data)


_EFFECTS: dict[str, Callable[[], Any]] = {
    "hang": lambda: threading.Event().wait(),
    "ignore SIGTERM and hang": _ignore_sigterm_and_hang,
    "crash": os.abort,
    "exit": lambda: sys.exit(3),
    "raise": _raise,
    "nothing": lambda: None,
    "text": lambda: "1.0",
    "nan": lambda: float("nan"),
    "parts": lambda: {"format": 0.25, "answer": 1},
    "named": lambda: {"reward": 0.5, "length": 7.0},
    "pid": os.getpid,
    "long name": lambda: {"x" * 201: 1.0},
    "torch": lambda: float("torch" in sys.modules),
}


def score(completion: str, example: Mapping[str, Any]) -> Any:
    """1 for the correct answer; some completions have effects."""
    if completion in _EFFECTS:
        return _EFFECTS[completion]()
    if completion.startswith("send "):
        _send(bytes.fromhex(completion.removeprefix("send ")))
    return completion == example["answer"]


async def score_async(completion: str, example: Mapping[str, Any]) -> Any:
    """As `score`; some of its completions wait for each other."""
    match completion:
        case "hang softly":
            await asyncio.Event().wait()
        case "pause":
            await asyncio.sleep(0)
        case "wait":
            await _waiting.wait()
        case "wake":
            _waiting.set()
    return score(completion, example)


_waiting = asyncio.Event()


class ScoreObject:
    """An object that can be called and awaited."""

    async def __call__(self, completion: str, example: Mapping[str, Any]) -> float:
        """1 for the correct answer."""
        return float(completion == example["answer"])


score_object = ScoreObject()


def score_in_sandbox(completion: str, example: object, *, sandbox: str) -> float:  # noqa: ARG001
    """1 if the completion names the level."""
    return float(completion == sandbox)


def __getattr__(name: str) -> Any:
    """Functions that cannot be loaded before something was sent to the service."""
    if name == "impatient":
        reply = pack_reply(Scored(1, 0, "ok", 1.0))
    elif name == "babbling":
        reply = LENGTH.pack(7) + b"babble!"
    else:
        raise AttributeError(name)
    _send(reply)
    return score


def longer_than(completion: str, example: object, *, least: int) -> float:  # noqa: ARG001
    """A reward function with a setting."""
    return float(len(completion) > least)
