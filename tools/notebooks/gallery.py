"""The gallery with titles and questions.

`marimo run FOLDER` names its cards after the files, unless a notebook's PEP 723 header has
`[tool.marimo.opengraph]`; but with that header marimo (0.25) prints four warnings each time the
notebook runs as a script. So titles and questions are read from the notebooks, here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from marimo._cli.cli import main
from marimo._metadata import opengraph

from tools.notebooks.files import FOLDER, app_title, prose


def serve(arguments: list[str]) -> None:
    """Run `marimo run` on the folder of notebooks until it is stopped.

    Args:
        arguments: further options of `marimo run`, such as `--port 2718 --headless`.
    """
    named_by_file = opengraph.resolve_opengraph_metadata

    def named(filepath: str, **others: Any) -> Any:
        found = named_by_file(filepath, **others)
        found.title, found.description = card(Path(filepath))
        return found

    # The server looks the function up when it lists the folder.
    opengraph.resolve_opengraph_metadata = named
    main(["run", str(FOLDER), *arguments])


def card(notebook: Path) -> tuple[str, str]:
    """Title and description of a notebook's card: its number, its title, its question."""
    text = notebook.read_text(encoding="utf-8")
    about = prose(text)[1]
    question = re.split(r"(?<=[.)]) ", " ".join(about.split()))[-1]
    number = notebook.stem.split("_", 1)[0].lstrip("0")
    return f"{number}. {app_title(text)}", question.replace("*", "").replace("`", "")
