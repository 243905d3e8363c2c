"""The text around a prompt and after a response: the rule by which both become tokens.

    prefix | prompt | suffix      response | end text, end token
    '---- tokens of a prompt ---' '-- tokens of a response ---'

A prompt template and a chat template with one turn are such rules. A reward model has the rule that
it was trained with beside its weights, so that it scores what it has learned to score.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from areal_lab.data.tokenize import TextCodec

FILE: Final = "reward_model.json"
"""Name of the file with the rule in the folder of a reward model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """Text around a prompt and after a response."""

    prefix: str = ""
    suffix: str = ""
    end_text: str = ""
    """Text after a response."""
    end_token: int | None = None
    """Token after the end text."""
    begins: bool = True
    """Whether the tokenizer adds its begin-of-text token; a chat template has its own."""

    def prompt(self, text: str) -> str:
        """The prompt with the text around it."""
        return f"{self.prefix}{text}{self.suffix}"

    def prompt_once(self, text: str) -> str:
        """The same, of a prompt that may already have the text around it."""
        around = len(self.prefix) + len(self.suffix)
        wrapped = text.startswith(self.prefix) and text.endswith(self.suffix)
        return text if wrapped and len(text) > around else self.prompt(text)

    def response_once(self, text: str) -> str:
        """The response with its end text, which it may already have."""
        return text.removesuffix(self.end_text) + self.end_text

    def tokens(self, codec: TextCodec, prompt: str, response: str) -> tuple[int, ...]:
        """Tokens of a prompt and a response, which may already have the text around them."""
        before, after = self.prompt_once(prompt), self.response_once(response)
        return (
            codec.encode_all([before], begins=self.begins)[0]
            + codec.encode_all([after], begins=False)[0]
            + self.end
        )

    @property
    def end(self) -> tuple[int, ...]:
        """The end token, if there is one."""
        return () if self.end_token is None else (self.end_token,)

    def write(self, folder: Path) -> None:
        """Write the rule into a model folder."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> Wrapping:
        """The rule of a model folder.

        Raises:
            ValueError: in one line, if the folder has none.
        """
        file = folder / FILE
        try:
            return Wrapping(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise ValueError(
                f"{folder} has no {FILE}: it is no reward model of areal-lab rm"
            ) from error
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
