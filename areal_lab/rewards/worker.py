"""A reward worker: loads a function, then scores requests until the socket closes.

`RewardService` runs it as `python -m areal_lab.rewards.worker FD [FOLDER]`. It does not import
torch itself.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from areal_lab.config.functions import load_function
from areal_lab.host.isolation import LevelSetting
from areal_lab.host.owned_folders import remove_tree
from areal_lab.host.processes import on_parent_death, watch_parent
from areal_lab.rewards.sandbox.levels import choose, runs_programs, takes_sandbox
from areal_lab.rewards.wire import (
    LENGTH,
    TOLD,
    BadReply,
    Failed,
    Ready,
    Reply,
    Scored,
    ScoreRequest,
    Status,
    pack_reply,
)

REFUSED: Final = "the reward function returned None, which is not a reward"
_NO_WEIGHTS: Final[Mapping[str, float]] = MappingProxyType({})


def main(arguments: list[str]) -> int:
    """Serve the socket whose descriptor is the first argument.

    The second argument, if given, is a temporary folder to remove if the parent is killed.
    """
    descriptor, *folders = arguments
    for folder in folders:
        on_parent_death(functools.partial(_remove, folder))
    watcher = watch_parent(guarded=True)
    os.set_inheritable(int(descriptor), False)  # the function's child processes must not keep it
    with socket.socket(fileno=int(descriptor)) as connection:
        messages = _received(connection)
        try:
            function, weights = _function(next(messages))
        except BaseException:  # a module may raise anything, SystemExit too
            _send(connection, Failed(traceback.format_exc()))
            return 1
        waits = is_async(function)
        _send(connection, Ready(waits))
        for message in messages:
            request: ScoreRequest = pickle.loads(message)
            if waits:
                asyncio.run(_score_async(function, weights, request, connection))
            else:
                for index in range(len(request.completions)):
                    _send(connection, _score_one(function, weights, request, index))
    if watcher is not None:  # the service is gone, or will send SIGTERM
        watcher.join()
    return 0


def _remove(folder: str) -> None:
    remove_tree(folder)


def reward_of(
    value: Any, weights: Mapping[str, float] = _NO_WEIGHTS
) -> tuple[float, dict[str, float]]:
    """Reward to train on and its named parts.

    Of named numbers, the one named `reward` is trained on, else the sum of those that do not report
    the outcome of the sample (`wire.TOLD`).
    """
    if isinstance(value, Mapping):
        if not value:
            raise TypeError("the reward function returned an empty mapping, but must name a number")
        parts = {str(name): _number(number) for name, number in value.items()}
        if weights:
            return _weighted(parts, weights), parts
        return parts["reward"] if "reward" in parts else _weighted(parts, {}), parts
    if weights:
        raise ValueError(
            f"reward.weights names {', '.join(weights)}, but the reward function returned one "
            "number without a name; return named numbers, or remove reward.weights"
        )
    return _number(value), {}


def _weighted(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    if unknown := weights.keys() - parts.keys():
        raise ValueError(
            f"reward.weights names {', '.join(sorted(unknown))}, but the reward function returned "
            f"{', '.join(parts)}; every weight needs a component of its name"
        )
    if "reward" in parts:
        raise ValueError(
            "the reward function returned `reward`, which is trained on as it is, so that "
            "reward.weights would have no effect; rename it, or remove reward.weights"
        )
    return math.fsum(
        weights.get(name, 0.0 if name in TOLD else 1.0) * number for name, number in parts.items()
    )


def _number(value: Any) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(
            f"the reward function returned {value!r}, but must return a number or named numbers"
        )
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward function returned {number}, but rewards must be finite")
    return number


def _function(message: bytes) -> tuple[Callable[..., Any], Mapping[str, float]]:
    sys_path, by_name, payload, kwargs, weights, sandbox = pickle.loads(message)
    # A function pickled by reference must be importable as in the sender.
    sys.path.extend(entry for entry in sys_path if entry not in sys.path)
    function = load_function(payload) if by_name else pickle.loads(payload)
    return bound(function, kwargs if by_name else {}, sandbox), weights


def bound(
    function: Callable[..., Any], kwargs: Mapping[str, Any], sandbox: LevelSetting
) -> Callable[..., Any]:
    """Function with its keyword arguments; for a class, an instance, which is then called.

    `sandbox` is the value of the parameter of this name, if there is one.
    """
    if takes_sandbox(function):
        kwargs = {"sandbox": sandbox, **kwargs}
        if runs_programs(function):
            choose(kwargs["sandbox"])
    if isinstance(function, type):
        made: Callable[..., Any] = function(**kwargs)
        return made
    return functools.partial(function, **kwargs) if kwargs else function


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, or the method that makes an object callable, has to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 -- not whether it can be called, but how
    )


def _score_one(
    function: Callable[..., Any], weights: Mapping[str, float], request: ScoreRequest, index: int
) -> Scored:
    try:
        value = function(request.completions[index], dict(request.example))
        if value is None:
            return Scored(request.number, index, "refused", detail=REFUSED)
        reward, parts = reward_of(value, weights)
    except Exception:
        return Scored(request.number, index, "error", detail=traceback.format_exc())
    return Scored(request.number, index, "ok", reward, parts)


async def _score_async(
    function: Callable[..., Any],
    weights: Mapping[str, float],
    request: ScoreRequest,
    connection: socket.socket,
) -> None:
    async def one(index: int, completion: str) -> None:
        limit = asyncio.timeout(request.timeout_s)
        try:
            async with limit:
                value = await function(completion, dict(request.example))
            if value is None:
                scored = Scored(request.number, index, "refused", detail=REFUSED)
            else:
                reward, parts = reward_of(value, weights)
                scored = Scored(request.number, index, "ok", reward, parts)
        except Exception as error:
            timed_out = isinstance(error, TimeoutError) and limit.expired()
            status: Status = "timeout" if timed_out else "error"
            scored = Scored(request.number, index, status, detail=traceback.format_exc())
        _send(connection, scored)

    if request.together:
        async with asyncio.TaskGroup() as group:
            for index, completion in enumerate(request.completions):
                group.create_task(one(index, completion))
    else:
        for index, completion in enumerate(request.completions):
            await one(index, completion)


def _send(connection: socket.socket, reply: Reply) -> None:
    try:
        data = pack_reply(reply)
    except BadReply:
        assert isinstance(reply, Scored)
        detail = traceback.format_exc()
        data = pack_reply(Scored(reply.request, reply.index, "error", detail=detail))
    connection.sendall(data)


def _received(connection: socket.socket) -> Iterator[bytes]:
    """Messages until the service closes its end."""
    with connection.makefile("rb") as stream:
        while header := stream.read(LENGTH.size):
            yield stream.read(LENGTH.unpack(header)[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
