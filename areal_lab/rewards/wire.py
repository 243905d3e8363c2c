"""Messages between the reward service and its workers, and addresses in `reward.fn`."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, NoReturn, TypeAlias, get_args

Status: TypeAlias = Literal["ok", "timeout", "error", "refused"]
"""Result of one call of the reward function; `refused` if it returned None."""

Told: TypeAlias = Literal["timed_out", "crashed", "refused", "no_answer"]
TOLD: Final[tuple[Told, ...]] = get_args(Told)
"""Named numbers with which a reward function reports the outcome of a scored sample, if they are
not 0; they are not part of the reward."""

LENGTH = struct.Struct("<Q")
"""Size in bytes of the following message."""

MOST_REPLY_BYTES: Final = 4 << 20
MOST_TEXT: Final = 20_000
"""Maximum characters of a traceback; of a longer one the end is sent."""
MOST_PARTS: Final = 1000
_MOST_NAME: Final = 200


@dataclass(frozen=True, slots=True)
class Ready:
    """The function is loaded."""

    is_async: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The function could not be loaded."""

    traceback: str


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Completions of one problem to score."""

    number: int
    """Number of the request, repeated in the replies."""
    completions: tuple[str, ...]
    example: Mapping[str, Any]
    together: bool
    """True if an async function scores all of them concurrently, False if in order."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Scored:
    """The result of one completion."""

    request: int
    index: int
    status: Status
    """`timeout` occurs with async functions only; a sync one is stopped from outside."""
    reward: float = math.nan
    """NaN unless `status` is ok."""
    rewards: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    """Traceback of an error."""


Reply: TypeAlias = Ready | Failed | Scored


class BadReply(ValueError):
    """A worker sent an invalid reply, which is discarded."""


def pack_reply(reply: Reply) -> bytes:
    """Encode a reply with its length; its texts are cut."""
    if isinstance(reply, Scored):
        _check_names(reply.rewards)
    fields = asdict(reply)
    if isinstance(reply, Scored) and reply.status != "ok":
        fields["reward"] = None
    for name in ("traceback", "detail"):
        if name in fields:
            fields[name] = fields[name][-MOST_TEXT:]
    kind = type(reply).__name__.lower()
    data = json.dumps({"kind": kind, **fields}, allow_nan=False).encode()
    return LENGTH.pack(len(data)) + data


def reply_size(header: bytes) -> int:
    """Size of the following reply; raises BadReply above 4 MiB."""
    size: int = LENGTH.unpack(header)[0]
    if size > MOST_REPLY_BYTES:
        raise BadReply(f"a reply of {size} bytes, but at most {MOST_REPLY_BYTES} are read")
    return size


def read_reply(data: bytes) -> Reply:
    """Decode the reply of a worker, which may send anything; raises BadReply for other content."""
    try:
        fields = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise BadReply(f"what is no JSON: {data[:40]!r}") from None
    match fields:
        case {"kind": "ready", "is_async": bool(is_async), **rest} if not rest:
            return Ready(is_async)
        case {"kind": "failed", "traceback": str(text), **rest} if not rest:
            return Failed(_text(text))
        case {
            "kind": "scored",
            "request": request,
            "index": index,
            "status": "ok" | "timeout" | "error" | "refused" as status,
            "reward": reward,
            "rewards": dict(rewards),
            "detail": str(detail),
            **rest,
        } if not rest and type(request) is type(index) is int:
            _check_names(rewards)
            parts = {_text(name): _number(value) for name, value in rewards.items()}
            total = _number(reward) if status == "ok" else math.nan
            return Scored(request, index, status, total, parts, _text(detail))
    raise BadReply(f"a reply with other fields: {data[:80]!r}")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _check_names(rewards: Mapping[str, Any]) -> None:
    if len(rewards) > MOST_PARTS or any(len(name) > _MOST_NAME for name in rewards):
        raise BadReply(
            f"{len(rewards)} components of a reward, but at most {MOST_PARTS} with names of up to "
            f"{_MOST_NAME} characters are read"
        )


def _number(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise BadReply(f"a reward that is not a finite number: {value!r:.40}")


def _text(text: str) -> str:
    """Text up to the maximum size, without characters that cannot be written to a file."""
    return text[-MOST_TEXT:].encode("utf-8", "replace").decode()


FUNCTION: Final = "areal_lab.rewards.http:HttpReward"
_SCHEMES: Final = ("http://", "https://")


class Unreachable(ValueError):
    """No service at the address; in one line."""


def is_address(fn: str) -> bool:
    """Return whether a reward function is a service over HTTP."""
    return fn.startswith(_SCHEMES)


def by_name(fn: str, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Reward function as `module:function`, and its keyword arguments."""
    return (FUNCTION, {"url": fn, **kwargs}) if is_address(fn) else (fn, dict(kwargs))
