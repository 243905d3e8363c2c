"""Render chat templates in a separate process: a template is untrusted code.

    template.py --{"template", "names": {"messages": ...}}--> here --{"text"} or {"error"}-->

Jinja's sandbox protects files and objects of the program, but limits neither time nor memory:
`"x" * 10**10` takes 10 GB. So this process has limits of both. Messages have a length of four bytes
before their JSON.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import struct
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES: Final = 256 * 2**20
"""Memory that this process may allocate after its start."""
CPU_S: Final = 5.0
"""CPU time for parsing or rendering one template."""
MOST_CHARACTERS: Final = 32 * 2**20
"""Maximum characters of a rendered text."""
_MOST_ERROR: Final = 2000
"""Maximum characters of a template's error."""
LENGTH: Final = struct.Struct(">I")


class _TooLong(Exception):
    """Rendering exceeded its CPU time."""


def main() -> None:
    """Serve the socket of the first argument until it is closed; the second one is `CPU_S`."""
    parent = socket.socket(fileno=int(sys.argv[1]))
    limit_s = float(sys.argv[2])
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGVTALRM, _over)
    templates: dict[str, jinja2.Template] = {}
    with parent.makefile("rwb") as stream:
        while len(head := stream.read(LENGTH.size)) == LENGTH.size:
            asked = json.loads(stream.read(LENGTH.unpack(head)[0]))
            content = json.dumps(_reply(asked, templates, limit_s)).encode()
            stream.write(LENGTH.pack(len(content)) + content)
            stream.flush()


def _reply(
    asked: dict[str, Any], templates: dict[str, jinja2.Template], limit_s: float
) -> dict[str, str]:
    """Reply with the text of a conversation, or an error."""
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
        return {"text": _text(asked, templates)}
    except MemoryError:
        error = f"it takes more than {MEMORY_BYTES / 2**20:.0f} MiB of memory"
    except _TooLong:
        error = f"it takes longer than {limit_s:g} s"
    except jinja2.TemplateSyntaxError as wrong:
        return {"error": str(wrong.message), "line": f"line {wrong.lineno} of "}
    # Any exception of a template is about its input.
    except Exception as raised:
        error = str(raised)[:_MOST_ERROR] or type(raised).__name__
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return {"error": error}


def _text(asked: dict[str, Any], templates: dict[str, jinja2.Template]) -> str:
    """Text of a conversation; empty for a request that only loads a template."""
    name = asked["template"]
    if "names" not in asked:
        templates[name] = _compiled(name)
        return ""
    text = _rendered(templates[name], asked["names"], datetime.fromisoformat(asked["now"]))
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"its text is longer than {MOST_CHARACTERS:,} characters")
    return text


def _rendered(template: jinja2.Template, names: dict[str, Any], now: datetime) -> str:
    def strftime_now(pattern: str) -> str:
        return now.strftime(pattern)

    return template.render({**names, "strftime_now": strftime_now})


def _over(*_: object) -> NoReturn:
    raise _TooLong


class _Generation(Extension):
    """`{% generation %}` around assistant text: for masks, which are not needed here."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A separate scope: in transformers, names that are set inside do not leave the block.
        return nodes.Scope(body, lineno=line)


def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Filter `tojson` of transformers: Jinja's own escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
