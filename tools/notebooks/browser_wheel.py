"""The wheel for pages whose Python runs in the browser: the simulator, and what notebooks import.

areal_lab's own wheel asks for psutil and a terminal, which browsers lack. marimo makes wheels of
local modules itself, but without their presets, tables and scripts.
"""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from tools.notebooks.files import ROOT

PARTS: Final = (
    "simulator",
    "areal_lab/__init__.py",
    "areal_lab/capacity.py",
    "areal_lab/config",
    "areal_lab/configs",
    "areal_lab/control",
    "areal_lab/extras.py",
    "areal_lab/foreign",
    "areal_lab/host/__init__.py",
    "areal_lab/host/claim.py",
    "areal_lab/host/machine.py",
    "areal_lab/host/durable.py",
    "areal_lab/host/foreign.py",
    "areal_lab/host/durable.py",
    "areal_lab/host/isolation.py",
    "areal_lab/host/terminal.py",
    "areal_lab/plots",
    "areal_lab/metrics",
    "areal_lab/runlog",
    "areal_lab/widgets",
    "benchmarks/__init__.py",
    "benchmarks/harness.py",
    "reproductions",
)
"""Files and folders of the tree that the wheel contains, without pictures."""
LACKING: Final = {"marimo", "psutil", "rich", "typer"}
"""Requirements of areal_lab that pages do not need, or that come with the page."""
NEWER: Final = {"omegaconf": "omegaconf>=2.4"}
"""omegaconf before 2.4 requires a package that has no wheel."""
_DATE = (1980, 1, 1, 0, 0, 0)


def requirements() -> list[str]:
    """What the wheel asks for: areal_lab's requirements and those of notebooks, less `LACKING`."""
    project = _project()
    wanted = [*project["dependencies"], *project["optional-dependencies"]["notebooks"]]
    named = {re.split(r"[^\w.-]", each)[0]: each for each in wanted}
    return [NEWER.get(name, each) for name, each in named.items() if name not in LACKING]


def write_wheel(folder: Path, requires: Iterable[str]) -> Path:
    """Write the wheel into `folder`; the same tree gives the same bytes.

    Args:
        folder: exists.
        requires: requirements, as a wheel names them.
    """
    version = _project()["version"]
    about = f"areal_lab-{version}.dist-info"
    contents = {str(path.relative_to(ROOT)): path.read_bytes() for path in _files(PARTS)}
    contents[f"{about}/METADATA"] = "\n".join(
        [
            "Metadata-Version: 2.1",
            "Name: areal_lab",
            f"Version: {version}",
            *(f"Requires-Dist: {each}" for each in requires),
            "",
        ]
    ).encode()
    contents[f"{about}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: areal_lab\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in contents.items()]
    contents[f"{about}/RECORD"] = "\n".join([*record, f"{about}/RECORD,,", ""]).encode()
    wheel = folder / f"areal_lab-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in contents.items():
            file.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_DEFLATED)
    return wheel


def _files(parts: Sequence[str]) -> list[Path]:
    found = [one for part in parts for one in ((ROOT / part), *(ROOT / part).rglob("*"))]
    left_out = {".pyc", ".png"}
    return sorted(one for one in found if one.is_file() and one.suffix not in left_out)


def _project() -> dict[str, Any]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
