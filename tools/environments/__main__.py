"""Check every environment that is offered: `python -m tools.environments`, about ten minutes.

    child with hash seed 1 --facts, digests--\\
    child with hash seed 2 --digests----------> checked.json --tools.pages--> docs

Needs the extras reasoning-gym, textarena and math. `--math500` and `--gsm8k` take the test files of
these releases, which are not shipped.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

FILE: Final = Path(__file__).with_name("checked.json")
_ROOMS: Final = {"reasoning-gym": "reasoning", "textarena": "games"}


def main() -> int:
    """Check, and write `checked.json`."""
    parser = argparse.ArgumentParser(prog="python -m tools.environments", description=__doc__)
    parser.add_argument("--library", choices=[*_ROOMS, "math-verify"], default="")
    parser.add_argument("--names", nargs="*", help="only these environments of the library")
    parser.add_argument("--math500", type=Path)
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--child", choices=["facts", "digests"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return _child(given.library, given.child, given.names)
    found = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for library in _ROOMS:
        if given.library in ("", library):
            checked = _check(library, given.names)
            if given.names:
                checked["environments"] = found[library]["environments"] | checked["environments"]
            found[library] = checked
    if given.library in ("", "math-verify"):
        found["math-verify"] = _mathematics(
            given.math500, given.gsm8k, found.get("math-verify", {})
        )
    FILE.write_text(_lines(found), encoding="utf-8")
    return 0


def _lines(found: dict[str, Any]) -> str:
    """JSON with a line for each environment."""
    parts = []
    for library, of in sorted(found.items()):
        rows = [
            f"    {json.dumps(name)}: {json.dumps(facts, sort_keys=True)}"
            for name, facts in sorted(of["environments"].items())
        ]
        known = {name: value for name, value in of.items() if name != "environments"}
        head = json.dumps(known, sort_keys=True).removesuffix("}")
        body = ",\n".join(rows)
        parts.append(f'  {json.dumps(library)}: {head}, "environments": {{\n{body}\n  }}}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _check(library: str, names: list[str] | None) -> dict[str, Any]:
    """Facts of a library's environments, with whether another process makes the same tasks."""
    command = [sys.executable, "-m", "tools.environments", "--library", library]
    command += ["--names", *names] if names else []
    children = [
        subprocess.Popen(
            [*command, "--child", what], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for what, seed in (("facts", "1"), ("digests", "2"))
    ]  # fmt: skip
    outputs = [json.loads(child.communicate()[0]) for child in children]
    facts: dict[str, Any] = outputs[0]["facts"]
    for name, digest in outputs[0]["digests"].items():
        other = outputs[1]["digests"].get(name)
        facts[name]["same_elsewhere"] = None if other is None else digest == other
    python = ".".join(map(str, sys.version_info[:2]))
    version = importlib.metadata.version(library)
    return {"version": version, "python": python, "environments": facts}


def _child(library: str, what: str, wanted: list[str] | None) -> int:
    """Print digests, and facts, of a library's environments as JSON."""
    output = os.dup(1)
    os.dup2(2, 1)  # games print
    room = importlib.import_module(f"tools.environments.{_ROOMS[library]}")
    names = wanted or room.names()
    facts: dict[str, Any] = {}
    if what == "facts":
        for name, found in room.check(names):
            print(name, found, file=sys.stderr, flush=True)
            facts[name] = found
    with open(output, "w", encoding="utf-8") as pipe:
        json.dump({"facts": facts, "digests": room.digests(names)}, pipe)
    return 0


def _mathematics(
    math500: Path | None, gsm8k: Path | None, before: dict[str, Any]
) -> dict[str, Any]:
    from tools.environments import mathematics

    facts: dict[str, Any] = dict(before.get("environments", {}))
    for name, path in (("MATH-500", math500), ("GSM8K", gsm8k)):
        if path is not None:
            facts.update(mathematics.check(name, path))
    return {"version": importlib.metadata.version("math-verify"), "environments": facts}


if __name__ == "__main__":
    sys.exit(main())
