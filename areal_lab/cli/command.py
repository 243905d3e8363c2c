"""Command-line options from a record of settings: `--max-sessions 8` is `max_sessions=8`.

    Record --command_class--> a command with its flags, and its settings in --help
    flags and arguments a=b --read_options--> Record, and the remaining arguments

Records are loaded when their command is called, so `--help` of other commands is fast.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from areal_lab.config.record import Record, Setting

Schema: TypeAlias = "Callable[[], tuple[type[Record], Mapping[str, str]]]"
"""Load a record of settings and their other names; the first other name is that of the flag."""
_R = TypeVar("_R", bound="Record")


def command_class(settings: Schema | None, options: Schema | None = None) -> type[TyperCommand]:
    """Create a command class.

    `settings` are set by arguments `a.b=c` and listed by `--help`, with named functions. `options`
    are set by flags, and by arguments `a=b` as well; the command gets the given flags by setting as
    `ctx.obj`, for `read_options`.
    """

    class Command(TyperCommand):
        @cached_property
        def _options(self) -> Sequence[Any]:
            return [] if options is None else _flags(*options())

        def get_params(self, ctx: Any) -> list[Any]:
            *known, last = super().get_params(ctx)  # the last is --help
            return [*known, *self._options, last]

        def invoke(self, ctx: Any) -> Any:
            if options is not None:
                values = {one.name: ctx.params.pop(one.name) for one in self._options}
                ctx.obj = {
                    name: value
                    for name, value in values.items()
                    if ctx.get_parameter_source(name).name == "COMMANDLINE"
                }
            return super().invoke(ctx)

        def format_help(self, ctx: Any, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            if settings is None:
                return
            from areal_lab.config.dump import format_settings
            from areal_lab.config.schema import TrainConfig

            record, aliases = settings()
            formatter.write("\nSettings, with their defaults:\n\n")
            formatter.write(format_settings(record, aliases) + "\n")
            if record is TrainConfig:
                from areal_lab.training.objective.formula_index import format_formulas

                formatter.write(f"\n{format_formulas()}\n")

    return Command


def schema(record: str, aliases: str = "") -> Schema:
    """A record and its other names, each as `module:NAME`."""

    def named(place: str) -> Any:
        module, _, name = place.partition(":")
        return getattr(import_module(module), name)

    return lambda: (named(record), named(aliases) if aliases else {})


def read_options(
    record: type[_R],
    aliases: Mapping[str, str],
    arguments: Sequence[str],
    flags: Mapping[str, Any],
    *,
    taken: Sequence[str] = (),
) -> tuple[_R, list[str]]:
    """Options, and the arguments that set none of them.

    An argument `a=b` may set an option, except for names in `taken`, which have another meaning
    there. `flags` are values by setting, which override those of arguments.
    """
    from areal_lab.config.load import load_record

    known = {*aliases, *record.model_fields} - {*taken}
    own = [one for one in arguments if "=" in one and one.partition("=")[0] in known]
    options = load_record(record(), None, own, aliases).with_settings(flags)
    return options, [one for one in arguments if one not in own]


def flag_of(setting: str, aliases: Mapping[str, str]) -> str:
    """Flag of a setting, such as `--gpus-per-node`."""
    name = next((alias for alias, known in aliases.items() if known == setting), setting)
    return f"--{name.replace('_', '-')}"


def _flags(record: type[Record], aliases: Mapping[str, str]) -> Sequence[Any]:
    """Command-line option for each setting of a record."""
    from areal_lab.config.dump import description
    from areal_lab.config.record import settings

    def declared() -> None:
        """Do nothing; the parameters are the options."""

    parameters = []
    for one in settings(record):
        flag, default = flag_of(one.name, aliases), one.default
        if default is True:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        option = typer.Option(
            None if default == [] else default,
            flag,
            help=description(one),
            metavar=one.metavar or None,
            min=one.bounds.least,
            max=one.bounds.most,
        )
        parameters.append(
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=_type_of(one)
            )
        )
    declared.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # of what typer reads
    declared.__annotations__ = {one.name: one.annotation for one in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(declared)
    command: Any = typer.main.get_command(app)
    return command.params  # type: ignore[no-any-return]  # typer's own click has no types


def _type_of(setting: Setting) -> Any:
    """Type for typer: a number, text, a truth value, or several texts."""
    bare = setting.bare
    if bare in (int, float, bool):
        return bare
    return str if setting.is_text else list[str]
