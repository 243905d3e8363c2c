"""A model's own chat template: plain messages in, text out; without torch or transformers.

A template is a small Jinja program that comes with a model. It runs in Jinja's sandbox, with the
names that transformers defines (`transformers.utils.chat_template_utils`, 5.23), and in a process
with limited time and memory (`rendering`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

from areal_lab.agents import rendering
from areal_lab.agents.rendering import CPU_S, LENGTH

Plain: TypeAlias = Mapping[str, Any]
"""A message or a tool in the form of templates: the same keys as in OpenAI's chat requests."""

TEMPLATE_FILE: Final = "chat_template.jinja"
_CONFIG_FILE: Final = "tokenizer_config.json"
SOME_DAY: Final = datetime(2026, 1, 1)
"""Fixed date for templates that write one, so data do not depend on the day."""
_TOKEN_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class TemplateRefusal(ValueError):
    """The template refused a conversation, with this message."""


class ChatTemplate:
    """A template and the names that it reads."""

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        tokens: Mapping[str, str] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a template."""
        self._plain = source
        self._with_tools = source if tool_source is None else tool_source
        for one in dict.fromkeys((self._plain, self._with_tools)):
            _renderer().read(one)
        self._names = {**(tokens or {}), **(arguments or {})}
        self.source = source if tool_source is None else source + tool_source
        """Text of the template, and of the one for tools if there is one."""

    def render(
        self, messages: Sequence[Plain], tools: Sequence[Plain], *, now: datetime, speaks_next: bool
    ) -> str:
        """Render a conversation.

        `now` is the present for templates that write the date. With `speaks_next` the text ends
        with the header of the assistant's message.
        """
        names = {
            **self._names,
            "messages": list(messages),
            "tools": list(tools) or None,
            "add_generation_prompt": speaks_next,
        }
        return _renderer().render(self._with_tools if tools else self._plain, names, now)

    def data(self, messages: Sequence[tuple[str, str]], speaks_next: bool = True) -> str:
        """Render messages of a data set, which are roles with contents; raises as `render`."""
        plain = [{"role": role, "content": content} for role, content in messages]
        return self.render(plain, (), now=SOME_DAY, speaks_next=speaks_next)


class _Renderer:
    """A process that renders templates (`rendering`) for one thread of this process."""

    def __init__(self) -> None:
        self.of_process = os.getpid()
        self._known: set[str] = set()
        """Templates that the process has loaded."""
        self._start()

    def _start(self) -> None:
        from areal_lab.host.processes import inherited_environment  # loads asyncio

        self._known.clear()
        self._socket, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", rendering.__name__, str(theirs.fileno()), str(CPU_S)],
                pass_fds=[theirs.fileno()],
                env=inherited_environment(),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        # At the end of the thread or the program; a copy in a forked process must not stop it.
        self._end = weakref.finalize(self, _end, self._socket, process, os.getpid())
        self._socket.settimeout(_MOST_S)

    def read(self, source: str) -> None:
        """Load a template; raises ValueError, in one line, if it cannot be parsed."""
        if source in self._known:
            return
        reply = self._ask({"template": source})
        if "error" in reply:
            where = reply.get("line", "")
            raise ValueError(f"{where}the chat template cannot be read: {reply['error']}")
        self._known.add(source)

    def render(self, source: str, names: Mapping[str, Any], now: datetime) -> str:
        """Render a conversation; raises TemplateRefusal."""
        self.read(source)
        reply = self._ask({"template": source, "names": names, "now": now.isoformat()})
        if "error" in reply:
            raise TemplateRefusal(f"the chat template refuses the conversation: {reply['error']}")
        return reply["text"]

    def _ask(self, message: Mapping[str, Any]) -> dict[str, str]:
        try:
            content = json.dumps(message).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateRefusal(f"the conversation is not JSON: {error}") from error
        try:
            self._socket.sendall(LENGTH.pack(len(content)) + content)
            (size,) = LENGTH.unpack(self._received(LENGTH.size))
            reply: dict[str, str] = json.loads(self._received(size))
        except (OSError, EOFError) as error:
            self._end()
            self._start()
            how = "takes too long" if isinstance(error, TimeoutError) else "ended its process"
            return {"error": f"it {how}"}
        except BaseException:
            self._end()  # a late reply would be taken for the reply to the next message
            self._start()
            raise
        return reply

    def _received(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(min(size - len(parts), 2**20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


def _end(ours: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    ours.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()
    else:
        process.returncode = 0  # not a child of this process


def _renderer() -> _Renderer:
    """Renderer of this thread, so threads do not wait for each other."""
    found: _Renderer | None = getattr(_of_thread, "renderer", None)
    if found is None or found.of_process != os.getpid():
        found = _of_thread.renderer = _Renderer()
    return found


_of_thread: Final = threading.local()
_MOST_S: Final = 60.0
"""Longest wait for a text, which takes at most `rendering.CPU_S` of a CPU."""


def load_template(
    folder: str | Path,
    file: str | Path | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """Load the chat template of a model folder, whose tokenizer config names the special tokens."""
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
                "messages need one; give a template file, or use the instruct model of the same "
                "family"
            )
        source = named
    try:
        return ChatTemplate(
            source, tool_source=tool_source, tokens=_token_names(config), arguments=arguments
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


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
