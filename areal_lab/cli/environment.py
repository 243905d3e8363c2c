"""`areal-lab environment list|check`: tasks of an environment of another library, and episodes.

Each command imports its modules when it runs, so `--help` is fast.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from areal_lab.cli.command import command_class, schema
from areal_lab.cli.outputs import FAILED, error_exit, exit_on_error, failures_reported
from areal_lab.extras import require
from areal_lab.host.terminal import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from areal_lab.config.schema import TrainConfig
    from areal_lab.data.problems import Problem
    from areal_lab.shell.display import Display

_CONFIG: Final = "verifiers"
"""Shipped config whose settings apply unless another one is named."""
_SHOWN: Final = 60
"""Characters of a prompt in a table."""
_OF_ID: Final = 16
"""Characters of an id in a table: some are hashes."""
_RESPONSE: Final = "I do not know."
app = typer.Typer(
    help="List and check environments of other libraries.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the environment in its library.")
]
_Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG a.b=c",
        help="A config, else the shipped one (verifiers), and settings that override it: "
        "environment.python=envs/NAME/bin/python 'environment.args={num_tasks: 500}'",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_SCHEMA: Final = schema("areal_lab.config.schema:TrainConfig", "areal_lab.config.load:ALIASES")


@app.command("list", cls=command_class(_SCHEMA))
@exit_on_error
def list_tasks(
    name: _Name,
    settings: _Settings = None,
    *,
    limit: Annotated[int, typer.Option(min=0, help="List the first tasks only; 0 takes all.")] = 20,
    as_json: _Json = False,
) -> None:
    """List the tasks of an environment: ids, starts of the prompts, and their number."""
    config = _config_of(name, settings or [])
    with _progress() as display:
        version, tasks, _ = _loaded(config, display)
    shown = tasks[: limit or None]
    if as_json:
        listed = [{"id": one.key, "prompt": one.prompt} for one in shown]
        typer.echo(json.dumps({**_facts(config, version), "count": len(tasks), "tasks": listed}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("id", "prompt", box=None, padding=(0, 2), header_style="dim")
    for one in shown:
        table.add_row(_text(one.key, _OF_ID), _text(one.prompt))
    Console().print(table)
    rest = f", of which {len(shown)} are listed (--limit)" if len(shown) < len(tasks) else ""
    typer.echo(f"{name} of {config.environment.standard} {version}: {len(tasks):,} tasks{rest}")


@app.command(cls=command_class(_SCHEMA))
@exit_on_error
def check(
    name: _Name,
    settings: _Settings = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model folder or name, or RUN: also play an episode with it, and use its "
            "tokenizer. Without one, tokens are bytes.",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Task to play, by the start of its id; the default is the first."
        ),
    ] = None,
    response: Annotated[
        str, typer.Option(metavar="TEXT", help="Response of each turn of the scripted episode.")
    ] = _RESPONSE,
    as_json: _Json = False,
) -> None:
    """Check an environment: load it, play an episode of a fixed response and one of a model.

    Shows rewards, turns, the tokens that a run would train on, forks of the conversation, and
    times. Exits with 1 if an episode has no reward.
    """
    import asyncio

    from areal_lab.pipeline.environment_check import episode_report, play_model, play_response
    from areal_lab.pipeline.model_evaluation import prepare_evaluation

    config = _config_of(name, settings or [])
    episodes: list[dict[str, Any]] = []
    with _progress() as display, tempfile.TemporaryDirectory() as folder:
        version, tasks, load_s = _loaded(config, display)
        played = _task(tasks, task)
        evaluation, tokenizer = None, None
        if model is not None:
            display.phase(f"checking {model}")
            evaluation = prepare_evaluation(
                config.with_settings({"actor.path": model}),
                samples=1,
                out=Path(folder) / "none",
                given=[played],
            )
            tokenizer = evaluation.served.model
        display.phase("playing an episode of a fixed response")
        with failures_reported():
            found = asyncio.run(play_response(config, played, response, tokenizer))
            episodes.append({"policy": "a fixed response", **episode_report(found)})
            if evaluation is not None:
                found = asyncio.run(play_model(evaluation, display))
                episodes.append({"policy": model, **episode_report(found)})
    facts = {
        **_facts(config, version),
        "tasks": len(tasks),
        "load_s": load_s,
        "task": played.key,
        "tokenizer": "bytes" if model is None else model,
    }
    if as_json:
        typer.echo(json.dumps({**facts, "response": response, "episodes": episodes}))
    else:
        from rich.console import Console

        Console().print(_table(facts, episodes))
    for one in episodes:
        if one["reward"] is None:
            last = (one["detail"].strip() or one["status"]).splitlines()[-1]
            raise error_exit(f"the episode of {one['policy']} has no reward: {last}", FAILED)


def _config_of(name: str, arguments: Sequence[str]) -> TrainConfig:
    require("areal-lab environment", "train")
    from areal_lab.config.load import load_config, split_arguments
    from areal_lab.resolve.unread import ENVIRONMENT

    configs, changes = split_arguments(arguments)
    for change in changes:
        setting, _, value = change.partition("=")
        if setting.strip() in ("environment", "environment.name") and value.strip() != name:
            raise ValueError(
                f"the first argument names the environment {name}, but {change} another one; "
                f"leave {change} out, or give {value.strip()} as the first argument"
            )
    # The config may be that of a run; only the settings given in addition have to be used.
    config = load_config(configs or [_CONFIG], changes, files_are_given=False)
    for note in ENVIRONMENT.check(config):
        typer.secho(printable(f"note: {note}"), err=True, fg="yellow")
    if config.dataset.type != "environment":
        raise ValueError(
            f"dataset.type is {config.dataset.type!r}, but must be environment; leave out the "
            f"config to take that of {_CONFIG}"
        )
    return config.with_settings({"environment.name": name})


@contextmanager
def _progress() -> Iterator[Display]:
    from areal_lab.shell.display import terminal_display

    with terminal_display(str, str) as display:
        yield display


def _loaded(config: TrainConfig, display: Display) -> tuple[str, list[Problem], float]:
    """Version of the library, tasks, and the seconds that this took."""
    from areal_lab.data.runners.tasks import described, problems_of_tasks

    display.phase(f"loading {config.environment.name}")
    began_s = time.monotonic()
    version, tasks = described(config.environment)
    if not tasks:
        raise ValueError(f"environment {config.environment.name} has no tasks")
    return version, problems_of_tasks(tasks), time.monotonic() - began_s


def _task(tasks: Sequence[Problem], key: str | None) -> Problem:
    if key is None:
        return tasks[0]
    found = [one for one in tasks if one.key == key] or [
        one for one in tasks if one.key.startswith(key)
    ]
    if len(found) != 1:
        raise ValueError(
            f"--task is {key!r}, with which {len(found)} ids of {len(tasks)} begin, but must be "
            f"the id of one task, such as {tasks[0].key!r} (`areal-lab environment list`)"
        )
    return found[0]


def _facts(config: TrainConfig, version: str) -> dict[str, Any]:
    environment = config.environment
    return {
        "environment": environment.name,
        "standard": environment.standard,
        "version": version,
        "python": environment.python,
    }


def _text(text: str, characters: int = _SHOWN) -> Text:
    """The start of a text, in one line that a terminal can show."""
    from rich.text import Text

    line = printable(" ".join(text.split()))
    return Text(line if len(line) <= characters else f"{line[:characters]}...", no_wrap=True)


def _table(facts: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]) -> Table:
    from rich.text import Text

    from areal_lab.shell.terminal import two_columns

    table = two_columns()
    what = f"{facts['environment']} of {facts['standard']} {facts['version']}"
    table.add_row("environment", Text(printable(what)))
    table.add_row("tasks", f"{facts['tasks']:,}; loaded in {facts['load_s']:.1f} s")
    table.add_row("task", _text(facts["task"], _OF_ID))
    for one in episodes:
        table.add_row("", "")
        table.add_row("policy", Text(printable(one["policy"]), style="bold"))
        for name, value in _rows(one, facts["tokenizer"]):
            table.add_row(name, Text(printable(value), style="red" if name == "failure" else ""))
    return table


def _tools(offered: Sequence[str], calls: Mapping[str, int]) -> str:
    """Tools that the model may call, and how often it did.

    >>> _tools(["add", "times"], {"add": 2, "?": 1})
    'add (2 calls), times; unreadable or unknown calls: 1'
    """
    counts = {name: calls.get(name, 0) for name in (*offered, *calls) if name != "?"}
    told = [f"{name} ({n} call{'s' * (n != 1)})" if n else name for name, n in counts.items()]
    rest = f"unreadable or unknown calls: {calls['?']}" if "?" in calls else ""
    return "; ".join(filter(None, [", ".join(told), rest]))


def _rows(one: Mapping[str, Any], tokenizer: str) -> Iterator[tuple[str, str]]:
    def listed(values: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in values.items())

    if one["reward"] is None:
        yield "failure", f"{one['status']}: {one['detail'].strip().splitlines()[-1]}"
    else:
        parts = f" ({listed(one['rewards'])})" if one["rewards"] else ""
        yield "reward", f"{one['reward']:.4g}{parts}"
    if one["metrics"]:
        yield "metrics", listed(one["metrics"])
    yield "turns", f"{one['turns']}, end: {one['end']}"
    yield "tools", _tools(one["tools"], one["tool_calls"]) or "none"
    unit = "bytes" if tokenizer == "bytes" else "tokens"
    share = "" if one["trained_share"] is None else f" ({one['trained_share']:.1%})"
    rows = f"{one['rows']} row{'s' * (one['rows'] != 1)}"
    yield "trained", f"{one['trained_tokens']:,} of {one['tokens']:,} {unit}{share} in {rows}"
    yield "forks", listed(one["forks"]) or "none"
    model = f", of it the model {one['model_s']:.1f} s" if one["model_s"] else ""
    yield "time", f"start {one['start_s']:.1f} s, episode {one['episode_s']:.1f} s{model}"
