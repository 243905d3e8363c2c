"""A model's own chat template: messages as plain data in, text out; without torch or transformers.

A template is a small program in Jinja's language that comes with a model. It runs in Jinja's
sandbox, with the names that transformers gives it (`transformers.utils.chat_template_utils`, 5.23).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Plain: TypeAlias = Mapping[str, Any]
"""A message or a tool as templates read it: the same keys as in OpenAI's chat requests."""

TEMPLATE_FILE: Final = "chat_template.jinja"
_CONFIG_FILE: Final = "tokenizer_config.json"
_TOKEN_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class TemplateRefusal(ValueError):
    """The template refused a conversation; the message has its words."""


class ChatTemplate:
    """A compiled template and the names that it reads."""

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        tokens: Mapping[str, str] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Compile a template.

        Args:
            source: text of the template.
            tool_source: text of another template, for conversations with tools.
            tokens: names of special tokens, by `bos_token` and the like.
            arguments: what else the template reads, such as `enable_thinking`.

        Raises:
            ValueError: in one line, if a template is not written in Jinja's language.
        """
        self._plain = _compiled(source)
        self._with_tools = self._plain if tool_source is None else _compiled(tool_source)
        self._names = {**(tokens or {}), **(arguments or {})}
        self.source = source if tool_source is None else source + tool_source
        """Text of the template; of both, if there is another one for tools."""

    def render(
        self, messages: Sequence[Plain], tools: Sequence[Plain], *, now: datetime, speaks_next: bool
    ) -> str:
        """The text of a conversation.

        Args:
            messages: in order, system messages included.
            tools: functions that the model may call.
            now: what the template takes for the present; some write the date into the prompt.
            speaks_next: whether the text ends where the assistant begins to speak.

        Raises:
            TemplateRefusal: the template raised an error.
        """

        def strftime_now(pattern: str) -> str:
            return now.strftime(pattern)

        names = {
            **self._names,
            "messages": list(messages),
            "tools": list(tools) or None,
            "add_generation_prompt": speaks_next,
            "strftime_now": strftime_now,
        }
        try:
            return (self._with_tools if tools else self._plain).render(names)
        # Templates are foreign programs: what they raise, of whatever type, is about their input.
        except Exception as error:
            raise TemplateRefusal(f"the chat template refuses the conversation: {error}") from error


def load_template(
    folder: str | Path,
    file: str | Path | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """The chat template of a model folder.

    Args:
        folder: of the model; its tokenizer's configuration names the special tokens.
        file: a template to use instead of the folder's own.
        arguments: what the template reads beside messages and tools.

    Raises:
        ValueError: in one line: there is no template, or it cannot be read.
    """
    folder = Path(folder)
    config = _config(folder / _CONFIG_FILE)
    own = folder / TEMPLATE_FILE
    tool_source = None
    if file is not None:
        where, source = Path(file), _text(Path(file))
    elif own.is_file():
        where, source = own, _text(own)
    else:
        where = folder / _CONFIG_FILE
        named = config.get("chat_template")
        if isinstance(named, list):
            sources = {entry["name"]: entry["template"] for entry in named}
            named, tool_source = sources.get("default"), sources.get("tool_use")
        if not isinstance(named, str) or not named:
            raise ValueError(
                f"{folder} has no chat template (no {TEMPLATE_FILE}, none in {_CONFIG_FILE}), but "
                "agents speak in messages; give a template file, or use the instruct model of the "
                "same family"
            )
        source = named
    try:
        return ChatTemplate(
            source, tool_source=tool_source, tokens=_token_names(config), arguments=arguments
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


class _Generation(Extension):
    """`{% generation %}` around what the assistant says: for masks, which nothing here needs."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own: in transformers, names that are set inside do not leave the block.
        return nodes.Scope(body, lineno=line)


def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"line {error.lineno} of the chat template cannot be read: {error.message}"
        ) from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: Jinja's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the chat template {file} cannot be read: {error}") from error


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{file} is a {type(read).__name__}, but must be a JSON object")
    return read


def _token_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Names of special tokens, which old files write as records."""
    names = {}
    for name in _TOKEN_NAMES:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            names[name] = text
    return names
