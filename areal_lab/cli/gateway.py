"""`areal-lab gateway`: engines behind the protocols of agents, until Ctrl-C.

Ctrl-C once     nothing new, calls that sample end, sessions are written
Ctrl-C twice    calls that sample are cut off, with the tokens so far; sessions are written
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer
from rich.console import Console

from areal_lab.agents.gateway.sessions import Limits
from areal_lab.agents.hosting.admin_key import how_to_start
from areal_lab.agents.hosting.conversations import Serving
from areal_lab.cli.errors import FAILED, error_exit, error_text
from areal_lab.config.load import load_config, split_arguments
from areal_lab.config.problem import ConfigError
from areal_lab.pipeline.gateway.prepare import GatewayPlan, prepare_gateway
from areal_lab.pipeline.gateway.serve import Ready, StandaloneGateway
from areal_lab.pipeline.progress import Lines

MAX_NEW_TOKENS: Final = 1024
"""Longest reply unless a config or `gconfig.max_new_tokens` is given."""
_TRY: Final = '{"task_id": "try"}'
_SETTING: Final = "gconfig.max_new_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """The options of the command line."""

    host: str
    port: int
    admin_key_file: str
    export: Path | None
    capacity: int | None
    max_sessions: int
    max_requests: int
    max_session_requests: int
    session_timeout_s: float
    reward_timeout_s: float
    pinned: bool
    turn_discount: float
    turn_discount_style: str
    tool_call_parser: str
    template: str
    describe_tools: bool
    seed: int | None


def run_gateway(model: str, arguments: Sequence[str], options: GatewayOptions) -> None:
    """Serve until Ctrl-C or SIGTERM; says on standard output where, and where sessions are.

    Raises:
        ConfigError: one line per problem, before any process starts.
        ValueError: an option is wrong, in one line.
    """
    plan = gateway_plan(model, arguments, options)
    try:
        asyncio.run(_until_stopped(plan))
    except ConfigError:
        raise
    except Exception as error:  # reported here, as no caller does
        raise error_exit(error_text(error), FAILED) from error
    typer.echo("stopped", err=True)


def gateway_plan(model: str, arguments: Sequence[str], options: GatewayOptions) -> GatewayPlan:
    """What the command line asks for, checked.

    Raises:
        ConfigError: one line per problem.
        ValueError: an option is wrong, in one line.
    """
    configs, changes = split_arguments(arguments)
    usual = not configs and not any(one.startswith(f"{_SETTING}=") for one in changes)
    if usual:
        changes = [f"{_SETTING}={MAX_NEW_TOKENS}", *changes]
    config = load_config(configs or None, [*changes, f"actor.path={model}"])
    stem = f"{Path(model).resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return prepare_gateway(
        config,
        Serving(
            tool_call_parser=options.tool_call_parser,
            template=options.template,
            describe_tools=options.describe_tools,
            turn_discount=options.turn_discount,
            turn_discount_style=options.turn_discount_style,
            pinned=options.pinned,
            limits=Limits(
                open_sessions=options.max_sessions,
                capacity=options.capacity,
                requests=options.max_requests,
                session_requests=options.max_session_requests,
                session_timeout_s=options.session_timeout_s,
                reward_timeout_s=options.reward_timeout_s,
            ),
        ),
        seed=secrets.randbits(31) if options.seed is None else options.seed,
        host=options.host,
        port=options.port,
        admin_key_file=options.admin_key_file,
        folder=options.export or Path("gateways") / stem,
        writes_all=options.export is not None,
        fits_length=usual,
    )


async def _until_stopped(plan: GatewayPlan) -> None:
    """Serve, and say where sessions are, also after a failure."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    serving = False

    def ready(told: Ready) -> None:
        nonlocal serving
        serving = True
        _announce(told, plan)

    gateway = StandaloneGateway(
        plan=plan, display=Lines(Console(stderr=True)), ready=ready, stop=stop, hurry=hurry
    )
    work = asyncio.create_task(gateway.run())

    def interrupt() -> None:
        if hurry.is_set() or not serving:
            work.cancel()
        if stop.is_set():
            hurry.set()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    await asyncio.wait((work,))
    lines = gateway.written
    if lines is not None and lines.written:
        typer.echo(f"sessions are in {lines.file}")
    if not work.cancelled():
        work.result()


def _announce(ready: Ready, plan: GatewayPlan) -> None:
    url, file = ready.url, ready.key_file
    lines = [
        f"{plan.model.name} is served on {url} by {ready.engines}",
        f"the admin key is in {file}, which only you can read",
        f"start a session: {how_to_start(url, file, _TRY)}",
        f"its api_key is for {url}/v1 (OpenAI) or {url} (Anthropic)",
    ]
    if plan.writes_all:
        lines.append(f"sessions are written to {plan.folder} when they end")
    if ready.open_to_others:
        lines.append(
            f"it listens on {plan.host}: other machines can reach it, and requests are not "
            "encrypted"
        )
    typer.echo("\n".join([*lines, "press Ctrl-C to stop"]))
    sys.stdout.flush()
