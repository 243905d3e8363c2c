"""Run a server's module in the engine's own Python, behind a key, and exit with the parent.

    python -P in_engine.py MODULE arguments...

The engine's environment has no `areal_lab`, so four light modules of it are imported by path. They
need psutil and uvicorn, which every engine requires anyway. `-P` keeps this folder off the module
path, where its files would shadow others.

The key guards the whole HTTP application from outside. The engines' own options do not: SGLang's
`--api-key` leaves /health, /ready, /metrics and WebSockets open and is printed into the log, and
vLLM's leaves /health open and, in older releases, every path outside of /v1.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_kept: list[Any] = []
"""Context manager of a changed setting, kept alive: the change is undone when it is collected."""


def main() -> None:
    """Watch the parent, then run the module as `python -m` would."""
    # Appended, so that the engine's own packages come first, and only for these imports.
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from areal_lab.engines import keys
    from areal_lab.host import owned_folders, process_groups, processes

    reader: type | None = None
    with suppress(ImportError):  # without httptools, uvicorn reads with h11, which has limits
        from areal_lab.host import asgi

        reader = asgi.BoundedProtocol
    sys.path.pop()
    scratch = os.environ.get("AREAL_LAB_SCRATCH")
    segments = process_groups.Segments()

    def clean_up() -> None:
        group = os.getpgid(0)
        segments.record(group)
        process_groups.remove_segments(segments.found, group)
        if scratch:
            owned_folders.remove_tree(scratch)

    processes.on_parent_death(clean_up)
    processes.watch_parent()
    module, sys.argv[:] = sys.argv[1], sys.argv[1:]
    if key := keys.take_key():
        _guard(key, keys.KeyGuard, reader, calls_itself=module.startswith("sglang"))
    # alter_sys: processes that the server spawns find their main module by its name.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _guard(
    key: str, guard: Callable[[Any, str], Any], reader: type | None, *, calls_itself: bool
) -> None:
    """Put a guard around every application that this process serves."""
    import uvicorn

    configure = uvicorn.Config.__init__

    def configure_guarded(config: Any, app: Any, *args: Any, **named: Any) -> None:
        if isinstance(app, str):
            sys.exit(
                "a server with several HTTP processes would serve without its key; leave out "
                "--tokenizer-worker-num, --api-server-count and --workers"
            )
        if calls_itself:
            _tell_sglang(key)
        if reader is not None:
            named["http"] = reader
        configure(config, guard(app, key), *args, **named)

    setattr(uvicorn.Config, "__init__", configure_guarded)  # noqa: B010 - for the type checker


def _tell_sglang(key: str) -> None:
    """Make SGLang send the key with its requests to itself.

    By now it has printed its settings, and has started the processes that get a copy of them: the
    key is in neither, and not in the reply of /server_info.
    """
    from sglang.srt.runtime_context import get_serving

    setting = get_serving().override(api_key=key)
    setting.__enter__()
    _kept.append(setting)


if __name__ == "__main__":
    main()
