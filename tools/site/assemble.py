"""Collect the pages of the site: `docs/`, the reference from docstrings, results beside the code.

    docs/ -----------------------------.
    docstrings --directives--> reference/ +--> build/docs --Zensical--> site/
    CHANGELOG.md, reproductions/, benchmarks/ --'

Pages are read on a code host too, so the pages in `docs/` need no site; what only a site can show,
the reference, is made here.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import areal_lab
import simulator

ROOT: Final = Path(__file__).parents[2]
ELSEWHERE: Final = {
    "CHANGELOG.md": "changelog.md",
    "reproductions/README.md": "reproductions.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages outside `docs/`, and their names in the site."""
FUNCTIONAL: Final = {
    "losses": ("losses",),
    "surrogates": ("surrogates",),
    "corrections": ("corrections",),
    "advantages": ("advantages",),
    "divergences": ("divergences",),
    "logprobs": ("logprobs",),
    "staleness": ("staleness",),
    "parts": ("aggregate", "ratios", "masked", "segments", "checks"),
}
"""Pages of `areal_lab.functional`, and their rooms or modules."""
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def assemble(target: Path) -> None:
    """Write all pages of the site into `target`, which is emptied first.

    Raises:
        ValueError: in one line: a page links to a file that the site does not have.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target)
    for source, name in ELSEWHERE.items():
        (target / name).write_text((ROOT / source).read_text(encoding="utf-8"), encoding="utf-8")
    shutil.copytree(ROOT / "reproductions" / "images", target / "images", dirs_exist_ok=True)
    (target / "reference").mkdir()
    for name, text in reference_pages().items():
        (target / "reference" / f"{name}.md").write_text(text, encoding="utf-8")
    for page in sorted(target.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(_linked(text, page.relative_to(target), target), encoding="utf-8")


def reference_pages() -> Mapping[str, str]:
    """Markdown with mkdocstrings directives, by the name of the page."""
    pages = {
        "areal_lab": _index("areal_lab", areal_lab._HOMES),
        "simulator": _index("simulator", simulator._HOMES),
        "control": _rooms("areal_lab.control", ["areal_lab.control"]),
    }
    for page, parts in FUNCTIONAL.items():
        names = [f"areal_lab.functional.{part}" for part in parts]
        pages[page] = _rooms(f"areal_lab.functional: {page}", names)
    return pages


def _index(title: str, homes: Mapping[str, str]) -> str:
    return _page(title, (f"{home}.{name}" for name, home in homes.items()))


def _rooms(title: str, names: Iterable[str]) -> str:
    return _page(title, names)


def _page(title: str, names: Iterable[str]) -> str:
    return "\n\n".join([f"# {title}", *(f"::: {name}" for name in names)]) + "\n"


def _linked(text: str, page: Path, target: Path) -> str:
    """The text with links to pages from elsewhere led to their names in the site."""
    origin = next((Path(k) for k, name in ELSEWHERE.items() if Path(name) == page), "docs" / page)

    def lead(match: re.Match[str]) -> str:
        link, anchor = match[1], match[2] or ""
        place = Path(os.path.normpath(origin.parent / link)).as_posix()
        if place in ELSEWHERE:
            new = ELSEWHERE[place]
        elif place.startswith("docs/"):
            new = place.removeprefix("docs/")
        elif place.startswith("reproductions/images/"):
            new = place.removeprefix("reproductions/")
        else:
            raise ValueError(f"{origin} links to {link}, which is no page of the site")
        if not (target / new).exists():
            raise ValueError(f"{origin} links to {link}, which does not exist")
        return f"]({os.path.relpath(new, page.parent)}{anchor})"

    return _LINK.sub(lead, text)
