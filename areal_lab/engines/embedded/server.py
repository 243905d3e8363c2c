"""The process of the embedded engine: options, port, threads, shutdown.

    python -m areal_lab.engines.embedded.server --model-path FOLDER --port 30000

With the environment variable AREAL_LAB_ENGINE_KEY, every request needs this key (`engines.keys`).
Its HTTP interface, a subset of SGLang's protocol, is in `app`.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from areal_lab.engines.keys import App, KeyGuard, take_key
from areal_lab.host.processes import heavy_imports, watch_parent

if TYPE_CHECKING:
    from areal_lab.data.tokenize import TextCodec
    from areal_lab.engines.embedded.batcher import Batcher

_KEEP_ALIVE_S = 3600
"""Longer than any client keeps an idle connection, so that none is closed just when a request is
sent on it."""


def main(arguments: list[str] | None = None) -> None:
    """Serve until terminated."""
    watch_parent()
    key = take_key()
    options = _parser().parse_args(arguments)
    _require_model_folder(Path(options.model_path))
    if options.socket_fd is not None:
        listener = socket.socket(fileno=options.socket_fd)
    else:
        try:
            listener = listen(options.host, options.port)
        except OSError as error:
            sys.exit(f"port {options.port} on {options.host} is not available: {error.strerror}")
    host, port = listener.getsockname()[:2]
    print(f"embedded engine: {options.model_path} on http://{host}:{port}", flush=True)

    # Imported late, so that a wrong option or a used port is reported immediately.
    with heavy_imports():
        import uvicorn

        from areal_lab.engines.embedded.app import create_app
        from areal_lab.engines.embedded.scheduler import Scheduler

    scheduler = Scheduler(lambda: load_batcher(options), threads=options.threads)
    scheduler.start()
    app: App = create_app(scheduler, model_path=options.model_path)
    uvicorn.Server(
        uvicorn.Config(
            KeyGuard(app, key) if key else app,
            access_log=False,
            log_level="warning",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
    ).run(sockets=[listener])
    # An orderly interpreter exit would crash while the scheduler's thread is inside a step.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on this port; 0 takes a free one.

    Raises:
        OSError: the port is not available.
    """
    listener = socket.create_server((host, port))
    # As in `agents.gateway.server.bind`: read from its descriptor, so that asyncio turns Nagle's
    # algorithm off. Otherwise each reply waits 40 ms for an acknowledgment.
    return socket.socket(fileno=listener.detach())


def load_batcher(options: argparse.Namespace) -> Batcher:
    """The batcher of a server started with these options."""
    with heavy_imports():
        from transformers.utils import logging

        from areal_lab.engines.embedded.batcher import Batcher
        from areal_lab.engines.embedded.loading import load_model
        from areal_lab.engines.weights.folder import read_manifest
        from areal_lab.models.dtypes import compute_dtype
        from areal_lab.models.image_features import ImagePixels
        from areal_lab.models.vision import IMAGE_FILES, read_vision_facts

    logging.disable_progress_bar()
    folder = Path(options.model_path)
    version = options.weight_version
    if version is None:
        manifest = read_manifest(folder)
        version = str(manifest["version"]) if manifest is not None else "0"
    # A run's weight folders have neither a tokenizer nor the image processor's settings.
    settings = Path(options.tokenizer_path or folder)
    vision = None
    if any((settings / name).is_file() for name in IMAGE_FILES):
        vision = read_vision_facts(settings)
    return Batcher(
        load_model(folder, compute_dtype(options.dtype, options.device), options.device),
        version=version,
        codec=_codec(settings),
        max_running_requests=options.max_running_requests,
        context_length=options.context_length,
        kept_prefix_bytes=round(options.prefix_cache_gib * 2**30),
        vision=vision,
        pixels=None if vision is None else ImagePixels(settings),
    )


def _codec(folder: Path) -> Callable[[], TextCodec] | None:
    """Loads the tokenizer of a folder at its first use; None if there is none."""
    from areal_lab.data.tokenize import TOKENIZER_FILE, TextCodec

    return cache(partial(TextCodec.load, folder)) if (folder / TOKENIZER_FILE).is_file() else None


def _require_model_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        sys.exit(f"{folder} is not a model folder: it has no config.json")
    if not any(folder.glob("*.safetensors")):
        sys.exit(f"{folder} has no weights (*.safetensors)")


def _gib(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of GiB >= 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m areal_lab.engines.embedded.server",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model-path", required=True, help="Hugging Face model folder")
    parser.add_argument(
        "--tokenizer-path",
        help="folder of the tokenizer and the image processor's settings; default: the model "
        "folder, if it has them",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 uses a free port")
    parser.add_argument(
        "--socket-fd", type=int, help="inherited, bound socket to use instead of a port"
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument(
        "--device", default="cpu", choices=["cpu", "cuda"], help="cuda is the first visible GPU"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument(
        "--prefix-cache-gib",
        type=_gib,
        default=1.0,
        help="limit of the keys and values of ended requests, which the next turns of their "
        "conversations share: tensors on the model's device, for which a CPU process holds about "
        "half as much again; 0 keeps none",
    )
    parser.add_argument("--context-length", type=int, help="at most the model's; its default")
    parser.add_argument("--weight-version", help="default: the manifest's version, else 0")
    return parser


if __name__ == "__main__":
    main()
