"""Errors of the data plane; each message names the host, the shard or folder, and a fix."""

from __future__ import annotations


class DataPlaneError(RuntimeError):
    """Tensors could not be put, fetched or freed."""


class StoreFull(DataPlaneError):
    """A host has no room for another shard; nothing was dropped to make room."""


class NotHeld(DataPlaneError):
    """A host does not hold this shard, folder or file, or no longer."""


class OtherIncarnation(DataPlaneError):
    """A host was restarted, or replaced in the meantime: what it held or sent is void."""


class Unreachable(DataPlaneError):
    """A host refuses connections, or is silent."""


class Damaged(DataPlaneError):
    """Bytes are incomplete or differ from their checksum."""


class Refused(DataPlaneError):
    """A host refused a request for another reason, such as a wrong key."""
