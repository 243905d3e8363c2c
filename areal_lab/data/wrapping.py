"""Text around a prompt and after a response: the rule by which both become tokens.

    prefix | prompt | suffix      response | end text, end token
    '---- tokens of a prompt ---' '-- tokens of a response ---'

A prompt template and a chat template with one turn are such rules. A reward model stores the rule
of its training next to its weights, so it scores texts in the form that it has learned.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from areal_lab.data.tokenize import TextCodec
from areal_lab.host.durable import replace_text
from areal_lab.models.files import invalid, read_object

FILE: Final = "reward_model.json"
"""Name of the file with the rule in the folder of a reward model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """Text around a prompt and after a response."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    prefix: str = ""
    suffix: str = ""
    end_text: str = ""
    """Text after a response."""
    end_token: int | None = None
    """Token after the end text."""
    begins: bool = True
    """True if the tokenizer adds its begin-of-text token; a chat template writes its own."""

    def prompt(self, text: str) -> str:
        """Prompt with the text around it."""
        return f"{self.prefix}{text}{self.suffix}"

    def prompt_once(self, text: str) -> str:
        """The same, for a prompt that may already have the text around it."""
        around = len(self.prefix) + len(self.suffix)
        wrapped = text.startswith(self.prefix) and text.endswith(self.suffix)
        return text if wrapped and len(text) > around else self.prompt(text)

    def response_once(self, text: str) -> str:
        """Response with its end text, which it may already have."""
        return text.removesuffix(self.end_text) + self.end_text

    def tokens(self, codec: TextCodec, prompt: str, response: str) -> tuple[int, ...]:
        """Tokens of a prompt and a response, which may already have the text around them."""
        before, after = self.prompt_once(prompt), self.response_once(response)
        said = codec.encode_all([after], begins=False)[0]
        ended = self.end_token is None or said[-1:] == self.end
        return (
            codec.encode_all([before], begins=self.begins)[0] + said + (() if ended else self.end)
        )

    @property
    def end(self) -> tuple[int, ...]:
        """The end token, if there is one."""
        return () if self.end_token is None else (self.end_token,)

    def write(self, folder: Path) -> None:
        """Write the rule into a model folder."""
        replace_text(folder / FILE, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(folder: Path) -> Wrapping:
        """The rule of a model folder."""
        file = folder / FILE
        if not file.is_file():
            raise ValueError(f"{folder} has no {FILE}: it is not a reward model of areal-lab rm")
        try:
            return _RULE.validate_python(read_object(file))
        except ValidationError as error:
            raise ValueError(f"{file} cannot be read: {invalid(error)}") from error


_RULE: Final = TypeAdapter(Wrapping)
