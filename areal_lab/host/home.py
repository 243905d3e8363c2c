"""Expansion of `~` in user-supplied paths."""

from __future__ import annotations

from pathlib import Path


def expanded(path: str | Path, setting: str) -> Path:
    """The path with `~` or `~user` replaced by the home folder.

    Args:
        path: may begin with `~`.
        setting: name of the setting, for the message.

    Raises:
        ValueError: in one line, if the home folder of that user is unknown.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{setting} is {path}, but no home folder is known for {Path(path).parts[0]}; "
            "write the full path"
        ) from error
