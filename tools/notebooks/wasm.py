"""Notebooks as pages whose Python runs in the browser: nothing computes on the server.

    notebook + wheel of areal_lab --> marimo, Chromium (resolves packages) --> folder to serve

The runtime (Pyodide) and packages such as numpy come from its package mirror while the folder is
made, and lie in the folder afterward: a page asks nothing of the network.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tools.notebooks.browser_wheel import requirements, write_wheel
from tools.notebooks.files import FOLDER
from tools.notebooks.pages import CHROMIUM

NAMES: Final = (
    "03_staleness",
    "04_speedup",
    "05_buy_a_cluster",
    "09_response_lengths",
    "12_your_own_run",
)
"""Notebooks that load no torch and start no processes."""


def export(
    target: Path,
    notebooks: Iterable[Path] | None = None,
    *,
    requires: Iterable[str] | None = None,
    pyodide: str | None = None,
    index: str | None = None,
) -> list[Path]:
    """Write pages and everything that they load into `target`; returns the pages.

    Args:
        target: made if it does not exist.
        notebooks: None takes `NAMES`.
        requires: what areal_lab needs in the page; None takes its requirements.
        pyodide: address of a mirror of Pyodide's `full/` distribution; None is the public one.
        index: address of a package index; None is the public one.

    Raises:
        RuntimeError: Chromium is missing, or the runtime or a package could not be fetched.
    """
    from marimo._export.exporter import Exporter
    from marimo._export.offline import OfflineExportError

    if not CHROMIUM.exists():
        raise RuntimeError(f"{CHROMIUM} does not exist; make test-browser installs it")
    target.mkdir(parents=True, exist_ok=True)
    Exporter().export_assets(target)
    sources = {"pyodide_index_url": pyodide, "pypi_index_url": index}
    pages = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(1) as thread,
        _debian_chromium(),
    ):
        wheel = write_wheel(Path(folder), requirements() if requires is None else requires)
        for notebook in notebooks or [FOLDER / f"{name}.py" for name in NAMES]:
            print(f"exporting {notebook.stem}", file=sys.stderr, flush=True)
            page = target / f"{notebook.stem}.html"
            try:
                # In a thread: the caller may have an event loop already, as Playwright has.
                text = thread.submit(_run, notebook, target, wheel, sources).result()
            except OfflineExportError as error:
                raise RuntimeError(
                    f"{notebook.name}: {error}\nThe runtime and packages such as numpy come from "
                    "Pyodide's package mirror while the pages are made; where it cannot be "
                    "reached, name another one: --pyodide URL --index URL"
                ) from error
            page.write_text(text, encoding="utf-8")
            pages.append(page)
    return pages


def _run(notebook: Path, target: Path, wheel: Path, sources: Mapping[str, str | None]) -> str:
    return asyncio.run(_page(notebook, target, wheel, sources))


async def _page(
    notebook: Path, target: Path, wheel: Path, sources: Mapping[str, str | None]
) -> str:
    """The text of one page; its packages are written into `target`."""
    from marimo._export.file import export_wasm
    from marimo._export.local_wheels import (
        copy_local_wheels,
        resolve_metadata_wheel_dependencies,
        with_wheel_dependencies,
    )
    from marimo._export.requests import WASMFileExportRequest
    from marimo._schemas.export_options import WASMExportOptions, WASMRuntimeConfig
    from marimo._utils.marimo_path import MarimoPath

    with tempfile.TemporaryDirectory() as folder:
        # marimo's own record of a wheel that a notebook names, made from a file that names ours.
        naming = Path(folder) / "naming.py"
        naming.write_text(f'# /// script\n# dependencies = ["areal_lab @ {wheel}"]\n# ///\n')
        wheels = resolve_metadata_wheel_dependencies(MarimoPath(naming))
    assert len(wheels) == 1
    result = await export_wasm(
        WASMFileExportRequest(
            path=MarimoPath(notebook),
            options=WASMExportOptions(
                mode="run", show_code=False, runtime=WASMRuntimeConfig(**sources)
            ),
            offline_export_dir=target,
            local_wheel_paths=(wheel,),
            code_transform=lambda code: with_wheel_dependencies(code, wheels),
        )
    )
    copy_local_wheels(target, [wheel])
    return result.text


@contextmanager
def _debian_chromium() -> Iterator[None]:
    """Let marimo resolve packages in Debian's Chromium: it would start Playwright's own."""
    from playwright.async_api import BrowserType

    own = BrowserType.launch

    async def launch(self: BrowserType, **options: Any) -> Any:
        return await own(self, executable_path=str(CHROMIUM), args=["--no-sandbox"], **options)

    BrowserType.launch = launch  # type: ignore[method-assign]
    try:
        yield
    finally:
        BrowserType.launch = own  # type: ignore[method-assign]
