"""Conversations as pieces of text by a model's chat template: what was said to it, what it says.

    user: hi, assistant: hello   -->   "<|user|>hi<|assistant|>" | "hello<|end|>"

Each piece becomes tokens by itself, as in generation: a prompt is tokenized before its response
exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from areal_lab.data.wrapping import Wrapping
from areal_lab.offline.rows import ASSISTANT, Message, Row, Text

Render: TypeAlias = Callable[[Sequence[Message], bool], str]
"""`(messages, whether the assistant speaks next) -> text`."""
_PROMPT: Final = "@@prompt@@"
_RESPONSE: Final = "@@response@@"


def chat_renderer(folder: Path) -> Render:
    """The chat template of a model folder.

    Raises:
        ValueError: in one line, if the model has none.
    """
    from transformers import AutoTokenizer  # text without a template does without

    tokenizer: Any = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if not tokenizer.chat_template:
        raise ValueError(
            f"{folder} has no chat template, but the rows have messages, or dataset.chat is true; "
            "use rows with prompt and response, and dataset.prompt_template"
        )

    def render(messages: Sequence[Message], speaks_next: bool) -> str:
        text: str = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=speaks_next,
        )
        return text

    return render


def conversation(row: Row, response: Text) -> tuple[Message, ...]:
    """The messages of a row with one of its responses."""
    prompt = (("user", row.prompt),) if isinstance(row.prompt, str) and row.prompt else row.prompt
    answer = ((ASSISTANT, response),) if isinstance(response, str) else response
    return (*(prompt or ()), *answer)


def pieces(messages: Sequence[Message], render: Render, where: str) -> list[tuple[str, bool]]:
    """The text of a conversation in order, each piece with whether the assistant said it.

    What follows the last message of the assistant is left out.

    Args:
        where: file and line, for errors.

    Raises:
        ValueError: in one line; the template changes what it wrote for earlier messages, or refuses
            the conversation.
    """
    found: list[tuple[str, bool]] = []
    written = ""
    for index, (role, _) in enumerate(messages):
        if role != ASSISTANT or index == 0:
            continue
        for upto, said in ((index, False), (index + 1, True)):
            try:
                text = render(messages[:upto], not said)
            except Exception as error:  # templates raise errors of their own
                raise ValueError(f"{where}: the chat template refuses it: {error}") from error
            if not text.startswith(written):
                raise ValueError(
                    f"{where}: the chat template writes message {index + 1} in another way once "
                    "further messages follow, so that no text is what the model saw; use one "
                    "response per row"
                )
            found.append((text[len(written) :], said))
            written = text
    return found


def chat_wrapping(render: Render) -> Wrapping:
    """The rule that a chat template is for one message of the user and one response.

    Raises:
        ValueError: in one line, if the template does not leave them as they are.
    """
    messages = (("user", _PROMPT), (ASSISTANT, _RESPONSE))
    (asked, _), (said, _) = pieces(messages, render, "a trial conversation")
    if asked.count(_PROMPT) != 1 or not said.startswith(_RESPONSE):
        raise ValueError("the chat template changes the text of a message; use prompt_template")
    prefix, suffix = asked.split(_PROMPT)
    end = said.removeprefix(_RESPONSE)
    return Wrapping(prefix=prefix, suffix=suffix, end_text=end, begins=False)
