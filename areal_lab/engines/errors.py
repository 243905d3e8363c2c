"""Errors of an engine and of the connection to it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_lab.engines.protocol import Generated

_NOTHING: Mapping[str, Generated] = MappingProxyType({})


class EngineError(RuntimeError):
    """An engine refused or failed; the message names the engine and the request."""


class EngineUnreachable(EngineError):
    """The engine's server is gone, or did not reply in time."""

    def __init__(
        self,
        message: str,
        partial: Mapping[str, Generated] = _NOTHING,
        *,
        discarded_tokens: int = 0,
    ) -> None:
        super().__init__(message)
        self.partial = partial
        """The part received of each sample of a `generate` call, by request id: tokens, log-probs
        and versions. Samples without a token are left out; unfinished ones end with `abort`."""
        self.discarded_tokens = discarded_tokens
        """Further received tokens, discarded because the weights behind them are unknown."""


class VersionMismatch(EngineError):
    """An engine holds other weights than those it was sent."""
