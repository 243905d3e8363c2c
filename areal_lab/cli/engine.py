"""The `areal-lab engine install|list|serve` commands: manage inference engines manually.

Each command imports its modules when it runs, so `--help` is fast.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from areal_lab.cli.command import command_class, read_options, schema
from areal_lab.cli.outputs import FAILED, error_exit, exit_on_error
from areal_lab.extras import require
from areal_lab.host.terminal import INTERRUPTED

if TYPE_CHECKING:
    from areal_lab.engines.launch.backends import Backend, Build
    from areal_lab.engines.launch.start import EngineProcess
    from areal_lab.engines.protocol import LoraShape

_PROGRESS_S: Final = 10.0
"""Seconds between two progress lines while a server starts."""

_ENGINE: Final = "A name that `areal-lab engine list` shows."
app = typer.Typer(
    help="Install, list and serve inference engines.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
@exit_on_error
def install(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help=_ENGINE)],
    *,
    build: Annotated[
        str | None, typer.Option(help="cpu or gpu; the default is gpu if a GPU is visible.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Reinstall even if it is up to date.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, then exit.")
    ] = False,
) -> None:
    """Install an engine into its own virtual environment.

    Does nothing if the environment is complete and up to date.
    """
    from rich.console import Console

    from areal_lab.engines.launch import install as installer
    from areal_lab.engines.launch.environments import environment, verify
    from areal_lab.engines.launch.install import Progress

    if build not in (None, "cpu", "gpu"):
        raise ValueError(f"--build is {build!r}, but must be cpu or gpu")
    recipe = installer.choose(engine, _as_build(build))
    try:
        found = verify(environment(engine))
    except OSError as error:
        raise error_exit(
            f"{recipe.folder} cannot be read ({error.strerror}); set AREAL_LAB_ENGINES to "
            "another folder", FAILED,
        ) from error  # fmt: skip
    if not force and not installer.needed(recipe, found):
        typer.echo(
            f"{engine} {found.version} ({found.build.upper()} build) is already installed in "
            f"{found.folder}; use --force to reinstall"
        )
        return
    typer.echo("\n".join(installer.describe(recipe, found)))
    started_s = time.monotonic()
    progress = Progress(Console(stderr=True))
    try:
        installer.check(recipe, force=force)
        if dry_run:
            typer.echo("dry run: nothing was changed")
            return
        installer.install(recipe, progress)
    except (installer.InstallError, OSError) as error:
        progress.end()
        raise error_exit(str(error), FAILED) from error
    except KeyboardInterrupt:
        progress.end()
        again = f"areal-lab engine install {engine}"
        typer.secho(f"interrupted; the environment is incomplete, run: {again}", err=True, fg="red")
        raise typer.Exit(INTERRUPTED) from None
    progress.end()
    installed = environment(engine)
    downloaded_gib = progress.downloaded_bytes / (1 << 30)
    typer.echo(
        f"{engine} {installed.version} is ready after {time.monotonic() - started_s:.0f} s "
        f"({downloaded_gib:.2f} GiB downloaded); use it with: areal-lab engine serve {engine}, or "
        f"rollout.backend={engine}"
    )


@app.command("list")
@exit_on_error
def list_engines() -> None:
    """List all engines with their state, version, build and folder."""
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


@app.command(cls=command_class(None, schema("areal_lab.config.serving:ServeConfig")))
@exit_on_error
def serve(
    ctx: typer.Context,
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help=_ENGINE)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="a=b -- ARGUMENTS",
            help="Options may be given as settings: port=30001. Extra arguments for the server "
            "follow --.",
        ),
    ] = None,
) -> None:
    """Serve a model until Ctrl-C and print its address.

    The server replies only to requests with its key: AREAL_LAB_ENGINE_KEY, else a random one in a
    file that only you can read. Runs on this machine find the file.
    """
    require("areal-lab engine serve", "train")
    import asyncio

    from areal_lab.config.serving import ServeConfig
    from areal_lab.engines.keys import take_key
    from areal_lab.engines.launch.backends import ServerOptions, backend_of
    from areal_lab.engines.launch.environments import engine_version, python_of
    from areal_lab.engines.launch.options import fit_to_machine
    from areal_lab.engines.launch.start import PortTaken, Start, check_host, start_server
    from areal_lab.host.processes import ChildDied
    from areal_lab.models.locate import sound_model_path

    options, extra = read_options(ServeConfig, {}, arguments or [], ctx.obj)
    backend = backend_of(engine)
    if options.device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device is {options.device!r}, but must be auto, cpu or cuda")
    check_host(options.host)
    # Before the model, whose first use may convert it for 20 s.
    python, version = python_of(engine), engine_version(engine)
    model = sound_model_path(options.model_path)
    server = fit_to_machine(
        backend,
        ServerOptions(
            model=model,
            version=str(options.weight_version),
            host=options.host,
            port=options.port,
            threads=options.threads,
            dtype=options.dtype,
            device=options.device,
            max_running_requests=options.max_running_requests,
            context_length=options.context_length,
            tensor_parallel=options.tensor_parallel,
            tokenizer=model if any(model.glob("tokenizer*")) else None,
            lora=_lora(backend, model, options.lora_rank),
            extra=tuple(extra),
        ),
    )
    log = Path(options.log or f"{tempfile.mkdtemp(prefix='areal_lab-log-')}/{engine}.log")
    typer.echo(f"starting {engine} with {model}; log: {log}", err=True)
    key = take_key()
    start = Start(
        backend=backend,
        python=python,
        version=version,
        index=0,
        log_path=log,
        ready_timeout_s=options.ready_timeout_s,
        request_timeout_s=None,
        key=key,
    )
    try:
        asyncio.run(
            _serve_until_stopped(lambda: start_server(start, server), options.model_path, bool(key))
        )
    except (ValueError, PortTaken, ChildDied, TimeoutError) as error:
        raise error_exit(str(error), FAILED) from error


def _lora(backend: Backend, model: Path, rank: int) -> LoraShape | None:
    """LoRA adapters on every linear layer, or None for rank 0."""
    from areal_lab.engines.launch.backends import lora_refusal
    from areal_lab.engines.protocol import EngineError, LoraShape
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


async def _serve_until_stopped(
    launch: Callable[[], Coroutine[None, None, EngineProcess]], model: str, own_key: bool = False
) -> None:
    """Start the server, print its address, wait for Ctrl-C or the server's exit.

    `own_key` is True if the user has chosen the key; otherwise it is in a file meanwhile.
    """
    import asyncio

    from areal_lab.engines.client.addresses import port_of
    from areal_lab.engines.keys import remove_key_file, write_key_file
    from areal_lab.shell.stop import StopSignal, stop_on_interrupt

    stop = StopSignal()
    stop_on_interrupt(stop, again=lambda: None)
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(launch())
    started_s = time.monotonic()
    while not starting.done() and not stopping.done():
        await asyncio.wait(
            {starting, stopping}, timeout=_PROGRESS_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not starting.done():
            typer.echo(f"[{time.monotonic() - started_s:5.0f} s] starting", err=True)
    if not starting.done():
        starting.cancel()  # stops the server, too
        await asyncio.wait({starting})
        return
    server = starting.result()
    port, key = port_of(server.base_url), server.client.key
    try:
        _announce(server, model, None if own_key else write_key_file(port, key))
        died = asyncio.create_task(server.child.died())
        await asyncio.wait({died, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            raise died.result()
        died.cancel()
    finally:
        remove_key_file(port, key)
        await server.stop()
    typer.echo("stopped", err=True)


def _announce(server: EngineProcess, model: str, key_file: Path | None) -> None:
    typer.echo(f"{server.backend} {server.version} serves {model} on {server.base_url}")
    typer.echo(
        f"""attach a run: areal-lab train CONFIG 'rollout.addresses=["{server.base_url}"]'"""
    )
    typer.echo(
        "its key is that of AREAL_LAB_ENGINE_KEY, which runs need, too"
        if key_file is None
        else f"its key is in {key_file}, where runs on this machine find it; for others, set "
        "AREAL_LAB_ENGINE_KEY to it"
    )
    typer.echo("press Ctrl-C to stop")
    sys.stdout.flush()


def _as_build(text: str | None) -> Build | None:
    match text:
        case "cpu" | "gpu":
            return text
    return None
