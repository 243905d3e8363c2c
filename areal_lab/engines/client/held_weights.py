"""What a client knows about the weights that its engine holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from areal_lab.control.events import Version
from areal_lab.engines.client.dialect import Digest

_KEPT = 3
"""Sets of weights whose digests are remembered."""


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """An adapter that requests name, compared when it was loaded."""

    name: str
    """Empty is the weights alone."""
    version: Version


@dataclass(slots=True)
class HeldWeights:
    """The engine's version, and digests that tell its weights apart."""

    version: Version | None = None
    """As the engine last reported it."""
    adapter: HeldAdapter | None = None
    """What draws, where versions are LoRA adapters on weights that stay."""
    digest: Digest | None = None
    """Of the weights loaded last."""
    shapes: Mapping[str, Sequence[int]] | None = None
    """Of the tensors that the engine has, by name."""
    _digest_of: dict[str, Digest] = field(default_factory=dict)
    """By our checksum."""
    _retired_caches: int = 0

    @property
    def cache_name(self) -> str:
        """Changes whenever keys and values stay in the cache whose weights go, so that later
        requests share none of them."""
        return f"after-{self._retired_caches}-in-place" if self._retired_caches else ""

    def retire_cache(self) -> None:
        """What is in the cache now is not for requests that are sent from now on."""
        self._retired_caches += 1

    def compare(self, checksum: str, digest: Digest | None) -> str | None:
        """What speaks against the engine holding the weights of this checksum, or None.

        Our own checksum has to be the same. Any other kind of digest is compared with those of the
        sets loaded before: equal weights have equal ones, and others another if it is of all.
        """
        self.digest = digest
        if digest is None:
            return None
        kind = checksum.partition(":")[0] + ":"
        if digest.value.startswith(kind):
            return None if digest.value == checksum else f"holds {digest.value}"
        known = self._digest_of.get(checksum)
        if known is not None and known != digest:
            return "its weights are not those that it had of this set before"
        others = [one for other, one in self._digest_of.items() if other != checksum]
        if digest.whole and digest in others:
            return "still holds the weights of a set before"
        self._digest_of.pop(checksum, None)
        self._digest_of[checksum] = digest
        while len(self._digest_of) > _KEPT:
            del self._digest_of[next(iter(self._digest_of))]
        return None
