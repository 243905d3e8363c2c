"""The admin key of a gateway, in a file that only its user can read.

no file named    a new key, in the folder of the engines' keys, while the gateway serves
a file named     its key; if the file does not exist, it is created with a new key, and stays
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from areal_lab.agents.gateway.sessions import sendable
from areal_lab.engines.keys import key_file, new_key, remove_key_file, write_private
from areal_lab.host.durable import expanded
from areal_lab.host.owned_folders import nearest_existing

_OTHERS: Final = 0o077
"""Permissions of everybody except the owner."""


@dataclass(frozen=True, slots=True)
class AdminKey:
    """The key and its file."""

    key: str = field(repr=False)
    file: Path


@contextmanager
def admin_key(port: int, file: str = "") -> Iterator[AdminKey]:
    """Provide the admin key of a gateway until the end of the block."""
    if not file:
        given = AdminKey(new_key(), key_file(port))
        _write(given)
        try:
            yield given
        finally:
            remove_key_file(port, given.key)
        return
    check_admin_key_file(file)
    path = expanded(file, "admin_key_file")
    if path.exists():
        yield AdminKey(path.read_text().strip(), path)
        return
    given = AdminKey(new_key(), path)
    _write(given)
    yield given


def check_admin_key_file(file: str) -> None:
    """Reject a file that `admin_key` could not use; an empty name is valid."""
    if not file:
        return
    path = expanded(file, "admin_key_file")
    what = f"admin_key_file is {path}"
    if not path.exists():
        folder = nearest_existing(path.parent)
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise ValueError(f"{what}, but {folder} is not a writable folder; name another file")
        return
    if not path.is_file():
        raise ValueError(f"{what}, which is not a file; name a file")
    mode = path.stat().st_mode & 0o777
    if mode & _OTHERS:
        raise ValueError(f"{what}, which others can read (mode {mode:o}); run: chmod 600 {path}")
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no ASCII text"
        raise ValueError(f"{what}, which cannot be read ({reason}); name another file") from error
    if not sendable(key):
        raise ValueError(
            f"{what}, but its content is not a key: printable ASCII characters without spaces; "
            "remove the file to get a new key"
        )


def how_to_start(url: str, file: Path, body: str = "{}") -> str:
    """Command that starts a session."""
    return (
        f'curl {url}/rl/start_session -H "Authorization: Bearer $(cat {shlex.quote(str(file))})" '
        f"-d {shlex.quote(body)}"
    )


def _write(key: AdminKey) -> None:
    try:
        write_private(key.file, key.key)
    except OSError as error:
        raise ValueError(
            f"the admin key of the gateway cannot be written to {key.file} ({error.strerror}); set "
            "admin_key_file to another file"
        ) from error
