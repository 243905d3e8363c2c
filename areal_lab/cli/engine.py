"""`areal-lab engine install|list|serve`: the inference servers, by hand.

What a command needs is imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from areal_lab.cli.errors import FAILED, INTERRUPTED, reported, stop
from areal_lab.extras import require

if TYPE_CHECKING:
    from areal_lab.engines.launch.backends import Backend, Build
    from areal_lab.engines.launch.start import EngineProcess
    from areal_lab.engines.protocol import LoraShape

_TELL_S: Final = 10.0
"""How often a wait for a server says that it goes on."""

_ENGINE: Final = "A name that `areal-lab engine list` shows."
app = typer.Typer(
    help="Install, list and serve inference engines.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
@reported
def install(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help=_ENGINE)],
    *,
    build: Annotated[
        str | None, typer.Option(help="cpu or gpu; gpu where one is visible, if not given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make it anew in any case.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")] = False,
) -> None:
    """Make the engine's own virtual environment; does nothing if that is there and whole."""
    from rich.console import Console

    from areal_lab.engines.launch import install as installer
    from areal_lab.engines.launch.environments import environment
    from areal_lab.engines.launch.install_progress import Progress
    from areal_lab.engines.launch.verify_environment import examined

    if build not in (None, "cpu", "gpu"):
        raise ValueError(f"--build is {build!r}, but must be cpu or gpu")
    recipe = installer.choose(engine, _as_build(build))
    try:
        found = examined(environment(engine))
    except OSError as error:
        raise stop(
            f"{recipe.folder} cannot be looked into ({error.strerror}); let AREAL_LAB_ENGINES name "
            "another folder", FAILED,
        ) from error  # fmt: skip
    if not force and not installer.needed(recipe, found):
        typer.echo(
            f"{engine} {found.version} ({found.build.upper()} build) is installed in "
            f"{found.folder} (--force makes it anew); nothing to do"
        )
        return
    typer.echo("\n".join(installer.describe(recipe, found)))
    began_s = time.monotonic()
    progress = Progress(Console(stderr=True))
    try:
        installer.check(recipe, force=force)
        if dry_run:
            typer.echo("nothing was done (--dry-run)")
            return
        installer.make(recipe, progress)
    except (installer.InstallError, OSError) as error:
        progress.end()
        raise stop(str(error), FAILED) from error
    except KeyboardInterrupt:
        progress.end()
        again = f"areal-lab engine install {engine}"
        typer.secho(f"stopped; what is there is half made, to go on: {again}", err=True, fg="red")
        raise typer.Exit(INTERRUPTED) from None
    progress.end()
    made = environment(engine)
    fetched = progress.downloaded_bytes / (1 << 30)
    typer.echo(
        f"{engine} {made.version} is ready after {time.monotonic() - began_s:.0f} s "
        f"({fetched:.2f} GiB fetched): areal-lab engine serve {engine}, or rollout.backend={engine}"
    )


