"""Chains of pages: each names the next one, and the last one has the answer.

    Start: hand
    Open: hand
    Next: milk
    Open: milk
    Found: red
    Answer: red
    Start: gate
             <- the prompt ends here; opening as many pages as the chain has finds the color

Words are in one chain only, so the pages of all chains are one corpus for search.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

from areal_lab.data.jsonl import split_problems
from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.data.tokenize import TextCodec
from areal_lab.host.durable import replace_text

COLORS: Final = ("red", "blue", "green", "black", "white", "brown", "gray", "pink")
_EXAMPLES: Final = (("hand", "milk", "door"), ("gate", "lamp", "rice", "boat"))
_NOT_WORDS: Final = {"next", "found", *COLORS, *(word for words in _EXAMPLES for word in words)}
"""Words that pages contain anyway."""
_CONSONANTS: Final = "bdfgklmnprstvz"
_VOWELS: Final = "aeiou"


@dataclass(frozen=True, slots=True)
class Chain:
    """Words in the order in which they are opened, and the content of the last page."""

    words: tuple[str, ...]
    color: str

    @property
    def pages(self) -> list[str]:
        """Text of each word's page."""
        steps = [f"Next: {word}" for word in self.words[1:]]
        return [*steps, f"Found: {self.color}"]


def made_up_words() -> list[str]:
    """Invented words of five letters, such as `bagif`; a few tokens each."""
    return ["".join(sounds) for sounds in product(*[_CONSONANTS, _VOWELS] * 2, _CONSONANTS)]


def words_of(codec: TextCodec) -> list[str]:
    """Words of four to eight lowercase letters that are one token behind a space.

    A small model copies one token more reliably than several.
    """
    texts = (codec.decode([token]) for token in range(codec.vocabulary))
    return sorted(text[1:] for text in texts if re.fullmatch(" [a-z]{4,8}", text))


def chains(
    count: int, *, depth: int, words: Sequence[str] | None = None, seed: int = 1
) -> list[Chain]:
    """Chains of `depth` pages, each word of which is in one of them; `made_up_words()` by
    default.
    """
    drawn = [
        word for word in (made_up_words() if words is None else words) if word not in _NOT_WORDS
    ]
    if count < 1 or depth < 1 or count * depth > len(drawn):
        raise ValueError(
            f"{count} chains of depth {depth} have {count * depth} words, but must have 1 to "
            f"{len(drawn)}"
        )
    rng = random.Random(f"{seed}/chain/{depth}")
    rng.shuffle(drawn)
    return [
        Chain(tuple(drawn[at * depth : (at + 1) * depth]), rng.choice(COLORS))
        for at in range(count)
    ]


def chain_problem(chain: Chain, examples: Sequence[Chain] = ()) -> Problem:
    """Problem of a chain, after solved examples: by default two of common words."""
    common = [Chain(words, color) for words, color in zip(_EXAMPLES, COLORS, strict=False)]
    solved = "".join(map(_solved, examples or common))
    prompt = f"{solved}Start: {chain.words[0]}\n"
    return Problem(prompt=prompt, answer=chain.color, key=chain.words[0])


def chain_problems(
    size: int, *, depth: int, examples: int = 0, eval_size: int = 0, seed: int = 1
) -> ProblemSet:
    """Problems of `chains(size, depth=depth)`, split; their pages are `chain_pages`.

    `examples` is the number of solved chains before each problem, which are in no problem; 0 shows
    two of common words. `eval_size` 0 is the default of `held_out_size`.
    """
    made = chains(size + examples, depth=depth)  # begins with those of `size`
    problems = [chain_problem(chain, made[size:]) for chain in made[:size]]
    return split_problems(problems, [], names=("dataset.size", ""), eval_size=eval_size, seed=seed)


def chain_pages(count: int, *, depth: int, seed: int = 1) -> list[tuple[str, str]]:
    """Word and text of each page of `chains`."""
    return [
        page
        for chain in chains(count, depth=depth, seed=seed)
        for page in zip(chain.words, chain.pages, strict=True)
    ]


def write_chains(
    folder: Path, count: int, *, depth: int, words: Sequence[str] | None = None, seed: int = 1
) -> None:
    """Write problems.jsonl (`dataset.type=jsonl`) and corpus.jsonl (a page a line) into a
    folder.
    """
    made = chains(count, depth=depth, words=words, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    problems = [chain_problem(chain) for chain in made]
    _write(
        folder / "problems.jsonl",
        [{"question": one.prompt, "answer": one.answer} for one in problems],
    )
    # A query finds the page by its word; the model sees the text behind it.
    _write(
        folder / "corpus.jsonl",
        [
            {"text": text, "title": word}
            for chain in made
            for word, text in zip(chain.words, chain.pages, strict=True)
        ],
    )


def _solved(chain: Chain) -> str:
    steps = zip(chain.words, chain.pages, strict=True)
    opened = "".join(f"Open: {word}\n{page}\n" for word, page in steps)
    return f"Start: {chain.words[0]}\n{opened}Answer: {chain.color}\n"


def _write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    replace_text(path, "".join(json.dumps(row) + "\n" for row in rows))
