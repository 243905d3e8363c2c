"""Notebooks as pages that need neither Python nor the network.

`marimo export html` writes pages whose scripts come from a content delivery network. The package
has the same scripts, so they are copied beside the pages once, and the pages are led to them. The
folder has to be served: browsers refuse module scripts of `file://`.
"""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import marimo

from areal_lab.runlog.records import log_of
from areal_lab.widgets.timeline import timeline_strip
from simulator import load_simulation, replicate
from tools.notebooks.files import FOLDER, ROOT, THUMBNAIL_PX, existing, thumbnail
from tools.notebooks.gallery import card

STATIC: Final = Path(marimo.__file__).parent / "_static"
_NETWORK: Final = re.compile(r"https://[^\"' )]*?/@marimo-team/frontend@[^/\"']*/dist")
_INDEX = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>areal_lab notebooks</title>
<link rel="icon" href="data:,">
<style>:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ max-width: 70rem; margin: 2rem auto; padding: 0 1rem }}
main {{ display: grid; gap: 2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)) }}
img {{ width: 100%; height: auto; border-radius: 6px }} h2 {{ font-size: 1.1rem; margin: 0.4rem 0 }}
p {{ margin: 0 }} h1 + p {{ margin-bottom: 2rem }} section {{ margin: 2rem 0 }}</style>
<h1>areal_lab notebooks</h1><p>As they were when they were exported: controls need Python.</p>
<main>{items}</main>{timeline}</html>
"""
_TIMELINE: Final = """<section><h2>A simulated run, played</h2>
<p>Two engines and a trainer at η = 2, as in notebook 3. Press play, or zoom in with the wheel.</p>
{strip}</section>
"""


def export(target: Path, names: Iterable[str] | None = None) -> list[Path]:
    """Run notebooks and write them into `target`, with an index; returns the pages.

    Raises:
        RuntimeError: a notebook failed, or marimo names the place of its scripts differently.
    """
    target.mkdir(parents=True, exist_ok=True)
    for folder in ("assets", "files"):
        if (STATIC / folder).is_dir():
            shutil.copytree(STATIC / folder, target / folder, dirs_exist_ok=True)
    for file in STATIC.iterdir():
        if file.is_file() and file.suffix != ".html":
            shutil.copy2(file, target / file.name)
    pages, items = [], []
    for name in existing() if names is None else names:
        print(f"exporting {name}", file=sys.stderr, flush=True)
        page = target / f"{name}.html"
        _run(name, page)
        page.write_text(offline(page.read_text(encoding="utf-8")), encoding="utf-8")
        pages.append(page)
        items.append(_item(name))
    (target / "index.html").write_text(
        _INDEX.format(items="\n".join(items), timeline=_timeline()), encoding="utf-8"
    )
    return pages


def _timeline() -> str:
    """A timeline that plays, of the simulation with which notebook 3 begins."""
    records: list[Any] = []
    config = load_simulation("small").with_settings({"schedule.eta": 2, "workload.steps": 12})
    replicate(config, processes=1, log=records.append)
    strip = timeline_strip(log_of(records), cells=1200)
    return _TIMELINE.format(strip=strip.html())


def _item(name: str) -> str:
    """A notebook in the index, which needs no other file: first picture, title, question."""
    title, question = card(FOLDER / f"{name}.py")
    drawn = thumbnail(name)
    picture = ""
    if drawn.exists():  # not of a notebook that was just added
        data = base64.b64encode(drawn.read_bytes()).decode()
        width, height = THUMBNAIL_PX
        picture = (
            f'<img src="data:image/png;base64,{data}" alt="the first picture of: {title}" '
            f'width="{width}" height="{height}">'
        )
    return (
        f'<article><a href="{name}.html">{picture}<h2>{title}</h2></a><p>{question}</p></article>'
    )


def offline(page: str) -> str:
    """The text of an exported page with its scripts beside it.

    Raises:
        RuntimeError: the page has no address of the scripts as marimo 0.25 writes it.
    """
    changed, found = _NETWORK.subn(".", page)
    if not found:
        raise RuntimeError(
            "an exported page has no address .../@marimo-team/frontend@VERSION/dist; marimo "
            f"{marimo.__version__} exports differently from 0.25: adapt tools/notebooks/export.py"
        )
    return changed


def _run(name: str, page: Path) -> None:
    command = [sys.executable, "-m", "marimo", "export", "html", f"{FOLDER / name}.py"]
    ended = subprocess.run(
        [*command, "--output", str(page), "--no-include-code", "--force"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"notebooks/{name}.py could not be exported:\n{ended.stderr.strip()}")
