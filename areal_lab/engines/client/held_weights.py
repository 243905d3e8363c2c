"""The weights that an engine holds, as far as its client knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from areal_lab.control.events import Version
from areal_lab.engines.client.dialect import Digest

_KEPT = 3
"""Sets of weights whose digests are remembered."""


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """The adapter that requests name; its load was verified."""

    name: str
    """Empty means the base weights."""
    version: Version


@dataclass(slots=True)
class HeldWeights:
    """The engine's version, and digests that distinguish sets of weights."""

    version: Version | None = None
    """As the engine last reported it."""
    adapter: HeldAdapter | None = None
    """The current adapter, where versions are LoRA adapters on fixed weights."""
    digest: Digest | None = None
    """Digest of the weights loaded last."""
    shapes: Mapping[str, Sequence[int]] | None = None
    """Shapes of the engine's tensors, by name."""
    _digest_of: dict[str, Digest] = field(default_factory=dict)
    """Digests by our checksum."""
    _retired_caches: int = 0

    @property
    def cache_name(self) -> str:
        """Changes whenever a weight update leaves old keys and values in the cache, so that later
        requests share none of them."""
        return f"after-{self._retired_caches}-in-place" if self._retired_caches else ""

    def retire_cache(self) -> None:
        """Keep requests sent from now on from sharing the present cache."""
        self._retired_caches += 1

    def compare(self, checksum: str, digest: Digest | None) -> str | None:
        """Why the engine cannot hold the weights of this checksum, or None.

        A digest of our own kind must equal the checksum. Any other kind is compared with those of
        earlier sets: equal weights have equal digests, and different weights have different ones
        if the digest covers all weights.
        """
        self.digest = digest
        if digest is None:
            return None
        kind = checksum.partition(":")[0] + ":"
        if digest.value.startswith(kind):
            return None if digest.value == checksum else f"holds {digest.value}"
        known = self._digest_of.get(checksum)
        if known is not None and known != digest:
            return "its weights differ from those it had for the same set before"
        others = [one for other, one in self._digest_of.items() if other != checksum]
        if digest.whole and digest in others:
            return "still holds the weights of an earlier set"
        self._digest_of.pop(checksum, None)
        self._digest_of[checksum] = digest
        while len(self._digest_of) > _KEPT:
            del self._digest_of[next(iter(self._digest_of))]
        return None
