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
from areal_lab.models.complete import check_folder

if TYPE_CHECKING:
    from areal_lab.data.tokenize import TextCodec
    from areal_lab.engines.embedded.batcher import Batcher

_KEEP_ALIVE_S = 3600
"""Longer than any client keeps an idle connection, so none is closed while a request is being
sent."""


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

    # Imported late, so a wrong option or a used port is reported immediately.
    with heavy_imports():
        from areal_lab.engines.embedded.app import create_app
        from areal_lab.engines.embedded.scheduler import Scheduler
        from areal_lab.host.asgi import Server, server_config

    scheduler = Scheduler(lambda: _loaded(options), threads=options.threads)
    scheduler.start()
    app: App = create_app(scheduler, model_path=options.model_path)
    Server(server_config(KeyGuard(app, key) if key else app, timeout_keep_alive=_KEEP_ALIVE_S)).run(
        sockets=[listener]
    )
    # An orderly interpreter exit would crash while the scheduler's thread is inside a step.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on this port; 0 takes a free one."""
    listener = socket.create_server((host, port))
    # As in `agents.gateway.server.bind`: created from its descriptor, so asyncio disables Nagle's
    # algorithm. Otherwise each reply waits 40 ms for an acknowledgment.
    return socket.socket(fileno=listener.detach())


def _loaded(options: argparse.Namespace) -> Batcher:
    """Load the batcher; a folder that cannot be loaded ends the process with one line."""
    try:
        return load_batcher(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # in the scheduler's thread, where an exit would be an error in a step


def load_batcher(options: argparse.Namespace) -> Batcher:
    """Create the batcher of a server with these options."""
    with heavy_imports():
        from transformers.utils import logging

        from areal_lab.engines.embedded.batcher import Batcher
        from areal_lab.engines.embedded.loading import load_model
        from areal_lab.engines.weights.folder import read_manifest
        from areal_lab.models.copies import limit_process_memory
        from areal_lab.models.folder import compute_dtype
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
    limit_process_memory(options.device, options.gpu_memory_fraction)
    return Batcher(
        load_model(folder, compute_dtype(options.dtype, options.device), options.device),
        version=version,
        codec=_codec(settings),
        max_running_requests=options.max_running_requests,
        context_length=options.context_length,
        kept_prefix_bytes=round(options.prefix_cache_gib * 2**30),
        cache_limit_bytes=options.cache_limit_bytes,
        vision=vision,
        pixels=None if vision is None else ImagePixels(settings),
    )


def _codec(folder: Path) -> Callable[[], TextCodec] | None:
    """Load the tokenizer of a folder at its first use; None without one."""
    from areal_lab.data.tokenize import TOKENIZER_FILE, TextCodec

    return cache(partial(TextCodec.load, folder)) if (folder / TOKENIZER_FILE).is_file() else None


def _require_model_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        sys.exit(f"{folder} is not a model folder: it has no config.json")
    if not any(folder.glob("*.safetensors")):
        sys.exit(f"{folder} has no weights (*.safetensors)")
    try:
        check_folder(folder)
    except ValueError as error:
        sys.exit(str(error))


def _gib(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of GiB >= 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of bytes >= 1")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0 and up to 1")
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
    parser.add_argument(
        "--cache-limit-bytes",
        type=_count,
        help="limit of all keys and values, kept prefixes included: requests beyond it wait, if "
        "running ones need more, the newest wait again, and a single one that cannot fit is "
        "refused; default: 0.7 of the free memory of a GPU, and no limit on a CPU, where a limit "
        "makes attention slower",
    )
    parser.add_argument(
        "--gpu-memory-fraction",
        type=_fraction,
        default=1.0,
        help="part of the GPU's memory that this process may allocate",
    )
    parser.add_argument("--context-length", type=int, help="at most the model's; its default")
    parser.add_argument("--weight-version", help="default: the manifest's version, else 0")
    return parser


if __name__ == "__main__":
    main()
