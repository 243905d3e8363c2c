"""Files of a deployment: YAML that every parser reads alike, and writing without losing edits.

    File --write_files--> on disk, its last line a digest of the lines before it

A file whose digest still matches has not been edited since it was written, and may be replaced.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from areal_lab.host.durable import replace_bytes

_MARK: Final = b"# areal-lab deploy: "
_PLAIN: Final = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
"""Text that is a string to every YAML parser, unless it is a keyword."""
_WORDS: Final = frozenset(("true", "false", "yes", "no", "on", "off", "y", "n", "null"))


@dataclass(frozen=True, slots=True)
class File:
    """A file to write."""

    name: str
    text: str
    purpose: str
    """Purpose of the file, for the user."""


class Edited(ValueError):
    """Files have been edited since they were written; the message names them."""


def yaml_text(value: Any, indent: int = 0) -> str:
    """Format a value as YAML; all lines but the first are indented, and the last has no line break.

    Text is quoted unless it consists of letters, digits and `_./-`: parsers of YAML 1.1 and 1.2
    disagree on other strings (`1e3`, `no`, `0o17`). Keys keep their order.
    """
    yaml: Any = importlib.import_module("yaml")  # by name: it has no types

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # it has no types
        """Without anchors, which make files hard to edit."""

        def ignore_aliases(self, _: Any) -> bool:
            """Return whether equal parts are written each time."""
            return True

    def represent(dumper: Any, text: str) -> Any:
        style: str | None = '"'
        if "\n" in text and all(one.isprintable() or one == "\n" for one in text):
            style = "|"  # other line breaks only: YAML 1.1 takes them for this one
        elif _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
            style = None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    text: str = yaml.dump(
        value, Dumper=Dumper, sort_keys=False, width=float("inf"), allow_unicode=True
    )
    end = "\n...\n" if text.endswith("\n...\n") else "\n"  # a mark below some lone scalars
    return re.sub(r"\n(?=[^\n])", "\n" + " " * indent, text.removesuffix(end))


def read_yaml_text(text: str) -> list[Any]:
    """Parse the documents of YAML."""
    yaml: Any = importlib.import_module("yaml")  # by name: it has no types
    return list(yaml.safe_load_all(text))


def comments(lines: Sequence[str]) -> str:
    """Format lines as comments of YAML, Dockerfiles and shells."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def write_files(folder: Path, files: Sequence[File], *, force: bool = False) -> Mapping[str, str]:
    """Write files into a folder, all or none of them.

    Returns `written`, `unchanged` or `replaced` by name. Without `force`, raises Edited if a file
    there differs and was edited, or written by someone else.
    """
    signed = {file.name: _signed(file.text) for file in files}
    done: dict[str, str] = {}
    edited: list[Path] = []
    for name, text in signed.items():
        path = folder / name
        if not path.exists():
            done[name] = "written"
            continue
        found = path.read_bytes()
        done[name] = "unchanged" if found == text else "replaced"
        if found != text and not _unedited(found):
            edited.append(path)
    if edited and not force:
        raise Edited(
            "\n".join(
                f"{path} has been edited, or was not written by areal-lab deploy; give another "
                "--out FOLDER, or --force to replace it"
                for path in edited
            )
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in signed.items():
        if done[name] != "unchanged":
            replace_bytes(folder / name, text)
    return done


def _signed(text: str) -> bytes:
    body = (text if text.endswith("\n") else f"{text}\n").encode()
    return body + _last_line(body)


def _unedited(found: bytes) -> bool:
    body, mark, _ = found.rpartition(_MARK)
    return bool(mark) and found == body + _last_line(body)


def _last_line(body: bytes) -> bytes:
    return _MARK + hashlib.sha256(body).hexdigest()[:16].encode() + b"\n"
