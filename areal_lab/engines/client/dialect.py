"""What one kind of server is asked, and how its answers are read: data and pure functions.

    Dialect.generate(requests) --> Call ... messages --> Dialect.read --> Chunk --> Arriving

The client performs the calls; nothing here sends anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from areal_lab.control.events import Version
from areal_lab.data.trajectory import FinishReason
from areal_lab.engines.errors import EngineError, VersionMismatch
from areal_lab.engines.protocol import GenerateRequest, PauseMode, WeightsFolder

Reply: TypeAlias = Any
"""A decoded JSON answer."""


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None


def get(path: str) -> Call:
    """A GET request."""
    return Call("GET", path)


def post(path: str, body: Mapping[str, Any] | None = None) -> Call:
    """A POST request with a JSON body."""
    return Call("POST", path, body or {})


class Span(NamedTuple):
    """Output tokens `start` .. `end - 1` were computed by these weights."""

    version: Version
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one message of a server says about one sample."""

    index: int = 0
    """Which sample of the HTTP request."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    total: int | None = None
    """Tokens of the sample up to and with these; None if they are always the newest."""
    spans: tuple[Span, ...] | None = None
    """Versions of all tokens so far, where the server says."""
    version: Version | None = None
    """The one version of this message, where the server says only that."""
    finish_reason: FinishReason | None = None
    retractions: int = 0
    cached_tokens: int = 0


class Digest(NamedTuple):
    """Tells an engine's weights apart: equal for equal weights."""

    value: str
    whole: bool = True
    """Whether it is of all weights; else different weights may have the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one kind of server is spoken to."""

    name: str
    together: bool
    """Whether one HTTP request carries all samples of a `generate` call."""
    generate: Callable[[Sequence[GenerateRequest], GenerateOptions], Call]
    """All requests if `together`, else exactly one."""
    read: Callable[[Reply], Chunk]
    """One message, streamed or not."""
    pause: Callable[[PauseMode], Call]
    resume: Call
    abort: Callable[[str], Call]
    """End one request."""
    abort_all: Callable[[Sequence[str]], Call]
    """End these, which are all there are of this client's: at once, so that none that waits takes
    the place of another."""
    load: Callable[[WeightsFolder, PauseMode], Sequence[Call]]
    """Load a folder into a paused engine, drop what was computed with other weights."""
    refusal: Callable[[Reply], str | None]
    """What a successful answer to a call of `load` has against it."""
    adapters: Call
    """Ask which LoRA adapters the engine has."""
    held_adapters: Callable[[Reply], Sequence[str]]
    """Their names."""
    adapter_support: Call
    supports_adapters: Callable[[Reply], bool]
    """Whether it was started for adapters, from the answer to `adapter_support`."""
    load_adapter: Callable[[str, WeightsFolder], Call]
    """Give it one more, by a name that no other has."""
    unload_adapter: Callable[[str], Call]
    """Let go of one that no running request names."""
    name_version: Callable[[Version], Call]
    """Have it report this version, whatever its weights."""
    held: Call
    """Ask which version the engine has."""
    held_version: Callable[[Reply], Version]
    digest: Call
    """Ask for a digest of the weights."""
    read_digest: Callable[[Reply], Digest | None]
    info: Call
    engine_name: Callable[[Reply], str]
    """Which of `backends.BACKENDS` the server is, from the answer to `info`."""
    engine_version: Callable[[Reply], str]
    """Version of its package, from the same answer."""
    tells_interruptions: bool
    """Whether every message says which version it is from and how often the sample lost its
    cache."""
    ready: Call
    """Answered with 200 by a server that generates; while it is paused, with anything."""
    ping_compute: Call
    """Answered by what computes, between two of its steps; `ready` may be answered by a process
    before it, whatever became of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What a client adds to requests."""

    stream: bool
    stream_interval: int
    """Tokens of a sample between two messages."""
    cache_name: str
    """Requests share cached prefixes with those of the same name only."""
    adapter: str = ""
    """The LoRA adapter that draws; empty is the weights alone."""


def parse_adapters(reply: Reply) -> tuple[str, ...]:
    """Names of the adapters among the models that a server lists, as OpenAI's API has them."""
    try:
        models = reply["data"]
        return tuple(str(one["id"]) for one in models if one.get("parent") is not None)
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"its list of models is {reply!r:.200}") from error


def parse_version(value: object) -> Version:
    """A version of ours.

    Raises:
        VersionMismatch: if it is none.
    """
    try:
        return int(str(value))
    except ValueError:
        raise VersionMismatch(
            f"weight version {value!r} is reported, which is not a version of ours"
        ) from None


def parse_spans(values: object) -> tuple[Span, ...]:
    """Version spans as both dialects write them, without empty ones."""
    if not isinstance(values, list):
        raise EngineError(f"version spans are {values!r:.200}")
    return tuple(
        Span(parse_version(one["version"]), int(one["start"]), int(one["end"]))
        for one in values
        if one["end"] > one["start"]
    )


def parse_finish_reason(kind: object) -> FinishReason | None:
    """`None` as long as the sample goes on."""
    match kind:
        case None:
            return None
        case "stop":
            return "stop"
        case "length":
            return "length"
        case "abort":
            return "abort"
    raise EngineError(f"the finish reason is {kind!r}")
