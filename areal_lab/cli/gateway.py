"""`areal-lab gateway`: engines behind the protocols of agents, until Ctrl-C.

Ctrl-C once     refuse new calls, finish running ones, write sessions
Ctrl-C twice    abort running calls, keep their tokens so far, write sessions
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console

from areal_lab.agents.hosting.admin_key import how_to_start
from areal_lab.cli.command import read_options
from areal_lab.cli.outputs import failures_reported
from areal_lab.config.load import load_config, split_arguments
from areal_lab.config.serving import GATEWAY_ALIASES, GatewayConfig
from areal_lab.host.terminal import printable
from areal_lab.pipeline.gateway.prepare import GatewayPlan, prepare_gateway
from areal_lab.pipeline.gateway.serve import Ready, StandaloneGateway
from areal_lab.resolve.unread import GATEWAY
from areal_lab.shell.display import Lines, reminders
from areal_lab.shell.stop import StopSignal, stop_on_interrupt

MAX_NEW_TOKENS: Final = 1024
"""Longest reply unless a config or `gconfig.max_new_tokens` is given."""
_TRY: Final = '{"task_id": "try"}'
_SETTING: Final = "gconfig.max_new_tokens"


def run_gateway(model: str, arguments: Sequence[str], flags: Mapping[str, Any]) -> None:
    """Serve until Ctrl-C or SIGTERM; prints the address, and the file of sessions, on standard
    output.

    `model` is a folder or a name; `arguments` are a config, and settings over it or of
    `GatewayConfig`; `flags` are more settings of `GatewayConfig`.
    """
    plan = gateway_plan(model, arguments, flags)
    with failures_reported():
        asyncio.run(_until_stopped(plan))
    typer.echo("stopped", err=True)


def gateway_plan(model: str, arguments: Sequence[str], flags: Mapping[str, Any]) -> GatewayPlan:
    """Parse and check the command line; see `run_gateway`."""
    options, arguments = read_options(
        GatewayConfig, GATEWAY_ALIASES, arguments, flags, taken=("seed",)
    )
    configs, changes = split_arguments(arguments)
    usual = not configs and not any(one.startswith(f"{_SETTING}=") for one in changes)
    if usual:
        changes = [f"{_SETTING}={MAX_NEW_TOKENS}", *changes]
    # The config may be that of a run; only the settings given in addition have to be used.
    config = load_config(configs or None, changes, files_are_given=False)
    for note in GATEWAY.check(config):
        typer.secho(printable(f"note: {note}"), err=True, fg="yellow")
    stem = f"{os.path.basename(os.path.realpath(model))}-{time.strftime('%Y%m%d-%H%M%S')}"
    return prepare_gateway(
        config.with_settings({"actor.path": model}),
        options,
        folder=Path("gateways") / stem,
        fits_length=usual,
    )


async def _until_stopped(plan: GatewayPlan) -> None:
    """Serve, and print the file of sessions, even after a failure."""
    stop, end_now = StopSignal(), StopSignal()
    serving = False
    display, starting = Lines(Console(stderr=True)), ExitStack()

    def ready(address: Ready) -> None:
        nonlocal serving
        serving = True
        starting.close()
        _announce(address, plan)

    gateway = StandaloneGateway(plan=plan, display=display, ready=ready, stop=stop, end_now=end_now)
    work = asyncio.create_task(gateway.run())

    def unless_serving() -> None:
        if not serving:
            work.cancel()

    def again() -> None:
        if end_now.requested or not serving:
            work.cancel()
        end_now.request()

    stop_on_interrupt(stop, first=unless_serving, again=again)
    with starting:
        starting.enter_context(reminders(display))
        await asyncio.wait((work,))
    lines = gateway.written
    if lines is not None and lines.written:
        typer.echo(f"sessions are in {lines.file}")
    if not work.cancelled():
        work.result()


def _announce(ready: Ready, plan: GatewayPlan) -> None:
    url, file = ready.url, ready.key_file
    lines = [
        f"{plan.served.model.name} is served on {url} by {ready.engines}",
        f"the admin key is in {file}, which only you can read",
        f"start a session: {how_to_start(url, file, _TRY)}",
        f"its api_key is for {url}/v1 (OpenAI) or {url} (Anthropic)",
    ]
    if plan.writes_all:
        lines.append(f"sessions are written to {plan.folder} when they end")
    if ready.open_to_others:
        lines.append(
            f"it listens on {plan.options.host}: other machines can reach it, and requests are not "
            "encrypted"
        )
    typer.echo("\n".join([*lines, "press Ctrl-C to stop"]))
    sys.stdout.flush()
