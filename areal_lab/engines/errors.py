"""What can go wrong between a client and its engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_lab.engines.protocol import Generated

_NOTHING: Mapping[str, Generated] = MappingProxyType({})


class EngineError(RuntimeError):
    """An engine refused or failed; the message names the engine and what was asked."""


class EngineUnreachable(EngineError):
    """The engine's server is gone, or did not answer in time."""

    def __init__(
        self,
        message: str,
        partial: Mapping[str, Generated] = _NOTHING,
        *,
        discarded_tokens: int = 0,
    ) -> None:
        super().__init__(message)
        self.partial = partial
        """What had arrived of each sample of a `generate` call, by request id: tokens, log-probs
        and versions. Samples without a token are left out; those cut off end with `abort`."""
        self.discarded_tokens = discarded_tokens
        """That had arrived as well, and which weights drew them is not known."""


class VersionMismatch(EngineError):
    """An engine holds other weights than those it was sent."""