@app.command("list")
@reported
def list_engines() -> None:
    """Say which engines there are, which are installed, and where."""
    from areal_lab.engines.launch.backends import BACKENDS
    from areal_lab.engines.launch.environments import environment

    rows = [("engine", "state", "version", "build", "folder")]
    for name in BACKENDS:
        found = environment(name)
        build = found.build.upper() if found.version else ""
        rows.append((name, found.condition, found.version, build, str(found.folder)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


@app.command()
@reported
def serve(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help=_ENGINE)],
    *,
    model_path: Annotated[
        str, typer.Option(help="A Hugging Face folder, or the name of a packaged model.")
    ] = "SmolLM2-135M-Instruct",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 30000,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets other machines in.")] = "127.0.0.1",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the server.")] = 1,
    max_running_requests: Annotated[int, typer.Option(min=1, help="Decoded together.")] = 64,
    context_length: Annotated[
        int | None, typer.Option(min=1, help="At most the model's, which is the default.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs of this server.")] = 1,
    lora_rank: Annotated[
        int, typer.Option(min=0, help="Takes LoRA adapters up to this rank; 0 takes none.")
    ] = 0,
    weight_version: Annotated[int, typer.Option(min=0, help="What it says it serves.")] = 0,
    ready_timeout_s: Annotated[float, typer.Option(min=1.0, help="Longest wait.")] = 600.0,
    log: Annotated[Path | None, typer.Option(help="Where its output goes.")] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGUMENTS", help="More arguments for the server itself."),
    ] = None,
) -> None:
    """Serve a model until Ctrl-C; prints the address that a run attaches to."""
    require("areal-lab engine serve", "train")
    import asyncio

    from areal_lab.engines.launch.backends import ServerOptions, backend_of
    from areal_lab.engines.launch.environments import engine_version, python_of
    from areal_lab.engines.launch.options import fitted
    from areal_lab.engines.launch.start import PortTaken, Start, check_host, start_server
    from areal_lab.host.processes import ChildDied
    from areal_lab.models.locate import resolve_model_path

    backend = backend_of(engine)
    check_host(host)
    model = resolve_model_path(model_path)
    options = fitted(
        backend,
        ServerOptions(
            model=model,
            version=str(weight_version),
            host=host,
            port=port,
            threads=threads,
            dtype=dtype,
            max_running_requests=max_running_requests,
            context_length=context_length,
            tensor_parallel=tensor_parallel,
            tokenizer=any(model.glob("tokenizer*")),
            lora=_lora(backend, model, lora_rank),
            extra=tuple(arguments or ()),
        ),
    )
    log = log or Path(tempfile.mkdtemp(prefix="areal_lab-log-")) / f"{engine}.log"
    typer.echo(f"starting {engine} with {model}; log: {log}", err=True)
    start = Start(
        backend=backend,
        python=python_of(engine),
        version=engine_version(engine),
        index=0,
        log_path=log,
        ready_timeout_s=ready_timeout_s,
        request_timeout_s=None,
    )
    try:
        asyncio.run(_until_asked(lambda: start_server(start, options), model_path))
    except (ValueError, PortTaken, ChildDied, TimeoutError) as error:
        raise stop(str(error), FAILED) from error


def _lora(backend: Backend, model: Path, rank: int) -> LoraShape | None:
    """Adapters to every linear layer, or None.

    Raises:
        ValueError: if the server cannot take them.
    """
    from areal_lab.engines.errors import EngineError
    from areal_lab.engines.launch.backends import lora_refusal
    from areal_lab.engines.protocol import LoraShape
    from areal_lab.engines.weights.verify_folder import linear_layers

    if rank == 0:
        return None
    try:
        names = tuple(linear_layers(model))
    except EngineError as error:
        raise ValueError(str(error)) from error
    lora = LoraShape(rank=rank, target_modules=names)
    if (refusal := lora_refusal(backend, lora)) is not None:
        raise ValueError(f"--lora-rank is {rank}, but {refusal}")
    if not names:
        raise ValueError(f"--lora-rank is {rank}, but {model} has no safetensors file with layers")
    return lora


async def _until_asked(
    launch: Callable[[], Coroutine[None, None, EngineProcess]], model: str
) -> None:
    """Start, say where, wait for Ctrl-C or the server's end."""
    import asyncio

    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    stopping = asyncio.create_task(asked.wait())
    starting = asyncio.create_task(launch())
    began_s = time.monotonic()
    while not starting.done() and not stopping.done():
        await asyncio.wait(
            {starting, stopping}, timeout=_TELL_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not starting.done():
            typer.echo(f"[{time.monotonic() - began_s:5.0f} s] loading", err=True)
    if not starting.done():
        starting.cancel()  # ends what was started
        await asyncio.wait({starting})
        return
    server = starting.result()
    try:
        _announce(server, model)
        dying = asyncio.create_task(server.child.died())
        await asyncio.wait({dying, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            raise dying.result()
        dying.cancel()
    finally:
        await server.stop()
    typer.echo("stopped", err=True)


def _announce(server: EngineProcess, model: str) -> None:
    typer.echo(f"{server.backend} {server.version} serves {model} on {server.base_url}")
    typer.echo(
        f"""attach a run: areal-lab train CONFIG 'rollout.addresses=["{server.base_url}"]'"""
    )
    typer.echo("Ctrl-C stops it")
    sys.stdout.flush()


def _as_build(text: str | None) -> Build | None:
    match text:
        case "cpu" | "gpu":
            return text
    return None
