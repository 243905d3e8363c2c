"""Paths that begin with `~`, as users write them."""

from __future__ import annotations

from pathlib import Path


def expanded(path: str | Path, setting: str) -> Path:
    """The path with the home folder in place of `~` or `~user`.

    Args:
        path: as it was given.
        setting: where it was given, for the message.

    Raises:
        ValueError: in one line: no home folder is known for that user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{setting} is {path}, but no home folder is known for {Path(path).parts[0]}; "
            "write the whole path"
        ) from error
