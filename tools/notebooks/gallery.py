"""The gallery with titles and questions.

`marimo run FOLDER` names its cards after the files, unless a notebook's PEP 723 header has
`[tool.marimo.opengraph]`; but with that header marimo (0.25) prints four warnings each time the
notebook runs as a script. So titles are read from the notebooks, and questions from the docs.
"""

from __future__ import annotations

import importlib
import re
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from marimo._cli.cli import main
from marimo._metadata import opengraph

from tools.notebooks.files import FOLDER, ROOT, app_title, setup_imports


def serve(arguments: list[str]) -> None:
    """Run `marimo run` on the folder of notebooks until it is stopped.

    Args:
        arguments: further options of `marimo run`, such as `--port 2718 --headless`.
    """
    named_by_file = opengraph.resolve_opengraph_metadata
    asked: SimpleQueue[Path | None] = SimpleQueue()
    Thread(target=load_setups, args=(asked,), daemon=True).start()

    def named(filepath: str, **others: Any) -> Any:
        found = named_by_file(filepath, **others)
        found.title, found.description = card(Path(filepath))
        asked.put(Path(filepath))
        return found

    # The server looks the function up when it lists the folder, and for the page of a notebook.
    opengraph.resolve_opengraph_metadata = named
    main(["run", str(FOLDER), *with_token(arguments)])


def load_setups(asked: SimpleQueue[Path | None]) -> None:
    """Import what notebooks import first, while a browser fetches their page's scripts, until None.

    The server is idle for a second then. A kernel is a thread of the server, so it finds the
    modules, or waits for the one that is being imported.
    """
    for notebook in iter(asked.get, None):
        for module, names in setup_imports(notebook.read_text(encoding="utf-8")):
            with suppress(ImportError):  # the notebook's own cell shows it
                loaded = importlib.import_module(module)
                for name in names:
                    getattr(loaded, name, None)  # of a package that imports names on demand


def with_token(arguments: list[str]) -> list[str]:
    """The options, with a key unless they say something about it: who reaches the gallery can read
    run folders and train as its user, and other users of the machine reach loopback."""
    said = any(one.startswith(("--token", "--no-token")) for one in arguments)
    return arguments if said else ["--token", *arguments]


def card(notebook: Path) -> tuple[str, str]:
    """Title and description of a card: a notebook's number and title, and its question in the docs.

    A notebook that `docs/notebooks.md` does not list, such as one of yours, has no description.
    """
    title = app_title(notebook.read_text(encoding="utf-8")) or notebook.stem
    number = notebook.stem.split("_", 1)[0].lstrip("0")
    if not number.isdigit():
        return title, ""
    listed = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    question = re.search(rf"^\| {number} {re.escape(title)} \| (.+) \|$", listed, re.MULTILINE)
    return f"{number}. {title}", question[1] if question else ""
